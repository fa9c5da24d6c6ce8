"""Tiny random models of every family; transformers is the reference."""

import copy
import functools
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

import offload_rt.llm
from bench.models.tiny import random_model
from offload_rt import LLM, Output, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.engine import builder, profile
from offload_rt.engine.engine import Engine
from offload_rt.engine.sequence_pool import Scheduler
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence as TokenSequence
from offload_rt.executor.step import Step
from offload_rt.kv.split import LEAST_BUDGET
from offload_rt.planning import local
from offload_rt.speculate.draft_model import SelfDraftModel
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.pauses import Pauses
from offload_rt.speculate.protocols import Drafter, DraftParts, VerificationRule
from offload_rt.speculate.select import drafter_type, load_rule
from offload_rt.speculate.tree_drafter import TreeDrafter
from offload_rt.speculate.tree_state import DraftState
from offload_rt.speculate.verify.match import MatchRule
from offload_rt.system import registry
from offload_rt.system.trace import Trace
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import open_checkpoint
from support.checkpoints import add_tokenizer, trained

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SMALLER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
WINDOW = 8
# A token comes back and the text goes round in circles where a random model is too tame: this one
# is not.
SPREAD = 0.25


@dataclass(frozen=True)
class Case:
    """A model type and its config changes; shards hold at most `shard` bytes."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"

    def build(
        self, seed: int, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> PreTrainedModel:
        """A random model, biases and norms included, so that every misplaced weight shows."""
        config = AutoConfig.for_model(self.model_type, **SIZES | self.changes | changes)
        return random_model(config, seed, spread=SPREAD).to(dtype)


def _rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters}}


LINEAR = _rope("linear", factor=3.0)
DYNAMIC = _rope("dynamic", factor=2.0)
LLAMA3 = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
CASES = {
    "llama": Case("llama"),
    "llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True,
        "num_key_value_heads": 4}, "200KB"),
    "llama-tied": Case("llama", {"tie_word_embeddings": True,
        "num_key_value_heads": 1}, "200KB"),
    "llama-linear": Case("llama", LINEAR),
    "llama-dynamic": Case("llama", DYNAMIC),
    "llama-llama3": Case("llama", LLAMA3),
    "llama-yarn": Case("llama", YARN),
    "mistral": Case("mistral", {"sliding_window": WINDOW}, "200KB"),
    "mistral-full": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2", YARN),
    "qwen2-window": Case("qwen2", WINDOWED),
    "qwen3": Case("qwen3", {"head_dim": 32}, "200KB"),
    "qwen3-window": Case("qwen3", {"head_dim": 8, "attention_bias": True,
        "tie_word_embeddings": True} | WINDOWED),
}  # fmt: skip
# Drafters that any pair serves; heads are in `test_heads`.
DRAFTERS = [
    name
    for name in registry.names("speculate.draft")
    if drafter_type(name).resources.find_heads is None
]
# Each with every rule that takes its trees.
COMBINATIONS = [
    (drafter, rule)
    for drafter in DRAFTERS
    for rule in registry.names("speculate.verify")
    if drafter_type(drafter).gives_draft_probs or load_rule(rule).child_sampling is None
    # They are self_window with another cache.
    if drafter not in ("self_snapkv", "self_retrieval") or rule == drafter_type(drafter).best_rule
]
# Every drafter and every rule in one combination.
EACH_IN_ONE = [
    (drafter, rule)
    for drafter, rule in COMBINATIONS
    if drafter == "static_tree" or rule == drafter_type(drafter).best_rule
]
PLACES = {"resident": {"device"}, "disk": {"disk"}, "mixed": {"device", "disk"}}


@dataclass(frozen=True)
class Pair:
    """A target, and a draft with slightly different weights."""

    model: PreTrainedModel
    target: Path
    draft_model: PreTrainedModel
    draft: Path

    def settings(self, drafter: str, rule: str = "auto") -> dict[str, str]:
        """Settings for a drafter and a rule, with the draft model if required."""
        chosen = {"drafter": drafter, "rule": rule}
        if drafter_type(drafter).resources.needs_checkpoint:
            chosen |= {"draft_model": str(self.draft), "draft_quantize": "none"}
        return chosen


def nearly(model: PreTrainedModel, off: float) -> PreTrainedModel:
    """The same model, with noise of this size on every weight."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(77)
    for parameter in draft.parameters():
        parameter.data += off * torch.randn(parameter.shape, generator=generator)
    return draft


