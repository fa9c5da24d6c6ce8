"""Spoilt headers, configs, indices and tokenizers are read right or refused in one sentence."""

import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import (
    check_bytes,
    entries_of,
    file_bytes,
    llama_config,
    llama_tensors,
    speaking_checkpoint,
    write_checkpoint,
)
from support.command_line import PROMPT, one_sentence
from support.spoiling import spoil_bytes, spoil_json

from bench.models.tiny import config_of
from offload_rt.errors import OffloadError
from offload_rt.models.families import parse_architecture
from offload_rt.text.detokenize import TextStream, encode, load_tokenizer
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.files import read_json
from offload_rt.weights.header import read_header

FEW_TOKENS = ["--prompt", PROMPT, "--device", "cpu", "--quiet", "--max-new-tokens", "3"]
INDEX = "model.safetensors.index.json"
FAMILIES = [config_of(kind).to_dict() for kind in ("llama", "mistral", "qwen2", "qwen3")]
ROPES = (
    None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
     "beta_fast": 32, "beta_slow": 1},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def memory() -> Iterator[None]:
    """Assert that no case used excessive memory; the peak persists, so one check suffices."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < 600 << 20


def _survives(call: Callable[[], Any], seed: object) -> None:
    """It returns, or is refused in one sentence."""
    started = time.process_time()
    try:
        call()
    except OffloadError as error:
        told = str(error)
        assert told.isprintable() and len(told) < 6000, (seed, told[:300])
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__} {str(error)[:300]}") from error
    assert time.process_time() - started < 5.0, seed


def _header(chance: random.Random, entries: Any, data: bytes) -> bytes:
    if chance.random() < 0.3:
        return spoil_bytes(file_bytes(entries, data), chance)
    header = spoil_json(entries, chance)
    return len(header).to_bytes(8, "little") + header + data


def test_hostile_headers(tmp_path):
    config = llama_config()
    entries, data = entries_of(llama_tensors(config))
    few = {name: entries[name] for name in list(entries)[:4]}
    few_data = data[: max(entry["data_offsets"][1] for entry in few.values())]
    path = write_checkpoint(tmp_path, config, {}) / "model.safetensors"
    for seed in range(1000):
        is_whole = seed % 8 == 0
        content = (entries, data) if is_whole else (few, few_data)
        path.write_bytes(_header(random.Random(seed), *content))
        if is_whole:
            _survives(lambda: check_bytes(open_checkpoint(tmp_path).layers), seed)
        else:
            _survives(lambda: read_header(path), seed)


def test_hostile_configs(tmp_path):
    path = tmp_path / "config.json"
    for seed in range(1000):
        chance = random.Random(seed)
        config = dict(chance.choice(FAMILIES))
        if rope := chance.choice(ROPES):
            name = chance.choice(("rope_scaling", "rope_parameters"))
            config[name] = {"rope_theta": 10000.0, **rope}
        path.write_bytes(spoil_json(config, chance))
        _survives(lambda: parse_architecture(read_json(path)), seed)


def test_hostile_indices(tmp_path):
    config = llama_config()
    write_checkpoint(tmp_path, config, llama_tensors(config), n_shards=2)
    sound = json.loads((tmp_path / INDEX).read_text())
    for seed in range(400):
        (tmp_path / INDEX).write_bytes(spoil_json(sound, random.Random(seed)))
        _survives(lambda: check_bytes(open_checkpoint(tmp_path).layers), seed)


def test_hostile_tokenizers(tmp_path):
    speaking_checkpoint(tmp_path, num_hidden_layers=1)
    names = ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "config.json")
    sound = {name: json.loads((tmp_path / name).read_text()) for name in names}

    def use() -> None:
        tokenizer = load_tokenizer(tmp_path)
        ids = encode(tokenizer, PROMPT)
        stream = TextStream(tokenizer, ids[:20], ("x",))
        for token in (0, 1, 50, 10**6):
            stream.add(token)

    for seed in range(400):
        chance = random.Random(seed)
        name = chance.choice(names)
        (tmp_path / name).write_bytes(spoil_json(sound[name], chance))
        _survives(use, seed)
        (tmp_path / name).write_text(json.dumps(sound[name]))


def test_hostile_checkpoints_through_the_command_line(model, tmp_path, line):
    flags = [*FEW_TOKENS, "--device-memory", "100MB", "--max-model-len", "64"]
    for seed in range(24):
        chance = random.Random(seed)
        copy = Path(shutil.copytree(model, tmp_path / f"m{seed}"))
        path = copy / ("config.json", "tokenizer.json", "model.safetensors")[seed % 3]
        raw = path.read_bytes()
        if path.suffix == ".json":
            path.write_bytes(spoil_json(json.loads(raw), chance))
        else:
            n = int.from_bytes(raw[:8], "little")
            path.write_bytes(_header(chance, json.loads(raw[8 : 8 + n]), raw[8 + n :]))
        code, _, err = line("--model", str(copy), *flags)
        assert code in (0, 2, 3), (seed, err)
        if code:
            one_sentence(err)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", INDEX])
def test_folder_in_place_of_a_file(name, model, tmp_path, line):
    copy = Path(shutil.copytree(model, tmp_path / "m"))
    (copy / name).unlink(missing_ok=True)
    (copy / name).mkdir()
    code, out, err = line("--model", str(copy), *FEW_TOKENS)
    assert (code, out) == (2, "")
    one_sentence(err, str(copy))
