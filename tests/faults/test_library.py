"""Faults inside one process: failed reads and writes, and checkpoints that change."""

import _thread
import contextlib
import gc
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.checkpoints import llama_config, llama_tensors, write_checkpoint, write_file
from support.command_line import PROMPT, one_sentence
from support.programs import wait_until
from support.spies import before_calls

from offload_rt import LLM, SamplingParams
from offload_rt.engine import builder
from offload_rt.errors import LinkError, OffloadError
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.mirrors import DirectFiles
from offload_rt.weights.checkpoint import open_checkpoint


def _spoil_after(n_reads: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let a number of disk reads succeed, then fail each."""
    reads = DiskTier.reads
    good = iter(range(n_reads))

    def spoilt(part: Callable[[], int]) -> int:
        if next(good, None) is None:
            raise error
        return part()

    monkeypatch.setattr(
        DiskTier, "reads", lambda *arguments: [partial(spoilt, part) for part in reads(*arguments)]
    )


@pytest.mark.parametrize(("error", "code", "reason", "said"), [
    *((error, 3, "error", f"error: {said}") for error, said in (
        (LinkError("the disk has gone"), "the disk has gone"),
        (OSError(28, "No space left on device"), "the machine: No space left"),
        (MemoryError(), "out of memory"), (RuntimeError("can't start new thread"), "out of memory"),
        (OSError(12, "Cannot allocate memory"), "out of memory"),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
            "CUDA device unavailable"),
        (RuntimeError("Found no NVIDIA driver on your system"), "CUDA device unavailable"))),
    (KeyboardInterrupt(), 130, "interrupted", "interrupted"),
])  # fmt: skip
def test_json_reports_the_text_before_a_failure(
    error, code, reason, said, line, speaks, begins_with, monkeypatch
):
    flags = speaks("--json", "--max-new-tokens", "40")
    assert line(*flags)[0] == 0  # measures the disk, which reads it too
    _spoil_after(60, monkeypatch, error)
    got, out, err = line(*flags)
    assert got == code and err.startswith(said) and err.count("\n") == 1
    answer = json.loads(out)
    assert list(answer) == ["text", "token_ids", "finish_reason", "stats"]
    assert (answer["finish_reason"], answer["stats"]) == (reason, None)
    assert 0 < len(answer["token_ids"]) < 40 and begins_with.startswith(answer["text"])
    _spoil_after(0, monkeypatch, error)
    if reason == "error":
        assert line(*flags) == (3, "", err)


def test_internal_error_is_not_reported_as_device_error(line, speaks, monkeypatch):
    broken = Mock(side_effect=RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    monkeypatch.setattr(builder, "load", broken)
    monkeypatch.setattr("offload_rt.llm.load", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        line(*speaks())


@contextlib.contextmanager
def _streaming(model: Path) -> Iterator[LLM]:
    settings = {"device": "cpu", "max_model_len": 64, "device_memory": 1_000_000, "drafter": "none"}
    with LLM(str(model), **settings) as llm:
        assert llm.plan.tiers.count("disk") >= 3
        yield llm


@contextlib.contextmanager
def _nothing_is_left(model: Path) -> Iterator[None]:
    """Assert that thread and file counts equal those before the body, after one warm-up run."""
    with _streaming(model):
        pass
    gc.collect()  # garbage of earlier tests has open files
    threads = {*threading.enumerate()}
    files = len(os.listdir("/proc/self/fd"))
    yield
    # An interrupt may meet a thread that nobody can join yet.
    wait_until(lambda: {*threading.enumerate()} <= threads)
    assert len(os.listdir("/proc/self/fd")) == files


def test_llm_continues_after_a_failed_pass(model, begins_with, monkeypatch):
    params = SamplingParams(max_new_tokens=20)
    with _streaming(model) as llm:
        whole = llm.generate(PROMPT, params)[0]
        assert begins_with.startswith(whole.text)
        for n_reads in (0, 1, 7, 23):
            with monkeypatch.context() as patch:
                _spoil_after(n_reads, patch, LinkError("the disk has gone"))
                with pytest.raises(LinkError, match="the disk has gone"):
                    llm.generate(PROMPT, params)
            assert llm.generate(PROMPT, params)[0].token_ids == whole.token_ids


@pytest.mark.parametrize("is_closed", [True, False])
def test_closed_or_unreferenced_llm_leaves_no_thread_and_no_file(is_closed, model):
    before = {*threading.enumerate()}
    with _nothing_is_left(model):
        llm = LLM(str(model), device="cpu", max_model_len=64, device_memory=1_000_000)
        llm.generate(PROMPT, SamplingParams(max_new_tokens=2))
        assert {*threading.enumerate()} > before
        if is_closed:
            llm.close()
            llm.close()
            with pytest.raises(OffloadError, match="closed"):
                llm.generate(PROMPT)
        del llm
        gc.collect()


def test_interrupt_while_loading_leaves_no_thread(line, model, monkeypatch):
    begun = []

    def interrupt(*_: object) -> None:
        begun.append(1)
        if len(begun) == 3:
            _thread.interrupt_main()

    with _nothing_is_left(model), monkeypatch.context() as patch:
        before_calls(patch, DirectFiles, "fill", interrupt)
        ended = line("--model", str(model), "--device", "cpu", "--prompt", PROMPT)
        assert ended == (130, "", "interrupted\n")


@pytest.mark.parametrize("n_reads", [1, 3, 5])
def test_lost_disk_leaves_no_thread_and_no_file(n_reads, model, draft, monkeypatch):
    """While the model or the draft is loaded, or while passes are timed."""
    drafted = {"draft_model": str(draft), "tree_size": 8, "device_memory": 1_500_000}
    for settings in ({}, {"device_memory": 1_000_000}, drafted):
        if settings or n_reads == 1:
            with _nothing_is_left(model), monkeypatch.context() as patch:
                _spoil_after(n_reads, patch, LinkError("the disk has gone"))
                with pytest.raises(LinkError):
                    LLM(str(model), device="cpu", max_model_len=64, **settings)


@pytest.mark.parametrize(("drafter", "rule", "temperature"), [
    ("static_tree", "coupled", 0.0), ("dynamic_tree", "coupled", 0.8),
    ("static_tree", "specinfer", 0.8), ("static_tree", "traversal", 0.8),
])  # fmt: skip
def test_draft_with_nan_logits_is_disabled_for_its_sequence(tmp_path, drafter, rule, temperature):
    config = llama_config()
    tensors = llama_tensors(config)
    target = str(write_checkpoint(tmp_path / "target", config, tensors))
    tensors["model.embed_tokens.weight"][7] = float("nan")
    draft = str(write_checkpoint(tmp_path / "draft", config, tensors))
    prompts = [[1, 7], [1, 2]]
    params = SamplingParams(max_new_tokens=8, temperature=temperature, seed=1, ignore_eos=True)
    with LLM(target, device="cpu", drafter="none", rule="coupled") as plain:
        expected = [output.token_ids for output in plain.generate(prompts, params)]
    said = "drafting skipped: the draft model's logits contain NaN or Inf"
    with (
        LLM(target, draft, device="cpu", drafter=drafter, rule=rule, tree_size=8) as llm,
        pytest.warns(RuntimeWarning, match=said),
    ):
        outputs = llm.generate(prompts, params)
    assert rule != "coupled" or [output.token_ids for output in outputs] == expected
    assert [len(output.token_ids) for output in outputs] == [8, 8]
    assert outputs[0].stats.nodes_per_tree == 1 < outputs[1].stats.nodes_per_tree


@pytest.mark.parametrize("more", [[], ["--json"], ["--plan"], ["--help"]])
def test_closed_pipes_and_full_disks_under_stdout(more, line, speaks, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    for file, code in ((write, 0), (os.open("/dev/full", os.O_WRONLY), 3)):
        # closing raises where what could not be written is still there
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            ended, _, err = line(*speaks("--max-new-tokens", "4", *more))
        assert ended == code
        if code:
            one_sentence(err, "No space left")
        else:
            assert err == ""


@pytest.mark.parametrize("name", [".", "no/such/folder/t.json", "x" * 300])
def test_unwritable_trace_is_reported_before_the_run(name, line, speaks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = line(*speaks("--trace", name))
    assert (code, out) == (2 if "/" in name else 3, "")
    one_sentence(err)
    assert not list(tmp_path.iterdir())


def _write_others(path: Path) -> Path:
    config = json.loads((path.parent / "config.json").read_text())
    write_file(path, llama_tensors(config, seed=1))
    return path


# How a checkpoint changes, and whether a run ends.
CHANGES = {
    "cut in half": (lambda path: os.truncate(path, path.stat().st_size // 2), True),
    "cut by a byte": (lambda path: os.truncate(path, path.stat().st_size - 1), True),
    "lengthened": (lambda path: os.truncate(path, path.stat().st_size + 1), True),
    "overwritten": (_write_others, True),
    "deleted": (Path.unlink, False),
    "replaced": (lambda path: _write_others(path.with_name("new")).replace(path), False),
    "the folder deleted": (lambda path: shutil.rmtree(path.parent), False),
    "its mode changed": (lambda path: path.chmod(0), False),
}


@pytest.mark.parametrize(("change", "ends"), CHANGES.values(), ids=CHANGES)
def test_checkpoint_changed_during_a_run(change, ends, model, begins_with, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    with LLM(str(copy), device="cpu", max_model_len=128, device_memory=1_000_000) as llm:
        assert llm.plan.tiers.count("disk") > 3
        pieces = llm.stream(PROMPT, SamplingParams(max_new_tokens=60))
        text = next(pieces).text + next(pieces).text
        change(copy / "model.safetensors")
        with pytest.raises(LinkError, match="safetensors") if ends else contextlib.nullcontext():
            for piece in pieces:
                text += piece.text
    assert begins_with.startswith(text) and len(text) >= (1 if ends else 60)


@pytest.mark.parametrize("name", ["overwritten", "replaced"])
def test_file_changed_between_header_and_weights(name, model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    checkpoint = open_checkpoint(copy)
    CHANGES[name][0](copy / "model.safetensors")
    with pytest.raises(LinkError, match="changed while in use"):
        DiskTier(checkpoint.layers)
