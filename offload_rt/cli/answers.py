"""Answers of `offload-rt run`: streamed or printed at the end, also after an early end."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn

from offload_rt.cli.process import INTERRUPTED
from offload_rt.system.progress import progress_bar

if TYPE_CHECKING:
    from offload_rt.engine.engine_thread import IndexedPiece
    from offload_rt.executor.sequence import PassTimes
    from offload_rt.llm import Output, Piece


@dataclass
class _Answer:
    """An answer so far; `finish_reason` is None until the end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answers:
    """Answers to all prompts so far.

    as_json     print JSON at the end instead of streaming text
    is_quiet    print no speed after an early end
    is_printed  stdout has the complete output
    """

    as_json: bool = False
    is_quiet: bool = False
    is_printed: bool = False
    prompts: Sequence[str] = ()
    by_prompt: list[list[_Answer]] = field(default_factory=lambda: [[_Answer()]])
    _outputs: "dict[int, Output]" = field(default_factory=dict)
    # Passes by their start, with their tokens: sequences share passes.
    _passes: "dict[float, tuple[PassTimes, int]]" = field(default_factory=dict)

    def follow(
        self, pieces: "Iterator[IndexedPiece]", prompts: Sequence[str], n: int, console: Console
    ) -> "list[Output]":
        """Print `n` answers per prompt; the first answer to a single prompt is streamed."""
        self.prompts = prompts
        self.by_prompt = [[_Answer() for _ in range(n)] for _ in prompts]
        if self._is_streamed:
            self._echo(0)
            with progress_bar(console, "first pass over the weights", is_transient=True):
                first = next(pieces)
            for i, piece in chain((first,), pieces):
                self._add(i, piece)
                if piece.index == 0:
                    print(piece.text, end="", flush=True)
        else:
            with progress_bar(console, "prompts", MofNCompleteColumn) as bar:
                for i, piece in pieces:
                    self._add(i, piece)
                    bar(len(self._outputs), len(prompts))
        self._print("")
        return [self._outputs[i] for i in range(len(prompts))]

    @property
    def _is_streamed(self) -> bool:
        return len(self.prompts) == 1 and not self.as_json

    def _add(self, i: int, piece: "Piece") -> None:
        answer = self.by_prompt[i][piece.index]
        answer.text += piece.text
        answer.token_ids += piece.token_ids
        answer.finish_reason = piece.finish_reason
        if piece.output is not None:
            self._outputs[i] = piece.output
        if piece.verified_in is not None:
            times = piece.verified_in.times
            _, n_tokens = self._passes.get(times.started, (times, 0))
            self._passes[times.started] = times, n_tokens + len(piece.token_ids)

    def report(self, baseline_s: float | None, *settings: Any) -> str:
        """Return the report of the passes so far; see `format.report`."""
        from offload_rt.cli.format import report

        n_answers = sum(bool(answer.token_ids) for answers in self.by_prompt for answer in answers)
        return report(list(self._passes.values()), n_answers, baseline_s, *settings)

    def print_unfinished(self, code: int) -> None:
        """After an early end, print the rest of the output and the speed."""
        if self.is_printed:
            return
        # JSON is printed after an interrupt, and if there is a token.
        if self._passes or (self.as_json and code == INTERRUPTED):
            self._print("interrupted" if code == INTERRUPTED else "error")
        if self._passes and not self.is_quiet:
            print(self.report(None, {}), file=sys.stderr)

    def _print(self, unfinished: str) -> None:
        """Print what was not streamed; unfinished answers end for the reason `unfinished`."""
        if self.as_json:
            objects = [self._object(i, unfinished) for i in range(len(self.by_prompt))]
            print(json.dumps(objects if len(objects) > 1 else objects[0]), flush=True)
        for i, answers in enumerate(self.by_prompt):
            if self.as_json or not any(answer.token_ids for answer in answers):
                continue
            if not self._is_streamed:
                self._echo(i)
            texts = ["" if self._is_streamed else answers[0].text]
            for n, answer in enumerate(answers[1:], 2):
                texts.append(f"--- answer {n} of {len(answers)}\n{answer.text}")
            print("\n".join(texts), end="\n" if self._is_streamed else "\n\n", flush=True)
        self.is_printed = True

    def _echo(self, i: int) -> None:
        if self.is_quiet:
            return
        first, *more = self.prompts[i].strip().splitlines() or [""]
        text = f"[{i + 1}] {first[:72]}{' ...' if more or len(first) > 72 else ''}"
        Console(stderr=True).print(text, style="dim", highlight=False, soft_wrap=True, markup=False)

    def _object(self, i: int, unfinished: str) -> dict[str, Any]:
        output = self._outputs.get(i)
        objects = []
        for answer in output.outputs if output else self.by_prompt[i]:
            fields: dict[str, Any] = {"text": answer.text, "token_ids": answer.token_ids}
            fields["finish_reason"] = answer.finish_reason or unfinished
            for name in ("logprobs", "prompt_logprobs"):
                if (rows := getattr(answer, name, None)) is not None:
                    fields[name] = [
                        row and {token: logprob._asdict() for token, logprob in row.items()}
                        for row in rows
                    ]
            objects.append(fields)
        numbered = [{"index": n} | entry for n, entry in enumerate(objects)]
        stats = asdict(output.stats) if output else None
        return objects[0] | {"stats": stats} | ({"outputs": numbered} if len(objects) > 1 else {})
