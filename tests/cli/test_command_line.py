"""The command line: exit codes, stdout, stderr, and one sentence for each mistake."""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from support.checkpoints import BYTES, speaking_checkpoint
from support.command_line import PROMPT, SMALL, one_sentence, surroundings
from support.tiny import open_unloaded

from offload_rt import LLM, SamplingParams, Stats
from offload_rt.cli import calibrate, chat
from offload_rt.cli import main as cli_main
from offload_rt.cli.calibrate import Findings
from offload_rt.cli.flags import Parser
from offload_rt.cost.tree_size import N_RANKS
from offload_rt.engine import device
from offload_rt.errors import SettingsError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_checkpoint(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module")
def drafting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run with memory for two slots, and the model's first layers as a draft."""
    draft = speaking_checkpoint(tmp_path_factory.mktemp("draft"), num_hidden_layers=5)
    trees = {"draft_model": str(draft), "tree_size": 24, "tree_depth": 4, "max_model_len": 128}
    with open_unloaded(model, device="cpu", **trees) as llm:
        budget = llm.plan.reserved.total + 2 * llm.plan.slot_nbytes
    settings = trees | {"model": model, "device": "cpu", "device_memory": budget}
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def spoken(model: Path) -> Iterator[Callable[..., Any]]:
    with LLM(str(model), device="cpu", max_model_len=64) as llm:
        yield lambda **params: llm.generate(PROMPT, SamplingParams(**params))[0]


def test_text_without_a_place_in_the_encoding_is_replaced(tmp_path, line, monkeypatch):
    directory = str(speaking_checkpoint(tmp_path, BYTES))
    with LLM(directory, device="cpu", max_model_len=64) as llm:
        text = llm.generate("é", SamplingParams(max_new_tokens=40))[0].text
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode())))
    monkeypatch.setattr(sys, "stdout", stdout)
    code, _, report = line(directory, *SMALL, "--max-new-tokens", "40", "--prompt-file", "-")
    assert code == 0 and not text.isascii()
    assert stdout.buffer.getvalue() == text.encode("ascii", "replace") + b"\n"
    assert "40 tokens in" in report and "per pass" in report


def _refused(got: tuple[int, str, str], *words: str) -> None:
    assert got[:2] == (2, "")
    one_sentence(got[2], *words)


def test_draft_model_changes_speed_but_not_text(line, drafting, spoken):
    flags = ["--prompt", PROMPT, "--max-new-tokens=24", "--show-tree", "--baseline", "--verbose"]
    code, out, report = line(*drafting, *flags)
    assert (code, out) == (0, spoken(max_new_tokens=24).text + "\n")
    for pattern in (
        r"24 tokens in .* tokens per pass", r"trees of \d+ nodes on [\d.]+ levels",
        r"tokens/s, [\d.]+ times plain decoding at [\d.]+\n",
        r"start: import [\d.]+ s, .*measure [\d.]+ s, first pass [\d.]+ s",
        r"a pass of plain decoding takes [\d.]+ s", "GB per pass",
        r"\d+ nodes on \d+ levels, up to \d+ children a node|chain of \d+ nodes",
    ):  # fmt: skip
        assert re.search(pattern, report), pattern
    assert "is full" not in report


def test_calibrate_prints_one_json_object(drafting, capfd):
    assert calibrate.main([*drafting, "--tokens", "10", "--json"]) == 0
    out, report = capfd.readouterr()
    found = json.loads(out)
    assert list(found) == [item.name for item in fields(Findings)]
    assert len(found["acceptance"]) == N_RANKS
    assert found["acceptance"] == sorted(found["acceptance"], reverse=True)
    assert len(found["widths"]) == len(found["pass_s"]) == len(found["compute_s"])
    assert min(found["link_s"], *found["pass_s"]) > 0
    assert (found["sizes"], found["depths"]) == ([1, 8, 16], [1, 2, 4])
    # One node is one level, and several are more than one.
    measured = [[cost is not None for cost in row] for row in found["cost"]]
    assert measured == [[True, False, False], *[[False, True, True]] * 2]
    costs = [cost for row in found["cost"] for cost in row if cost is not None]
    n_nodes, n_levels, seconds = found["best"]
    assert 1 <= n_nodes <= 24 and 1 <= n_levels <= 4
    assert 0 < seconds <= min(costs) * 1.01  # the smallest of those that are as good
    (best,) = found["optima"]  # the cache has room for one sequence of 127 tokens, and a tree
    assert (best["batch"], best["context"]) == (1, 127)
    assert best["n_nodes"] <= 24 and best["token_s"] <= best["plain_s"]
    assert report.count("tokens per pass") == report.count(" s per token") == 8
    assert report.count("adaptive_tree: ") == report.count("static_tree: ") == 4


