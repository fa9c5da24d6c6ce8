"""GGUF files: weights, config, tokenizer and refused contents."""

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import write_gguf
from support.checkpoints import llama_config, llama_tensors
from support.checkpoints import pack as pack_block
from support.gguf_files import build, stored_tensors
from support.tiny import CASES, generate, open_llm, prompt_of, say
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.integrations.gguf.dequant import dequantize
from write_gguf import Stored

from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CheckpointError, OffloadError, UnsupportedModelError
from offload_rt.packing import REFERENCE_NBYTES
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.formats import Matrix, Source, format_of
from offload_rt.weights.gguf import read_gguf
from offload_rt.weights.locate import locate

pytestmark = pytest.mark.numeric
N_NEW = 40


def wide_llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A Llama with rows of 256 weights, as required by large blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    model = CASES["llama"].build(3, **sizes)
    for parameter in model.parameters():
        parameter.data /= 2 if parameter.dim() == 2 else 1
    return model.to(dtype)


def check_tokens(path: Path, model: PreTrainedModel) -> None:
    """Assert that plain passes from disk and trees give transformers' text."""
    prompt = prompt_of(0)
    expected = generate(model, prompt, N_NEW)
    assert len(set(expected)) > 5
    for place, more in (("disk", {}), ("resident", {"draft_model": str(path)})):
        with open_llm(path, place, dtype="float32", **more) as llm:
            assert say(llm, prompt, N_NEW) == expected


