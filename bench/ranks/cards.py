"""What would several GPUs gain? A forecast of `offload_rt.planning`, without measurements.

    python -m bench.ranks.cards [--model llama2-70b] [--draft-model llama2-7b] [--gpu rtx4090]

Print seconds per token for 1 to 8 GPUs: raw and lossless in bfloat16, with a link per GPU and per
pair of GPUs, for each kind of parallelism. Brackets contain the gain of the last doubling, and the
lines below each table the limiting resource.
"""

import argparse
from collections.abc import Iterator

from bench.common.measure import Benchmark
from offload_rt.config import EngineConfig, parse_size
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.models.families import parse_architecture
from offload_rt.planning.acceptance import assume
from offload_rt.planning.forecast import Forecast, PlanRequest, predict_if_it_fits
from offload_rt.planning.hardware import find_card
from offload_rt.planning.known_models import KNOWN
from offload_rt.planning.machine import Machine
from offload_rt.planning.ranks import Parallelism
from offload_rt.planning.sizes import lossless

N_CARDS = (1, 2, 4, 8)
WAYS = {
    "sharded layers, the draft on the first GPU": {},
    "sharded layers and draft": {"split_draft": True},
    "the same with --exact-parallel": {"split_draft": True, "exact": True},
    "a pipeline of layers": {"pipeline": True},
}
COLUMNS = {
    (shared, encoded): ("lossless" if encoded else "raw") + (", shared" if shared else "")
    for encoded in (False, True)
    for shared in (False, True)
}


def forecasts(
    flags: argparse.Namespace, way: dict[str, bool]
) -> Iterator[tuple[int, str, Forecast | None]]:
    """Yield number of GPUs, column and forecast; None if the model does not fit."""
    card = find_card(flags.gpu)
    machine = Machine.with_card(card, parse_size(flags.ram), 7.0)
    target, draft = (
        Sizes.of_spec(parse_architecture(KNOWN[name]), DType.BFLOAT16)
        for name in (flags.model, flags.draft_model)
    )
    config = EngineConfig(flags.model, flags.draft_model, drafter="static_tree")
    acceptance = assume("auto", ("", ""), (flags.model, flags.draft_model), 0.0)
    for n in N_CARDS:
        for (shared, encoded), column in COLUMNS.items():
            ranks = Parallelism.for_cards(n, card, card.link.gbps, None, shared_link=shared, **way)
            shard = ranks.part(target)
            models = (
                lossless(shard, True) if encoded else shard,
                ranks.part(draft) if ranks.split_draft else draft,
            )
            request = PlanRequest(config, models, acceptance, flags.context, 128)
            yield n, column, predict_if_it_fits(request, machine.of_rank(ranks))


def main() -> None:
    """Print a table for each kind of parallelism."""
    bench = Benchmark("cards", __doc__)
    bench.add("--model", default="llama2-70b", choices=KNOWN, metavar="NAME")
    bench.add("--draft-model", default="llama2-7b", choices=KNOWN, metavar="NAME")
    bench.add("--gpu", default="rtx4090")
    bench.add("--ram", default="192GiB")
    bench.add("--context", default=128, type=int)
    flags = bench.start()
    result: dict[str, object] = {}
    for title, way in WAYS.items():
        cells = {(n, column): forecast for n, column, forecast in forecasts(flags, way)}
        print(f"\n{title}\nGPUs " + "".join(f"{column:>18}" for column in COLUMNS.values()))
        for n in N_CARDS:
            row = (
                _cell(cells[n, column], cells.get((n // 2, column))) for column in COLUMNS.values()
            )
            print(f"{n:5}" + "".join(row))
        for n in N_CARDS[1:]:
            if (forecast := cells[n, "lossless"]) is not None:
                print(f"{n}, lossless: {forecast.bound}")
        result[title] = {
            f"{n}, {column}": forecast and forecast.run.seconds_per_token
            for (n, column), forecast in cells.items()
        }
    bench.finish(**result)


def _cell(forecast: Forecast | None, half: Forecast | None) -> str:
    if forecast is None:
        return f"{'does not fit':>18}"
    seconds = forecast.run.seconds_per_token
    gain = f"({half.run.seconds_per_token / seconds:.2f})" if half else ""
    return f"{seconds:11.3f} {gain:6}"


if __name__ == "__main__":
    main()
