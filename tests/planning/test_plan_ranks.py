"""Plans for several GPUs and by the experts that tokens touch; bytes are counted by hand."""

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from support.experts import open_touched
from support.plans import known_sizes, planned, request
from support.tiny import measure_little

from offload_rt.cli import plan, run
from offload_rt.cli.format import format_speed
from offload_rt.config import EngineConfig
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.planning.alternatives import expert_ways
from offload_rt.planning.forecast import (
    ON_CPU,
    ON_DEMAND,
    WHOLE_LAYERS,
    Forecast,
    predict,
)
from offload_rt.planning.hardware import find_card
from offload_rt.planning.known_models import KNOWN
from offload_rt.planning.machine import RAM_GBPS, Machine
from offload_rt.planning.ranks import Parallelism
from offload_rt.planning.sizes import find_models

CARD = find_card("rtx4090")
# of Llama2-70B; KV: columns of keys, and of values
D, INNER, KV, VOCAB, LAYERS = 8192, 28672, 1024, 32000, 80
FAST = Parallelism(2, gbps=1e9, via_link=False)


WHOLE = known_sizes("llama2-70b")


def forecast(ranks: Parallelism) -> Forecast:
    machine = Machine.with_card(CARD, 200 * 10**9, 7.0).of_rank(ranks)
    return predict(request(ranks.part(WHOLE), max_model_len=512), machine)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64])
def test_rank_has_its_part_of_every_matrix_and_all_norms(n):
    part = Parallelism(n).part(WHOLE)
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
    """A rank receives (n - 1) / n of gathered vectors, and of sums twice as much."""
    ranks, exact = Parallelism(n), Parallelism(n, exact=True)
    sums = 2 * 4 * D
    head = 2 * VOCAB
    gathered = 2 * LAYERS * (3 * D + INNER)
    for parallelism, nbytes in ((ranks, (2 * LAYERS + 1) * sums), (exact, gathered + sums)):
        received = parallelism.received(parallelism.part(WHOLE).spec, 2)
        assert received == (nbytes + head) * (n - 1) // n


