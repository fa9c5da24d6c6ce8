"""Which experts should stay, and does it pay to fetch those ahead that the next layer will probably
take?

`python -m bench.expert_policy --model FOLDER` replays the choices of a mixture's routers on
held-out text (of one that `scripts/train_mixture.py` has trained, say) through `ExpertCache`, whose
link and computing follow a clock of their own; without a model the routers take all experts alike.
What is there and what is fetched is told by what is needed; the floor of what is fetched is
Belady's choice of what makes room, which knows the future and fetches nothing ahead. A second is
the link's time for the experts of a row. The last line is one JSON object.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.experts import open_paced
from bench.measure import Spread, commit, machine
from bench.prompts import held_out_prompts
from offload_rt import SamplingParams
from offload_rt.config import parse_size
from offload_rt.cost.pass_times import TouchedExperts
from offload_rt.models.architecture import Mixture
from offload_rt.offload import expert_cache
from offload_rt.offload.expert_cache import ExpertCache
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.placement import ExpertSizes
from offload_rt.weights.layout import Layout, PackedLayer

_NOTHING = PackedLayer(torch.empty(0, dtype=torch.uint8), Layout((), 0))


@dataclass(frozen=True)
class Choices:
    """What routers chose, (tokens, layers, n_used), and what was `expected` of the layer behind,
    wrong for the last one.
    """

    chosen: np.ndarray
    expected: np.ndarray
    n_experts: int

    @classmethod
    def alike(cls, n_tokens: int, n_layers: int, n_experts: int, n_used: int) -> "Choices":
        """Of routers that take all experts equally often, and of which nothing can be foretold."""
        chance = np.random.default_rng(0)
        both = chance.random((2, n_tokens, n_layers, n_experts)).argpartition(n_used, -1)[
            ..., :n_used
        ]
        return cls(both[0], both[1], n_experts)

    @classmethod
    def of_model(cls, folder: Path, n_texts: int, n_tokens: int) -> "Choices":
        """Of a mixture of transformers, on texts one after the other."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        gates = [one.mlp.gate for one in model.model.layers]
        given: list[torch.Tensor] = []
        hooks = [
            one.register_forward_hook(lambda _, args, out: given.append(args[0])) for one in gates
        ]
        chosen = []
        expected = []
        for tokens in held_out_prompts(AutoTokenizer.from_pretrained(folder), n_texts, n_tokens):
            given.clear()
            with torch.inference_mode():
                model(torch.tensor([tokens]), use_cache=False)
                hidden = [one.reshape(-1, one.shape[-1]) for one in given]
                of_next = zip([*gates[1:], gates[0]], hidden, strict=True)
                chosen.append(
                    torch.stack([gate(x)[2] for gate, x in zip(gates, hidden, strict=True)], 1)
                )
                expected.append(torch.stack([gate(x)[2] for gate, x in of_next], 1))
            del given[len(gates) :]
        for hook in hooks:
            hook.remove()
        return cls(
            torch.cat(chosen).numpy(), torch.cat(expected).numpy(), model.config.num_local_experts
        )

    def passes(self, n_rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of passes of so many tokens that follow each other."""
        for at in range(0, len(self.chosen) - n_rows + 1, n_rows):
            yield self.chosen[at : at + n_rows], self.expected[at : at + n_rows]

    def describe(self) -> dict[str, float]:
        """How far from alike they are."""
        n_tokens, n_layers, n_used = self.chosen.shape
        share = np.array(
            [
                np.bincount(self.chosen[:, k].ravel(), minlength=self.n_experts)
                for k in range(n_layers)
            ]
        )
        busiest = -np.sort(-share, 1)[:, : self.n_experts // 4].sum() / share.sum()
        again = np.mean(
            [
                len(np.intersect1d(a, b))
                for a, b in zip(self._flat()[:-1], self._flat()[1:], strict=True)
            ]
        )
        hits = [
            len(np.intersect1d(self.chosen[t, k + 1], self.expected[t, k]))
            for t in range(n_tokens)
            for k in range(n_layers - 1)
        ]
        return {
            "taken by the busiest quarter": float(busiest),
            "as the token before": float(again / n_layers / n_used),
            "foretold": float(np.mean(hits) / n_used),
            "foretold by chance": n_used / self.n_experts,
        }

    def _flat(self) -> np.ndarray:
        return np.array(
            self.chosen + self.n_experts * np.arange(self.chosen.shape[1])[:, None]
        ).reshape(len(self.chosen), -1)


class Replayed(ExpertCache):
    """Slots without bytes, by a clock: a second brings one expert.

    is_card  what was enqueued comes in its order; else what is needed overtakes what is likely
    """

    def __init__(self, sizes: ExpertSizes, n_slots: int, is_card: bool) -> None:
        tier = MemoryTier()
        for i in range(sizes.n_blocks):
            tier.put(i, _NOTHING)
        super().__init__(sizes, tier, lambda *_: None, [_NOTHING.block] * n_slots)
        self.now = 0.0
        self.n_needed = 0
        self.n_there = 0
        self.n_fetched = 0
        self._is_card = is_card
        self._urgent: list[list] = []  # block, slot, seconds left
        self._idle: list[list] = []

    def compute(self, seconds: float) -> None:
        """So long the device is busy, and the link goes on."""
        until = self.now + seconds
        while self._bring_next(until):
            pass
        self.now = until

    def _bring_next(self, until: float) -> bool:
        """Let the link go on until then, or until something comes; returns whether it did."""
        queue = self._urgent or self._idle
        if not queue:
            return False
        one = queue[0]
        seconds = min(one[2], until - self.now)
        self.now, one[2] = self.now + seconds, one[2] - seconds
        if one[2] > 1e-12:
            return False
        queue.pop(0)
        self._taken[one[1]] = one[0] in self._wanted
        self._fill()
        return True

    def close(self) -> None:
        """There is nothing to release."""

    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        (self._urgent if is_needed or self._is_card else self._idle).append([block, slot, 1.0])
        self.n_fetched += 1

    def _await(self) -> int:
        while True:
            coming = {one[0] for one in self._urgent + self._idle}
            for one in sorted(self._wanted):
                if one in self._slot_of and one not in coming:
                    return one
            assert self._bring_next(np.inf), "what is wanted comes"

    def _sort(self) -> None:
        coming = {one[0] for one in self._urgent + self._idle}
        self.n_needed += len(self._wanted)
        self.n_there += sum(one in self._slot_of and one not in coming for one in self._wanted)
        if self._is_card:
            return
        likely = self._idle
        self._idle = []
        for one in likely:
            if one[0] in self._wanted:
                self._urgent.append(one)
            elif one[2] == 1.0:
                self._free(one[0])
                self.n_fetched -= 1
            else:
                self._idle.append(one)

    def _in_transfer(self) -> tuple[set[int], int]:
        return set(), 0  # nobody computes on the host

    def _computed(self, slot: int) -> None:
        """It takes no time of its own."""

    def _drain(self) -> None:
        """No layer is left half-way."""


@dataclass(frozen=True)
class Setting:
    """How long use is remembered, and how many of the experts that a row takes may be fetched
    ahead.
    """

    memory: float = 0.95
    ahead: float = 0.0


@dataclass(frozen=True)
class Found:
    """Of passes: experts needed that were there, and fetched, by those needed; seconds; those that
    came by the cost model's.
    """

    there: float
    fetched: float
    seconds: float
    by_model: float


def replay(
    choices: Choices,
    setting: Setting,
    share: float,
    n_rows: int,
    computing: float,
    is_card: bool,
    most: int,
) -> Found:
    """What a policy gives with slots for this share of all experts.

    computing  seconds of a layer besides its experts, by those that the link takes for the experts
               of a row The first half of the passes fills the slots.
    """
    n_layers, n_used = choices.chosen.shape[1:]
    sizes = ExpertSizes(Mixture(tuple(range(n_layers)), choices.n_experts, n_used), 1)
    n_slots = max(int(share * sizes.n_blocks), n_used + 1)
    with patch.multiple(expert_cache, _MEMORY=setting.memory, _AHEAD=setting.ahead):
        cache = Replayed(sizes, n_slots, is_card)
        passes = list(choices.passes(n_rows))[-most:]
        for n, (chosen, expected) in enumerate(passes):
            if n == len(passes) // 2:
                cache.n_needed = cache.n_there = cache.n_fetched = 0
                started = cache.now
            for k in range(n_layers):
                cache.compute(computing * n_used)
                is_last = k == n_layers - 1
                likely = (
                    []
                    if is_last
                    else [one for one, _ in Counter(expected[:, k].ravel().tolist()).most_common()]
                )
                cache.expect((k + 1) % n_layers, likely)
                for _ in cache.arrive(k, Counter(chosen[:, k].ravel().tolist())):
                    cache.compute(computing)
    n = len(passes) - len(passes) // 2
    seconds = (cache.now - started) / (n * n_layers * n_used)
    model = TouchedExperts("host", n_layers, choices.n_experts, n_used, 1, n_slots / n_layers)
    by_model = cache.n_fetched / (n * float(model.pass_nbytes(np.array(n_rows))))
    return Found(
        cache.n_there / cache.n_needed, cache.n_fetched / cache.n_needed, seconds, by_model
    )


def belady(choices: Choices, share: float, n_rows: int, most: int) -> float:
    """The least that can be fetched, by what is needed."""
    n_layers, n_used = choices.chosen.shape[1:]
    n_slots = max(int(share * n_layers * choices.n_experts), n_used + 1)
    passes = list(choices.passes(n_rows))[-most:]
    steps = [
        [k * choices.n_experts + one for one in np.unique(chosen[:, k]).tolist()]
        for chosen, _ in passes
        for k in range(n_layers)
    ]
    later: list[list[int]] = []
    last: dict[int, int] = {}
    for at in range(len(steps) - 1, -1, -1):
        later.append([last.get(one, len(steps)) for one in steps[at]])
        last.update(dict.fromkeys(steps[at], at))
    held: dict[int, int] = {}
    n_needed = n_fetched = 0
    for at, (step, following) in enumerate(zip(steps, reversed(later), strict=True)):
        counts = at >= len(passes) // 2 * n_layers
        n_needed += counts * len(step)
        for one, then in zip(step, following, strict=True):
            if one not in held:
                n_fetched += counts
                if len(held) == n_slots:
                    del held[max(held, key=held.__getitem__)]
            held[one] = then
    return n_fetched / n_needed


def settings() -> list[Setting]:
    """Those that are compared: the shortest memory is that of LRU, the longest one of LFU."""
    return [
        *(Setting(memory=one) for one in (0.5, 0.9, 0.95, 0.99, 0.9999)),
        *(Setting(ahead=one) for one in (0.25, 0.5, 1, 2, 8)),
    ]


def paced(folder: Path, memory: int, gbps: float) -> dict[float, Spread]:
    """Seconds for a token of a model behind a link of a set speed, by what is fetched ahead, over
    those with nothing ahead.
    """
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(folder), 8, 24)
    ratios = dict[float, list[float]]()
    with ExitStack() as stack:  # each has a cache of its own
        llms = {
            one: stack.enter_context(open_paced(folder, "touched experts", memory, gbps))
            for one in (0.0, 0.25, 8.0)
        }
        print(f"{llms[0.0].plan.n_expert_slots} slots")
        for prompt in prompts:
            seconds = dict[float, float]()
            texts = list[list[int]]()
            for ahead, llm in llms.items():
                with patch.object(expert_cache, "_AHEAD", ahead):
                    llm.generate(prompt, SamplingParams(max_new_tokens=8, temperature=0.0))
                    started = time.perf_counter()
                    texts.append(
                        llm.generate(prompt, SamplingParams(max_new_tokens=32, temperature=0.0))[
                            0
                        ].token_ids
                    )
                seconds[ahead] = time.perf_counter() - started
            assert texts == [texts[0]] * 3, "what is ahead changes no token"
            for ahead, value in seconds.items():
                ratios.setdefault(ahead, []).append(value / seconds[0.0])
    return {ahead: Spread.of(one) for ahead, one in ratios.items()}


def main() -> None:
    """Print a table for each number of slots and rows, and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a mixture of transformers that was trained")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.15, 0.3, 0.6], help="slots / experts"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--passes", type=int, default=500)
    parser.add_argument("--computing", type=float, default=0.1, help="see `replay`")
    parser.add_argument(
        "--card", action="store_true", help="copies come in the order in which they were enqueued"
    )
    parser.add_argument(
        "--gbps", type=float, default=0.0, help="of a link that the model itself is run behind"
    )
    parser.add_argument(
        "--memory", type=parse_size, default=parse_size("18MB"), help="of the model that is run"
    )
    flags = parser.parse_args()
    print(f"{machine()}; commit {commit()}")
    choices = (
        Choices.of_model(flags.model, 12, 512) if flags.model else Choices.alike(6144, 6, 32, 4)
    )
    results: dict[str, object] = {"commit": commit(), "choices": choices.describe()}
    for ahead, ratio in paced(flags.model, flags.memory, flags.gbps).items() if flags.gbps else ():
        print(f"behind a link of {flags.gbps} GB/s, ahead {ahead}: {ratio}")
        results[f"paced {ahead}"] = asdict(ratio)
    print(", ".join(f"{key}: {value:.3f}" for key, value in choices.describe().items()))
    for share in flags.shares:
        for n_rows in flags.rows:
            floor = belady(choices, share, n_rows, flags.passes)
            print(f"\nslots for {share:.0%}, {n_rows} rows; Belady fetches {floor:.3f}")
            for one in settings():
                found = replay(
                    choices, one, share, n_rows, flags.computing, flags.card, flags.passes
                )
                print(
                    one,
                    ", ".join(f"{key} {value:.3f}" for key, value in asdict(found).items()),
                    flush=True,
                )
                results[f"{share} {n_rows} {one.memory} {one.ahead}"] = asdict(found)
            results[f"{share} {n_rows} floor"] = floor
    print(json.dumps(results))


if __name__ == "__main__":
    main()
