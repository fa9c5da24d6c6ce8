"""A checkpoint is checked before a weight is read; each fault is one sentence."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    Entries,
    check_bytes,
    entries_of,
    file_bytes,
    llama_config,
    llama_tensors,
    raw_bytes,
    write_checkpoint,
    write_file,
)
from torch import Tensor

from offload_rt.errors import CheckpointError, OffloadError, UnsupportedModelError
from offload_rt.llm import LLM
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.files import end_ids
from offload_rt.weights.header import read_header
from offload_rt.weights.layout import BlockRecord
from offload_rt.weights.locate import locate

DOWN = "model.layers.1.mlp.down_proj.weight"
LAST = "model.layers.2.input_layernorm.weight"
SHARD_1 = "model-00001-of-00002.safetensors"
SHARD_2 = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@functools.cache
def _sound() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = llama_config()
    return config, llama_tensors(config)


def _write(
    directory: Path, tensors: dict[str, Tensor] | None = None, n_shards: int = 1, **changes: Any
) -> Path:
    config, sound = _sound()
    return write_checkpoint(directory, config | changes, tensors or sound, n_shards=n_shards)


def _refused(directory: Path, kind: type[OffloadError], pattern: str | None) -> None:
    with pytest.raises(kind, match=pattern) as caught:
        open_checkpoint(directory)
    assert type(caught.value) is kind and caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n_shards", [1, 2])
def test_valid_checkpoint_opens_with_every_tensor(n_shards, tmp_path):
    """Beside pickles."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    checkpoint = open_checkpoint(_write(tmp_path, n_shards=n_shards))
    _, tensors = _sound()
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    for i, layer in enumerate(checkpoint.layers):
        wanted = [name for name, _ in checkpoint.spec.layer_tensors(i)]
        assert [record.key for record in layer] == wanted
        assert [record.name for record in layer] == [f"model.layers.{i}.{name}" for name in wanted]
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert [record.name for record in checkpoint.non_layer] == names
    for record in checkpoint.records:
        assert record.read(0, record.nbytes) == raw_bytes(tensors[record.name]), record.name


@pytest.mark.parametrize("stored", [True, False])
def test_tied_checkpoint_can_store_its_head(stored, tmp_path):
    """And rotary frequencies, as old checkpoints do."""
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(3)}
    kept = {name: x for name, x in _sound()[1].items() if stored or name != "lm_head.weight"} | old
    checkpoint = open_checkpoint(_write(tmp_path, kept, tie_word_embeddings=True))
    names = [record.name for record in checkpoint.non_layer]
    assert names == ["model.embed_tokens.weight", "model.norm.weight"]


def test_auto_map_is_ignored_and_not_run(tmp_path):
    _write(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with LLM(str(tmp_path), device="cpu") as llm:
        assert llm.plan.tiers.count("device") == 3
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("content", "pattern"), [
    (None, "No such file"), (b"{", "not JSON"), (b"[" * 100_000, "not JSON"), (b"[1]", "object"),
    (b"\xff\xfe\x00", "not JSON"),
], ids=["missing", "cut", "deep", "list", "binary"])  # fmt: skip
def test_unreadable_config_is_refused(content, pattern, tmp_path):
    path = _write(tmp_path) / "config.json"
    path.unlink() if content is None else path.write_bytes(content)
    _refused(tmp_path, CheckpointError, rf"config\.json.*{pattern}")


@pytest.mark.parametrize(("changes", "pattern"), [
    ({"frobnicate": 1}, "'frobnicate'"),
    ({"model_type": "gpt_new"}, "'gpt_new'.*transformers"),
    *(({"model_type": kind}, "model_type") for kind in (None, ["llama"])),
    ({"model_type": "_spec"}, "'_spec'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"quantization_config": {"quant_method": "exl3"}}, "'quantization_config'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}}, "wobble"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope"),
    ({"rope_theta": "big"}, "rope_theta"),
    ({"hidden_act": "gelu"}, "(?s)(?=.*gelu)(?=.*silu)"),
    *(({"num_hidden_layers": n}, "num_hidden_layers") for n in (None, 0, "3", 10**12)),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    *(({"head_dim": n}, "head_dim") for n in (3, 10**12)),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    *(({"torch_dtype": name}, name) for name in ("int8", "float7")),
])  # fmt: skip
def test_unsupported_config_is_refused(changes, pattern, tmp_path):
    _write(tmp_path, **changes)
    _refused(tmp_path, UnsupportedModelError, pattern)