def test_json_has_text_ids_reason_and_stats(line, drafting, spoken):
    flags = [*drafting, "--prompt", PROMPT, "--max-new-tokens", "24", "--json", "--quiet"]
    for stop in ("e", ""):
        code, out, err = line(*flags, *(["--stop", stop] if stop else []))
        assert (code, out.count("\n"), err) == (0, 1, "")
        api = spoken(max_new_tokens=24, stop=stop or ())
        *got, (_, stats) = json.loads(out).items()
        assert got == [(key, getattr(api, key)) for key in ("text", "token_ids", "finish_reason")]
        assert list(stats) == [item.name for item in fields(Stats)]
        assert stats["n_tokens"] == len(api.token_ids) and stats["link_bytes"] > 0
    assert stats["n_passes"] < 24 and stats["tokens_per_pass"] > 1
    assert 1 < stats["nodes_per_tree"] <= 24 and 1 < stats["levels_per_tree"] <= 4
    assert len(stats["tree_widths"]) <= 4 and sum(stats["tree_widths"]) <= 24
    assert stats["tree_widths"][0] == 1
    rates = stats["acceptance_by_rank"]
    assert 0 <= min(rates) <= max(rates) <= 1 and max(rates) > 0
    assert stats["predicted_seconds_per_token"] > 0 and stats["measured_seconds_per_token"] > 0
    seconds = stats["draft_seconds"], stats["verify_seconds"], stats["prefill_seconds"]
    assert min(seconds) > 0 and max(seconds) < stats["seconds"]


def test_calibrate_refuses_invalid_flags(line, drafting, model):
    for flags, *words in (
        (["--tokens", "0"], "--tokens is 0"), (["--temperature", "-1"], "temperature"),
        (["--prompt-file", "/no/such/file"], "--prompt-file", "/no/such/file"),
        (["--tree-size", "1"], "--tree-size"), (["--plot", "/no/such/folder/plot.png"], "--plot"),
    ):  # fmt: skip
        code, _, err = line(*drafting, *flags, main=calibrate.main)
        assert code == 2
        one_sentence(err.splitlines()[-1], *words)
    for name, word in ((str(model), "set --draft-model"), ("/nope", "no model called /nope")):
        _refused(line(name, "--device", "cpu", main=calibrate.main), word)


@pytest.mark.parametrize(("arguments", "words"), [
    ([], ["--prompt or --prompt-file", "neither"]), (["--prompt", ""], ["the prompt is empty"]),
    (["--prompt", "the " * 200], ["too long", "--max-model-len"]),
    (["--prompt", "\udcff"], ["--prompt", "UTF-8"]),
    (["--prompt-file", "/no/such/file"], ["/no/such/file", "No such file"]),
    (["--prompt-file", "/"], ["--prompt-file", "directory"]),
    (["--prompt", "a", "--prompt-file", "b"], ["both"]),
    (["the", "quick"], ["arguments: quick; quote a prompt with spaces"]),
    *((["--prompt", "x", *flags.split()], [*words]) for flags, *words in (
        ("--chat", "chat template"), ("--image x.png", "--image: needs --chat"),
        ("--top-p 0", "top_p"), ("--temperature -1", "at least 0; change --temperature"),
        ("--trace /no/such/folder/t.json", "an existing folder"),
        ("--drafter telepathy", "no drafter called", "none"),
        ("--drafter adaptive-tree", "did you mean adaptive_tree?"),
        ("--dtype flaot16", "'flaot16'", "did you mean float16?"),
        ("--max-tokens ten", "--max-tokens is 'ten': needs an integer"),
        ("--logit-bias ten", "is 'ten': needs JSON like {"),
        ("--logprobs 2", "--logprobs", "add --json"), ("--n 2", "a temperature above 0"),
        ("--stop-token-ids 9999", "9999 in stop_token_ids"),
        ("--chat-template /no/such", "read: No such file or directory;"),
        ("--drafter none --tree-size 4", "--tree-size with --drafter none"),
        ("--drafter none --tree-depth 4", "--tree-depth with --drafter none"),
        ("--tree-siez 4", "did you mean --tree-size?"), ("--host-memory 1GB", "--host-memory"),
        ("--json-schema /dev/null", "error: --json-schema is not JSON"),
        ("--max-model-len 100000", "--max-model-len", "8192"),
        ("--device-memory 1000TiB", "--device-memory", "1024000.00 GiB"),
        ("--device-memory lots", "'lots'", "22GiB"))),
    (["--prompt", "x", "--stop", ""], ["stop"]),
], ids=lambda value: " ".join(value)[:40].encode("ascii", "replace").decode())  # fmt: skip
def test_mistakes_are_one_sentence_and_exit_code_2(arguments, words, line, model):
    _refused(line("--model", str(model), *SMALL, *arguments), *words)