def test_two_ranks_move_half_the_layers_over_each_link():
    single = forecast(Parallelism())
    two = forecast(FAST)
    resident = [result.memory_plan.plan.tiers.count("device") for result in (single, two)]
    assert resident[1] > 2 * resident[0]
    for n, result, k in zip((1, 2), (single, two), resident, strict=True):
        nbytes = (LAYERS - k) * Parallelism(n).part(WHOLE).layer_nbytes[0]
        assert result.moved == {"host": nbytes}
        assert result.plain.pass_s == pytest.approx(nbytes / 25e9, rel=0.01)
    # Half of the head as well.
    spec = replace(two.request.models[0].spec, vocab_size=VOCAB // 2)
    roof = two.machine.roof(DType.BFLOAT16, None)
    alone = roof.compute_times(spec, DType.BFLOAT16, is_replayed=False)
    assert two.row_s - two.exchange_s == pytest.approx(float(alone.at(np.array([1]), 128)[0]))


def test_pipeline_has_room_for_more_layers_and_one_link():
    single = forecast(Parallelism())
    row = forecast(Parallelism(8, 12.5, True, pipeline=True))
    assert single.bound.startswith("the host-to-card link") and row.moved == {}
    assert row.exchange_s == pytest.approx(7 * 20e-6 + 7 * 2 * D / 12.5e9)
    roof = row.machine.roof(DType.BFLOAT16, None)
    assert row.plain.pass_s > sum(WHOLE.layer_nbytes) / roof.bandwidth  # one card after the other


@pytest.mark.parametrize("exact", [False, True])
def test_mixtures_and_models_without_a_plan_are_divided_by_experts(exact):
    """By hand: gpt-oss gathers all attention matrices, and a row uses four experts."""
    whole = known_sizes("gpt-oss-20b")
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
    results = {
        split: planned([*asked, "--split-draft", split], capsys) for split in ("auto", "on", "off")
    }
    seconds = {split: result["predicted_seconds_per_token"] for split, result in results.items()}
    assert seconds["auto"] == min(seconds.values())
    assert results["auto"]["ranks"]["split_draft"] == (place != "on the first card")
    assert plan.main(asked) == 0
    told = re.findall(r"^with the draft model(.*): (.*)$", capsys.readouterr().out, re.M)
    assert place in told[0][0]
    by_place = sorted((seconds["on"], seconds["off"]))
    assert [speed for _, speed in told] == [format_speed(s) for s in by_place]


def forecast_experts(name: str, ram: int = 64 << 30) -> Forecast:
    target, _ = find_models(EngineConfig(name))
    return predict(request(target), Machine.with_card(CARD, ram, 7.0))


def test_gpt_oss_config_gives_the_size_of_its_checkpoint(mxfp4_checkpoint, tmp_path):
    alone = tmp_path / "config.json"
    alone.write_text((mxfp4_checkpoint / "config.json").read_text())
    by_config, by_headers = (
        find_models(EngineConfig(str(path)))[0] for path in (alone, mxfp4_checkpoint)
    )
    padding = 256 * len(by_headers.spec.layer_tensors(0))
    for mine, theirs in zip(by_config.layer_nbytes, by_headers.layer_nbytes, strict=True):
        assert abs(mine - theirs) <= padding < theirs / 2
    assert by_config.view_nbytes == by_headers.view_nbytes
    assert by_config.host_view_nbytes == by_headers.host_view_nbytes


def test_missing_experts_cross_the_link_in_every_pass() -> None:
    result = forecast_experts("qwen3-30b-a3b")
    plan = result.memory_plan.plan
    expert = plan.experts.nbytes
    assert expert == pytest.approx(2 * 3 * 2048 * 768, rel=1e-4)
    room = plan.budget.device - plan.reserved.total + plan.reserved.experts
    assert plan.n_expert_slots == (room - sum(plan.layer_nbytes)) // expert
    assert plan.tiers == ("device",) * 48 and plan.experts.n_on_host == 48 * 128
    missing = 48 * expert * 8 * (1 - plan.n_expert_slots / 48 / 128)
    assert sum(plan.pass_bytes.at(0).values()) == pytest.approx(missing, rel=1e-6)
    # Processor and link share the missing experts and end together.
    assert result.moved["host"] == pytest.approx(missing * 25 / (25 + RAM_GBPS), rel=1e-3)
    ways = expert_ways(result)
    assert result.mode == ON_CPU and ways[ON_CPU].plain == result.plain
    assert ways[ON_DEMAND].moved["host"] == pytest.approx(missing, rel=1e-6)
    assert ways[ON_DEMAND].plain.pass_s > missing / 25e9
    whole = ways[WHOLE_LAYERS]
    assert whole.memory_plan.plan.experts is None
    assert whole.plain.pass_s > 10 * ways[ON_DEMAND].plain.pass_s


@pytest.mark.filterwarnings("error::FutureWarning")
def test_printed_experts_are_complete_and_traffic_agrees(capsys: pytest.CaptureFixture) -> None:
    assert plan.main(["mixtral-8x7b", "--gpu", "rtx3090", "--ram", "64GiB"]) == 0
    out, err = capsys.readouterr()
    held = [int(n) for n in re.findall(r"(\d+) of 256 experts +│ (?:device|host|disk)", out)]
    assert min(held) > 0 and sum(held) == 256 and err == ""
    host_link = re.findall(r"host link │ +([\d.]+) GiB", out)
    rows = re.findall(r"(?:^bf16|\(the mode of a run\)) +([\d.]+) GiB +[\d.]+$", out, re.M)
    assert rows == 2 * host_link


def test_streamed_layers_precede_experts_in_host_memory() -> None:
    """A pass reads every layer, but 8 of 256 experts. Three layers without experts are larger."""
    plan = forecast_experts("deepseek-v3", ram=64 * 10**9).memory_plan.plan
    assert plan.experts is not None and set(plan.tiers) == {"device", "host"}
    free = plan.budget.host - plan.budget.buffers - plan.on("host")
    # Host slots for layers and a block of experts may remain.
    assert 0 <= free < 4 * max(plan.layer_nbytes)


@pytest.mark.parametrize("drafting", [{}, {"drafter": "recycle", "tree_size": 8}])
def test_plan_and_run_agree_for_a_mixture(mixture_of, drafting, monkeypatch, capsys):
    """`offload-rt plan`, `run --plan` and the run have the same placement and limits."""
    measure_little(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = mixture_of("mixtral")[1]
    with open_touched(folder, 5, max_model_len=64, **drafting) as llm:
        loaded = llm.spec.memory
        assert llm.engine.drafter.limits == loaded.limits
    settings = {"drafter": "none", "device_memory": loaded.plan.budget.device} | drafting
    flags = ["--model", str(folder), "--max-model-len", "64", "--json"]
    flags += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    lengths = ["--context", "16", "--max-new-tokens", "8"]
    for main, more in ((plan.main, lengths), (run.main, ["--plan"])):
        assert main([*flags, *more]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["plan"] == json.loads(json.dumps(asdict(loaded.plan)))
        assert printed["max_tree_nodes"] == loaded.limits.n_nodes
        assert printed["link_bytes"] == loaded.plan.pass_bytes.at(16, printed["tree_nodes"])
