"""What goes wrong while it runs: interrupts, readers that go away, full disks, files that shrink, numbers that are none."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpoints import llama_config, llama_tensors, speaking_checkpoint, write_checkpoint
from test_command_line import PROMPT, SMALL, command, surroundings

from offload_rt import LLM, SamplingParams, build, run
from offload_rt.errors import CapacityError, LinkError, NumericsError, OffloadError
from offload_rt.tiers.disk import DiskTier

ENOUGH = 20  # characters that show that generation is under way
PATIENCE_S = 120.0  # what takes so long, even on a busy machine, has hung
ENDLESS = ["--device", "cpu", "--max-model-len", "8192", "--max-new-tokens", "8000"]


@dataclass(frozen=True)
class Ended:
    """A process that has ended, and how long it took after it was disturbed."""

    code: int
    out: bytes
    err: bytes
    seconds: float
    n_left: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_checkpoint(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module")
def begins_with(model: Path) -> str:
    """How the endless answer begins."""
    with LLM(str(model), device="cpu", max_model_len=256) as llm:
        return llm.generate(PROMPT, SamplingParams(max_new_tokens=200))[0].text


def _disturbed(arguments: list[str], disturb: Callable[[subprocess.Popen], None], **how: Any) -> Ended:
    """Start a run, wait until it has spoken, disturb it, and wait for its end."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=surroundings(),
        start_new_session=True,
        **how,
    )
    watch = threading.Timer(PATIENCE_S, process.kill)
    watch.start()
    said = b""
    while len(said) < ENOUGH and (more := os.read(process.stdout.fileno(), ENOUGH)):
        said += more
    disturb(process)
    started = time.perf_counter()
    if process.stdout.closed:
        rest, err = b"", process.stderr.read()
        process.wait()
    else:
        rest, err = process.communicate()
    watch.cancel()
    left = [one for one in psutil.process_iter(["pid"]) if _session(one.pid) == process.pid]
    return Ended(process.returncode, said + rest, err, time.perf_counter() - started, len(left))


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _truncate(path: Path) -> Callable[[subprocess.Popen], None]:
    return lambda process: os.truncate(path, path.stat().st_size // 2)


def _interrupt_without_a_reader(process: subprocess.Popen) -> None:
    """As Ctrl-C on a pipeline does: the reader dies of it too."""
    process.send_signal(signal.SIGSTOP)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)


def _to_a_full_disk(arguments: list[str]) -> Ended:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command(*arguments), stdout=full, stderr=subprocess.PIPE, env=surroundings(), timeout=PATIENCE_S
        )
    return Ended(done.returncode, b"", done.stderr, 0.0, 0)


def _in_little_memory(arguments: list[str], nbytes: int) -> Ended:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))

    done = subprocess.run(
        command(*arguments), capture_output=True, env=surroundings(), timeout=PATIENCE_S, preexec_fn=limit
    )
    return Ended(done.returncode, done.stdout, done.stderr, 0.0, 0)


def _through_head(arguments: list[str]) -> Ended:
    line = [*command(*arguments)]
    first = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=surroundings())
    head = subprocess.Popen(["head", "-c", "5"], stdin=first.stdout, stdout=subprocess.PIPE)
    first.stdout.close()
    out, _ = head.communicate(timeout=PATIENCE_S)
    err = first.stderr.read()
    return Ended(first.wait(timeout=PATIENCE_S), out, err, 0.0, 0)