def test_unusable_files_devices_and_budgets_are_refused(line, model, tmp_path, monkeypatch):
    for limit, advice in ((1 << 40, "set --device-memory to "), (1000, "use a larger device")):
        monkeypatch.setattr(device, "memory_limit", lambda limit=limit: limit)
        _refused(line(str(model), "x", "--device", "cpu", "--device-memory", "1000"), advice)
    monkeypatch.undo()
    (tmp_path / "prompt").write_bytes(b"caf\xe9")
    _refused(line("--model", str(model), "--prompt-file", str(tmp_path / "prompt")), "not UTF-8")
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "tokenizer.json").write_text('{"version": "1.0", "model": 7}')
    _refused(line("--model", str(copy), "--prompt", "x"), "the tokenizer in", "cannot be loaded")
    (copy / "tokenizer.json").unlink()
    _refused(line(str(copy), "x", "--device", "cpu", "--quiet"), "tokenizer")
    _refused(line(str(model), "--device", "cpu", main=chat.main), "no chat template")
    if not torch.cuda.is_available():
        code, out, err = line("--model", str(model), "--device", "cuda", "--prompt", "x")
        assert (code, out) == (3, "") and err.startswith("error: --device cuda")


@pytest.mark.parametrize(("prompts", "n"), [(["the"], 1), (["the", "lazy\ndog"], 2)])
def test_interrupt_prints_all_answers_and_the_speed(prompts, n, line, model, monkeypatch):
    flags = ["--model", str(model), "--device=cpu", "--max-model-len=64", "--drafter=none"]
    flags += ["--max-num-seqs=4", "--temperature=1", "--seed=0", f"--n={n}"]
    flags += [f"--prompt={prompt}" for prompt in prompts]

    def answers() -> list[dict[str, Any]]:
        parsed = json.loads(line(*flags, "--json")[1])
        objects = parsed if len(prompts) > 1 else [parsed]
        return [output for answer in objects for output in answer.get("outputs", [answer])]

    whole = answers()
    assert "the context of 64 tokens is full; raise --max-model-len" in line(*flags)[2]
    load = LLM.load

    def interrupted_load(llm: LLM, *arguments: Any) -> None:
        load(llm, *arguments)
        steps = chain(repeat(DEFAULT, 5), repeat(KeyboardInterrupt))
        llm.engine.step = Mock(wraps=llm.engine.step, side_effect=steps)

    monkeypatch.setattr(LLM, "load", interrupted_load)
    cut = answers()
    assert all(output["finish_reason"] == "interrupted" for output in cut)
    assert [output["token_ids"] for output in cut] == [output["token_ids"][:5] for output in whole]
    code, out, err = line(*flags)
    texts = [output["text"] for output in cut]
    both = zip(texts[::2], texts[1::2], strict=False)
    several = "".join(f"{first}\n--- answer 2 of 2\n{second}\n\n" for first, second in both)
    assert (code, out) == (130, several or f"{texts[0]}\n")
    assert "[1] the\n" in err and ("[2] lazy ...\n" in err) == (n == 2)
    count = "5 tokens in" if n == 1 else "20 tokens of 4 answers in"
    assert re.search(rf"tokens/s\n{count} [\d.]+ s, .*pass\ninterrupted\n$", err)
    assert line(*flags, "--quiet")[2] == "interrupted\n"
    monkeypatch.setattr(LLM, "load", Mock(side_effect=KeyboardInterrupt))
    code, out, err = line(*flags, "--json", "--quiet")
    ended = {"text": "", "token_ids": [], "finish_reason": "interrupted", "stats": None}
    assert (code, json.loads(out), err) == (130, ended, "interrupted\n")