def save_pair(
    folder: Path, model: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tokenizer | None = None
) -> Pair:
    """Save both models as checkpoints, optionally with a tokenizer."""
    pair = Pair(model, folder / "target", draft, folder / "draft")
    for saved, path in ((model, pair.target), (draft, pair.draft)):
        saved.save_pretrained(path)
        if tokenizer is not None:
            add_tokenizer(path, tokenizer)
    return pair


class Steady:
    """A cost estimator with constant times, so that trees do not depend on the clock.

    pass_s  seconds of passes by their rows; by default a tenth of a pass for every 100 rows
    """

    is_measured = True

    def __init__(
        self,
        level_s: float = 0.01,
        pass_s: Callable[[np.ndarray], np.ndarray] = lambda n_rows: 1.0 + n_rows / 1000,
    ) -> None:
        self.level_s = level_s
        self._pass_s = pass_s

    def seconds(
        self,
        n_rows: np.ndarray,
        context: int,
        draft_s: np.ndarray | float = 0.0,
        n_sequences: int = 1,
    ) -> np.ndarray:
        """Drafting counts as predicted."""
        return self._pass_s(n_rows) + (draft_s if isinstance(draft_s, np.ndarray) else 0.0)

    def fixed(self, level_s: float) -> "Steady":
        return self

    def level(self, n_sequences: int) -> float:
        return self.level_s

    def passed(self, *_: float) -> None:
        """Learns nothing."""

    drafted = passed
    best_tree = CostEstimator.best_tree


def keep_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grow trees as if passes were slow and drafting cheap, without timing or pair statistics."""
    monkeypatch.setattr(profile, "pass_profile", lambda *_: None)
    monkeypatch.setattr(builder, "CostEstimator", lambda *_: Steady())
    monkeypatch.setattr(PairStats, "load", lambda *_: PairStats())


def pause_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause drafting for one and for several passes, in turn."""
    pattern = itertools.cycle([True, False, True, True, False, False, False])

    def drafts(pauses: Pauses, _: object) -> bool:
        pauses.is_drafting = next(pattern)
        return pauses.is_drafting

    for kind in (Drafter, TreeDrafter):
        monkeypatch.setattr(kind, "may_pause", True)
    monkeypatch.setattr(Pauses, "drafts", drafts)
    monkeypatch.setattr(Pauses, "passed", lambda *_: None)


def measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine in a moment: a matrix within caches, and one layer of the disk."""
    monkeypatch.setattr(local, "busy_cpus", lambda: 0.0)
    monkeypatch.setattr(profile, "beyond_caches", lambda device: 4 << 20)
    monkeypatch.setattr(profile, "link_gbps", partial(profile.link_gbps, seconds=0.0))


class Zoo:
    """Checkpoints below one folder, each made once, and their references."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cache  # noqa: B019
    def model(self, name: str, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        return CASES[name].build(seed, dtype)

    @functools.cache  # noqa: B019
    def directory(self, name: str, seed: int, dtype: torch.dtype = torch.float32) -> Path:
        path = self._folder / f"{name}-{seed}-{dtype}".replace("torch.", "")
        self.model(name, seed, dtype).save_pretrained(path, max_shard_size=CASES[name].shard)
        return path

    @functools.cache  # noqa: B019
    def pair(self, name: str, seed: int) -> Pair:
        """A smaller model of a family with a draft that is right about two times of three."""
        model = CASES[name].build(seed, **SMALLER)
        return save_pair(self._folder / f"{name}-{seed}-pair", model, nearly(model, 0.03))

    def greedy(self, name: str, seed: int, n_new: int = 64) -> "GreedyText":
        """Greedy continuation of `prompt_of(seed)` by transformers in float32."""
        return generate(self.model(name, seed), prompt_of(seed), n_new)


def prompt_of(seed: int, n: int = 21, vocab_size: int = 128) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(vocab_size, (n,), generator=generator).tolist()


@dataclass(eq=False, repr=False)
class GreedyText(Sequence[int]):
    """The greedy continuation of a prompt by transformers.

    Comparison with a text takes a single forward pass: each token of the text must be the most
    probable one after its predecessors. Other uses and unequal texts generate the continuation.
    """

    model: PreTrainedModel
    prompt: Sequence[int]
    n_new: int

    @functools.cached_property
    def tokens(self) -> list[int]:
        ids = torch.tensor([list(self.prompt)])
        lengths = {"max_new_tokens": self.n_new, "min_new_tokens": self.n_new}
        options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, **lengths}
        return self.model.generate(ids, do_sample=False, **options)[0, ids.shape[1] :].tolist()

    def __eq__(self, text: object) -> bool:
        if isinstance(text, list) and len(text) == self.n_new:
            logits = logits_of(self.model, [*self.prompt, *text])
            if logits[len(self.prompt) - 1 : -1].argmax(-1).tolist() == text:
                return True
        return self.tokens == text

    __hash__ = None

    def __len__(self) -> int:
        return self.n_new

    def __getitem__(self, i: Any) -> Any:
        return self.tokens[i]

    def __radd__(self, before: list[int]) -> list[int]:
        return before + self.tokens

    def __repr__(self) -> str:
        return repr(self.tokens)