@pytest.mark.parametrize(("name", "pattern"), [
    ("notes", "no weights at all"), ("x.gguf", "x.gguf"),
    ("pytorch_model.bin", r"pytorch_model.bin.*safetensors\.torch\.save_file"),
])  # fmt: skip
def test_directory_without_safetensors_is_refused(name, pattern, tmp_path):
    _write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    _refused(tmp_path, CheckpointError, pattern)


def _swap(where: dict[str, Any]) -> None:
    where[DOWN] = SHARD_1 if where[DOWN] == SHARD_2 else SHARD_2


@pytest.mark.parametrize(("edit", "pattern"), [
    (_swap, f"{DOWN}.*but it is not"),
    (lambda where: where.update({"model.layers.0.ghost.weight": SHARD_1}), f"ghost.*{SHARD_1}"),
    (lambda where: where.pop(DOWN), f"{DOWN}.*missing"),
    (lambda where: where.update({DOWN: "model-00003-of-00002.safetensors"}), "00003.*missing"),
    (lambda where: where.clear(), "weight_map"),
    *((lambda where, shard=shard: where.update({DOWN: shard}), pattern) for shard, pattern in (
        (7, DOWN), ("a\nb.safetensors", "missing"), ("..", None), ("", None), ("w.bin", None),
        ("../outside.safetensors", f"{DOWN}.*no file name"),
        ("/etc/outside.safetensors", "no file name"), ("sub/inside.safetensors", "no file name"),
    )),
])  # fmt: skip
def test_invalid_index_is_refused(edit, pattern, tmp_path):
    index = _write(tmp_path / "model", n_shards=2) / INDEX
    for place in (tmp_path, tmp_path / "model"):
        (place / "sub").mkdir(exist_ok=True)
        write_file(place / "sub" / "inside.safetensors", {})
        write_file(place / "outside.safetensors", {})
    where = json.loads(index.read_text())["weight_map"]
    edit(where)
    index.write_text(json.dumps({"weight_map": where}))
    _refused(tmp_path / "model", CheckpointError, pattern)
    for content in ({}, {"weight_map": [1]}):
        index.write_text(json.dumps(content))
        _refused(tmp_path / "model", CheckpointError, "weight_map")