@pytest.mark.parametrize("length", [20, 40])
def test_longer_context_is_advised_only_if_possible(length, line, tmp_path, monkeypatch):
    directory = str(speaking_checkpoint(tmp_path, max_position_embeddings=40))
    (tmp_path / "chat.jinja").write_text("the")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    given = ["--device=cpu", f"--max-model-len={length}", "--drafter=none"]
    report = line(directory, "the", *given, "--max-tokens", "99")[2]
    given += ["--chat-template", str(tmp_path / "chat.jinja"), "--quiet"]
    answered = line(directory, *given, main=chat.main)[2]
    assert f"the context of {length} tokens is full" in report
    assert "the answer is cut off: the context is full" in answered
    assert [report.count("raise"), answered.count("raise")] == [int(length < 40)] * 2


def test_other_operating_systems_are_refused():
    for part, name in ((".run", "main"), (".cli.main", "main"), ("", "LLM")):
        code = f"import sys; sys.platform = 'darwin'; from offload_rt{part} import {name}"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=surroundings())
        assert done.returncode
        assert done.stderr.endswith("offload_rt needs Linux; on Windows use WSL 2\n")
        assert done.stderr.count("\n") == 1 or not part


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_unusable_cuda_device_is_reported(line, model, monkeypatch):
    monkeypatch.setattr("offload_rt.engine.device.cards", lambda: ["NVIDIA GeForce RTX 4090"])
    flags = f"--model {model} --prompt x --max-new-tokens 1 --device-memory 1MB --max-model-len 64"
    code, _, err = line(*flags.split())
    said = "computing on the CPU: there is a NVIDIA GeForce RTX 4090, but torch can use none ("
    assert code == 0 and said in err
    assert "computing on" not in line(*flags.split(), "--device", "cpu")[2]


def test_verbs_receive_their_flags(capfd, model):
    assert cli_main.main(["plan", str(model), "--gpu", "rtx4090", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["machine"] == "GeForce RTX 4090"
    for arguments in (["--help"], []):
        assert cli_main.main(arguments) == 0
        out = capfd.readouterr().out
        assert all(verb in out for verb in ("run", "plan", "calibrate", "report"))
    for arguments, word in (
        (["rum"], "mean run?"), (["--model", "m", "run"], "COMMAND"), (["Run"], "mean run?"),
    ):  # fmt: skip
        code = cli_main.main(arguments)
        _refused((code, *capfd.readouterr()), word)
    # argparse of Python 3.11 quotes choices, argparse of 3.13 does not.
    for choices in ("'float16', 'auto'", "float16, auto"):
        said = f"argument --dtype: invalid choice: 'flaot16' (choose from {choices})"
        with pytest.raises(SettingsError, match="did you mean float16"):
            Parser("", "").error(said)


@pytest.mark.parametrize("width", [60, 80])
def test_help_fits_the_terminal_and_keeps_its_examples(width, capfd, monkeypatch):
    n_examples = 0
    for verb in cli_main.VERBS:
        shown = []
        for columns in (1000, width):
            monkeypatch.setenv("COLUMNS", str(columns))
            assert cli_main.main([verb, "--help"]) == 0
            shown.append(capfd.readouterr().out)
        whole, wrapped = shown
        assert whole.startswith(f"usage: offload-rt {verb} ")
        assert max(map(len, wrapped.splitlines())) <= width, verb
        examples = [text.partition("examples:")[2].replace("\\\n", "") for text in shown]
        commands, wrapped_commands = (
            [shlex.split(line) for line in text.splitlines() if line] for text in examples
        )
        assert commands == wrapped_commands
        n_examples += len(commands)
        assert not re.search(r"default: *(None|$)", whole, re.M)
    assert n_examples > 10


def test_bash_completes_verbs_flags_and_choices(capfd, tmp_path):
    assert cli_main.main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capfd.readouterr().out)
    typed = {
        "ca": "calibrate", "run --device-m": "--device-memory", "plan DIR --sweep ": "ram memory",
        "chat --hide": "--hide-thinking", "run --drafter tri": "triforce",
        "plan --gpu rtx4090": "rtx4090 rtx4090d rtx4090laptop",
    }  # fmt: skip
    for line, expected in typed.items():
        program = f"""
            source {tmp_path / "script"}
            COMP_WORDS=(offload-rt {line}) COMP_CWORD={line.count(" ") + 1}
            COMP_WORDS[COMP_CWORD]="${{COMP_WORDS[COMP_CWORD]-}}"
            _shtab_offload_rt; echo "${{COMPREPLY[*]}}" """
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
        assert done.stdout.split() == expected.split(), line