def generate(model: PreTrainedModel, prompt: Sequence[int], n_new: int) -> GreedyText:
    """The greedy continuation by transformers, of exactly so many tokens."""
    return GreedyText(model, prompt, n_new)


def assert_continued(
    outputs: Sequence[Output], model: PreTrainedModel, prompts: Sequence[Sequence[int]], n_new: int
) -> None:
    """Assert that answers are the greedy continuations by transformers."""
    expected = [generate(model, prompt, n_new) for prompt in prompts]
    assert [output.token_ids for output in outputs] == expected


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """(n, vocabulary) by transformers, one pass without a cache."""
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


def open_unloaded(directory: Path, *draft: str, **settings: Any) -> LLM:
    return LLM.open(EngineConfig(str(directory), *draft, **settings))


def open_llm(directory: Path, place: str = "resident", **settings: Any) -> LLM:
    """Open an LLM on the CPU with layers in the tiers of PLACES, by a budget unless resident.

    Decodes plainly without a draft model or drafter. Trees have `tree_size` nodes, so that one
    budget fits.
    """
    drafter = "auto" if "draft_model" in settings else "none"
    settings = {
        "device": "cpu", "max_model_len": 128, "drafter": drafter, "tree_size": 16,
    } | settings  # fmt: skip
    if settings["drafter"] == "none":
        settings = {k: v for k, v in settings.items() if k not in ("tree_size", "tree_depth")}
    with parsed_once():
        if place != "resident":
            with open_unloaded(directory, **settings) as unloaded:
                plan = unloaded.plan
            most = min(5 * plan.slot_nbytes, sum(plan.layer_nbytes) - 1)
            free = most if place == "mixed" else 2 * plan.slot_nbytes
            settings["device_memory"] = plan.reserved.total + free
        llm = LLM(str(directory), **settings)
    is_free = llm.plan.experts or place == "streamed"
    assert is_free or set(llm.plan.tiers) == PLACES[place], llm.plan.tiers
    return llm


def open_streamed(directory: Path, **settings: Any) -> LLM:
    """Open an LLM with memory for two layers, which may hold all of a model with two wide ones."""
    return open_llm(directory, "streamed", **{"drafter": "auto", **settings})


