"""GGUF files: weights, config, tokenizer and refused contents."""

import itertools
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import write_gguf
from quantize import write_one_file
from support.checkpoints import llama_config, llama_tensors
from support.checkpoints import pack as pack_block
from support.gguf_files import build, stored_tensors
from support.tiny import CASES, generate, open_llm, prompt_of, say
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.gguf.dequant import dequantize
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from write_gguf import Stored

from offload_rt import SamplingParams
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CheckpointError, OffloadError, UnsupportedModelError
from offload_rt.models.rope import Rope
from offload_rt.packing import REFERENCE_NBYTES
from offload_rt.text.detokenize import load_tokenizer
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.files import end_ids
from offload_rt.weights.formats import Matrix, Source, format_of
from offload_rt.weights.gguf import read_gguf
from offload_rt.weights.locate import find_config, locate

pytestmark = pytest.mark.numeric
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-target"
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


def written(model: PreTrainedModel, type: str) -> tuple[dict, dict, dict]:
    return write_gguf.model(model.config.to_dict(), stored_tensors(model), type)


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


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K", "BF16"])
def test_tokens_equal_transformers_with_the_weights_of_the_file(type, tmp_path):
    """Q4_K and Q5_K are mixtures with Q6_K, as files have them."""
    check_tokens(tmp_path / "m.gguf", build(tmp_path / "m.gguf", wide_llama(), type))


def test_transformers_reads_the_same_model(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    build(tmp_path / "m.gguf", wide_llama(), "Q4_K")
    theirs = LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).eval()
    check_tokens(tmp_path / "m.gguf", theirs)


def test_layers_can_differ_in_types(tmp_path):
    """Of the same module; the memory of the widest is planned."""
    model = wide_llama()
    path = tmp_path / "m.gguf"
    metadata, stored, exact = written(model, "Q4_K")
    for i, type in enumerate(("Q8_0", "F16")):
        name = f"model.layers.{i}.mlp.up_proj.weight"
        data, exact[name] = write_gguf.blocks(model.state_dict()[name], type)
        up = Stored(write_gguf.TYPES[type], (256, 256), data.tobytes())
        stored[f"blk.{i}.ffn_up.weight"] = up
    path.write_bytes(write_gguf.file_bytes(metadata, stored))
    model.load_state_dict(exact)
    check_tokens(path, model)
    checkpoint = open_checkpoint(path)
    sizes = Sizes.of_checkpoint(checkpoint, DType.FLOAT32)
    assert sizes.view_nbytes == 256 * 256 * 4 + REFERENCE_NBYTES
    types = [
        [matrix.type for module, matrix in layer.matrices.items() if "mlp" in module]
        for layer in checkpoint.layers
    ]
    others = ["Q4_K", "Q4_K", "Q6_K"]
    # F16 is no quantised matrix
    assert types == [["Q4_K", "Q8_0", "Q6_K"], ["Q4_K", "Q6_K"], others, others]


def test_split_file_is_read(tmp_path):
    """Given by any of its parts, or by its directory."""
    model = wide_llama()
    metadata, stored, exact = written(model, "Q8_0")
    paths = write_gguf.split(metadata, stored, 3, tmp_path / "m.gguf")
    model.load_state_dict(exact)
    assert locate(str(paths[2])) == locate(str(tmp_path)) == paths[0]
    assert {record.path for record in open_checkpoint(paths[0]).records} == set(paths)
    check_tokens(tmp_path, model)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=f"{paths[1].name}: No such file"):
        open_checkpoint(locate(str(tmp_path)))


