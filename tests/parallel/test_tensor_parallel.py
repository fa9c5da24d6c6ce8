"""Ranks with divided weights give the results of one rank; ranks are threads."""

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize import Choice, config_of, quantized, write
from safetensors.torch import save_file
from support.gguf_files import build
from support.quantized import id_of
from support.spies import before_calls
from support.thread_ranks import MINE, divided_tokens, opened, together, tokens_of
from support.tiny import (
    CASES,
    DRAFTERS,
    Pair,
    generate,
    keep_steady,
    measure_little,
    nearly,
    open_llm,
    open_unloaded,
    prompt_of,
    save_pair,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from offload_rt import LLM
from offload_rt.cli import convert
from offload_rt.config import EngineConfig
from offload_rt.engine import link, loader, profile, ranks_spec
from offload_rt.engine.draft_spec import DraftSpec
from offload_rt.engine.link_rates import LinkRates
from offload_rt.engine.ranks_spec import RanksSpec
from offload_rt.errors import (
    CapacityError,
    CheckpointError,
    DeviceError,
    SettingsError,
    UnsupportedModelError,
)
from offload_rt.executor.captured_passes import capture_passes
from offload_rt.executor.cuda_graphs import GraphPass, GraphShape
from offload_rt.executor.runner import Runner
from offload_rt.models.layers import TensorShape
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.mirrors import DirectFiles
from offload_rt.parallel.division import Cut
from offload_rt.parallel.sharded_weights import shard, shard_checkpoint
from offload_rt.parallel.tensor_parallel import TensorParallelModel
from offload_rt.speculate.select import drafter_type
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.formats import Source, format_of
from offload_rt.weights.header import read_header
from offload_rt.weights.layout import host_block


def config_for(path: Path, **settings: Any) -> EngineConfig:
    settings = {"device": "cpu", "drafter": "none", "max_model_len": 64} | settings
    return EngineConfig(str(path), **settings)


def least_of(config: EngineConfig, n_slots: float = 2) -> EngineConfig:
    with LLM.open(config) as unloaded:
        plan = unloaded.plan
    nbytes = plan.reserved.total + plan.link.buffer + int(n_slots * plan.slot_nbytes)
    return replace(config, device_memory=nbytes)


NAME = "mlp.down_proj.weight"
SHAPE = (384, 256)


@pytest.fixture(autouse=True)
def a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set rates that favour sidecars on any machine."""
    monkeypatch.setattr(link, "measured_rates", lambda *_: LinkRates(1.0, 100.0))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Heads enough for two ranks, and matrices that int4 packs."""
    sizes = {"num_hidden_layers": 3, "max_position_embeddings": 512}
    model = CASES["llama"].build(5, **sizes)
    return save_pair(tmp_path_factory.mktemp("pair"), model, nearly(model, 0.03))


def quantised(folder: Path, choice: Choice | str | None, **sizes: Any) -> tuple[Path, Any]:
    """Write a Llama checkpoint that every format divides; return it and the exact model."""
    sizes = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 32,
    } | sizes  # fmt: skip
    model = CASES["llama"].build(3, **sizes)
    for parameter in model.parameters():
        parameter.data /= 2 if parameter.dim() == 2 else 1
    if isinstance(choice, str):
        return folder / "m.gguf", build(folder / "m.gguf", model, choice)
    if choice is None:
        model.bfloat16().save_pretrained(folder / "exact")
    else:
        model.save_pretrained(folder / "model")
        write(folder / "model", folder / "m", choice, folder / "exact")
    exact = AutoModelForCausalLM.from_pretrained(folder / "exact", dtype=torch.float32)
    return folder / ("m" if choice else "exact"), exact


def streamed(path: Path, **settings: Any) -> EngineConfig:
    """Settings that stream layers from disk with any division."""
    return least_of(config_for(path, dtype="float32", **settings), 2.5)


