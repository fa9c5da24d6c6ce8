"""Does the simulator predict the time of a pass?

    python -m bench.simulate [--size 2100MB] [--seconds 420]

Part "passes": passes of so many rows over a model of which a part is resident and the rest comes
over a link of a set speed (memory behind `bench/paced.py`), against the simulator, which is told
the time of a layer by width, what the link reaches while nothing is computed, and what a byte that
arrives costs the computation, all three measured in the same run. Part "published": rows of
Sequoia's table of Llama 70B on an L40. The last line is one JSON object.
"""

import itertools
import threading
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np
import psutil
import torch

from bench.measure import (
    commit,
    expanded_model,
    flag_parser,
    machine,
    print_result,
    resident_layers,
)
from bench.paced import PacedTier
from offload_rt import LLM
from offload_rt.config import EngineConfig
from offload_rt.cost.pass_times import ComputeTimes, MachineProfile, pass_time
from offload_rt.cost.roofline import head_share
from offload_rt.dtypes import DType
from offload_rt.engine.memory_plan import Sizes
from offload_rt.engine.profile import compute_times
from offload_rt.executor.runner import Runner
from offload_rt.executor.step import Step
from offload_rt.models.families import spec_of
from offload_rt.offload.placement import MemoryBudget, Plan, ReservedMemory, place_layers
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources
from offload_rt.offload.tier import read_parallel
from offload_rt.planning.acceptance import PRESETS, Preset
from offload_rt.planning.forecast import Machine, PlanRequest, predict
from offload_rt.planning.hardware import find_card
from offload_rt.planning.known_models import KNOWN
from offload_rt.planning.simulate import Costs, StreamSchedule, generate, mean_pass_s, simulate
from offload_rt.system.trace import Trace
from offload_rt.tree.topology import Topology
from offload_rt.weights.layout import host_block

CONTEXT = 64
N_PASSES = 2
# Rows at which the contention is measured; none of the settings has as many.
CONTENTION_ROWS = 64
# Other programs on the same cores make a pass several times slower: a round in which they had a
# larger share is repeated.
_LITTLE = 0.06
_N_PAIRS = 4


@dataclass(frozen=True)
class Setting:
    """A budget as part of the weights, a link, and the rows of a pass."""

    share: float
    gbps: float
    n_rows: int