@contextmanager
def parsed_once() -> Iterator[None]:
    """Parse each target once, which takes most of a plan for models of transformers.

    Ranks in threads would restore each other's function.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with mock.patch.object(offload_rt.llm, "open_checkpoint", functools.cache(open_checkpoint)):
        yield


def drafter_of(
    llm: LLM, name: str, rule: str, limits: DraftLimits, level_s: float = 0.01,
    **parts: Any,
) -> Drafter:  # fmt: skip
    """Return another drafter for an LLM, without learned statistics and clock."""
    its_rule = load_rule(rule)
    runner = llm.engine.runner
    chosen = drafter_type(name)
    resources = chosen.resources
    sizes = runner.spec.vocab_size, limits.n_levels, Trace(on=False)
    model = own = None
    if llm.engine.draft:
        model = resources.open_model(llm.engine.draft, *sizes, resources.draft_context)
    if resources.view is not None:
        views = {"kind": resources.view, "budget": LEAST_BUDGET, "n_rows": 1_000_000}
        own = SelfDraftModel(runner, *sizes, **views)
    models = {"draft_model": model, "self_model": own} | parts
    child_sampling = its_rule.child_sampling or "without_replacement"
    given = limits, Steady(level_s), child_sampling, its_rule.coupled_up_to
    return chosen.open(DraftParts(*given, **models))


def begin(llm: LLM, drafter: Drafter, sequences: Sequence[TokenSequence], n_nodes: int) -> None:
    """Start sequences with target caches of all but their last tokens."""
    for sequence in sequences:
        before = sequence.tokens[:-1]
        cache = prefill(runner_of(llm), before, 256) if before else runner_of(llm).new_cache(1)
        drafter.begin(sequence, cache, n_nodes)


def engine_of(
    llm: LLM, drafter: Drafter, rule: VerificationRule | None = None, n_nodes: int = 1000
) -> Engine:
    """An engine over an LLM's runner with another drafter, any number of sequences, no clock."""
    scheduler = Scheduler(1_000_000, n_nodes)
    return Engine(
        runner=runner_of(llm), drafter=drafter, scheduler=scheduler, rule=rule or MatchRule(),
        cost=Steady(), trace=Trace(on=False),
    )  # fmt: skip


def sequence_of(seed: int) -> TokenSequence:
    """A sequence of one token, for its random numbers."""
    return TokenSequence([0], SamplingParams(seed=seed), 1_000_000)


def runner_of(llm: LLM) -> Runner:
    return llm.engine.runner


def prompt_steps(runner: Runner, prompts: Sequence[Sequence[int]], n_rows: int) -> list[Step]:
    """A pass over prompts in new caches of n_rows rows, with the logits of every token."""
    return [
        Step(
            runner.new_cache(n_rows), torch.tensor(prompt), Topology.chain(len(prompt)),
            len(prompt), len(prompt),
        )
        for prompt in prompts
    ]  # fmt: skip


def feed(
    runner: Runner, cache: int, tokens: Sequence[int], topology: Topology, n_wanted: int = 0
) -> Tensor:
    """Logits of the last `n_wanted` tokens, or of all; the rows stay pending."""
    n_prompt = runner.n_committed(cache) + len(tokens)
    step = Step(cache, torch.tensor(tokens), topology, n_wanted or len(tokens), n_prompt)
    return runner.forward([step])[0]


def prefill(runner: Runner, tokens: Sequence[int], capacity: int) -> int:
    """A cache that holds exactly these tokens, from one pass over them."""
    cache = runner.new_cache(capacity)
    feed(runner, cache, tokens, Topology.chain(len(tokens)), n_wanted=1)
    runner.commit(cache, range(len(tokens)))
    return cache


def random_tree(n: int, seed: int, reach: int = 1000) -> Topology:
    """A random tree of n nodes, each parent among the `reach` nodes before; fewer is deeper."""
    generator = torch.Generator().manual_seed(seed)
    bounds = ((max(n - reach, 0), n) for n in range(1, n))
    parents = [int(torch.randint(*bound, (), generator=generator)) for bound in bounds]
    return Topology(np.array([-1, *parents]))


def assert_drawn(drawn: Iterable[Any], chances: Mapping[Any, float], least_p: float = 1e-6) -> None:
    """Chi-square with rare values pooled; impossible values never occur."""
    counts = Counter(drawn)
    possible = [(counts[value], p * counts.total()) for value, p in chances.items() if p > 0]
    assert counts.total() == sum(n for n, _ in possible)
    common = [cell for cell in possible if cell[1] >= 8]
    rare = np.array([cell for cell in possible if cell[1] < 8]).reshape(-1, 2).sum(0)
    observed, expected = np.array([*common, rare] if rare[1] else common).T
    assert observed.sum() == pytest.approx(expected.sum())
    statistic = torch.tensor(((observed - expected) ** 2 / expected).sum())
    freedom = torch.tensor(len(observed) - 1.0)
    # The chance of counts at least this far from the expected ones.
    assert freedom == 0 or torch.special.gammaincc(freedom / 2, statistic / 2) > least_p