def read_block(disk: DiskTier, i: int) -> Tensor:
    block = host_block(disk.layout(i).nbytes)
    for read in disk.reads(i, block):
        read()
    return block


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("choice", [
    *map(Choice, ("pack-quantized", "fp8", "awq", "nf4", "gptq", "float-quantized")),
    *(Choice("pack-quantized", **how) for how in ({"group_size": -1}, {"group_size": 80})),
    *(Choice(name, 3) for name in ("pack-quantized", "gptq")), Choice("mxfp4-pack-quantized"),
    *(Choice(name, desc_act=True) for name in ("pack-quantized", "gptq")),
    Choice("int-quantized", group_size=-1), Choice("nf4", group_size=128),
    Choice("nf4", symmetric=True), None,
], ids=lambda choice: id_of(choice) or "dense")  # fmt: skip
def test_parts_of_a_matrix_join_to_the_whole(tmp_path, choice, dim):
    """By inputs, act-order, ragged groups and continuous blocks are refused."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16() / 10
    stored, exact = quantized({NAME: weight}, choice) if choice else ({NAME: weight},) * 2
    save_file(stored, tmp_path / "model.safetensors")
    source = Source(read_header(tmp_path / "model.safetensors"))
    n = SHAPE[dim] // 2
    is_divisible = choice is None or (
        choice.format != "nf4" and not choice.desc_act and choice.group_size != 80
    )
    parts = []
    for rank in (0, 1):
        fmt = format_of(config_of(choice) if choice else None)
        given = fmt, TensorShape(NAME, SHAPE), Cut(dim, rank * n, n), source
        if dim == 1 and not is_divisible:
            with pytest.raises(CheckpointError):
                shard(*given)
            return
        with closing(DiskTier([shard(*given)], ReadSettings(8192))) as files:
            view = fmt.view(files.layout(0), read_block(files, 0), torch.bfloat16)
        rows = torch.arange(given[2].shape(SHAPE)[0])
        parts.append(view.rows(rows, NAME.removesuffix(".weight")))
    assert torch.equal(torch.cat(parts, dim), exact[NAME].bfloat16())


@pytest.mark.parametrize(
    "choice", ["plain", None, Choice("gptq"), Choice("nf4"), Choice("fp8"), "Q4_K"], ids=str
)
def test_rank_reads_and_holds_its_share(tmp_path, monkeypatch, choice):
    """At most 1.03 times; plain checkpoints are divided by outputs, others use files of convert."""
    is_converted = choice != "plain"
    sizes = {
        "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 64,
    }  # fmt: skip
    path, _ = quantised(tmp_path, choice if is_converted else None, **sizes)
    if is_converted:
        convert_for_ranks(path, "--link-format", "raw")
    prefer(monkeypatch, not is_converted)
    whole = open_checkpoint(path)
    n_layers = sum(record.nbytes for layer in whole.layers for record in layer)

    def count(*given: Any) -> None:
        MINE.n_read = getattr(MINE, "n_read", 0) + given[-1]

    before_calls(monkeypatch, DirectFiles, "fill", count)

    def work() -> tuple[int, int, int]:
        with LLM.open(streamed(path)) as llm:
            assert set(llm.plan.tiers) == {"disk"}
            assert bool(llm.spec.target.link.layers) == is_converted
            MINE.n_read = 0
            for i in range(3):
                read_block(llm.spec.files.disk, i)
            return MINE.n_read, llm.plan.streamed_nbytes, llm.spec.target.checkpoint.nbytes

    for n_read, n_streamed, n_held in together(2, work):
        assert max(n_read, n_streamed) <= 1.03 * n_layers / 2
        assert n_held <= 1.03 * whole.nbytes / 2


@pytest.mark.parametrize(
    ("name", "size", "place"),
    [("llama-biases", 2, "disk"), ("qwen3-window", 4, "resident"), ("llama-tied", 8, "disk")],
)
def test_greedy_tokens_equal_transformers(zoo, name, size, place):
    """With fewer heads of keys and values than ranks, too, and with fewer heads."""
    tokens = divided_tokens(
        size, zoo.directory(name, 0), prompt_of(0), 8, place=place, exact_parallel=place == "disk"
    )
    assert tokens == zoo.greedy(name, 0, 8)


@pytest.mark.parametrize(("drafter", "is_exact", "split"), [
    *((drafter, False, "auto") for drafter in DRAFTERS), ("self_window", True, "auto"),
    ("adaptive_tree", True, "auto"), ("adaptive_tree", True, "on"),
    ("adaptive_tree", False, "on"), ("adaptive_tree", False, "off"),
])  # fmt: skip
def test_every_drafter_gives_the_targets_tokens(pair, monkeypatch, drafter, is_exact, split):
    """With split_draft=auto, a divided draft model is timed, too."""
    keep_steady(monkeypatch)
    cut = []
    before_calls(monkeypatch, ranks_spec, "divide", lambda whole, _: cut.append(whole.path))
    prompt = prompt_of(2, 40)
    settings = pair.settings(drafter) | {"exact_parallel": is_exact, "split_draft": split}
    settings |= {} if drafter == "none" else {"tree_depth": 4}
    if drafter_type(drafter).resources.view is not None:
        settings["draft_context"] = 32
    tokens = divided_tokens(2, pair.target, prompt, 12, **settings)
    assert tokens == generate(pair.model, prompt, 12)
    if drafter == "adaptive_tree":
        n_cut = cut.count(pair.target) if split != "off" else 0
        assert cut.count(Path(settings["draft_model"])) == n_cut


TREES = {"max_model_len": 64, "tree_size": 16, "tree_depth": 5}


def places(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, whole_s: float, *parts_s: float, **settings: Any
) -> list[str]:
    """Return the place of the draft on each rank, by the level seconds of both divisions."""

    def is_part(checkpoint: Any) -> bool:
        return isinstance(checkpoint.spec, TensorParallelModel)

    def level_seconds(draft: DraftSpec, *_: Any) -> float:
        if draft.checkpoint is None:
            return 0.0
        return parts_s[MINE.ranks.rank] if is_part(draft.checkpoint) else whole_s

    monkeypatch.setattr(DraftSpec, "level_seconds", level_seconds)
    settings = {"device": "cpu", "draft_model": str(pair.draft)} | TREES | settings
    target_id, draft_id = (open_checkpoint(path).identity for path in (pair.target, pair.draft))

    def work() -> str:
        with open_unloaded(pair.target, **settings) as llm:
            assert llm.spec.target.checkpoint.identity == target_id
            draft = llm.spec.draft.drafting.draft
            assert draft is None or draft.identity == draft_id
            return "nothing" if draft is None else "part" if is_part(draft) else "all"

    return together(2, work)


@pytest.mark.parametrize(("seconds", "placement"), [
    ((1.0, 2.0, 2.0), ["all", "nothing"]),
    ((2.0, 1.0, 1.0), ["part", "part"]),
    ((2.0, 1.0, 3.0), ["all", "nothing"]),  # by the slowest rank
])  # fmt: skip
def test_draft_placement_minimises_the_level_time(pair, monkeypatch, seconds, placement):
    assert places(pair, monkeypatch, *seconds) == placement
    assert places(pair, monkeypatch, *seconds, split_draft="on") == ["part", "part"]
    assert places(pair, monkeypatch, *seconds, split_draft="off") == ["all", "nothing"]
    assert places(pair, monkeypatch, 9.0, 1.0, 1.0, learn_draft="on") == ["all", "nothing"]
    words = 'split_draft="on": needs a whole draft model that does not learn'
    with pytest.raises(SettingsError, match=words):
        places(pair, monkeypatch, *seconds, split_draft="on", learn_draft="on")


def test_draft_placement_counts_the_memory_of_the_target(tmp_path, monkeypatch):
    """A whole draft on rank 0 may leave no slots or more bytes to read."""
    measure_little(monkeypatch)
    pair = save_pair(tmp_path, *(CASES["llama"].build(n, num_hidden_layers=n) for n in (8, 5)))
    drafted = (1e-4, 1.1e-4, 1.1e-4)
    part = ["part", "part"]

    def memory(split: str) -> int:
        """Return the least memory of rank 0, and some pages."""
        models = str(pair.target), str(pair.draft), "cpu"
        config = EngineConfig(*models, split_draft=split, exact_parallel=True, **TREES)
        plan = opened(lambda: config, lambda llm: llm.plan)[0]
        return plan.reserved.total + 2 * plan.slot_nbytes + 16384

    least, enough = memory("on"), memory("off")
    assert places(pair, monkeypatch, *drafted, device_memory=least) == part
    for gbps, expected in ((1e-3, part), (1e3, ["all", "nothing"])):
        monkeypatch.setattr(profile, "link_gbps", lambda *_, rate=gbps, **__: rate)
        settings = {"device_memory": enough, "exact_parallel": True}
        assert places(pair, monkeypatch, *drafted, **settings) == expected


def test_indivisible_draft_is_on_rank_0(pair, tmp_path, monkeypatch):
    odd = save_pair(tmp_path, pair.model, CASES["llama"].build(6, intermediate_size=97))
    assert places(odd, monkeypatch, 2.0, 1.0, 1.0) == ["all", "nothing"]
    with pytest.raises(UnsupportedModelError, match="97 outputs"):
        places(odd, monkeypatch, 2.0, 1.0, 1.0, split_draft="on")


# What o_proj and down_proj are cut by: 0 outputs, 1 inputs. The former is no Q4_K.
@pytest.mark.parametrize(("choice", "o", "down"), [
    (Choice("gptq", desc_act=True), 0, 0), (Choice("awq"), 1, 1), (Choice("nf4"), 0, 0),
    ("Q8_0", 1, 1), ("Q4_K", 1, 0), (Choice("fp8"), 1, 1),
    (Choice("nf4", group_size=64, symmetric=True), 0, 0),
], ids=lambda x: id_of(x) or str(x))  # fmt: skip
def test_formats_are_cut_by_outputs_where_required(tmp_path, choice, o, down):
    """With groups in any order, blocks longer than a part, and continuous blocks."""
    path, model = quantised(tmp_path, choice, intermediate_size=256 if choice == "Q4_K" else 512)
    part = shard_checkpoint(open_checkpoint(path), 0, 2, is_exact=False).spec
    assert isinstance(part, TensorParallelModel)
    names = ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")
    assert [part.division.styles[name].dim for name in names] == [o, down, 0]
    expected = generate(model, prompt_of(0), 16)
    assert divided_tokens(2, path, prompt_of(0), dtype="float32") == expected
    assert len(set(expected)) > 3


def convert_for_ranks(path: Path, *flags: str, size: int = 2) -> None:
    assert convert.main(["--model", str(path), "--ranks", str(size), *flags]) == 0


def prefer(monkeypatch: pytest.MonkeyPatch, is_exact: bool) -> None:
    monkeypatch.setattr(profile, "memory_gbps", lambda *_: 1.0)
    monkeypatch.setattr(
        RanksSpec,
        "token_seconds",
        lambda ranks, target, *_: float(target.checkpoint.spec.is_exact != is_exact),
    )


@pytest.mark.parametrize(
    "flags", [[], ["--link-format", "raw"], ["--exact-parallel"]], ids=" ".join
)
def test_ranks_stream_converted_weights(tmp_path, monkeypatch, flags):
    """A faster division without files has priority and is reported."""
    path, model = quantised(tmp_path, None, num_hidden_layers=4)
    convert_for_ranks(path, *flags, "--sidecar", str(tmp_path))
    monkeypatch.setattr(link, "_BUFFERS", 8192)
    is_exact = "--exact-parallel" in flags
    is_raw = "raw" in flags
    prefer(monkeypatch, is_exact)

    def work() -> list[int]:
        with LLM.open(streamed(path, sidecar=str(tmp_path))) as llm:
            target = llm.spec.target
            assert (bool(target.link.sidecar), bool(target.link.layers)) == (not is_raw, is_raw)
            assert target.checkpoint.spec.is_exact == is_exact and "disk" in llm.plan.tiers
            said = "" if is_raw else "weights are read encoded: "
            assert llm.spec.notice.startswith(said) and bool(llm.spec.notice) != is_raw
            files = [record.payload for record in target.link.sidecar or ()] or [
                record for of in target.checkpoint.layers for record in of
            ]
            assert {file.path.parent.name for file in files} == {f"rank-{MINE.ranks.rank}"}
            llm.load()
            return tokens_of(llm, prompt_of(0))

    assert together(2, work)[0] == generate(model, prompt_of(0), 16)
    prefer(monkeypatch, not is_exact)
    words = "passes are faster so than from what offload-rt convert has written"
    config = partial(streamed, path, sidecar=str(tmp_path))
    assert all(words in notice for notice in notices(config))


def notices(config: Callable[[], EngineConfig]) -> set[str]:
    """Return the notices of two ranks that read the original checkpoint."""

    def notice(llm: LLM) -> str:
        assert llm.spec.target.link.sidecar is None and llm.spec.target.link.layers is None
        return llm.spec.notice

    return {*opened(config, notice)}


def test_sidecars_of_other_runs_are_reported_and_ignored(pair, tmp_path):
    """Of other ranks, of another cut, of a model that has changed, and none at all."""
    shutil.copytree(pair.target, path := tmp_path / "m")
    config = partial(config_for, path)
    assert notices(config) == {""}
    convert_for_ranks(path, "--exact-parallel")
    convert_for_ranks(path, size=4)
    said = (
        f"weights are transferred raw: no sidecar in {path}/raw-2/rank-0: has lossless-2-exact,"
        " lossless-4; run `offload-rt convert --ranks 2` first, or use --link-format raw"
    )
    assert notices(config) == {said, said.replace("rank-0", "rank-1")}
    assert notices(partial(config, link_format="raw")) == {""}
    for settings, words in (
        ({"link_format": "lossless"}, r"lossless-2/rank-[01]: has lossless-2-exact, lossless-4; "),
        ({"sidecar": str(tmp_path)}, r"no sidecar in .*raw-2/rank-[01]; "),
    ):
        with pytest.raises(CheckpointError, match=words + "run"):
            notices(partial(config, **settings))
    lossless = partial(config, link_format="lossless", exact_parallel=True)
    assert all(opened(lossless, lambda llm: llm.spec.target.link.sidecar))
    convert_for_ranks(path)
    nearly(pair.model, 0.03).save_pretrained(path)
    words = "is not layer 0 of this checkpoint; run `offload-rt convert` again"
    assert all(words in notice for notice in notices(config))


def test_convert_reports_unsupported_formats(tmp_path, capfd):
    path, _ = quantised(tmp_path, "Q8_0")
    for flags, words in (
        ([], "quantised weights do not shrink"),
        (["--ranks", "2", "--link-format", "lossless"], "do not shrink"),
        (["--link-format", "raw"], "add --ranks"),
        (["--ranks", "1"], "at least 2"),
        (["--ranks", "3"], "128 outputs"),
    ):
        assert convert.main(["--model", str(path), *flags]) == 2
        assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("strided", "contiguous", "exchange_s", "is_exact"),
    [(0.6, 1.0, 0.0, True), (0.6, 1.0, 1.0, False), (1.0, 1.0, 1e-3, False)],
    ids=["of the disk", "of the network", "where the disk is alike"],
)
def test_disk_layers_are_divided_in_the_faster_way(
    tmp_path, monkeypatch, strided, contiguous, exchange_s, is_exact
):
    path, _ = quantised(tmp_path, None, num_hidden_layers=4)

    def rate(tier: Any, n_layers: int) -> float:
        # A rank alone with another opinion is overruled: the slowest one counts.
        pieces = max(part.n_pieces for _, parts in tier._blocks for part in parts)
        of_slowest = strided if pieces > 1 else contiguous
        return of_slowest if MINE.ranks.rank else 10 / of_slowest

    monkeypatch.setattr(profile, "link_gbps", rate)
    monkeypatch.setattr(profile, "memory_gbps", lambda *_: 1e6)
    monkeypatch.setattr(profile, "timed", lambda device, work: [exchange_s])
    vain = "gaps between a rank's parts, in 1.3 times their bytes; offload-rt convert --ranks 2"
    config = partial(streamed, path)
    told = opened(config, lambda llm: (is_cut_exactly(llm), vain in llm.spec.notice))
    assert told == [(is_exact, not is_exact)] * 2
    # Weights without parts by outputs are divided by inputs.

    def refuse(_: Any, model: TensorParallelModel) -> None:
        if model.is_exact:
            raise UnsupportedModelError("it has no such parts")

    before_calls(monkeypatch, ranks_spec, "divide", refuse)
    assert opened(config, is_cut_exactly) == [False] * 2


def is_cut_exactly(llm: LLM) -> bool:
    return llm.spec.target.checkpoint.spec.is_exact


def test_memory_limits_decide_the_way_of_division(tmp_path, monkeypatch):
    """A rank with too little memory refuses for all."""
    path, _ = quantised(tmp_path, None, num_hidden_layers=4)
    convert_for_ranks(path, "--link-format", "raw")
    prefer(monkeypatch, is_exact=True)

    def work(*more: int) -> bool | str:
        config = least_of(config_for(path))
        config = replace(config, device_memory=config.device_memory + more[MINE.ranks.rank])
        try:
            with LLM.open(config) as llm:
                return is_cut_exactly(llm)
        except CapacityError as error:
            return str(error)

    n = 1 << 18
    assert together(2, lambda: work(n, n)) == [True] * 2
    assert together(2, lambda: work(0, n)) == [False] * 2
    message, short = together(2, lambda: work(n, -n))
    assert message.startswith("another rank has too little memory")
    assert short.startswith("the device memory budget is too")


def test_all_ranks_time_equal_numbers_of_layers(pair, monkeypatch, tmp_path):
    """A layer has exchanges, so that a rank with more layers would wait for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timed: list[list[int]] = [[], []]

    def seconds_of_parts(runner: Runner, blocks: list[Any], step: Any) -> list[float]:
        rank = MINE.ranks.rank
        if isinstance(runner.spec, TensorParallelModel):  # not the draft, which rank 0 has alone
            timed[rank].append(len(blocks))
        return [(0.02, 0.06)[rank], 0.0]

    monkeypatch.setattr(profile, "_seconds_of_parts", seconds_of_parts)

    def work(place: str) -> tuple[list[int], list[float], int]:
        settings = {"draft_model": str(pair.draft), "exact_parallel": True}
        with open_llm(pair.target, place, **settings) as llm:
            compute = llm.engine.cost.profile.compute
            return tokens_of(llm, prompt_of(4)), llm.time_plain(20), len(compute.widths)

    for place in ("resident", "disk"):
        tokens, seconds, n_widths = together(2, partial(work, place))[0]
        assert tokens == generate(pair.model, prompt_of(4), 16)
        assert len(seconds) == 3 and n_widths > 1
        assert timed[0] == timed[1] and timed[0]


