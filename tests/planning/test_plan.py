"""Plans from a config alone: placements equal those of the loader."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from support.checkpoints import llama_config, llama_tensors, write_checkpoint
from support.plans import known_request, planned
from support.tiny import measure_little

from offload_rt import LLM
from offload_rt.cli import plan, plan_tables, run
from offload_rt.config import EngineConfig
from offload_rt.cost.decoding import Decoding
from offload_rt.cost.pass_times import ComputeTimes
from offload_rt.cost.roofline import Roof
from offload_rt.cost.tree_size import N_RANKS, Acceptance
from offload_rt.dtypes import DType
from offload_rt.engine import profile
from offload_rt.engine.memory_plan import less_margin, plan_memory
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.models.families import parse_architecture
from offload_rt.offload.placement import MemoryBudget
from offload_rt.planning import local
from offload_rt.planning.acceptance import assume
from offload_rt.planning.alternatives import Alternatives, Sweep, sweep
from offload_rt.planning.drafters import RankedDrafter
from offload_rt.planning.forecast import predict
from offload_rt.planning.hardware import CARDS, find_card
from offload_rt.planning.known_models import KNOWN, known_name
from offload_rt.planning.local import measure_roof
from offload_rt.planning.machine import Machine
from offload_rt.speculate.pair_stats import Estimates, PairStats
from offload_rt.speculate.select import pick_drafter
from offload_rt.tree.search import expected_tokens, search

MODELS = Path(__file__).resolve().parents[2] / "models"
DEMO, DEMO_DRAFT = str(MODELS / "demo-target"), str(MODELS / "demo-draft")
NO_CHECKPOINTS = ("", "")
CARD = ["--gpu", "rtx4090", "--ram", "160GB"]
MACHINE = Machine.with_card(find_card("rtx4090"), 64 * 10**9, 7.0)
PAIR = ["--model", "llama2-70b", "--draft-model", "llama2-7b"]
# The settings of Sequoia's measurement.
PUBLISHED = ["--drafter", "static_tree", "--draft-quantize", "none"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence of a plan that is refused; its flags exist."""
    assert plan.main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1
    flags = re.findall(r"--[a-z][a-z-]*", re.sub("`.*?`", "", error))
    assert {*flags} <= plan.new_parser()._option_string_actions.keys()
    return error