def exact_draws(
    probs: np.ndarray, n: int, independent: bool = False, excluded: Iterable[int] = ()
) -> dict[tuple[int, ...], float]:
    """The distribution of n sampled children in order; uniform once nothing is left."""
    chances = {}
    for tokens in itertools.product(range(len(probs)), repeat=n):
        free = np.ones(len(probs))
        free[list(excluded)] = 0
        p = 1.0
        for token in tokens:
            left = probs * free if (probs * free).sum() > 0 else free
            p *= left[token] / left.sum()
            free[token] = independent
        if p > 0:
            chances[tokens] = p
    return chances


SPOKEN = [
    "the quick brown fox jumps over the lazy dog; the end of the story",
    "naïve café, e\u0301te\u0301 coöperate",
    "日本語のテキスト、中文字符\uff0c한국어",
    "smiles 🙂🙃 families 👨‍👩‍👧‍👦 flags 🇫🇷 waves 👋🏽",
]


def byte_level(vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE tokenizer: most non-ASCII characters have several tokens."""
    return trained(vocab_size, pre_tokenizers.ByteLevel.alphabet(), SPOKEN * 4)


def metaspace() -> Tokenizer:
    """A tokenizer like Llama 2's: a space belongs to the next word; unknown text is bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(SPOKEN[:1] * 4, trainer)
    # The trainer knows no byte tokens, so they are written into the finished vocabulary.
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    n = len(vocab)
    vocab |= {f"<0x{byte:02X}>": n + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(content))


def least_streaming(directory, **settings) -> int:
    """The budget of a device that streams all layers through two slots."""
    nbytes = None
    for _ in range(2):
        with open_unloaded(directory, device_memory=nbytes, **settings) as unloaded:
            nbytes = unloaded.plan.reserved.total + 2 * unloaded.plan.slot_nbytes
    return nbytes


ATOL = 2e-4


def check_tree(runner, model, n=8):
    """Holds the logits of a tree against transformers' own along each path."""
    tree = random_tree(n, seed=3, reach=2)
    assert n < 24 or tree.depths.max() > WINDOW + 2
    vocab_size = min(model.config.get_text_config().vocab_size, 150)
    sizes = (1, 11), (2, 3), (3, n)
    committed, lacking, drafted = (prompt_of(*size, vocab_size) for size in sizes)
    cache = prefill(runner, committed, len(committed) + len(lacking) + n)
    got = feed(runner, cache, lacking + drafted, tree.after_chain(len(lacking)), n_wanted=n)
    for node in range(n):
        path = [drafted[ancestor] for ancestor in [0, *tree.path_to(node)]]
        expected = logits_of(model, committed + lacking + path)[-1]
        atol = ATOL * float(expected.abs().max())
        torch.testing.assert_close(got[node], expected, atol=atol, rtol=0)


def after_start(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[DraftState, list[int]], None]
) -> None:
    """Call a function with state and tokens whenever a tree of a draft model has started."""
    start = DraftState.start

    def started(state: DraftState, tokens: list[int], n_prompt: int) -> None:
        start(state, tokens, n_prompt)
        check(state, tokens)

    monkeypatch.setattr(DraftState, "start", started)


def watch(monkeypatch: pytest.MonkeyPatch, *runners: Runner) -> dict[Runner, list[tuple[int, int]]]:
    """Record per pass the committed rows of the first sequence and the rows computed of all."""
    passes: dict[Runner, list[tuple[int, int]]] = {runner: [] for runner in runners}
    forward = Runner.forward

    def watched(runner: Runner, steps: Any) -> Any:
        if runner in passes:
            n_committed = runner.n_committed(steps[0].cache)
            passes[runner].append((n_committed, sum(step.n_rows for step in steps)))
        return forward(runner, steps)

    monkeypatch.setattr(Runner, "forward", watched)
    return passes


def say(llm: LLM, prompt: list[int], n: int) -> list[int]:
    return llm.generate(prompt, SamplingParams(max_new_tokens=n))[0].token_ids