@pytest.fixture(scope="module")
def ended(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """All processes of this file, two at a time."""
    shrinking = [tmp_path_factory.mktemp("shrinking") / str(n) for n in range(2)]
    for copy in shrinking:
        shutil.copytree(model, copy)
    hungry = tmp_path_factory.mktemp("hungry")
    # Three kilobytes of cache for a token, and a million tokens: the plan allows it, what Python and torch take does not.
    speaking_checkpoint(hungry, max_position_embeddings=2**21, num_key_value_heads=4)
    million = ["--max-model-len", "1150000", "--max-new-tokens", "1149000", "--device-memory", "4200000000"]
    with pytest.raises(CapacityError) as least:
        LLM(str(model), device="cpu", max_model_len=8192, device_memory=1)
    budget = re.search(r"set --device-memory to (\d+)", str(least.value)).group(1)

    def speaks(directory: Path, *more: str) -> list[str]:
        return ["--model", str(directory), "--prompt", PROMPT, "--quiet", *ENDLESS, "--device-memory", budget, *more]

    short = ["--model", str(model), *SMALL, "--prompt", PROMPT, "--quiet"]
    much = ["--model", str(hungry), "--prompt", PROMPT, "--device", "cpu", "--quiet", *million]
    jobs: dict[str, Callable[[], Ended]] = {
        "SIGINT": lambda: _disturbed(speaks(model), lambda process: process.send_signal(signal.SIGINT)),
        "SIGTERM": lambda: _disturbed(speaks(model), lambda process: process.send_signal(signal.SIGTERM)),
        "no reader": lambda: _disturbed(speaks(model), _interrupt_without_a_reader),
        "truncated": lambda: _disturbed(speaks(shrinking[0]), _truncate(shrinking[0] / "model.safetensors")),
        "gone reader": lambda: _disturbed(speaks(model), lambda process: process.stdout.close()),
        "head": lambda: _through_head(speaks(model)),
        "full disk": lambda: _to_a_full_disk(short),
        "full disk, json": lambda: _to_a_full_disk([*short, "--json"]),
        "little memory": lambda: _in_little_memory(much, 4 << 30),
    }
    # In the background of a shell interrupts are ignored, by all that is started there.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(job) for name, job in jobs.items()}
    signal.signal(signal.SIGINT, handler)


def _one_sentence(err: bytes, *words: str) -> None:
    lines = err.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_ends_soon_with_what_it_had_produced(
    name: str, ended: dict[str, Future], begins_with: str
) -> None:
    done = ended[name].result()
    assert done.code == 130
    assert done.err == b"interrupted\n"
    text = done.out.decode()
    assert text.endswith("\n")
    assert len(text) > ENOUGH
    n = min(len(text) - 1, len(begins_with))
    assert text[:n] == begins_with[:n]
    assert done.seconds < PATIENCE_S / 2
    assert done.n_left == 0


def test_an_interrupt_when_nobody_reads_any_more_is_no_traceback(ended: dict[str, Future]) -> None:
    done = ended["no reader"].result()
    assert done.code in (0, 130)
    assert done.err in (b"", b"interrupted\n")


@pytest.mark.parametrize("name", ["head", "gone reader"])
def test_a_reader_that_has_had_enough_ends_the_run_quietly(
    name: str, ended: dict[str, Future], begins_with: str
) -> None:
    done = ended[name].result()
    assert (done.code, done.err) == (0, b"")
    n = 5 if name == "head" else ENOUGH
    assert done.out.decode()[:n] == begins_with[:n]


@pytest.mark.parametrize("name", ["full disk", "full disk, json"])
def test_a_full_disk_under_stdout_is_one_sentence(name: str, ended: dict[str, Future]) -> None:
    done = ended[name].result()
    assert done.code == 3
    _one_sentence(done.err, "No space left")


def test_a_file_that_shrinks_while_it_is_read_ends_the_run_after_what_it_had_produced(
    ended: dict[str, Future], begins_with: str
) -> None:
    done = ended["truncated"].result()
    assert done.code == 3
    _one_sentence(done.err, "model.safetensors")
    text = done.out.decode()
    n = min(len(text) - 1, len(begins_with))
    assert n >= ENOUGH - 1
    assert text[:n] == begins_with[:n]


def test_too_little_memory_is_one_sentence(ended: dict[str, Future]) -> None:
    done = ended["little memory"].result()
    assert (done.code, done.out) == (3, b"")
    _one_sentence(done.err, "out of memory", "--max-model-len")


# The same inside this process.


@pytest.fixture
def line(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    handler = signal.getsignal(signal.SIGTERM)
    yield lambda *arguments: (run.main(list(arguments)), *capfd.readouterr())
    signal.signal(signal.SIGTERM, handler)


def _spoil_after(n_reads: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let so many reads of the disk through, then fail each."""
    reads, count = DiskTier.reads, 0

    def spoilt(self: DiskTier, i: int, into: torch.Tensor) -> list[Callable[[], int]]:
        def failing(part: Callable[[], int]) -> Callable[[], int]:
            def read() -> int:
                nonlocal count
                count += 1
                if count > n_reads:
                    raise error
                return part()

            return read

        return [failing(part) for part in reads(self, i, into)]

    monkeypatch.setattr(DiskTier, "reads", spoilt)


@pytest.mark.parametrize(
    ("error", "code", "reason", "said"),
    [
        (LinkError("the disk has gone"), 3, "error", "error: the disk has gone"),
        (OSError(28, "No space left on device"), 3, "error", "error: the machine: No space left"),
        (MemoryError(), 3, "error", "error: out of memory"),
        (RuntimeError("can't start new thread"), 3, "error", "error: out of memory"),
        (OSError(12, "Cannot allocate memory"), 3, "error", "error: out of memory"),
        (KeyboardInterrupt(), 130, "interrupted", "interrupted"),
    ],
)
def test_json_tells_what_came_out_before_the_end(
    error: BaseException, code: int, reason: str, said: str, line: Any, model: Path, begins_with: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    flags = ["--model", str(model), *SMALL, "--prompt", PROMPT, "--quiet", "--json", "--max-new-tokens", "40"]
    assert line(*flags)[0] == 0  # measures the disk, which reads it too
    _spoil_after(60, monkeypatch, error)
    got, out, err = line(*flags)
    assert got == code
    assert err.startswith(said)
    assert err.count("\n") == 1
    found = json.loads(out)
    assert list(found) == ["text", "token_ids", "finish_reason", "stats"]
    assert found["finish_reason"] == reason
    assert found["stats"] is None
    assert 0 < len(found["token_ids"]) < 40
    assert begins_with.startswith(found["text"])


def test_a_run_that_fails_before_the_first_token_prints_no_json(
    line: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model", str(model), *SMALL, "--prompt", PROMPT, "--quiet", "--json"]
    assert line(*flags, "--max-new-tokens", "1")[0] == 0
    _spoil_after(0, monkeypatch, LinkError("the disk has gone"))
    assert line(*flags) == (3, "", "error: the disk has gone\n")


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight", "model.layers.5.input_layernorm.weight", "lm_head.weight"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_told(name: str, value: float, line: Any, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    tensors = llama_tensors(config)
    tensors[name].view(-1)[:] = value
    write_checkpoint(tmp_path / "m", config, tensors)
    code, out, err = line("--model", str(tmp_path / "m"), *SMALL, "--prompt", PROMPT, "--quiet")
    assert (code, out) == (3, "")
    _one_sentence(err.encode(), "not all numbers")


def test_an_error_that_is_ours_is_not_taken_for_the_machines(
    line: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(build, "load", broken)
    monkeypatch.setattr("offload_rt.api.load", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        line("--model", str(model), *SMALL, "--prompt", PROMPT)


# The API after a fault.


@contextlib.contextmanager
def _streaming(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", max_model_len=64, device_memory=1_000_000) as llm:
        assert llm.plan.count("disk") >= 3
        yield llm


def test_an_llm_goes_on_after_a_failed_pass(model: Path, begins_with: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_llm_goes_on_after_a_stream_that_was_given_up(model: Path, begins_with: str) -> None:
    with _streaming(model) as llm:
        for n in (1, 2, 5):
            pieces = llm.stream(PROMPT, SamplingParams(max_new_tokens=30))
            for _ in range(n):
                next(pieces)
            pieces.close()
            text = llm.generate(PROMPT, SamplingParams(max_new_tokens=20))[0].text
            assert begins_with.startswith(text)


def test_a_stream_held_over_the_end_of_its_llm_is_an_error(model: Path) -> None:
    with _streaming(model) as llm:
        pieces = llm.stream(PROMPT, SamplingParams(max_new_tokens=30))
        next(pieces)
    ended: list[BaseException] = []

    def go_on() -> None:
        try:
            next(pieces)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 4)
    assert not thread.is_alive(), "it waits for ever"
    assert isinstance(ended[0], OffloadError)


def test_closing_leaves_no_thread_and_no_file(model: Path) -> None:
    with _streaming(model):
        pass
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    llm = LLM(str(model), device="cpu", max_model_len=64, device_memory=1_000_000)
    llm.generate(PROMPT, SamplingParams(max_new_tokens=2))
    assert set(threading.enumerate()) > threads
    llm.close()
    llm.close()
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) == files
    with pytest.raises(OffloadError, match="closed"):
        llm.generate(PROMPT)


def test_a_file_lost_while_loading_leaves_no_thread_and_no_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _streaming(model):
        pass
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    _spoil_after(1, monkeypatch, LinkError("the disk has gone"))
    with pytest.raises(LinkError):
        LLM(str(model), device="cpu", max_model_len=64)
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("n_reads", [3, 5])
def test_a_disk_lost_once_the_streamer_runs_leaves_no_thread_and_no_file(
    n_reads: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the draft is loaded, or while passes are timed."""
    draft = {"draft_model": str(speaking_checkpoint(tmp_path / "draft", num_hidden_layers=2)), "tree_size": 8}
    with _streaming(model):
        pass
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for settings in ({"device_memory": 1_000_000}, {"device_memory": 1_500_000, **draft}):
        with monkeypatch.context() as patch:
            _spoil_after(n_reads, patch, LinkError("the disk has gone"))
            with pytest.raises(LinkError):
                LLM(str(model), device="cpu", max_model_len=64, **settings)
        assert set(threading.enumerate()) <= threads
        assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("drafter", ["static_tree", "dynamic_tree", "hybrid_tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_computes_no_numbers_is_an_error(tmp_path: Path, drafter: str, temperature: float) -> None:
    config = llama_config()
    tensors = llama_tensors(config)
    target = write_checkpoint(tmp_path / "target", config, tensors)
    tensors["model.norm.weight"][3] = float("nan")
    draft = write_checkpoint(tmp_path / "draft", config, tensors)
    with LLM(str(target), str(draft), device="cpu", drafter=drafter, tree_size=8) as llm:
        for _ in range(2):
            with pytest.raises(NumericsError, match="draft"):
                llm.generate([[1, 2]], SamplingParams(temperature=temperature))


def test_nan_weights_are_an_error_of_the_api_too(tmp_path: Path) -> None:
    config = llama_config()
    tensors = llama_tensors(config)
    tensors["model.norm.weight"][3] = float("nan")
    with LLM(str(write_checkpoint(tmp_path, config, tensors)), device="cpu") as llm, pytest.raises(NumericsError):
        llm.generate([[1, 2]])