def test_oom_on_rank_0_ends_the_run(pair, monkeypatch):
    """Other ranks are within the pass, so it cannot be repeated."""

    def fail(model: TensorParallelModel, i: int, *_: Any) -> None:
        if (model.rank, i) == (0, 1):
            raise torch.OutOfMemoryError("CUDA out of memory")

    before_calls(monkeypatch, TensorParallelModel, "layer", fail)
    with pytest.raises(DeviceError, match="out of memory"):
        divided_tokens(2, pair.target, prompt_of(6), drafter="none")


@pytest.mark.parametrize("fails", ["", "at first", "always"])
def test_ranks_capture_and_replay_the_same_passes(pair, monkeypatch, fails):
    """Of draft and target; where one rank has no memory for a graph, none has it."""
    keep_steady(monkeypatch)
    logs: list[list[tuple[str, Any]]] = [[], []]
    refuses = {"": (), "at first": range(3), "always": range(10**6)}[fails]
    make = loader.Loader.runner

    def capture(rank: int, compute: Callable[[], None]) -> Callable[[], None]:
        log, captured = logs[rank], compute.__self__  # type: ignore[attr-defined]
        of = getattr(captured._function, "__self__", None)
        if not isinstance(of, GraphPass):  # what rank 0 makes of logits
            return compute
        what = len(of._logits)
        n = [event for event, _ in log].count("capture")
        log.append(("capture", what))
        if rank == 1 and n in refuses:
            raise torch.OutOfMemoryError
        return lambda: log.append(("replay", what)) or compute()

    def runner(*given: Any) -> Runner:
        built = make(*given)
        # Rank 0 captures in its engine thread.
        capture_passes(built, GraphShape(64, 512, 128), partial(capture, MINE.ranks.rank), 1.0)
        return built

    monkeypatch.setattr(loader.Loader, "runner", runner)
    settings = {"split_draft": "on", "tree_size": 16, "tree_depth": 5}
    texts = [(prompt_of(2, 40), 24), (prompt_of(3, 9), 12)]

    def work() -> list[list[int]]:
        with open_llm(pair.target, **settings, **pair.settings("adaptive_tree")) as llm:
            return [tokens_of(llm, prompt, n) for prompt, n in texts]

    assert together(2, work)[0] == [generate(pair.model, prompt, n) for prompt, n in texts]
    assert logs[0] == logs[1]
    n_replays = [event for event, _ in logs[0]].count("replay")
    assert n_replays == 0 if fails == "always" else n_replays > 10
