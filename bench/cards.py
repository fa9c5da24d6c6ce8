"""What would several cards gain? A forecast by `offload_rt.planning`, with nothing measured.

    python -m bench.cards [--model llama2-70b] [--draft-model llama2-7b] [--gpu rtx4090] [--ram
    192GiB] [--context 128]

For 1 to 8 cards: seconds per token of the pair in bfloat16, as it is and lossless, with a link for
each card and with one for every two, by what of the model each card has. In brackets what the last
doubling gained; behind the table what passes wait for. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Iterator

from bench.measure import flag_parser
from offload_rt.config import EngineConfig, parse_size
from offload_rt.dtypes import DType
from offload_rt.engine.memory_plan import Sizes
from offload_rt.models.families import spec_of
from offload_rt.planning.acceptance import assume
from offload_rt.planning.forecast import Forecast, Machine, PlanRequest, predict_if_it_fits
from offload_rt.planning.hardware import find_card
from offload_rt.planning.known_models import KNOWN
from offload_rt.planning.ranks import Parallelism
from offload_rt.planning.sizes import lossless

N_CARDS = (1, 2, 4, 8)
HOW = {
    "parts of layers, the draft on the first card": {},
    "parts of layers and of the draft": {"split_draft": True},
    "the same, gathered for the numbers of one card": {"split_draft": True, "exact": True},
    "a pipeline of layers": {"pipeline": True},
}
COLUMNS = {(shared, encoded): f"{'lossless' if encoded else 'raw'}{', shared' if shared else ''}"
           for encoded in (False, True) for shared in (False, True)}  # fmt: skip


def forecasts(
    flags: argparse.Namespace, how: dict[str, bool]
) -> Iterator[tuple[int, str, Forecast | None]]:
    """Number of cards, column, and what is predicted; None where the model does not fit."""
    card = find_card(flags.gpu)
    one = Machine.with_card(card, parse_size(flags.ram), 7.0)
    target, draft = (
        Sizes.of_spec(spec_of(KNOWN[name]), DType.BFLOAT16)
        for name in (flags.model, flags.draft_model)
    )
    config = EngineConfig(flags.model, flags.draft_model, drafter="static_tree")
    acceptance = assume("auto", ("", ""), (flags.model, flags.draft_model), 0.0)
    for n in N_CARDS:
        for (shared, encoded), column in COLUMNS.items():
            ranks = Parallelism.of(n, card, card.link.gbps, None, shared_link=shared, **how)
            part = ranks.part(target)
            models = (
                lossless(part, True) if encoded else part,
                ranks.part(draft) if ranks.split_draft else draft,
            )
            request = PlanRequest(config, models, acceptance, flags.context, 128)
            yield n, column, predict_if_it_fits(request, one.of_rank(ranks))


def main() -> None:
    """Print a table for each way and one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--model", default="llama2-70b", choices=KNOWN, metavar="NAME")
    parser.add_argument("--draft-model", default="llama2-7b", choices=KNOWN, metavar="NAME")
    parser.add_argument("--gpu", default="rtx4090")
    parser.add_argument("--ram", default="192GiB")
    parser.add_argument("--context", default=128, type=int)
    flags = parser.parse_args()
    result: dict[str, object] = {"bench": "cards", **vars(flags)}
    print(f"forecast, seconds per token: {flags.model} with {flags.draft_model} on {flags.gpu}")
    for title, how in HOW.items():
        found = {(n, column): one for n, column, one in forecasts(flags, how)}
        print(f"\n{title}\ncards" + "".join(f"{column:>18}" for column in COLUMNS.values()))
        for n in N_CARDS:
            print(
                f"{n:5}"
                + "".join(
                    _cell(found[n, column], found.get((n // 2, column)))
                    for column in COLUMNS.values()
                )
            )
        for n in N_CARDS[1:]:
            if (one := found[n, "lossless"]) is not None:
                print(f"{n}, lossless: {one.bound}")
        result[title] = {
            f"{n}, {column}": one and one.run.seconds_per_token
            for (n, column), one in found.items()
        }
    print(json.dumps(result))


def _cell(one: Forecast | None, before: Forecast | None) -> str:
    if one is None:
        return f"{'does not fit':>18}"
    gain = f"({before.run.seconds_per_token / one.run.seconds_per_token:.2f})" if before else ""
    return f"{one.run.seconds_per_token:11.3f} {gain:6}"


if __name__ == "__main__":
    main()
