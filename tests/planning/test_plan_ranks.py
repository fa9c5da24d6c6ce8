"""Plans for several GPUs: shares and exchanged bytes are computed by hand."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offload_rt.cli import plan
from offload_rt.cli.format import format_speed
from offload_rt.config import EngineConfig
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.models.families import parse_architecture
from offload_rt.planning.acceptance import assume
from offload_rt.planning.forecast import Forecast, Machine, PlanRequest, predict
from offload_rt.planning.hardware import find_card
from offload_rt.planning.known_models import KNOWN
from offload_rt.planning.ranks import Parallelism

CARD = find_card("rtx4090")
# of Llama2-70B; KV: columns of keys, and of values
D, INNER, KV, VOCAB, LAYERS = 8192, 28672, 1024, 32000, 80
FAST = Parallelism(2, gbps=1e9, via_link=False)


def sizes(name: str = "llama2-70b") -> Sizes:
    return Sizes.of_spec(parse_architecture(KNOWN[name]), DType.BFLOAT16)


def forecast(
    ranks: Parallelism, draft: str | None = None, ram: int = 200 * 10**9, **settings: Any
) -> Forecast:
    target = ranks.part(sizes())
    drafts = sizes(draft) if draft else None
    if ranks.split_draft and drafts:
        drafts = ranks.part(drafts)
    settings = {"draft_quantize": "none", "drafter": "static_tree" if draft else "none"} | settings
    config = EngineConfig("llama2-70b", draft, **settings)
    acceptance = assume("auto", ("", ""), ("llama2-70b", draft or ""), 0.0)
    machine = Machine.with_card(CARD, ram, 7.0).of_rank(ranks)
    return predict(PlanRequest(config, (target, drafts), acceptance, 128, 16), machine)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64])
def test_rank_has_its_part_of_every_matrix_and_all_norms(n):
    part = Parallelism(n).part(sizes())
    keys = 2 * D * max(KV // n, 128)  # of 16 ranks every two have the same head
    by_hand = 2 * (2 * D * D // n + keys + 3 * D * INNER // n + 2 * D)
    assert part.layer_nbytes == (by_hand,) * LAYERS
    assert part.layer_nbytes == Sizes.of_spec(part.spec, DType.BFLOAT16).layer_nbytes
    assert part.non_layer_nbytes == pytest.approx(2 * (2 * VOCAB * D // n + D), abs=1)
    assert part.spec.kv_nbytes(2) == LAYERS * 2 * max(KV // n, 128) * 2
    if n <= 8:
        assert part.spec.flops(0, 1, 100) == by_hand - 2 * 2 * D * (1 - 1 / n) + 4 * 101 * D // n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_exchanged_bytes_equal_a_ring(n):
    def summed(width: int) -> int:
        """Numbers that rank 0 receives until all have the sum of vectors of this width."""
        parts = [[{(rank, chunk)} for chunk in range(n)] for rank in range(n)]
        received = 0
        for step in range(2 * (n - 1)):
            for rank in range(n):
                chunk = (rank - step) % n
                parts[(rank + 1) % n][chunk] |= parts[rank][chunk]
                received += width // n if (rank + 1) % n == 0 else 0
        assert all(len(chunk) == n for rank in parts for chunk in rank)
        return received

    def gathered(width: int) -> int:
        return width - width // n

    part = Parallelism(n).part(sizes()).spec
    head = 2 * gathered(VOCAB)
    assert Parallelism(n).received(part, 2) == 4 * (2 * LAYERS + 1) * summed(D) + head
    exact = LAYERS * (gathered(D) + gathered(D) + gathered(INNER) + gathered(D))
    whole_sums = Parallelism(n, exact=True)
    assert whole_sums.received(whole_sums.part(sizes()).spec, 2) == 2 * exact + 4 * summed(D) + head
    # (2 + 3.5 + 1) numbers against 4, of two bytes against four of sums.
    assert 2 * exact / (4 * 2 * LAYERS * summed(D)) == pytest.approx(6.5 * 2 / (4 * 4))


def test_two_ranks_move_half_the_layers_over_each_link():
    single = forecast(Parallelism(), max_model_len=512)
    two = forecast(FAST, max_model_len=512)
    resident = [result.memory_plan.plan.tiers.count("device") for result in (single, two)]
    assert resident[1] > 2 * resident[0]
    for n, result, k in zip((1, 2), (single, two), resident, strict=True):
        nbytes = (LAYERS - k) * Parallelism(n).part(sizes()).layer_nbytes[0]
        assert result.moved == {"host": nbytes}
        assert result.plain.pass_s == pytest.approx(nbytes / 25e9, rel=0.01)
    # Half of the head as well.
    spec = replace(two.request.models[0].spec, vocab_size=VOCAB // 2)
    roof = two.machine.roof(DType.BFLOAT16, None)
    alone = roof.compute_times(spec, DType.BFLOAT16, is_replayed=False)
    assert two.row_s - two.exchange_s == pytest.approx(float(alone.at(np.array([1]), 128)[0]))


def test_pipeline_has_room_for_more_layers_and_one_link():
    single = forecast(Parallelism(), max_model_len=512)
    row = forecast(Parallelism(8, 12.5, True, pipeline=True), max_model_len=512)
    assert single.bound.startswith("the host-to-card link") and row.moved == {}
    assert row.exchange_s == pytest.approx(7 * 20e-6 + 7 * 2 * D / 12.5e9)
    roof = row.machine.roof(DType.BFLOAT16, None)
    assert row.plain.pass_s > sum(sizes().layer_nbytes) / roof.bandwidth  # one card after the other


@pytest.mark.parametrize("exact", [False, True])
def test_mixtures_and_models_without_a_plan_are_divided_by_experts(exact):
    """By hand: gpt-oss gathers all attention matrices, and a row uses four experts."""
    whole = sizes("gpt-oss-20b")
    ranks = Parallelism(4, exact=exact)
    part = ranks.part(whole)
    config = KNOWN["gpt-oss-20b"]
    d = config["hidden_size"]
    n_layers = config["num_hidden_layers"]
    heads = 64 * config["num_attention_heads"]
    assert sum(part.layer_nbytes) == pytest.approx(sum(whole.layer_nbytes) / 4, rel=0.01)
    assert part.spec.mixture == (tuple(range(n_layers)), 8, 1)
    assert part.spec.kv_nbytes(2) == whole.spec.kv_nbytes(2)
    gathered = 2 * (heads + 2 * 64 * config["num_key_value_heads"] + d)
    mixed = 2 * 4 * d * (4 if exact else 1)
    assert (
        ranks.received(part.spec, 2)
        == 3 * (n_layers * (gathered + mixed) + 2 * 4 * d + 2 * config["vocab_size"]) // 4
    )


# The command line.

PAIR = [
    "--model", "llama2-70b", "--draft-model", "llama2-7b", "--gpu", "rtx4090", "--ram", "192GiB",
    "--tree-size", "64",
]  # fmt: skip


@pytest.mark.parametrize(("more", "place"), [
    ([], "sharded over all cards"),  # room for layers
    # nothing to exchange
    (["--model", "llama2-7b", "--draft-model", "llama-68m"], "on the first card"),
])  # fmt: skip
def test_draft_is_planned_where_it_is_faster(more, place, capsys):
    asked = [*PAIR, "--ranks", "2", *more, "--max-new-tokens", "4", "--tree-size", "64"]
    results = {}
    for split in ("auto", "on", "off"):
        assert plan.main([*asked, "--split-draft", split, "--json"]) == 0
        results[split] = json.loads(capsys.readouterr().out)
    seconds = {split: result["predicted_seconds_per_token"] for split, result in results.items()}
    assert seconds["auto"] == min(seconds.values())
    assert results["auto"]["ranks"]["split_draft"] == (place != "on the first card")
    assert plan.main(asked) == 0
    told = re.findall(r"^with the draft model(.*): (.*)$", capsys.readouterr().out, re.M)
    assert place in told[0][0]
    by_place = sorted((seconds["on"], seconds["off"]))
    assert [speed for _, speed in told] == [format_speed(s) for s in by_place]
