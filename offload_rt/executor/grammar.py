"""Grammars of structured outputs, as token masks for the nodes of draft trees.

llguidance compiles JSON schemas, regular expressions and Lark grammars, and computes masks.
xgrammar masks draft trees in one call (`traverse_draft_tree`), in 1.0 to 1.4 times the time, and
requires triton; llguidance is one wheel of 3 MB without dependencies.
"""

import json
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload_rt.errors import SettingsError
from offload_rt.executor.json_schema import adapted
from offload_rt.sampling_params import StructuredOutputs
from offload_rt.text.detokenize import token_bytes

if TYPE_CHECKING:  # optional packages
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

Path = tuple[int, ...]

# llguidance panics for longer tokens.
_MAX_TOKEN_NBYTES = 1024
# Compiling a grammar takes up to 750 times the bytes of its text, and 10 s per MB.
_MAX_CHARACTERS = 3 << 16
# Options of llguidance. Optional white space would let a model pad its answer forever.
COMPACT_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarCompiler:
    """Compiles structured outputs for a tokenizer, and owns the threads that compute masks."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", vocab_size: int, end_ids: Collection[int]
    ) -> None:
        """Raises SettingsError without llguidance, a fast tokenizer, or an end token."""
        refused = partial(SettingsError, "structured outputs")
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            change = "run `pip install offload-rt[server]`"
            raise refused(need="the package llguidance", change=change) from error
        if not end_ids:
            raise refused(need="a model with an end token")
        if (n := _longest_token(tokenizer)) > _MAX_TOKEN_NBYTES:
            need = f"tokens of at most {_MAX_TOKEN_NBYTES} bytes"
            raise refused(need=need, have=f"a token of {n} bytes")
        n_vocab = max(vocab_size, len(tokenizer))  # models pad their vocabulary
        try:
            fast: Any = tokenizer  # checked there
            self._tokenizer = llguidance.hf.from_tokenizer(fast, n_vocab, sorted(end_ids))
        except ValueError as error:
            raise refused(need="a fast tokenizer", have=str(error)[:200]) from error
        self._matcher = llguidance.LLMatcher
        self._n_words = -(-n_vocab // 32)
        self._ends = frozenset(end_ids)
        self._threads = ThreadPoolExecutor(2, "grammar")

    def compile(self, outputs: StructuredOutputs) -> "Grammar":
        """Compile a grammar. Raises SettingsError for unsupported and unsatisfiable grammars."""
        try:
            source = _within(outputs.around, self._source(outputs))
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"{outputs.flag}: {str(error)[:300]}") from error
        if len(source) > _MAX_CHARACTERS:
            need = f"a grammar of at most {_MAX_CHARACTERS} characters"
            raise SettingsError(outputs.flag, need=need, have=str(len(source)))
        matcher = self._matcher(self._tokenizer, source, log_level=0)
        _check(matcher, outputs.flag)
        return Grammar(matcher, self._n_words, self._ends, self._threads)

    def _source(self, outputs: StructuredOutputs) -> str:
        if outputs.json is not None:
            schema = json.dumps(adapted(outputs.json))
            return str(self._matcher.grammar_from_json_schema(schema, COMPACT_JSON))
        if outputs.regex is not None:
            return str(self._matcher.grammar_from_regex(outputs.regex))
        from llguidance import grammar_from

        if outputs.choice:
            return str(grammar_from("choice", json.dumps(outputs.choice)))
        return str(grammar_from("grammar", outputs.grammar or ""))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


@dataclass(eq=False, repr=False)
class Grammar:
    """Position of an answer in a grammar.

    Drafted tokens are consumed by copies of the matcher: after `rollback` behind a mask, llguidance
    1.9.1 takes a text of a list for the name of a property.

    matcher  state behind the generated tokens
    n_words  words of 32 tokens in a mask
    ends     end tokens; text behind an end token is not constrained
    """

    matcher: "LLMatcher"
    n_words: int
    ends: frozenset[int]
    threads: ThreadPoolExecutor
    _masks: Future[Tensor] | None = field(default=None, init=False)
    _known: dict[Path, Tensor] = field(default_factory=dict, init=False)

    def copy(self) -> "Grammar":
        """Return an independent position in the same compiled grammar."""
        return replace(self, matcher=self.matcher.deep_copy())

    def start_masks(self, paths: Sequence[Path]) -> None:
        """Start to compute the masks after these paths in a thread, during a forward pass."""
        self._masks = self.threads.submit(self.masks_after, paths)

    def masks(self) -> Tensor:
        """Wait for the masks of the last `start_masks`; see `masks_after`."""
        assert self._masks is not None, "masks were started"
        return self._masks.result()

    def check(self) -> None:
        """Raise SettingsError if the grammar became too complex; masks are not valid then."""
        _check(self.matcher)

    def masks_after(self, paths: Sequence[Path]) -> Tensor:
        """Compute the allowed tokens after the answer and each path of further tokens.

        All tokens are allowed after an end token and after paths outside the grammar.
        Returns (n, words) int32, bit t of a row for token t.
        """
        path: Path = ()
        matcher = None  # behind `path`
        for next_path in sorted(set(paths) - self._known.keys()):
            if matcher is None or next_path[: len(path)] != path:
                path, matcher = (), self.matcher.deep_copy()
            tokens = takewhile(lambda token: token not in self.ends, next_path[len(path) :])
            path += next_path[len(path) :][: matcher.try_consume_tokens(list(tokens))]
            mask = torch.full((self.n_words,), -1, dtype=torch.int32)
            if path == next_path:
                matcher.unsafe_compute_mask_ptr(mask.data_ptr(), 4 * self.n_words)
            self._known[next_path] = mask
        return torch.stack([self._known[path] for path in paths])

    def n_allowed(self, tokens: Sequence[int]) -> int:
        """Return the number of first tokens that the grammar allows, up to an end token."""
        return self.matcher.validate_tokens(list(tokens))

    def forced(self) -> list[int]:
        """Return the next tokens as far as each is the only allowed token."""
        if self.matcher.is_stopped():
            return list(self.ends) if len(self.ends) == 1 else []
        return list(self.matcher.compute_ff_tokens())

    def forced_after(self, path: Path) -> list[int]:
        """Return the forced tokens after a path of further tokens; none after an end token."""
        after = self.copy()
        n_inside = 0 if self.ends.intersection(path) else after.matcher.try_consume_tokens([*path])
        return after.forced() if n_inside == len(path) else []

    def advance(self, token: int) -> None:
        """Append a generated token. Raises SettingsError if the grammar becomes too complex."""
        self._known.clear()
        self.matcher.consume_token(token)
        self.check()


def _longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the bytes of the longest token; 0 if no token can exceed the limit."""
    # A character has at most four bytes.
    vocab = tokenizer.get_vocab().items()
    candidates = [id for token, id in vocab if 4 * len(token) > _MAX_TOKEN_NBYTES]
    return max((len(token_bytes(tokenizer, id)) for id in candidates), default=0)


def _within(around: str | None, source: str) -> str:
    """Return a grammar of llguidance, in place of @answer of the Lark grammar `around`."""
    if around is None:
        return source
    is_json = source.startswith("{")
    (answer,) = json.loads(source)["grammars"] if is_json else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": around}, answer | {"name": "answer"}]})


def _check(matcher: "LLMatcher", name: str = "structured outputs") -> None:
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split())[:300]
        raise SettingsError(f"{name}: {reason}")