@pytest.mark.parametrize("type", write_gguf.TYPES)
def test_matrix_equals_its_reference(type, tmp_path):
    """In float32, one rounding; queries and keys in the order that transformers rotates."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) / 10
    data, exact = write_gguf.blocks(weight, type)
    number = write_gguf.TYPES[type]
    name = "self_attn.q_proj"
    if type not in ("F32", "F16", "BF16"):
        assert torch.equal(dequantize(torch.from_numpy(data), number).view(64, 256), exact)
        assert (exact - weight).abs().max() < 0.04
    metadata, stored, _ = write_gguf.model(llama_config(), llama_tensors(llama_config()), "F32")
    stored["blk.0.attn_q.weight"] = Stored(number, (64, 256), data.tobytes())
    (tmp_path / "m.gguf").write_bytes(write_gguf.file_bytes(metadata, stored))
    config, records = read_gguf(tmp_path / "m.gguf")
    fmt = format_of(replace(config["quantization_config"], head_dim=16))
    source = Source(records, "model.layers.0.")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = fmt.stored(f"{name}.weight", (64, 256), None, source)
        content = {
            tensor.name: source.read(tensor._replace(dtype=source.expect(tensor).stored_dtype()))
            for tensor in stored.tensors
        }
        packed = pack_block(content, {name: stored} if isinstance(stored, Matrix) else None)
        view = fmt.view(packed.layout, packed.block, dtype)
        rows = torch.tensor([5, 0, 63])
        ordered = exact.to(dtype).view(4, 8, 2, 256).transpose(1, 2).reshape(64, 256)
        assert torch.equal(view.rows(rows, name), ordered[rows])
        assert torch.equal(view.linear(torch.eye(256, dtype=dtype), name).T, ordered)
        assert torch.equal(view.linears(torch.eye(256, dtype=dtype), (name, name))[1].T, ordered)


def test_transformers_reads_the_same_model(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    build(tmp_path / "m.gguf", wide_llama(), "Q4_K")
    options = {"gguf_file": "m.gguf", "dtype": torch.float32}
    check_tokens(tmp_path / "m.gguf", LlamaForCausalLM.from_pretrained(tmp_path, **options).eval())


def test_split_file_with_layers_of_different_types(tmp_path):
    """Given by any of its parts, or by its directory; the memory of the widest layer is planned."""
    model = wide_llama()
    config, tensors = model.config.to_dict(), stored_tensors(model)
    metadata, stored, exact = write_gguf.model(config, tensors, "Q4_K")
    for i, type in enumerate(("Q8_0", "F16")):
        name = f"model.layers.{i}.mlp.up_proj.weight"
        data, exact[name] = write_gguf.blocks(tensors[name], type)
        up = Stored(write_gguf.TYPES[type], (256, 256), data.tobytes())
        stored[f"blk.{i}.ffn_up.weight"] = up
    model.load_state_dict(exact)
    paths = write_gguf.split(metadata, stored, 3, tmp_path / "m.gguf")
    assert locate(str(paths[2])) == locate(str(tmp_path)) == paths[0]
    check_tokens(tmp_path, model)
    checkpoint = open_checkpoint(paths[0])
    assert {record.path for record in checkpoint.records} == set(paths)
    sizes = Sizes.of_checkpoint(checkpoint, DType.FLOAT32)
    assert sizes.view_nbytes == 256 * 256 * 4 + REFERENCE_NBYTES
    matrices = [layer.matrices.get("mlp.up_proj") for layer in checkpoint.layers]
    types = [matrix and matrix.type for matrix in matrices]
    assert types == ["Q8_0", None, "Q4_K", "Q4_K"], "F16 is no quantised matrix"
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=f"{paths[1].name}: No such file"):
        open_checkpoint(locate(str(tmp_path)))


def test_directory_of_several_files_is_refused_by_name(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        build(tmp_path / name, CASES["llama"].build(0), "Q8_0")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf; give one of them"):
        locate(str(tmp_path))


def small() -> tuple[dict[str, Any], dict[str, Stored]]:
    config = llama_config(hidden_size=32, intermediate_size=32, head_dim=8, num_hidden_layers=1)
    metadata, stored, _ = write_gguf.model(config, llama_tensors(config), "Q8_0")
    words = {"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.scores": [0.5, 1.5, 2.5]}
    return metadata | words, stored


def test_spoilt_and_truncated_files_are_refused(tmp_path):
    """Bytes, lengths and counts overwritten anywhere in the header; errors are one sentence."""
    metadata, stored = small()
    whole = write_gguf.file_bytes(metadata, stored)
    sizes = [len(tensor.data) for tensor in stored.values()]
    n_head = len(whole) - sum(n + -n % 32 for n in sizes)
    draw = random.Random(7)
    path = tmp_path / "x.gguf"
    path.write_bytes(whole)
    assert len(open_checkpoint(path).layers) == 1
    extremes = [0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
    for _ in range(500):
        at = draw.randrange(n_head - 8)
        number = draw.choice(extremes)
        n, new = draw.choice((
            (1, bytes([draw.randrange(256)])), (8, struct.pack("<Q", number)),
            (4, struct.pack("<I", number % 2**32)), (2, b""),
        ))  # fmt: skip
        path.write_bytes(whole[:at] + new + whole[at + n :])
        try:
            open_checkpoint(path)
        except OffloadError as error:
            assert "\n" not in str(error)
    n_whole = len(whole) - -sizes[-1] % 32  # padding behind the last tensor may be missing
    cuts = (whole[:at] for at in (*range(64), *range(64, n_whole, 61), n_whole - 1))
    for content in (b"\x80\x04." * 20, b"GGUF" + bytes([1, 0, 0, 0]) + bytes(16), *cuts):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a GGUF file"):
            open_checkpoint(path)


def tensor(type: int, *shape: int, nbytes: int) -> Stored:
    return Stored(type, shape, bytes(nbytes))


# A value of None removes the entry.
@pytest.mark.parametrize(("changes", "message"), [
    ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
    ({"llama.block_count": None}, "llama.block_count is None"),
    ({"llama.embedding_length": -1.5}, "embedding_length is -1.5"),
    ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv is \[2, 4\]"),
    ({"llama.expert_shared_count": 8}, "llama.expert_shared_count is not understood"),
    ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4: needs 8"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
    ({"general.alignment": 3}, "general.alignment 3"),
    ({"rope_freqs.weight": tensor(0, 4, nbytes=16)}, "rope_freqs.weight is not understood"),
    ({"rope_freqs.weight": tensor(0, 3, nbytes=12)}, "misshapen"),
    ({"blk.0.attn_q.weight": tensor(39, 32, 32, nbytes=544)}, "of ggml type 39"),
    ({"blk.0.attn_q.weight": tensor(12, 32, 32, nbytes=544)}, "of 32 weights in blocks of 256"),
    ({"blk.0.attn_q.weight": tensor(8, 31, 32, nbytes=31 * 34)}, "misshapen"),
    ({"blk.0.attn_q.weight": tensor(12, 32, 256, nbytes=32 * 144)}, "in blocks of 256 weights"),
    ({"blk.0.attn_norm.weight": tensor(8, 32, nbytes=34)}, "'model.layers.0.input_layernorm"),
    ({"blk.0.ffn_gate_exps.weight": tensor(0, 1, nbytes=4)}, "gate_exps.weight' belongs to no"),
    ({"blk.0.ffn_up.weight": None}, "mlp.up_proj.weight' is missing"),
    (dict.fromkeys(small()[1]), "input_layernorm.weight' is missing"),
    ({"model.norm.weight": small()[1]["output_norm.weight"]}, "two tensors have the same name"),
])  # fmt: skip
def test_unsupported_metadata_is_refused_by_name(changes, message, tmp_path):
    metadata, stored = small()
    for name, value in changes.items():
        entries = stored if name.endswith(".weight") else metadata
        entries.pop(name, None)
        entries |= {} if value is None else {name: value}
    (tmp_path / "m.gguf").write_bytes(write_gguf.file_bytes(metadata, stored))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        open_checkpoint(tmp_path / "m.gguf")
