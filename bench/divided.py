"""Do the nodes of two sequences share the rows of a pass as they should?

    python -m bench.divided [--drafters adaptive_tree recycle] [--temperatures 0 0.8] [--rows 32] [--prompts 12]

The demonstration pair goes on with two texts at once: Python, on which it was trained, and C++, which it was not. A pass of up
to `--rows` rows costs the same, each row beyond that its part of it. The rows are divided by the chances of the nodes
("chances", as `tree/choose.best_prefixes` does), by these times each sequence's own running ratio of accepted to expected
tokens, shrunk towards that of both ("own ratio"), or into halves ("halves"). Tokens of both texts together are counted over
the same number of passes; the differences to "chances" are paired, with their standard errors. What is learned of the pair
goes on from text to text, the ways take turns, and nothing else is kept. The last line is one JSON object.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from unittest import mock

import numpy as np
from transformers import AutoTokenizer

from bench.learn import headers
from bench.measure import commit, machine
from bench.methods import DRAFT, TARGET, no_pair_stats
from bench.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.executor.sequence import Sequence as Text
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.select import drafter_type, pick_drafter
from offload_rt.tree.choose import ExpectedTokensBias, best_prefixes

WAYS = ("chances", "own ratio", "halves")
# Tokens that a ratio of a sequence is weighed against the one of both by.
_WEIGHT = 10.0


@dataclass
class Divided:
    """What `best_prefixes` is replaced by, for two sequences.

    expected  of each tree of the last pass, by its chances
    """

    way: str
    n_rows: int
    expected: list[float] = field(default_factory=list)
    of_both: ExpectedTokensBias = field(default_factory=ExpectedTokensBias)
    own: list[ExpectedTokensBias] = field(default_factory=lambda: [ExpectedTokensBias(), ExpectedTokensBias()])

    def __call__(self, chances: Sequence[np.ndarray], pass_s: Callable[[np.ndarray], np.ndarray]) -> list[int]:
        """See `best_prefixes`."""
        ratios = [1.0] * len(chances)
        if self.way == "own ratio":
            prior = self.of_both.corrected(2.0) - 1
            ratios = [float((one.hits[0] + _WEIGHT * prior) / (one.tries[0] + _WEIGHT)) for one in self.own]
        sizes = best_prefixes([ratio * one for ratio, one in zip(ratios, chances, strict=True)], pass_s)
        if self.way == "halves":
            sizes = [min(self.n_rows // len(chances) - 1, len(one)) for one in chances]
        self.expected = [1 + float(one[:n].sum()) for one, n in zip(chances, sizes, strict=True)]
        return sizes

    def observe(self, n_new: Sequence[int]) -> None:
        """What the last pass gave each sequence."""
        for known, expected, got in zip(self.own, self.expected, n_new, strict=True):
            known.observe(expected, got)
            self.of_both.observe(expected, got)


def opened(name: str, n_rows: int) -> tuple[LLM, Callable[[], Drafter]]:
    """The model, and what makes a drafter that knows what was learned of the pair and nothing else."""
    kind = drafter_type(name)
    draft = DRAFT if kind.needs_model else None
    config = EngineConfig(TARGET, draft, dtype="float32", device_memory="2GB", max_model_len=1024, drafter=name)
    kept: list[DraftParts] = []

    def open_drafter(parts: DraftParts) -> Drafter:
        cost = parts.cost.fixed(level_s=0.0)
        cost.seconds = lambda rows, *_, **__: np.maximum(np.asarray(rows) / n_rows, 1.0)  # type: ignore[method-assign]
        kept.append(replace(parts, cost=cost))
        return kind.open(kept[0])

    drafting = pick_drafter(config)
    llm = LLM.open(config, replace(drafting, type=replace(kind, open=open_drafter)))
    llm.load()
    return llm, lambda: kind.open(kept[0])


def counted(
    name: str, temperature: float, pairs: Sequence[tuple[list[int], list[int]]], flags: argparse.Namespace
) -> dict[str, list[list[float]]]:
    """Tokens and rows of each text a pass, by way and pair of prompts."""
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    module = "draft.recycle" if name == "recycle" else "tree_drafter"
    with no_pair_stats(), ExitStack() as stack:
        llm, new_drafter = opened(name, flags.rows)
        engine = stack.enter_context(llm).engine
        for (i, pair), n in itertools.product(enumerate(pairs), range(len(WAYS))):
            way = WAYS[(i + n) % len(WAYS)]
            divided, engine.drafter = Divided(way, flags.rows), new_drafter()
            params = SamplingParams(max_new_tokens=380, temperature=temperature, seed=i, ignore_eos=True)
            texts = [Text(prompt, params, 448) for prompt in map(list, pair)]
            ids = [engine.add(text) for text in texts]
            with mock.patch(f"offload_rt.speculate.{module}.best_prefixes", divided):
                engine.step()
                before = [(text.n_new, text.stats.n_nodes) for text in texts]
                for _ in range(flags.passes):
                    n_new = [text.n_new for text in texts]
                    engine.step()
                    divided.observe([text.n_new - n for text, n in zip(texts, n_new, strict=True)])
            after = [(text.n_new, text.stats.n_nodes) for text in texts]
            found[way].append(((np.array(after) - before) / flags.passes).ravel().tolist())
            for id in ids:
                engine.abort(id)
            engine.reset_prefix_cache()
    return found


def main() -> None:
    """Print a line for each drafter, temperature and way, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=["adaptive_tree", "recycle"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--passes", type=int, default=14)
    parser.add_argument("--prompts", type=int, default=12)
    flags = parser.parse_args()
    print(f"{machine()}\ncommit {commit()}")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    pairs = [*zip(held_out_prompts(tokenizer, flags.prompts), headers(tokenizer)[1], strict=False)]
    result = {"bench": "divided", "machine": machine(), "commit": commit(), **vars(flags)}
    for name, temperature in itertools.product(flags.drafters, flags.temperatures):
        found = result[f"{name}, T = {temperature:g}"] = counted(name, temperature, pairs, flags)
        for way, runs in found.items():
            of = [one[0] + one[2] - other[0] - other[2] for one, other in zip(runs, found["chances"], strict=True)]
            python, rows, other, other_rows = map(mean, zip(*runs, strict=True))
            print(
                f"{name}, T = {temperature:g}, {way}: {python + other:.2f} tokens a pass "
                f"({mean(of):+.2f} ± {stdev(of) / len(of) ** 0.5:.2f}); "
                f"Python {python:.2f} of {rows:.1f} rows, C++ {other:.2f} of {other_rows:.1f}",
                flush=True,
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
