"""Plans for other formats, copies of the target, published drafters, several GPUs and experts."""

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import quantize
import torch
import write_gguf
from quantize import Choice
from support.checkpoints import llama_config, llama_tensors, write_checkpoint
from support.experts import open_touched
from support.plans import known_request, known_sizes, planned, request
from support.tiny import measure_little, open_unloaded
from transformers import AutoConfig, AutoModelForCausalLM

from offload_rt.cli import plan, run
from offload_rt.cli.format import format_speed
from offload_rt.config import EngineConfig, parse_size
from offload_rt.cost.roofline import Roof, layer_weights
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.models.families import parse_architecture
from offload_rt.planning import local
from offload_rt.planning.acceptance import power_law
from offload_rt.planning.alternatives import expert_ways
from offload_rt.planning.drafters import compare, fitted_power, published
from offload_rt.planning.forecast import ON_CPU, ON_DEMAND, WHOLE_LAYERS, Forecast, predict
from offload_rt.planning.hardware import find_card
from offload_rt.planning.known_models import KNOWN
from offload_rt.planning.local import measure_roof
from offload_rt.planning.machine import RAM_GBPS, Machine
from offload_rt.planning.ranks import Parallelism
from offload_rt.planning.sizes import copies, find_models, formats, is_plain
from offload_rt.tree.search import expected_tokens, search
from offload_rt.weights.formats import Matrix