@pytest.mark.parametrize(("name", "billions"), [
    ("llama2-7b", 6.74), ("llama2-13b", 13.02), ("llama2-70b", 68.98), ("llama3-8b", 8.03),
    ("llama3-70b", 70.55), ("llama3.1-8b", 8.03), ("llama3.1-70b", 70.55),
    ("llama3.1-405b", 405.85), ("llama3.2-1b", 1.236), ("llama3.2-3b", 3.213),
    ("llama3.3-70b", 70.55), ("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.721), ("qwen3-4b", 4.022),
    ("qwen3-8b", 8.191), ("qwen3-14b", 14.77), ("qwen3-32b", 32.76), ("mistral-small-3", 23.57),
    ("mistral-small-3.1", 23.57), ("tinyllama-1.1b", 1.10), ("sheared-llama-1.3b", 1.35),
    ("llama-68m", 0.068), ("vicuna-33b", 32.5), ("qwen3-235b-a22b", 235.1), ("glm5", 744),
    ("kimi-k2", 1026), ("llama4-maverick", 400), ("deepseek-v3", 671),
])  # fmt: skip
def test_known_shapes_have_the_published_parameter_counts(name, billions):
    spec = parse_architecture(KNOWN[name])
    parts = [spec.non_layer_tensors(), *map(spec.layer_tensors, range(spec.n_layers))]
    n = sum(int(np.prod(shape)) for tensors in parts for _, shape in tensors)
    assert n / 1e9 == pytest.approx(billions, rel=0.01)


def test_gpu_is_described_by_its_figures():
    card = find_card("RTX 4090")
    figures = f"24GiB, {card.memory_gbps}GB/s, {card.tflops}TFLOPS, {card.link.gbps}GB/s"
    unnamed = {"name": "", "title": "", "source": ""}
    assert replace(find_card(figures), link=card.link, **unnamed) == replace(card, **unnamed)
    assert find_card(figures).link.gbps == card.link.gbps


def test_roofline_is_the_longer_of_reading_and_multiplying():
    spec = parse_architecture(KNOWN["llama2-7b"])
    roof = Roof(flops=1e12, bandwidth=1e11)
    n_weights = sum(int(np.prod(shape)) for _, shape in spec.layer_tensors(0))
    assert roof.layer_s(spec, 1, 0, 2) == pytest.approx(2 * n_weights / 1e11, rel=0.01)
    assert roof.layer_s(spec, 1000, 0, 2) == pytest.approx(2 * 1000 * n_weights / 1e12, rel=0.05)
    # One row and a context so long that its keys and values are the most of it.
    keys = 2 * 10**6 * spec.n_kv_heads * spec.head_dim * 2
    assert roof.layer_s(spec, 1, 10**6, 2) == pytest.approx((keys + 2 * n_weights) / 1e11, rel=0.01)
    times = roof.compute_times(spec, torch.float16)
    by_hand = 32 * roof.layer_s(spec, 64, 1024, 2) + roof.product_s(4096 * 32000, 64, 2)
    assert float(times.at(np.array([64]), 1024)[0]) == pytest.approx(by_hand)


@pytest.mark.parametrize("name", ["llama2-70b", "llama-68m"])
def test_layer_waits_for_the_host_only_if_launches_are_slower_than_compute(name):
    spec = parse_architecture(KNOWN[name])
    bare = Roof(flops=1e15, bandwidth=1e12)
    roof = replace(bare, gap_s=1e-6, launch_s=5e-6)
    for n_rows, n_chunks in ((1, 1), (600, 2)):
        replayed, eager = (
            roof.layer_s(spec, n_rows, 0, 2, is_replayed=is_replayed)
            for is_replayed in (True, False)
        )
        assert replayed == pytest.approx(bare.layer_s(spec, n_rows, 0, 2) + 11e-6)
        by_host = n_chunks * 11 * 5e-6
        assert eager == pytest.approx(by_host if name == "llama-68m" else replayed)


def test_measured_products_scale_with_the_weights(monkeypatch):
    roof = Roof(1e12, 1e11, products=((1, 1e-11), (8, 4e-11), (64, 32e-11)))
    for n_rows, of_a_weight in ((1, 1e-11), (4, 2.2857e-11), (64, 32e-11), (500, 1e-9)):
        assert roof.product_s(10**6, n_rows, 2) == pytest.approx(10**6 * of_a_weight, rel=1e-4)
    measure_little(monkeypatch)
    measured = measure_roof(DType.FLOAT32, torch.device("cpu"))
    seconds = [duration for _, duration in measured.products]
    assert seconds == sorted(seconds) and seconds[0] > 0 and measured.products[0][0] == 1


def test_plan_of_a_config_equals_the_load_of_its_checkpoint(tmp_path):
    config = llama_config()
    write_checkpoint(tmp_path, config, llama_tensors(config))
    engine = EngineConfig(str(tmp_path), device="cpu", drafter="none", device_memory=1_000_000)
    with LLM.open(engine) as llm:
        loaded = llm.spec.memory
        by_file = Sizes.of_checkpoint(llm.spec.target.checkpoint, DType.FLOAT32)
    sizes = Sizes.of_spec(parse_architecture(config), DType.FLOAT32)
    budget = loaded.plan.budget
    memory = plan_memory(engine, pick_drafter(engine), (sizes, None), DType.FLOAT32, budget)
    assert memory.plan.reserved == loaded.plan.reserved
    assert memory.plan.reserved.non_layer == by_file.non_layer_nbytes == 4 * (2 * 40 * 16 + 16)
    assert (memory.max_model_len, memory.cache_rows) == (loaded.max_model_len, loaded.cache_rows)
    # On a device every tensor begins at a multiple of 256 bytes.
    padding = 256 * len(by_file.spec.layer_tensors(0))
    for exact, packed in zip(by_file.layer_nbytes, sizes.layer_nbytes, strict=True):
        assert exact <= packed <= exact + padding


@pytest.mark.parametrize(("nbytes", "captures_target"), [(20 << 30, False), (200 << 30, True)])
def test_captured_passes_are_counted_on_cuda(nbytes, captures_target):
    """Activations of target and draft share a pool that serves no other pass."""
    engine = EngineConfig("x", tree_size=100, max_model_len=512)
    sizes = known_request().models
    captured = sizes if captures_target else sizes[1:]
    pools = [model.view_nbytes + model.spec.scratch_nbytes(96, 96, 2) for model in captured]
    drafting = pick_drafter(replace(engine, drafter="recycle"))
    for has_card, nbytes_of_graphs in (
        (True, max(pools) + len(pools) * 96 * 32000 * 2),
        (False, 0),
    ):
        budget = MemoryBudget(nbytes, 200 << 30, has_card=has_card)
        plan = plan_memory(engine, drafting, sizes, torch.float16, budget).plan
        assert plan.is_resident == captures_target
        assert plan.reserved.graphs == nbytes_of_graphs


def test_llama2_70b_is_planned_for_a_4090_without_weights(capsys):
    arguments = [*PAIR, *CARD, "--offline"]
    result = planned([*arguments, *PUBLISHED], capsys)
    assert result["plan"]["tiers"].count("host") + result["plan"]["tiers"].count("device") == 80
    seconds = result["predicted_seconds_per_token"]
    assert seconds == pytest.approx(0.54, abs=0.08)  # Sequoia on this card: 0.57
    assert result["bound"].startswith("the host-to-card link")
    over_link = result["pass_over_link"]["host"]
    assert over_link == pytest.approx(result["pass_seconds"] / result["link_seconds"]["host"])
    assert 1 <= over_link < 1 / 0.9
    assert result["link_busy"]["host"] == pytest.approx(1 / over_link)
    level = result["draft_level"]
    assert level["seconds"] * (result["tree_levels"] - 1) == pytest.approx(result["draft_seconds"])
    by_memory = level["nbytes"] / level["gbps"] / 1e9
    assert level["ratio"] == pytest.approx(level["seconds"] / by_memory)
    assert level["nbytes"] == pytest.approx(2 * (6.74e9 - 32000 * 4096), rel=0.01)
    assert 1 < level["ratio"] < 1.5
    assert plan.main([*arguments, *PUBLISHED]) == 0
    out = capsys.readouterr().out
    assert f"busy for {result['link_busy']['host']:.1%} of a pass" in out
    # One plain figure, of the faster placement: without the draft model.
    plain_s = result["predicted_plain_seconds_per_token"]
    alone = result["formats"]["fp16"]["none"]["predicted_seconds_per_token"]
    assert plain_s == pytest.approx(alone)
    assert plain_s < result["link_seconds"]["host"]
    assert f"plain decoding: {1 / plain_s:.2f} tokens/s ({plain_s:.2f} s per token)" in out
    assert out.count(f"{plain_s / seconds:.2f} times as fast") == 1
    rate = result["predicted_tokens_per_second"]
    assert out.endswith(f"verdict: slow, {rate:.2f} tokens/s\n") and result["verdict"] == "slow"
    # Dynamic trees and an int4 draft, each with its measured ratio of tokens per pass.
    faster = planned(arguments, capsys)
    assert faster["draft_quantize"] == "int4"
    assert faster["predicted_seconds_per_token"] < 0.9 * seconds
    source = planned([*arguments, "--draft-quantize", "int4"], capsys)["acceptance"]["source"]
    assert "times 1.15 for dynamic" in source and "times 0.96 for a draft in int4" in source


def test_plan_fits_a_narrow_terminal(monkeypatch, capsys):
    """No line is too long, and no character is missing."""
    forecast = predict(known_request(), MACHINE)
    drafter = RankedDrafter("eagle", "publisher/a-long-name-without-spaces", 9**9, forecast, "?")
    others = Alternatives(
        formats={"fp8, blocks 128x128": {"none": forecast, "draft model": None, "self": forecast}},
        experts={}, sweep=Sweep("GiB of host memory", ((16, None), (32, forecast), (64, forecast))),
        places={"sharded over all cards": forecast}, drafters=(drafter,),
    )  # fmt: skip
    shown = []
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        plan_tables.show(forecast, others)
        shown.append(capsys.readouterr().out)
        assert max(map(len, shown[-1].splitlines())) <= columns and "…" not in shown[-1]
    narrow, wide = (Counter(filter(str.isalnum, text)) for text in shown)
    assert narrow == wide


def test_ram_describes_another_machine(monkeypatch):
    """On a CPU the budget of the run, beside a GPU the host memory."""
    cpu = torch.device("cpu")
    for memory, nbytes in ((None, less_margin(16 << 30)), ("4GiB", 4 << 30)):
        config = EngineConfig("x", device_memory=memory)
        assert local._budget(config, cpu, "16GiB").device == nbytes
    with pytest.raises(CapacityError, match="of 16GiB"):
        local._budget(EngineConfig("x", device_memory="16GiB"), cpu, "16GiB")
    monkeypatch.setattr(local, "memory_budget", lambda config, device: config.host_memory)
    assert local._budget(EngineConfig("x"), torch.device("cuda"), "16GiB") == "16GiB"
    monkeypatch.setattr(plan, "cards", lambda: ["a card"])
    monkeypatch.setattr(LLM, "open", opened := Mock(side_effect=CapacityError("opened")))
    assert plan.main([DEMO, "--ram", "8GiB"]) == 2
    assert run.main([DEMO, "--prompt", "x", "--plan", "--host-memory", "4GiB"]) == 2
    assert [call.args[0].host_memory for call in opened.call_args_list] == ["8GiB", "4GiB"]


@pytest.mark.parametrize("over", ["ram", "memory"])
def test_more_memory_is_never_slower(over):
    points = sweep(over, known_request(draft=None, max_model_len=512), MACHINE).points
    seconds = [forecast.run.seconds_per_token for _, forecast in points if forecast is not None]
    if over == "ram":  # 137 GB of layers, until all fit
        assert [x for x, _ in points] == [16, 32, 64, 128, 256]
        on_disk = [forecast.memory_plan.plan.tiers.count("disk") for _, forecast in points]
        assert on_disk == sorted(on_disk, reverse=True) and on_disk[0] > 60 and on_disk[-1] == 0
    else:
        assert len(seconds) > 8
    assert all(after <= before * 1.005 for before, after in itertools.pairwise(seconds))
    assert seconds[-1] < 0.7 * seconds[0]


def test_local_statistics_precede_published_figures(monkeypatch):
    names = ("llama2-70b", "llama2-7b")
    monkeypatch.setattr(PairStats, "load", lambda *_: PairStats())
    assert "Sequoia" in assume("auto", NO_CHECKPOINTS, names, 0.0).source
    assert "guess" in assume("auto", NO_CHECKPOINTS, names, 0.3).source
    seen = Acceptance()
    for _ in range(50):
        seen.observe(3, 1)
    estimates = Estimates(seen)
    for n_nodes, n_tokens in ((9, 4), (1, 1), (1, 1)):
        estimates.drafted.observe(n_nodes, n_tokens)
    monkeypatch.setattr(PairStats, "load", lambda *_: PairStats({"dynamic 0.0": estimates}))
    acceptance = assume("auto", NO_CHECKPOINTS, names, 0.0)
    assert "measured on this machine" in acceptance.source
    assert acceptance.by_rank == pytest.approx(seen.by_rank())
    assert acceptance.drafted == pytest.approx(0.5, abs=0.01)
    fixed = expected_tokens(search(seen.by_rank(), 5, 5).topology(5, 5), seen.by_rank())
    assert acceptance.dynamic_ratio == pytest.approx(2.5 / fixed, rel=0.01)


def test_passes_without_a_draft_yield_one_token():
    request = known_request()
    always, half = (
        predict(replace(request, acceptance=replace(request.acceptance, drafted=share)), MACHINE)
        for share in (1.0, 0.5)
    )
    assert half.run.tokens_per_pass == pytest.approx((always.run.tokens_per_pass + 1) / 2)
    assert Decoding(3.0, 5.0).mixed(Decoding(1.0, 1.0), 0.25) == Decoding(1.5, 2.0)


def test_acceptance_can_be_given():
    acceptance = assume("0.7,0.1", NO_CHECKPOINTS, ("a", "b"), 0.0)
    assert acceptance.by_rank[:3] == pytest.approx([0.7, 0.1, 0.0])
    assert len(acceptance.by_rank) == N_RANKS
    for wrong in ("0.7,x", "0.7,0.6", "0.5,nan", "0.1,0.7"):
        with pytest.raises(SettingsError):
            assume(wrong, NO_CHECKPOINTS, ("a", "b"), 0.0)


def test_builtin_shapes_and_gpus_are_listed(capsys):
    for flag, names in (("--list", list(KNOWN)), ("--list-gpus", [card.name for card in CARDS])):
        assert plan.main([flag]) == 0
        assert capsys.readouterr().out.split() == names


@pytest.mark.parametrize(("model", "name"), [
    ("Qwen/Qwen3-8B", "qwen3-8b"), ("meta-llama/Llama-2-70b-chat-hf", "llama2-70b"),
    ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3"), ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
    ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4-scout"),
    ("zai-org/GLM-5-FP8", None), ("Qwen/Qwen3-8B-FP8", None), ("someone/Qwen3-8B", None),
    ("qwen3-9b", None),
])  # fmt: skip
def test_hub_ids_of_publishers_have_builtin_shapes(model, name):
    assert known_name(model) == name


DRAFT = "--draft-model llama2-7b"


@pytest.mark.parametrize(("arguments", "told"), [
    ("--gpu rtx4099", "rtx4090"), ("--gpu 16GiB,300GB/s", "memory, memory rate"),
    ("--gpu 16GiB,300,80TFLOPS,25GB/s", "needs a rate"),
    ("--gpu 16GiB,300GB/s,fast,25GB/s", "memory, memory rate"),
    ("--gpu this --link 12GB/s", "name a card"),
    ("--disk 7", "7GB/s"), ("--disk 0GB/s", "7GB/s"),
    ("--ram much", "not a size"), ("--ram 1GiB", "; raise --ram or --device-memory"),
    ("--device-memory 23GiB", "at most 22.89 GiB"),
    ("--device-memory 2GiB", "does not fit: the device memory"),
    ("--max-model-len 9000", "4096"), ("--context 4000", "lower --context"),
    (f"{DRAFT} --acceptance 0.1,0.5", "descending"), ("--acceptance sequoia", "llama2-70b-chat"),
    ("--tree-size 64", "set --draft-model"), ("--temperature -1", "temperature"),
    ("--drafter lookahead", "a forecast of tokens per pass"),
    ("--drafter static_tree", "needs a draft model"),
    (f"{DRAFT} --drafter self", "or omit --drafter"),
    ("--drafter self", "the device memory budget is too small"),
    ("--draft-model llama3-8b", "different tokenizer"),
    ("--ranks 3", "cannot be divided among 3 ranks"), ("--ranks 0", "raise --ranks"),
    ("--ranks 2 --pipeline 2", "omit --ranks or --pipeline"),
    ("--ranks 2 --network 10", "7GB/s"), ("--ranks 2 --gpu this", "name a card"),
    ("--model no-such-model", "--list` prints all"), ("--model Qwen3-9B", "did you mean qwen3-8b"),
    ("--model nobody/nothing-of-this-name", "not in the hub cache"),
    ("--model nowhere/at/all", "no model called"), ("--model config.json", "not JSON"),
])  # fmt: skip
def test_mistakes_are_one_sentence(arguments, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{", encoding="utf-8")  # damaged
    asked = f"--model llama2-70b --gpu rtx4090 --offline {arguments}"
    assert told in refused(asked.split(), capsys)


def test_hub_id_config_file_and_directory_give_the_plan_of_the_name(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["llama2-70b"]), encoding="utf-8")
    models = ("llama2-70b", "meta-llama/Llama-2-70b-hf", tmp_path / "config.json", tmp_path)
    plans = [planned([str(model), *CARD, "--offline"], capsys)["plan"] for model in models]
    assert plans == plans[:1] * 4


def test_plan_measures_this_machine(capsys, monkeypatch):
    measure_little(monkeypatch)
    model = ["--model", DEMO, "--max-model-len", "256"]
    pair = [*model, "--draft-model", DEMO_DRAFT, "--tree-size", "8"]
    result = planned([*pair, "--device-memory", "11.5MB"], capsys)
    assert result["machine"].startswith("this machine")
    assert result["plan"]["tiers"].count("disk") > 0 and result["predicted_seconds_per_token"] > 0
    assert any("measured with the model's files" in source for source in result["sources"])
    result = planned([*model, "--ram", "2000GiB"], capsys)
    assert result["plan"]["budget"]["device"] == less_margin(2000 << 30)
    small = ["--model", "llama-68m", "--device-memory", "400MB"]
    result = planned(small, capsys)
    assert result["links"]["disk"] == 7.0 and "--disk: 7GB/s assumed" in result["sources"]
    assert not any("other programs" in source for source in result["sources"])
    n = psutil.cpu_count()
    monkeypatch.setattr(local, "busy_cpus", lambda: 0.9 * n)
    assert plan.main(small) == 0
    assert f"other programs use {0.9 * n:.1f} of {n} CPUs: the" in capsys.readouterr().out


@pytest.mark.parametrize(("memory", "pass_s"), [("100MB", 4.0), ("11.5MB", 3.0)])
def test_plan_of_local_weights_uses_timed_passes(memory, pass_s, capsys, monkeypatch):
    """Resident and streamed layers; the link is faster than these passes. Trees are recycled.

    Whole passes of resident layers are timed, with sampling and verification.
    """
    measure_little(monkeypatch)
    times = ComputeTimes((1,), (0,), ((3.0,),))
    monkeypatch.setattr(profile, "compute_times", lambda *_: times)
    monkeypatch.setattr(LLM, "time_plain", lambda *_: [4.0])
    result = planned(["--model", DEMO, "--device-memory", memory], capsys)
    assert result["predicted_plain_seconds_per_token"] == pytest.approx(pass_s)
    assert result["tokens_per_pass"] > 2
    tokens = pass_s / result["predicted_seconds_per_token"]
    assert tokens == pytest.approx(result["tokens_per_pass"])
    assert "target: timed passes" in result["sources"]
    assert "Token Recycling" in result["acceptance"]["source"]


@pytest.mark.parametrize("flags", [["--draft-quantize", "int4"], ["--learn-draft", "on"]])
def test_run_plan_times_the_target_beside_settings_of_the_draft(flags, monkeypatch):
    measure_little(monkeypatch)
    assert (
        run.main([DEMO, "--draft-model", DEMO_DRAFT, *flags, "--device-memory", "40MB", "--plan"])
        == 0
    )
