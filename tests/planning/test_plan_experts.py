"""Plans of mixtures by touched experts: bytes are computed by hand, and the table shows the
computed figures.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from support.plans import MIXTURE

from offload_rt.cli import plan
from offload_rt.config import EngineConfig
from offload_rt.dtypes import DType
from offload_rt.engine.memory_plan import Sizes
from offload_rt.models.families import spec_of
from offload_rt.planning.acceptance import assume
from offload_rt.planning.experts import RAM_GBPS, experts_of, touched
from offload_rt.planning.forecast import Forecast, Machine, PlanRequest, predict
from offload_rt.planning.hardware import find_card
from offload_rt.planning.sizes import find_models, formats, lossless

GPT_OSS_EXPERT = (5760 + 2880) * 2880 * 17 // 32 + 2 * (5760 + 2880)  # and its biases


def forecast(sizes: Sizes, ram: int = 64 << 30, card: str = "rtx4090") -> Forecast:
    machine = Machine.with_card(find_card(card), ram, 7.0)
    request = PlanRequest(
        EngineConfig("m", drafter="none"),
        (sizes, None),
        assume("1", ("", ""), ("", ""), 0.0),
        128,
        16,
    )
    return predict(request, machine)


@pytest.mark.parametrize(
    ("name", "n_layers", "n_experts", "n_used", "nbytes"),
    [
        ("qwen3-30b-a3b", 48, 128, 8, 2 * 3 * 2048 * 768),
        ("mixtral-8x7b", 32, 8, 2, 2 * 3 * 4096 * 14336),
        ("gpt-oss-120b", 36, 128, 4, GPT_OSS_EXPERT),
    ],
)
def test_experts_are_found_in_the_shapes_of_a_model(name, n_layers, n_experts, n_used, nbytes):
    experts, share = experts_of(find_models(EngineConfig(name))[0])
    assert (experts.n_layers, experts.n_experts, experts.n_used) == (n_layers, n_experts, n_used)
    assert experts.nbytes == pytest.approx(nbytes, rel=1e-4) and 0.6 < share < 1
    assert experts_of(find_models(EngineConfig("llama2-7b"))[0]) is None


def test_separately_stored_experts_give_the_same_plan():
    spec = spec_of(MIXTURE)
    shapes = {
        f"model.{name}.weight": shape
        for name, shape in (("embed_tokens", (96, 64)), ("norm", (64,)))
    }
    shapes["lm_head.weight"] = (96, 64)
    for i in range(3):
        layer = f"model.layers.{i}."
        moe = f"model.layers.{i}.block_sparse_moe."
        shapes |= {f"{layer}{norm}_layernorm.weight": (64,) for norm in ("input", "post_attention")}
        rows = {"q": 64, "k": 32, "v": 32, "o": 64}
        shapes |= {f"{layer}self_attn.{one}_proj.weight": (n, 64) for one, n in rows.items()}
        shapes |= {
            f"{moe}experts.{e}.{w}.weight": (128, 64) for e in range(8) for w in ("w1", "w3")
        }
        shapes |= {f"{moe}experts.{e}.w2.weight": (64, 128) for e in range(8)} | {
            f"{moe}gate.weight": (8, 64)
        }
    one_by_one, _ = spec.of_checkpoint(shapes)
    assert all(len(one.shape) < 3 for one in one_by_one.layer_tensors(0))
    (found, share), (expected, of_all) = (
        experts_of(Sizes.of_spec(one, DType.BFLOAT16)) for one in (one_by_one, spec)
    )
    assert replace(found, nbytes=0) == replace(expected, nbytes=0) and share == of_all
    # and some norms that begin at 256 bytes
    assert found.nbytes == pytest.approx(2 * 3 * 64 * 128, rel=0.01)


def test_gpt_oss_config_gives_the_size_of_its_checkpoint(mxfp4_checkpoint, tmp_path):
    alone = tmp_path / "config.json"
    alone.write_text((mxfp4_checkpoint / "config.json").read_text())
    by_config, by_headers = (
        find_models(EngineConfig(str(one)))[0] for one in (alone, mxfp4_checkpoint)
    )
    padding = 256 * len(by_headers.spec.layer_tensors(0))
    for mine, theirs in zip(by_config.layer_nbytes, by_headers.layer_nbytes, strict=True):
        assert abs(mine - theirs) <= padding < theirs / 2
    assert by_config.view_nbytes == by_headers.view_nbytes


def test_missing_experts_arrive_before_their_compute():
    whole = forecast(find_models(EngineConfig("qwen3-30b-a3b"))[0])
    found = touched(whole)
    plan_of_all = whole.memory_plan.plan
    expert = 2 * 3 * 2048 * 768
    layers = 48
    rest = sum(plan_of_all.layer_nbytes) - layers * 128 * expert
    room = whole.machine.budget.device - plan_of_all.reserved.total - rest - 2 * 8 * expert
    assert found.experts.n_resident == pytest.approx(room / (layers * expert), rel=1e-3)
    assert found.experts.n_resident + found.n_on_host == 128  # all others are in 64 GiB
    nbytes = layers * expert * 8 * (1 - found.experts.n_resident / 128)
    assert found.streamed_s == pytest.approx(
        nbytes / 25e9 + whole.row_s + whole.machine.fixed_s, rel=1e-3
    )
    # Processor and link end together, and the card computes what has come.
    together_s = nbytes / (25 + RAM_GBPS) / 1e9
    assert together_s < found.on_cpu_s < together_s + whole.row_s + whole.machine.fixed_s
    assert found.host_nbytes == pytest.approx(25e9 * together_s, rel=1e-3)
    assert found.streamed_s < whole.plain.pass_s / 10


def test_expert_misses_equal_those_of_random_tokens():
    found = touched(forecast(find_models(EngineConfig("gpt-oss-120b"))[0])).experts
    assert found.nbytes == pytest.approx(GPT_OSS_EXPERT, rel=1e-4)
    found = replace(found, n_resident=32)
    rng = np.random.default_rng(0)
    missed = [len({*rng.choice(128, 4, replace=False)} - {*range(32)}) for _ in range(4000)]
    expected = float(found.pass_nbytes(np.array(1))) / found.n_layers / found.nbytes
    assert expected == 3.0 and abs(np.mean(missed) - expected) < 5 * np.std(missed) / math.sqrt(
        4000
    )


def test_experts_beyond_memory_are_read_from_disk():
    target = find_models(EngineConfig("gpt-oss-120b"))[0]
    seconds = [touched(forecast(target, ram << 30)) for ram in (96, 64, 32, 24)]
    assert (
        seconds[0].streamed_s
        == seconds[1].streamed_s
        <= seconds[2].streamed_s
        < seconds[3].streamed_s
    )
    last = seconds[3]
    n_on_disk = 128 - last.experts.n_resident - last.n_on_host
    of_disk = 36 * last.experts.nbytes * 4 * n_on_disk / 128
    assert n_on_disk > 30 and last.streamed_s == pytest.approx(
        of_disk / 7e9 + forecast(target).row_s + 0.01, rel=1e-3
    )


def test_cpu_multiplies_quantised_experts_by_their_codes():
    """It reads them once; nothing is written."""
    found = touched(forecast(find_models(EngineConfig("gpt-oss-120b"))[0]))
    share = 25 / (25 + RAM_GBPS)  # of missing experts, copied over the link
    assert found.host_nbytes / found.nbytes == pytest.approx(share, rel=0.01)
    assert found.on_cpu_s < found.streamed_s


def test_dense_models_report_no_experts():
    target = find_models(EngineConfig("qwen3-30b-a3b"))[0]
    whole = forecast(target)
    assert touched(forecast(lossless(target, True))) is None
    assert touched(forecast(find_models(EngineConfig("llama2-7b"))[0])) is None
    budget = replace(whole.machine.budget, has_card=False)
    assert touched(replace(whole, machine=replace(whole.machine, budget=budget))) is None


def test_quantised_experts_of_touched_rows_are_decoded():
    """All of a dense layer, of a mixture as many as are met by one row, and more by many."""
    int4 = formats(find_models(EngineConfig("qwen3-30b-a3b"))[0], True)["int4, groups of 128"]
    slow = replace(Machine.with_card(find_card("h200"), 64 << 30, 7.0), decode_gbps=1.0)
    request = forecast(int4, card="h200").request
    fast, decoding = (predict(request, replace(slow, decode_gbps=rate)) for rate in (1e6, 1.0))
    met = 48 * (8 * 3 * 2048 * 768 + 2048 * (4096 + 2 * 512) + 4096 * 2048)
    assert decoding.row_s - fast.row_s == pytest.approx(2 * met / 1e9, rel=0.01)


def test_plan_shows_published_figures_beside_ways(capsys):
    asked = [
        "--model",
        "gpt-oss-120b",
        "--gpu",
        "rtx4090",
        "--ram",
        "64GiB",
        "--max-new-tokens",
        "16",
    ]
    assert plan.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["formats"] == {} and found["experts"]["experts"]["n_experts"] == 128
    assert plan.main(asked) == 0
    out = capsys.readouterr().out
    rates = [f"{1 / found['experts'][key]:.2f}" for key in ("streamed_s", "on_cpu_s")]
    for told in (
        "whole layers",
        *rates,
        "and the CPU beside",
        "published: 33.1 by llama.cpp",
        "as often as any other",
    ):
        assert told in out
