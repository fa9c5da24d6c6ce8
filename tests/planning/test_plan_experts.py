"""Plans of mixtures by the experts that tokens touch; bytes are counted by hand."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import measure_little
from transformers import MixtralConfig, MixtralForCausalLM

from offload_rt import LLM
from offload_rt.cli import plan, run
from offload_rt.config import EngineConfig
from offload_rt.engine.model_sizes import Sizes
from offload_rt.planning.acceptance import assume
from offload_rt.planning.alternatives import expert_ways
from offload_rt.planning.forecast import (
    ON_CPU,
    ON_DEMAND,
    RAM_GBPS,
    WHOLE_LAYERS,
    Forecast,
    Machine,
    PlanRequest,
    predict,
)
from offload_rt.planning.hardware import find_card
from offload_rt.planning.sizes import find_models

GPT_OSS_EXPERT = (5760 + 2880) * 2880 * 17 // 32 + 2 * (5760 + 2880)  # and its biases


def forecast(sizes: Sizes, ram: int = 64 << 30, card: str = "rtx4090") -> Forecast:
    machine = Machine.with_card(find_card(card), ram, 7.0)
    acceptance = assume("1", ("", ""), ("", ""), 0.0)
    config = EngineConfig("m", drafter="none")
    return predict(PlanRequest(config, (sizes, None), acceptance, 128, 16), machine)


@pytest.mark.parametrize(("name", "n_layers", "n_experts", "n_used", "nbytes"), [
    ("qwen3-30b-a3b", 48, 128, 8, 2 * 3 * 2048 * 768),
    ("mixtral-8x7b", 32, 8, 2, 2 * 3 * 4096 * 14336),
    ("gpt-oss-120b", 36, 128, 4, GPT_OSS_EXPERT),
])  # fmt: skip
def test_experts_are_found_in_the_shapes_of_a_model(name, n_layers, n_experts, n_used, nbytes):
    sizes = find_models(EngineConfig(name))[0]
    divided = sizes.by_expert()
    mixture = divided.experts.mixture
    assert (len(mixture.layers), *mixture[1:]) == (n_layers, n_experts, n_used)
    assert divided.experts.nbytes == pytest.approx(nbytes, rel=1e-4)
    experts_nbytes = n_layers * n_experts * divided.experts.nbytes
    assert sum(divided.layer_nbytes) + experts_nbytes == pytest.approx(sum(sizes.layer_nbytes))
    assert find_models(EngineConfig("llama2-7b"))[0].by_expert() is None


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
    result = forecast(find_models(EngineConfig("qwen3-30b-a3b"))[0])
    plan = result.memory_plan.plan
    expert = plan.experts.nbytes
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
    model = find_models(EngineConfig("deepseek-v3"))[0]
    plan = forecast(model, ram=64 * 10**9).memory_plan.plan
    assert plan.experts is not None and set(plan.tiers) == {"device", "host"}
    free = plan.budget.host - plan.budget.buffers - plan.on("host")
    # Host slots for layers and a block of experts may remain.
    assert 0 <= free < 4 * max(plan.layer_nbytes)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a mixture with experts that are much larger than the rest of its layers."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 96}
    config = MixtralConfig(**sizes, **experts, num_attention_heads=4, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("mixture")
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def with_slots(mixture: Path, n_slots: int, **settings: Any) -> EngineConfig:
    """Settings with room for so many experts, all other weights on the device."""
    config = EngineConfig(str(mixture), device="cpu", max_model_len=64, **settings)
    with LLM.open(config) as llm:
        divided = llm.spec.target.sizes.by_expert()
        reserved = llm.plan.reserved.total
    nbytes = reserved + sum(divided.layer_nbytes) + n_slots * divided.experts.nbytes
    return replace(config, device_memory=nbytes)


@pytest.mark.parametrize("drafter", ["none", "recycle"])
def test_plan_and_run_agree_for_a_mixture(mixture, drafter, monkeypatch, capsys):
    """`offload-rt plan`, `run --plan` and the run have the same placement and limits."""
    measure_little(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = with_slots(mixture, 5, drafter=drafter)
    flags = ["--model", str(mixture), "--max-model-len", "64", "--json"]
    flags += ["--device-memory", str(config.device_memory), "--drafter", drafter]
    with LLM.open(config) as llm:
        llm.load()
        loaded = llm.spec.memory
        assert llm.engine.runner.experts is not None
        assert llm.engine.drafter.limits == loaded.limits
    assert 5 <= loaded.plan.n_expert_slots < 32
    expected = json.loads(json.dumps(asdict(loaded.plan)))
    moved = loaded.plan.pass_bytes.at(16)
    lengths = ["--context", "16", "--max-new-tokens", "8"]
    for main, more in ((plan.main, lengths), (run.main, ["--plan"])):
        assert main([*flags, *more]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["plan"] == expected
        assert printed["max_tree_nodes"] == loaded.limits.n_nodes
        assert printed["link_bytes"] == moved