def test_directory_of_several_files_is_refused_by_name(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        build(tmp_path / name, CASES["llama"].build(0), "Q8_0")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf; give one of them"):
        locate(str(tmp_path))


def test_metadata_describes_the_model(tmp_path):
    """Tokenizer, end tokens, dtype, and the identity of copies."""
    path, copied = tmp_path / "demo.gguf", tmp_path / "copy.gguf"
    write_one_file(DEMO, path, "Q4_K")
    copied.write_bytes(path.read_bytes())
    mine, theirs = load_tokenizer(path), load_tokenizer(DEMO)
    text = "def read(path):\n    return 'naïve'"
    ids = theirs.encode(text, add_special_tokens=False)
    assert mine.encode(text, add_special_tokens=False) == ids
    assert mine.decode(mine.encode(text)) == text
    opened = {place: open_checkpoint(place) for place in (path, copied, DEMO)}
    assert all(end_ids(place, opened[place].config) == {0} for place in (path, DEMO))
    assert opened[path].dtype == DType.BFLOAT16
    assert find_config(str(path))["num_hidden_layers"] == 6
    assert opened[path].identity == opened[copied].identity != opened[DEMO].identity
    with open_llm(path, "disk") as llm:
        assert llm.generate("import numpy", SamplingParams(8)).pop().text


def small() -> tuple[dict[str, Any], dict[str, Stored]]:
    config = llama_config(hidden_size=32, intermediate_size=32, head_dim=8, num_hidden_layers=1)
    metadata, stored, _ = write_gguf.model(config, llama_tensors(config), "Q8_0")
    words = {"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.scores": [0.5, 1.5, 2.5]}
    return metadata | words, stored


def test_any_header_is_read_or_refused(tmp_path):
    """Bytes, lengths and counts overwritten anywhere in it; errors are one sentence."""
    metadata, stored = small()
    whole = write_gguf.file_bytes(metadata, stored)
    sizes = (len(tensor.data) for tensor in stored.values())
    n_head = len(whole) - sum(n + -n % 32 for n in sizes)
    draw = random.Random(7)
    path = tmp_path / "x.gguf"
    path.write_bytes(whole)
    assert len(open_checkpoint(path).layers) == 1
    extremes = [0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
    for _ in range(500):
        at = draw.randrange(n_head - 8)
        n, new = (
            lambda: (1, bytes([draw.randrange(256)])),
            lambda: (8, struct.pack("<Q", draw.choice(extremes))),
            lambda: (4, struct.pack("<I", draw.choice(extremes) % 2**32)),
            lambda: (2, b""),
        )[draw.randrange(4)]()
        path.write_bytes(whole[:at] + new + whole[at + n :])
        try:
            open_checkpoint(path)
        except OffloadError as error:
            assert "\n" not in str(error)


def test_truncated_file_is_refused(tmp_path):
    metadata, stored = small()
    whole = write_gguf.file_bytes(metadata, stored)
    path = tmp_path / "x.gguf"
    n_data = len(list(stored.values())[-1].data)
    n_whole = len(whole) - -n_data % 32  # padding behind the last tensor may be missing
    for at in itertools.chain(range(64), range(64, n_whole, 61), [n_whole - 1]):
        path.write_bytes(whole[:at])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


Change = Callable[[dict[str, Any], dict[str, Stored]], object]
FACTS: list[tuple[Change, str]] = [
    (lambda m, _: m.update({"general.architecture": "gemma3"}),
        "architecture 'gemma3' is not supported"),
    (lambda m, _: m.pop("general.architecture"), "architecture None"),
    (lambda m, _: m.pop("llama.block_count"), "llama.block_count is None"),
    (lambda m, _: m.update({"llama.embedding_length": -1.5}), "embedding_length is -1.5"),
    (lambda m, _: m.update({"llama.attention.head_count_kv": [2, 4]}),
        r"head_count_kv is \[2, 4\]"),
    (lambda m, _: m.update({"llama.expert_shared_count": 8}),
        "llama.expert_shared_count is not understood"),
    (lambda m, _: m.update({"llama.rope.dimension_count": 4}),
        "rope.dimension_count is 4: needs 8"),
    (lambda m,
        _: m.update({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}),
        "'longrope'"),
    (lambda m, _: m.update({"llama.attention.layer_norm_rms_epsilon": float("nan")}),
        "rms_norm_eps"),
    (lambda m, _: m.update({"general.alignment": 3}), "general.alignment 3"),
    (lambda _, t: t.update({"rope_freqs.weight": Stored(0, (4,), bytes(16))}),
        "rope_freqs.weight is not understood"),
    (lambda _, t: t.update({"rope_freqs.weight": Stored(0, (3,), bytes(12))}), "misshapen"),
    (lambda _, t: t.update({"blk.0.attn_q.weight": Stored(39, (32, 32), bytes(544))}),
        "of ggml type 39"),
    (lambda _, t: t.update({"blk.0.attn_q.weight": Stored(12, (32, 32), bytes(544))}),
        "rows of 32 weights in blocks of 256"),
    (lambda _, t: t.update({"blk.0.attn_q.weight": Stored(8, (31, 32), bytes(31 * 34))}),
        "misshapen"),
    (lambda _, t: t.update({"blk.0.attn_q.weight": Stored(12, (32, 256), bytes(32 * 144))}),
        "in blocks of 256 weights"),
    (lambda _, t: t.update({"blk.0.attn_norm.weight": Stored(8, (32,), bytes(34))}),
        "'model.layers.0.input_layernorm"),
    (lambda _, t: t.update({"blk.0.ffn_gate_exps.weight": Stored(0, (1,), bytes(4))}),
        "ffn_gate_exps.weight' belongs to no"),
    (lambda _, t: t.pop("blk.0.ffn_up.weight"), "mlp.up_proj.weight' is missing"),
    (lambda _, t: t.clear(), "input_layernorm.weight' is missing"),
    (lambda _, t: t.pop("token_embd.weight"), "embed_tokens.weight' is missing"),
    (lambda _, t: t.update({"model.norm.weight": t["output_norm.weight"]}),
        "two tensors have the same name"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FACTS)
def test_unsupported_metadata_is_refused_by_name(change, message, tmp_path):
    metadata, stored = small()
    change(metadata, stored)
    (tmp_path / "m.gguf").write_bytes(write_gguf.file_bytes(metadata, stored))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "content", [b"", b"GGU", b"GGUF", b"\x80\x04." * 20, b"GGUF" + bytes([1, 0, 0, 0]) + bytes(16)]
)
def test_other_files_are_refused(content, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "m.gguf")


def test_rotations_of_a_scaled_context_equal_transformers():
    """Two lists that depend on the text length are refused."""
    factors = [1.0, 1.5, 2.0, 4.0]
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors,
        "long_factor": factors, "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=rope)
    plain = 1 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    cos, _ = Rope(config).cos_sin(torch.tensor([1]), torch.tensor([200]), torch.float32)
    scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))[1]
    torch.testing.assert_close(cos[0, :4], scale * torch.cos(plain / torch.tensor(factors)))
    config.rope_parameters = rope | {"long_factor": [1.0] * 4}
    with pytest.raises(UnsupportedModelError, match="differ"):
        Rope(config)
