"""Which experts should stay cached, and does prefetching for the next layer pay?

    python -m bench.experts.policy --model FOLDER [--shares 0.15 0.4] [--rows 1 8] [--card]
        [--latency 0 1]

Replay the router choices of a mixture on held-out text (e.g. of `scripts/train_mixture.py`) through
`ExpertCache` on a virtual clock. Without --model, routers use all experts equally often. Counts are
relative to the needed experts. The floor of fetches is Belady's optimal eviction without
prefetching. The time unit is the link time for the experts of a row. A disk adds a latency to
each request, except for the block that follows the previous request.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.common.measure import Benchmark
from bench.common.prompts import held_out_prompts
from offload_rt.cost.pass_times import TouchedExperts
from offload_rt.models.layers import Mixture
from offload_rt.offload import expert_cache
from offload_rt.offload.expert_cache import ExpertCache
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.placement import ExpertSizes
from offload_rt.weights.layout import Layout, PackedLayer

_EMPTY = PackedLayer(torch.empty(0, dtype=torch.uint8), Layout((), 0))


@dataclass(frozen=True)
class Choices:
    """Router choices.

    chosen    (tokens, layers, n_used) chosen experts
    expected  (tokens, layers, n_used) prediction for the next layer, unused for the last
    """

    chosen: np.ndarray
    expected: np.ndarray
    n_experts: int

    @classmethod
    def uniform(cls, n_tokens: int, n_layers: int, n_experts: int, n_used: int) -> "Choices":
        """Draw choices with equal probabilities and useless predictions."""
        random = np.random.default_rng(0).random((2, n_tokens, n_layers, n_experts))
        chosen, expected = random.argpartition(n_used, -1)[..., :n_used]
        return cls(chosen, expected, n_experts)

    @classmethod
    def of_model(cls, folder: Path, n_texts: int, n_tokens: int) -> "Choices":
        """Record the choices of a mixture of transformers on consecutive texts."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        gates = [layer.mlp.gate for layer in model.model.layers]
        inputs: list[torch.Tensor] = []
        for gate in gates:
            gate.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        chosen = []
        expected = []
        for tokens in held_out_prompts(AutoTokenizer.from_pretrained(folder), n_texts, n_tokens):
            inputs.clear()
            with torch.inference_mode():
                model(torch.tensor([tokens]), use_cache=False)
                hidden = [x.reshape(-1, x.shape[-1]) for x in inputs]
                for rows, routers in ((chosen, gates), (expected, [*gates[1:], gates[0]])):
                    pairs = zip(routers, hidden, strict=True)
                    # `forward` avoids the hooks, which would extend `inputs`.
                    rows.append(torch.stack([gate.forward(x)[2] for gate, x in pairs], 1))
        n_experts = model.config.num_local_experts
        return cls(torch.cat(chosen).numpy(), torch.cat(expected).numpy(), n_experts)

    def passes(self, n_rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield choices and predictions of consecutive passes of n rows."""
        for start in range(0, len(self.chosen) - n_rows + 1, n_rows):
            part = slice(start, start + n_rows)
            yield self.chosen[part], self.expected[part]

    def describe(self) -> dict[str, float]:
        """Measure skew, repetition and predictability."""
        _, n_layers, n_used = self.chosen.shape
        by_layer = [self.chosen[:, k].ravel() for k in range(n_layers)]
        counts = np.array([np.bincount(x, minlength=self.n_experts) for x in by_layer])
        busiest = -np.sort(-counts, 1)[:, : self.n_experts // 4].sum() / counts.sum()

        def overlap(a: np.ndarray, b: np.ndarray) -> float:
            return float((a[..., None] == b[..., None, :]).any(-1).mean())

        return {
            "share of the busiest quarter": float(busiest),
            "equal to the previous token": overlap(self.chosen[1:], self.chosen[:-1]),
            "predicted": overlap(self.chosen[:, 1:], self.expected[:, :-1]),
            "predicted by chance": n_used / self.n_experts,
        }


@dataclass(frozen=True)
class Link:
    """Transfers of a block in a second each.

    latency  further seconds of a request
    is_card  transfers keep their order; otherwise needed experts overtake predicted experts
    """

    latency: float = 0.0
    is_card: bool = False

    @property
    def request_s(self) -> float:
        """Seconds of a separate request."""
        return 1.0 + self.latency


@dataclass
class Transfer:
    """A block in transfer to a slot."""

    block: int
    slot: int
    seconds_left: float


class Replayed(ExpertCache):
    """Cache with empty blocks on a virtual clock; see `Link`."""

    def __init__(self, sizes: ExpertSizes, n_slots: int, link: Link) -> None:
        tier = MemoryTier()
        for i in range(sizes.n_blocks):
            tier.put(i, _EMPTY)
        super().__init__(sizes, tier, lambda *_: None, [_EMPTY.block] * n_slots)
        self.now = 0.0
        self.n_needed = 0
        self.n_cached = 0
        self._link = link
        self._last = -1  # latest block on the link
        self._urgent: list[Transfer] = []
        self._idle: list[Transfer] = []

    def compute(self, seconds: float) -> None:
        """Advance the clock while the link continues."""
        until = self.now + seconds
        while self._transfer_next(until):
            pass
        self.now = until

    def _transfer_next(self, until: float) -> bool:
        """Advance the link until a time or the next arrival; returns whether a block arrived."""
        queue = self._urgent or self._idle
        if not queue:
            return False
        transfer = queue[0]
        if transfer.seconds_left == self._link.request_s and transfer.block == self._last + 1:
            transfer.seconds_left = 1.0
        self._last = transfer.block
        seconds = min(transfer.seconds_left, until - self.now)
        self.now += seconds
        transfer.seconds_left -= seconds
        if transfer.seconds_left > 1e-12:
            return False
        queue.pop(0)
        self._taken[transfer.slot] = transfer.block in self._wanted
        self._fill()
        return True

    def close(self) -> None:
        """Release nothing."""

    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        queue = self._urgent if is_needed or self._link.is_card else self._idle
        queue.append(Transfer(block, slot, self._link.request_s))

    def _pending(self) -> set[int]:
        return {transfer.block for transfer in self._urgent + self._idle}

    def _await(self) -> int:
        while True:
            pending = self._pending()
            for block in sorted(self._wanted):
                if block in self._slot_of and block not in pending:
                    return block
            assert self._transfer_next(np.inf), "wanted blocks arrive"

    def _sort(self) -> None:
        pending = self._pending()
        self.n_needed += len(self._wanted)
        self.n_cached += sum(
            block in self._slot_of and block not in pending for block in self._wanted
        )
        if self._link.is_card:
            return
        predicted = self._idle
        self._idle = []
        for transfer in predicted:
            if transfer.block in self._wanted:
                self._urgent.append(transfer)
            elif transfer.seconds_left == self._link.request_s:
                self._free(transfer.block)
            else:
                self._idle.append(transfer)

    def _in_transfer(self) -> tuple[set[int], int]:
        return set(), 0  # no host compute

    def _computed(self, slot: int) -> None:
        """Take no time."""

    def _drain(self) -> None:
        """Leave complete layers only."""


@dataclass(frozen=True)
class Policy:
    """Decay of use counts (0.5: LRU, near 1: LFU); prefetched share of a row's experts."""

    memory: float = 0.95
    ahead: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Cached and fetched experts per needed expert, seconds, fetches / cost model's fetches."""

    cached: float
    fetched: float
    seconds: float
    by_model: float


POLICIES = (
    *(Policy(memory=memory) for memory in (0.5, 0.9, 0.95, 0.99, 0.9999)),
    *(Policy(ahead=ahead) for ahead in (0.25, 0.5, 1, 2, 8)),
)


def replay(
    passes: list[tuple[np.ndarray, np.ndarray]], n_experts: int, policy: Policy, share: float,
    computing: float, link: Link,
) -> Outcome:  # fmt: skip
    """Replay passes with slots for a share of all experts; the first half fills the slots.

    computing  seconds per layer besides its experts, relative to the link time of a row's experts
    """
    n_rows, n_layers, n_used = passes[0][0].shape
    sizes = ExpertSizes(Mixture(tuple(range(n_layers)), n_experts, n_used), 1)
    n_slots = max(int(share * sizes.n_blocks), n_used + 1)
    with patch.multiple(expert_cache, _MEMORY=policy.memory, _AHEAD=policy.ahead):
        cache = Replayed(sizes, n_slots, link)
        for n, (chosen, expected) in enumerate(passes):
            if n == len(passes) // 2:
                cache.n_needed = cache.n_cached = cache.n_fetched = 0
                started = cache.now
            for k in range(n_layers):
                cache.compute(computing * n_used)
                predicted = Counter(expected[:, k].ravel().tolist() if k < n_layers - 1 else ())
                cache.expect((k + 1) % n_layers, [block for block, _ in predicted.most_common()])
                for _ in cache.arrive(k, Counter(chosen[:, k].ravel().tolist())):
                    cache.compute(computing)
    n = len(passes) - len(passes) // 2
    model = TouchedExperts("host", n_layers, n_experts, n_used, 1, n_slots / n_layers)
    return Outcome(
        cache.n_cached / cache.n_needed,
        cache.n_fetched / cache.n_needed,
        (cache.now - started) / (n * n_layers * n_used),
        cache.n_fetched / (n * float(model.pass_nbytes(np.array(n_rows)))),
    )


def belady(passes: list[tuple[np.ndarray, np.ndarray]], n_experts: int, share: float) -> float:
    """Return the minimum of fetched per needed experts in the second half of the passes."""
    _, n_layers, n_used = passes[0][0].shape
    n_slots = max(int(share * n_layers * n_experts), n_used + 1)
    steps = [
        [k * n_experts + expert for expert in np.unique(chosen[:, k]).tolist()]
        for chosen, _ in passes
        for k in range(n_layers)
    ]
    next_use: dict[int, int] = {}
    uses: list[list[int]] = []
    for i in range(len(steps) - 1, -1, -1):
        uses.append([next_use.get(block, len(steps)) for block in steps[i]])
        next_use.update(dict.fromkeys(steps[i], i))
    cached: dict[int, int] = {}
    n_needed = n_fetched = 0
    for i, (step, following) in enumerate(zip(steps, reversed(uses), strict=True)):
        counts = i >= len(passes) // 2 * n_layers
        n_needed += counts * len(step)
        for block, use in zip(step, following, strict=True):
            if block not in cached:
                n_fetched += counts
                if len(cached) == n_slots:
                    del cached[max(cached, key=cached.__getitem__)]
            cached[block] = use
    return n_fetched / n_needed


def main() -> None:
    """Print a table for each number of slots and rows."""
    bench = Benchmark("expert_policy", __doc__)
    bench.add("--model", type=Path, help="a trained mixture of transformers")
    bench.add("--shares", type=float, nargs="+", default=[0.15, 0.3, 0.6], help="slots / experts")
    bench.add("--rows", type=int, nargs="+", default=[1, 8])
    bench.add("--passes", type=int, default=500)
    bench.add("--computing", type=float, default=0.1, help="see `replay`")
    bench.add("--latency", type=float, nargs="+", default=[0.0], help="of requests, in transfers")
    bench.add("--card", action="store_true", help="transfers keep their order, as on a GPU")
    flags = bench.start()
    choices = (
        Choices.of_model(flags.model, 12, 512) if flags.model else Choices.uniform(6144, 6, 32, 4)
    )
    figures = choices.describe()
    results: dict[str, object] = {"choices": figures}
    print(_listed(figures))
    for share, n_rows in itertools.product(flags.shares, flags.rows):
        passes = list(choices.passes(n_rows))[-flags.passes :]
        floor = belady(passes, choices.n_experts, share)
        print(f"\nslots for {share:.0%}, {n_rows} rows; Belady fetches {floor:.3f}")
        results[f"{share} {n_rows} floor"] = floor
        for latency, policy in itertools.product(flags.latency, POLICIES):
            link = Link(latency, flags.card)
            outcome = replay(passes, choices.n_experts, policy, share, flags.computing, link)
            print(f"latency {latency}", policy, _listed(asdict(outcome)), flush=True)
            results[f"{share} {n_rows} {policy.memory} {policy.ahead} latency {latency}"] = outcome
    bench.finish(**results)


def _listed(figures: dict[str, float]) -> str:
    return ", ".join(f"{name}: {value:.3f}" for name, value in figures.items())


if __name__ == "__main__":
    main()