FLAGS = ["--gpu", "rtx4090", "--ram", "160GiB"]
WIDE = {
    "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
    "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip


def sizes_of(name: str) -> Sizes:
    return find_models(EngineConfig(name))[0]


@pytest.fixture
def plain(tmp_path):
    config = llama_config(**WIDE)
    tensors = llama_tensors(config)
    write_checkpoint(tmp_path / "plain", config, tensors)
    return config, tensors


def write_q4(path, config, tensors):
    metadata, stored, _ = write_gguf.model(config, tensors, "Q4_0")
    path.write_bytes(write_gguf.file_bytes(metadata, stored))
    return str(path)


def test_mixture_is_planned_by_all_weights_and_touched_experts():
    target = sizes_of("mixtral-8x7b")
    config = KNOWN["mixtral-8x7b"] | {"num_hidden_layers": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    experts = 8 * 3 * 4096 * 14336
    # tensors begin at 256 bytes
    assert all(2 * layer <= nbytes <= 2 * layer + 30 * 256 for nbytes in target.layer_nbytes)
    assert target.spec.kv_nbytes(2) == 32 * 2 * 8 * 128 * 2
    # Reading at a byte a second: some of n rows use an expert with the probability 1 - (3/4)^n.
    reads = Roof(flops=1e18, bandwidth=1.0)
    for n in (1, 4, 64):
        by_hand = 2 * (layer - experts * (1 - 2 / 8) ** n)
        others = reads.layer_s(target.spec, n, 0, 2, share=0.0)
        assert reads.layer_s(target.spec, n, 0, 2) - others == pytest.approx(by_hand, rel=0.1)
    # Multiplying: a row has two experts of eight, and a hundred keys of 32 heads of 128 + 128.
    multiplies = Roof(flops=1.0, bandwidth=1e30)
    by_hand = 200 * (layer - experts * 6 / 8 + 100 * 32 * 256)
    assert multiplies.layer_s(target.spec, 100, 0, 2) == pytest.approx(by_hand, rel=0.01)


FORMATS = [Choice("fp8"), Choice("pack-quantized", symmetric=True), Choice("awq"), "Q4_0"]


@pytest.mark.parametrize("choice", FORMATS, ids=str)
def test_quantised_checkpoint_is_planned_by_its_headers(choice, plain, tmp_path, capsys):
    path = tmp_path / "model.gguf"
    if choice == "Q4_0":
        write_q4(path, *plain)
    else:
        quantize.write(tmp_path / "plain", path := tmp_path / "quantised", choice)
    result = planned(["--model", str(path), *FLAGS], capsys)
    with open_unloaded(path, device="cpu", drafter="none") as llm:
        loaded = llm.plan
    assert result["plan"]["reserved"]["non_layer"] == loaded.reserved.non_layer
    assert result["formats"] == {}
    for n, packed in zip(loaded.layer_nbytes, result["plan"]["layer_nbytes"], strict=True):
        assert n == pytest.approx(packed, rel=0.08)  # on a CPU as they lie in files
    exact = Sizes.of_spec(parse_architecture(plain[0]), DType.FLOAT32)
    assert 2 * sum(result["plan"]["layer_nbytes"]) < sum(exact.layer_nbytes)


def test_formats_take_their_bytes():
    target = sizes_of("llama2-7b")
    by_name = formats(target, on_card=True)
    plain = sum(target.layer_nbytes)
    links = {name: sizes.link or sizes for name, sizes in by_name.items()}
    shares = {name: sum(sizes.layer_nbytes) / plain for name, sizes in links.items()}
    # A scale of 4 bytes for 128 x 128 weights, one of 2 for 128.
    expected = {
        "fp16": 1.0, "lossless": 0.70, "fp8, blocks 128x128": 0.5 * (1 + 4 / 128**2),
        "int4, groups of 128": 0.25 + 1 / 128,
    }  # fmt: skip
    assert shares == pytest.approx(expected, rel=1e-3)
    assert is_plain(by_name["lossless"]) and sum(by_name["lossless"].layer_nbytes) == plain
    # Decoding needs room for the decoded layer, or for its largest matrix.
    assert by_name["lossless"].link.buffer == max(target.layer_nbytes)
    assert by_name["int4, groups of 128"].view_nbytes >= 2 * 4096 * 11008


def test_measured_products_of_quantised_matrices_replace_an_assumed_decoding():
    spec = parse_architecture(llama_config(**WIDE, torch_dtype="bfloat16"))
    plain = Sizes.of_spec(spec, DType.BFLOAT16)
    asked = []

    def roof(dtype: DType, matrix: Matrix | tuple[int, int] | None) -> Roof:
        asked.append(matrix)
        seconds = 4e-6 if isinstance(matrix, Matrix) else 1e-6
        return Roof(1e18, 1e18, products=((1, seconds),))

    card = Machine.with_card(find_card("rtx4090"), 10**11, 7.0)
    machine = replace(card, roof=roof, times_codes=True, fixed_s=0.0)
    layers = sum(layer_weights(spec, i) for i in range(4)) * 1e-6
    head = spec.vocab_size * spec.hidden_size * 1e-6
    assert predict(request(plain), machine).row_s == pytest.approx(layers + head)
    for sizes in list(formats(plain, False).values())[2:]:
        assert predict(request(sizes), machine).row_s == pytest.approx(4 * layers + head)
    # A resident target drafts by its plain layers, a streamed one by its copies.
    draft = copies(plain)
    for n_device in (4, 1):
        tiers = ("device",) * n_device + ("disk",) * (4 - n_device)
        placed = predict(request(plain), machine).memory_plan.plan
        times = machine.costs(plain, draft, replace(placed, tiers=tiers)).draft
        expected = (n_device + 4 * (4 - n_device)) / 4 * layers + head
        assert times is not None and times.at(np.array([1]), 0)[0] == pytest.approx(expected)
    coded = {matrix for matrix in asked if isinstance(matrix, Matrix)}
    assert len(coded) > 1 and {*asked} - coded == {None, (2048, 512)}


def test_matrix_of_each_format_is_timed(plain, tmp_path, monkeypatch):
    models = [sizes_of(write_q4(tmp_path / "model.gguf", *plain)), sizes_of("gpt-oss-20b")]
    for choice in (Choice("fp8"), Choice("nf4"), Choice("awq")):
        quantize.write(tmp_path / "plain", tmp_path / choice.format, choice)
        models.append(sizes_of(str(tmp_path / choice.format)))
    exact = sizes_of(str(tmp_path / "plain"))
    models.append(exact.rounded("int4"))
    measure_little(monkeypatch)
    monkeypatch.setattr(local, "_WIDTHS", (1,))
    shapes = set()
    for sizes in models:
        assert sizes.matrix is not None
        shapes.add(sizes.matrix.shape)
        roof = measure_roof(DType.BFLOAT16, torch.device("cpu"), sizes.matrix)
        assert 0 < roof.products[0][1] < 1 and roof.flops == 2 / roof.products[0][1]
    assert shapes == {(512, 256), (5760, 2880)}
    assert exact.matrix is None


def test_self_draft_is_planned_as_loaded(tmp_path):
    config = llama_config(
        num_hidden_layers=4, hidden_size=64, intermediate_size=96, head_dim=16,
        torch_dtype="bfloat16",
    )  # fmt: skip
    write_checkpoint(tmp_path, config, llama_tensors(config, torch.bfloat16))
    target = Sizes.of_spec(parse_architecture(config), DType.BFLOAT16)
    with open_unloaded(tmp_path, device="cpu", drafter="self", device_memory=1_000_000) as llm:
        loaded = llm.spec.draft.sizes()
    assert copies(target).stand_in == loaded.stand_in


def test_self_draft_is_chosen_if_its_copies_fit(capsys):
    arguments = [
        "--model", "qwen3-32b", "--gpu", "rtx4090", "--ram", "64GiB", "--max-model-len", "1024",
    ]  # fmt: skip
    result = planned([*arguments, "--drafter", "self"], capsys)
    n_resident = result["plan"]["tiers"].count("device")
    copied = result["plan"]["reserved"]["stand_in"]
    (layer,) = {*result["plan"]["layer_nbytes"]}
    assert 0.25 < copied / layer < 0.3
    level = result["draft_level"]
    layers = n_resident * layer + (64 - n_resident) * copied
    assert level["nbytes"] == layers + 2 * 151936 * 5120
    assert 1 < level["ratio"] < 1.3
    source = result["acceptance"]["source"]
    assert "a guess" in source and "SubSpec" in source
    # SubSpec: 12.5 times, of a 32B on 24 GB. Without copies, more layers are resident.
    plain_s = result["predicted_plain_seconds_per_token"]
    assert 4 < plain_s / result["predicted_seconds_per_token"] < 20
    assert plan.main([*arguments, "--draft-model", "qwen3-0.6b"]) == 0
    assert "fastest forecast with bf16 weights: self, " in capsys.readouterr().out


def test_short_context_is_reported_with_a_remedy(capsys):
    def told(*more: str) -> str:
        assert plan.main(["llama2-13b", "--gpu", "rtx3060", "--device-memory", *more]) == 0
        text = " ".join(capsys.readouterr().out.split())
        return text.partition("the context is short")[2].partition(" verdict: ")[0]

    # 983 tokens fit into an eighth of 6 GiB, each with 40 layers of 20 KiB of keys and values.
    assert "983 tokens: --max-model-len 2048 needs 832.03 MiB more" in told("6GiB")
    assert told("6GiB", "--max-model-len", "1000") == ""
    budget = told("2500MiB").partition("set --device-memory to ")[2].partition(" ")[0]
    assert parse_size(budget) > parse_size("2500MiB")
    assert told(budget, "--max-model-len", "2048") == ""
    assert plan.main(["--model", "llama3-8b", "--gpu", "l40"]) == 0
    assert "is short" not in capsys.readouterr().out


TARGETS = ("llama3.3-70b", "qwen3-32b", "qwen3.5-27b", "gpt-oss-120b")


@pytest.mark.parametrize("target", TARGETS)
def test_fitted_acceptance_reaches_the_published_tokens(target):
    figures = [figure for entry in published(target) for figure in entry.figures]
    assert figures and all(figure["source"] for figure in figures)
    for figure in (figure for figure in figures if "preset" not in figure):
        sizes = figure["tokens_per_pass"], figure["n_nodes"], figure["n_levels"]
        law = power_law(fitted_power(*sizes))
        if figure["n_nodes"] == figure["n_levels"]:
            tokens = float((law[0] ** np.arange(figure["n_levels"])).sum())
        else:
            topology = search(law, *sizes[1:]).topology(*sizes[1:])
            tokens = expected_tokens(topology, law)
        assert tokens == pytest.approx(figure["tokens_per_pass"], abs=1e-3)


def test_drafters_are_ranked_with_their_sources(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine.with_card(find_card("rtx4090"), 192 << 30, 7.0)
    for target, head, gib in (
        ("gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash", 1.46),
        ("gpt-oss-120b", "gpt-oss-20b", 12.82),
        ("qwen3.5-27b", "z-lab/Qwen3.5-27B-DFlash", 3.96),
    ):
        choices = compare(known_request(target, None), machine, 0.0)
        names = {choice.drafter for choice in choices}
        assert {"none", "recycle", "self", "adaptive_tree", "mtp"} & names
        assert all(choice.source for choice in choices)
        (nbytes,) = (choice.nbytes for choice in choices if choice.name == head)
        assert nbytes / 2**30 == pytest.approx(gib, abs=0.005)  # of the published file
        forecasts = [choice.forecast for choice in choices if choice.forecast]
        seconds = [forecast.run.seconds_per_token for forecast in forecasts]
        assert seconds == sorted(seconds) and len(seconds) > 1
        for choice, entry in ((a, b) for a in choices for b in published(target)):
            if choice.name == entry.name and choice.forecast:
                deepest = max(figure["n_levels"] for figure in entry.figures)
                is_head = bool(choice.forecast.request.models[1].spec.taps)
                assert choice.forecast.topology.n_levels <= deepest or not is_head
            if choice.name == entry.name and not entry.figures:
                assert choice.forecast is None and "no published acceptance" in choice.source


@pytest.mark.slow
def test_plan_prints_the_comparison(capsys):
    flags = ["qwen3-32b", "--gpu", "rtx4090", "--compare-drafters"]
    assert plan.main(flags) == 0
    text = capsys.readouterr().out
    assert "forecast by drafter" in text and "github.com/Tencent/AngelSlim" in text
    assert plan.main([*flags, "--json"]) == 0
    drafters = json.loads(capsys.readouterr().out)["drafters"]
    assert {"eagle", "recycle"} <= {row["drafter"] for row in drafters}
    forecasts = [row for row in drafters if "predicted_tokens_per_second" in row]
    fastest = max(forecasts, key=lambda row: row["predicted_tokens_per_second"])
    verdict = text.splitlines()[-1]
    assert f"; with {fastest['drafter']}" in verdict
    assert f"{fastest['predicted_tokens_per_second']:.2f} tokens/s" in verdict


CARD = find_card("rtx4090")
# of Llama2-70B; KV: columns of keys, and of values
D, INNER, KV, VOCAB, LAYERS = 8192, 28672, 1024, 32000, 80
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
    two = forecast(Parallelism(2, gbps=1e9, via_link=False))
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


@pytest.mark.parametrize(("more", "place"), [
    ([], "sharded over all cards"),  # room for layers
    (["--model", "llama2-7b", "--draft-model", "llama-68m"], "on the first card"),
])  # fmt: skip
def test_draft_is_planned_where_it_is_faster(more, place, capsys):
    asked = ["--model", "llama2-70b", "--draft-model", "llama2-7b", "--ram", "192GiB", *more]
    asked += ["--gpu", "rtx4090", "--ranks", "2", "--max-new-tokens", "4", "--tree-size", "64"]
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
    return predict(request(sizes_of(name)), Machine.with_card(CARD, ram, 7.0))


def test_gpt_oss_config_gives_the_size_of_its_checkpoint(mxfp4_checkpoint, tmp_path):
    alone = tmp_path / "config.json"
    alone.write_text((mxfp4_checkpoint / "config.json").read_text())
    by_config, by_headers = (sizes_of(str(path)) for path in (alone, mxfp4_checkpoint))
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