SETTINGS = (
    Setting(1 / 4, 0.5, 1), Setting(1 / 2, 0.5, 128), Setting(1 / 4, 1, 1), Setting(3 / 8, 1, 32),
    Setting(1 / 4, 1, 128),
    Setting(1 / 2, 1, 256), Setting(1 / 4, 2, 1), Setting(3 / 8, 2, 32), Setting(1 / 4, 2, 128),
    Setting(1 / 2, 2, 256),
    Setting(1 / 4, 4, 1), Setting(1 / 2, 4, 32), Setting(1 / 4, 4, 128), Setting(1 / 4, 4, 256),
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One round of a setting: seconds of a pass, of computing it just before and just after, and
    the contention.

    gbps    at which the link brought the same layers while nothing was computed
    others  part of the cores that other programs had meanwhile
    """

    pass_s: float
    compute_s: float
    gbps: float
    contention: float
    others: float


@dataclass(frozen=True)
class Compared:
    """Seconds of a pass, medians over the rounds; each round is simulated with what was measured in
    it.
    """

    setting: Setting
    n_resident: int
    n_slots: int
    measured_s: float
    simulated_s: float
    without_contention_s: float
    closed_s: float
    compute_s: float
    gbps: float
    contention: float
    others: float

    @property
    def error(self) -> float:
        """Of the simulator."""
        return self.simulated_s / self.measured_s - 1


class Bench:
    """A model of which all layers are in memory, some of them behind a link."""

    def __init__(self, llm: LLM) -> None:
        self._like, self._source = llm.engine.runner, resident_layers(llm)
        self.spec = self._like.spec
        self._contentions: dict[float, float] = {}
        self.layer_nbytes = [self._source.layout(i).nbytes for i in range(self.spec.n_layers)]

    def plan(self, setting: Setting) -> Plan:
        """What the loop's own placement keeps resident."""
        budget = int(setting.share * sum(self.layer_nbytes))
        return place_layers(self.layer_nbytes, ReservedMemory(0, 0, 0), MemoryBudget(budget))

    def pass_s(self, setting: Setting) -> tuple[float, float]:
        """Seconds of a pass, and GB/s at which a sweep that computes nothing brings the same
        layers.

        The circle is full before and after what is timed.
        """
        plan = self.plan(setting)
        tier = PacedTier(self._source, setting.gbps)
        streamed = tuple(tier if name == "disk" else None for name in plan.tiers)
        streamer = ThreadStreamer(
            LayerSources(self._source, streamed, plan.n_slots), Trace(on=False)
        )
        where = self._like.device, self._like.dtype
        runner = Runner(
            self.spec, streamer, self._like.non_layer, self._like.format, *where, Trace(on=False)
        )
        cache = runner.new_cache(CONTEXT + setting.n_rows)
        runner.assume_context(cache, CONTEXT)
        tokens = torch.arange(setting.n_rows) % self.spec.vocab_size
        step = Step(cache, tokens, Topology.chain(setting.n_rows), setting.n_rows, CONTEXT)
        moments = []
        for _ in range(N_PASSES + 2):
            moments.append(time.perf_counter())
            runner.forward([step])
        for _ in range(2):
            moments.append(time.perf_counter())
            for _ in streamer.sweep():
                pass
        moments.append(time.perf_counter())
        streamer.close()
        seconds = [after - before for before, after in pairwise(moments)]
        return median(seconds[1 : 1 + N_PASSES]), plan.on("disk") / seconds[-1] / 1e9

    def sample(self, setting: Setting, tries: int) -> Sample:
        """A round, repeated while other programs have a large share of the cores; returns the
        quietest.
        """
        samples = []
        for _ in range(tries):
            quiet = Quiet()
            before = self.compute_s(setting)
            pass_s, gbps = self.pass_s(setting)
            compute_s = (before + self.compute_s(setting)) / 2
            samples.append(
                Sample(pass_s, compute_s, gbps, self._contention(setting.gbps), quiet.others())
            )
            if samples[-1].others < _LITTLE:
                break
        return min(samples, key=lambda sample: sample.others)

    def compute_s(self, setting: Setting) -> float:
        """Seconds of computing a pass, as the loop measures it: by one layer, nothing arriving."""
        times = compute_times(self._like, setting.n_rows, CONTEXT)
        return float(times.at(np.array([setting.n_rows]), CONTEXT)[0])

    def _contention(self, gbps: float) -> float:
        """Share of the speed lost per GB/s that arrives, from the fastest passes with and without
        copies beside them.
        """
        if gbps not in self._contentions:
            alone, together = zip(
                *(self._with_and_without(gbps) for _ in range(_N_PAIRS)), strict=True
            )
            self._contentions[gbps] = max(min(together) / min(alone) - 1, 0.0) / gbps
        return self._contentions[gbps]

    def _with_and_without(self, gbps: float) -> tuple[float, float]:
        tier = PacedTier(self._source, gbps)
        stop = threading.Event()
        into = host_block(max(self.layer_nbytes))
        read_parallel(tier.reads(0, into), 1)

        def copy() -> None:
            i = 0
            while not stop.is_set():
                read_parallel(tier.reads(i % self.spec.n_layers, into), 1)
                i += 1

        alone = self._layers_s()
        thread = threading.Thread(target=copy)
        thread.start()
        together = self._layers_s()
        stop.set()
        thread.join()
        return alone, together

    def _layers_s(self) -> float:
        """Seconds of a pass over all layers where they lie."""
        cache = self._like.new_cache(CONTEXT + CONTENTION_ROWS)
        self._like.assume_context(cache, CONTEXT)
        step = Step(
            cache,
            torch.zeros(CONTENTION_ROWS, dtype=torch.int64),
            Topology.chain(CONTENTION_ROWS),
            1,
            CONTEXT,
        )
        started = time.perf_counter()
        self._like.forward([step])
        self._like.free_cache(cache)
        return time.perf_counter() - started


class Quiet:
    """Measures the share of the cores that other programs have."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), _busy_s(), time.process_time()

    def others(self) -> float:
        """Part of all cores since it began to watch."""
        seconds = (time.perf_counter() - self._started) * psutil.cpu_count()
        return max(_busy_s() - self._busy - (time.process_time() - self._own), 0.0) / seconds


def _busy_s() -> float:
    times = psutil.cpu_times()
    # Niced programs are left out: they take little but idle time.
    return times.user + times.system + times.irq + times.softirq + times.steal


def passes(size: str, seconds: float, tries: int) -> list[Compared]:
    """Measure all settings in turn, in rounds for so long, and simulate each with what was measured
    beside it.
    """
    started = time.perf_counter()
    with LLM(str(expanded_model(size)), drafter="none", max_model_len=512) as llm:
        bench = Bench(llm)
        samples: dict[Setting, list[Sample]] = {setting: [] for setting in SETTINGS}
        for setting in itertools.cycle(SETTINGS):
            if time.perf_counter() - started > seconds and samples[setting]:
                break
            samples[setting].append(bench.sample(setting, tries))
            print(f"{setting}: {samples[setting][-1]}", flush=True)
        return [_compared(bench, setting, samples[setting]) for setting in SETTINGS]


def _compared(bench: Bench, setting: Setting, samples: list[Sample]) -> Compared:
    plan = bench.plan(setting)

    def simulated(sample: Sample, contention: float) -> float:
        links = (("disk", sample.gbps),)
        compute = ComputeTimes((setting.n_rows,), (CONTEXT,), ((sample.compute_s,),))
        work = Costs(compute, head=head_share(bench.spec)).work(
            Topology.chain(setting.n_rows), CONTEXT
        )
        return mean_pass_s(simulate(StreamSchedule.of(plan, links, contention), [work] * 6))

    def closed(sample: Sample) -> float:
        compute = ComputeTimes((setting.n_rows,), (CONTEXT,), ((sample.compute_s,),))
        profile = MachineProfile(
            "paced", True, (("disk", sample.gbps), ("host", 1.0)), 1.0, 0.0, compute
        )
        return pass_time(profile, plan.pass_bytes, setting.n_rows, CONTEXT)

    return Compared(
        setting=setting,
        n_resident=plan.tiers.count("device"),
        n_slots=plan.n_slots,
        measured_s=median(sample.pass_s for sample in samples),
        simulated_s=median(simulated(sample, sample.contention) for sample in samples),
        without_contention_s=median(simulated(sample, 0.0) for sample in samples),
        closed_s=median(closed(sample) for sample in samples),
        compute_s=median(sample.compute_s for sample in samples),
        gbps=median(sample.gbps for sample in samples),
        contention=samples[0].contention,
        others=max(sample.others for sample in samples),
    )


@dataclass(frozen=True)
class Row:
    """A row of Sequoia's table of Llama 70B on an L40 with a tree of 768 nodes on 18 levels, and
    what is simulated.

    published_s  seconds per token, and so plain_s without a draft
    ours_s       of this project's loop with the same tree
    theirs_s     of Sequoia's own scheme: no layer resident, two buffers, nothing ahead of a pass;
                 and so theirs_plain_s
    """

    preset: str
    published_s: float
    plain_s: float
    ours_s: float
    theirs_s: float
    theirs_plain_s: float

    @property
    def error(self) -> float:
        """Of the simulation of Sequoia's scheme."""
        return self.theirs_s / self.published_s - 1

    @property
    def plain_error(self) -> float:
        """The same, without a draft."""
        return self.theirs_plain_s / self.plain_s - 1


# Seconds per token with trees and without, as published; tokens per pass are the presets'.
PUBLISHED = {
    "llama2-70b-chat": (0.66, 5.65),
    "llama2-70b-chat-0.6": (0.68, 5.65),
    "llama3-70b-instruct": (0.60, 5.7),
}


def published() -> list[Row]:
    """Simulate the published rows, by our scheme and by Sequoia's."""
    card = Machine.with_card(find_card("l40"), 256 * 10**9, 7.0)
    return [
        _row(preset, *PUBLISHED[preset.name], card)
        for preset in PRESETS
        if preset.name in PUBLISHED
    ]


def _row(preset: Preset, published_s: float, plain_s: float, card: Machine) -> Row:
    config = EngineConfig(*preset.pair, drafter="static_tree", tree_size=preset.n_nodes,
        tree_depth=preset.n_levels,
                          max_model_len=1024)  # fmt: skip
    specs = [spec_of(KNOWN[name]) for name in preset.pair]
    sizes = [Sizes.of_spec(spec, DType.FLOAT16) for spec in specs]
    ours = predict(PlanRequest(config, (sizes[0], sizes[1]), preset.assumed, 128, 128), card)
    costs = replace(card.costs(sizes[0], sizes[1], ours.memory_plan.plan), level_s=0.0)
    n = specs[0].n_layers
    schedule = StreamSchedule(
        (("host",),) * n,
        sizes[0].layer_nbytes,
        (("host", dict(card.links)["host"]),),
        2,
        card.contention,
        ahead=False,
    )
    theirs, alone = (
        generate(schedule, costs, (topology, preset.assumed.by_rank), (128, 256)).seconds_per_token
        for topology in (ours.topology, Topology.chain(1))
    )
    return Row(preset.name, published_s, plain_s, ours.run.seconds_per_token, theirs, alone)


def _line(one: Compared) -> str:
    asked = one.setting
    closed, bare = (
        seconds / one.measured_s - 1 for seconds in (one.closed_s, one.without_contention_s)
    )
    return (
        f"{asked.share:.3f} of the weights, {asked.gbps:3} GB/s ({one.gbps:.2f} reached),"
        f" {asked.n_rows:3} rows: computing {one.compute_s:.3f} s, measured {one.measured_s:.3f} s,"
        f" simulated {one.simulated_s:.3f} s, {one.error:+.1%} (without contention {bare:+.1%},"
        f" closed form {closed:+.1%}; others had {one.others:.0%})"
    )


def main() -> None:
    """Print the table and one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--size", default="2100MB")
    parser.add_argument("--seconds", type=float, default=420.0, help="of measuring passes")
    # Threads of a product wait for each other: beside niced programs, two threads took 30 times as
    # long for 32 rows.
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument(
        "--tries", type=int, default=2, help="of a round in which others had part of the cores"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("passes", "published"), default=["passes", "published"]
    )
    flags = parser.parse_args()
    print(f"{machine()}\ncommit {commit()}")
    result: dict[str, object] = {}
    torch.set_num_threads(flags.threads)
    if "passes" in flags.parts:
        compared = passes(flags.size, flags.seconds, flags.tries)
        for one in compared:
            print(_line(one))
        within = sum(abs(one.error) <= 0.1 for one in compared)
        print(f"within 10 %: {within} of {len(compared)}")
        result["passes"] = [{**asdict(one), "error": one.error} for one in compared]
    if "published" in flags.parts:
        rows = published()
        for row in rows:
            print(
                f"{row.preset:20} published {row.published_s:.2f} s per token, Sequoia's scheme"
                f" simulated {row.theirs_s:.2f} {row.error:+.1%}, plain {row.plain_s} and"
                f" {row.theirs_plain_s:.2f} {row.plain_error:+.1%}; ours {row.ours_s:.2f}"
            )
        result["published"] = [
            {**asdict(row), "error": row.error, "plain_error": row.plain_error} for row in rows
        ]
    print_result("simulate", flags, **result)


if __name__ == "__main__":
    main()