def _with(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[..., None]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


def _without(part: str) -> Callable[..., Any]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


@pytest.mark.parametrize(("edit", "pattern"), [
    (_without(DOWN), f"{DOWN}.*missing"),
    (_without("lm_head.weight"), "lm_head.weight.*missing"),
    (_with("model.layers.1.extra.weight", 2), r"model\.layers\.1\.extra\.weight"),
    (_with("model.layers.0.self_attn.q_proj.bias", 16), r"q_proj\.bias"),
    (_with(DOWN, 16, 23), rf"{DOWN}.*misshapen.*\[16, 24\].*\[16, 23\]"),
    (_with(DOWN, 24, 16), f"{DOWN}.*misshapen"),
    (_with(LAST, 1, 16), f"{LAST}.*misshapen"),
    (_with(DOWN, 16, 24, dtype=torch.int8), f"{DOWN}.*I8"),
    (_without(".2."), r"model\.layers\.2.*config\.json"),
    (_with(LAST.replace("2", "3"), 16), r"model\.layers\.3.*config\.json"),
    (_without(".1."), r"model\.layers\.1.*missing"),
    (_with(f"model.layers.{'9' * 5000}.x", 1), r"model\.layers\.999"),
])  # fmt: skip
@pytest.mark.parametrize("n_shards", [1, 2])
def test_unexpected_or_missing_tensors_are_refused(n_shards, edit, pattern, tmp_path):
    tensors = dict(_sound()[1])
    edit(tensors)
    _write(tmp_path, tensors, n_shards)
    _refused(tmp_path, CheckpointError, pattern)


def _shift(name: str, begin: int, end: int) -> Callable[[Entries], None]:
    def edit(entries: Entries) -> None:
        a, b = entries[name]["data_offsets"]
        entries[name]["data_offsets"] = [a + begin, b + end]

    return edit


def _set(name: str, **values: Any) -> Callable[[Entries], None]:
    return lambda entries: entries[name].update(values)


@pytest.mark.parametrize(
    ("edit", "tail"),
    {
        "overlap": (_shift(DOWN, -4, -4), b""),
        "hole": (_shift("lm_head.weight", 4, 4), b"\0\0\0\0"),
        "size": (_shift(DOWN, 0, 4), b""),
        "backwards": (_set(DOWN, data_offsets=[8, 4]), b""),
        "overflow": (_set(DOWN, shape=[2**62] * 400), b""),
        "dtype size": (_set(DOWN, dtype="F16"), b""),
        "unknown dtype": (_set(DOWN, dtype="F9"), b""),
        "number for entry": (lambda entries: entries.update({DOWN: 7}), b""),
        "list": (lambda entries: "[1, 2]", b""),
        "deep": (lambda entries: "{" * 200_000, b""),
        "cut": (lambda entries: json.dumps(entries)[:-1], b""),
        "longer": (lambda entries: None, b"\0"),
    }.values(),
)
def test_damaged_header_is_refused(edit, tail, tmp_path):
    """The header is changed by `edit`, which returns a new header or None."""
    entries, data = entries_of(_sound()[1])
    header = edit(entries) or entries
    (_write(tmp_path) / "model.safetensors").write_bytes(file_bytes(header, data + tail))
    _refused(tmp_path, CheckpointError, "model.safetensors is damaged")


def test_copies_and_other_shards_have_the_same_identity(tmp_path):
    """Not a fine-tune of equal config, shapes and sizes, of which one tensor is a little off."""
    tensors = _sound()[1]
    single = _write(tmp_path / "single")
    sharded = _write(tmp_path / "sharded", n_shards=2)
    copy = Path(shutil.copytree(single, tmp_path / "copy", copy_function=shutil.copyfile))
    identity = open_checkpoint(single).identity
    assert {open_checkpoint(path).identity for path in (sharded, copy)} == {identity}
    assert len(identity) == 24
    for name in (DOWN, "model.norm.weight", "lm_head.weight"):
        tuned = _write(tmp_path / name, {**tensors, name: tensors[name] * 1.001})
        assert open_checkpoint(tuned).identity != identity


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("phase", [256, 2304, 3840])
def test_tensor_in_phase_with_a_page_overwrites_no_other(phase, backwards, tmp_path):
    """Its page offsets in file and block are equal."""
    tensors = {
        "first": torch.zeros(1, dtype=torch.bfloat16),
        "crooked": torch.arange(phase // 4, dtype=torch.float32),
        "between": torch.ones(4094 // 2, dtype=torch.bfloat16),
        "in phase": torch.arange(1000).to(torch.bfloat16),
        "behind": torch.arange(300).to(torch.bfloat16),
    }
    entries, data = entries_of(tensors)
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(json.dumps(entries).ljust(4096 - 8), data))
    records = read_header(path)
    assert records["crooked"].start == 4096 + 2
    assert records["in phase"].start % 4096 == phase
    block = BlockRecord(tuple(records[name] for name in ("crooked", "in phase", "behind")))
    check_bytes([block], backwards=backwards)


@pytest.mark.parametrize("model", [
    "/no/such/place", "./no-such-place", "~/no-such-place", "~no-such-user/x", "a/b/c", "a\0b",
    "x" * 5000,
])  # fmt: skip
def test_missing_path_is_refused_without_the_hub(model, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError):
        locate(model)


@pytest.mark.parametrize(("generation", "config", "wanted"), [
    (None, 2, {2}), (None, [2, 5], {2, 5}), ([7, 8], 2, {7, 8}), (9, [2], {9}), (None, None, set()),
])  # fmt: skip
def test_every_end_id_counts_and_generation_config_precedes(generation, config, wanted, tmp_path):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert end_ids(tmp_path, {"eos_token_id": config}) == wanted
