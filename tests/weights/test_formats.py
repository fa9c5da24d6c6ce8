"""Quantised checkpoints: weights and tokens equal each format's reference."""

import functools
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import autoawq
from compressed_tensors.quantization import QuantizationScheme
from quantize import Choice, config_of, pack, quantized, write
from safetensors.torch import load_file, save_file
from support import emulated
from support.checkpoints import llama_config, llama_tensors, write_checkpoint
from support.checkpoints import pack as pack_block
from support.fake_gpu import fake_gpu
from support.quantized import id_of
from support.tiny import prompt_of, say
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from offload_rt import LLM
from offload_rt.errors import CheckpointError, OffloadError, UnsupportedModelError
from offload_rt.ops import extension, linear_cpu
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.formats import Matrix, Source, WeightFormat, format_of
from offload_rt.weights.header import read_header


def weight_of(
    config: Any, source: Source, stored: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """All rows of the matrix of a block, by the format of a config."""
    fmt = config if isinstance(config, WeightFormat) else format_of(config)
    return view_of(fmt, source, stored, dtype).rows(torch.arange(SHAPE[0]), MODULE)


CHOICES = [
    Choice("pack-quantized"), Choice("pack-quantized", symmetric=True),
    Choice("pack-quantized", group_size=40), Choice("pack-quantized", group_size=-1),
    Choice("pack-quantized", desc_act=True),
    *(Choice("pack-quantized", bits) for bits in (2, 3, 5, 6, 7, 8)),
    Choice("int-quantized", group_size=-1), Choice("int-quantized", symmetric=True),
    Choice("float-quantized"), Choice("mxfp4-pack-quantized"), Choice("fp8"),
    Choice("fp8", group_size=40), Choice("awq"), Choice("awq", group_size=-1),
    *(Choice("gptq", bits) for bits in (2, 3, 4, 8)), Choice("gptq", symmetric=True, desc_act=True),
    Choice("gptq", group_size=40), Choice("gptq", group_size=-1, desc_act=True),
    Choice("gptq_v2", 3, desc_act=True), Choice("gptq_v2"), Choice("nf4"),
    Choice("nf4", symmetric=True),
]  # fmt: skip
ONE_OF_EACH = [
    Choice("pack-quantized", desc_act=True), Choice("int-quantized"), Choice("float-quantized"),
    Choice("mxfp4-pack-quantized"),
    Choice("fp8"), Choice("awq"), Choice("gptq", desc_act=True), Choice("gptq_v2", 3),
    Choice("nf4"),
]  # fmt: skip
MODULE = "mlp.down_proj"
SHAPE = (72, 96)


def one_matrix(
    folder: Path, choice: Choice, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor, Source]:
    """Return stored tensors of a matrix, its exact values, and the file's source."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(choice.bits)).to(dtype) / 10
    stored, exact = quantized({f"{MODULE}.weight": weight}, choice)
    save_file(stored, folder / "model.safetensors")
    return stored, exact[f"{MODULE}.weight"], Source(read_header(folder / "model.safetensors"))


def view_of(
    fmt: WeightFormat, source: Source, stored: dict[str, Tensor], dtype: torch.dtype
) -> Any:
    matrix = fmt.stored(f"{MODULE}.weight", SHAPE, None, source)
    assert isinstance(matrix, Matrix)
    content = {tensor.name: stored[tensor.name] for tensor in matrix.tensors}
    packed = pack_block(content, {MODULE: matrix})
    return fmt.view(packed.layout, packed.block, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("choice", CHOICES, ids=id_of)
def test_weights_are_dequantised_exactly(choice, dtype, tmp_path, monkeypatch):
    """Product in the dtype of the scales, one rounding, then the dtype of the computation.

    Emulated kernels give the same weights.
    """
    stored, exact, source = one_matrix(tmp_path, choice, dtype)
    # Products may use the values before they are rounded to the dtype of the computation.
    limits = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
    for computed_in, limit in limits.items():
        view = view_of(format_of(config_of(choice)), source, stored, computed_in)
        weight = view.rows(torch.arange(SHAPE[0]), MODULE)
        assert torch.equal(weight, exact.to(computed_in))
        assert torch.equal(view.linear(torch.eye(SHAPE[1]).to(computed_in), MODULE).T, weight)
        x = torch.randn(3, SHAPE[1]).to(computed_in)
        error = (view.linear(x, MODULE).double() - x.double() @ exact.double().T).abs()
        size = x.double().abs() @ exact.double().abs().T
        assert float((error / size).max()) < limit
    library = getattr(torch.ops, emulated.load())
    monkeypatch.setattr(extension, "serves", lambda _: True)
    monkeypatch.setattr(extension, "kernels", lambda: library)
    monkeypatch.setattr(linear_cpu, "serves", lambda *_: False)
    assert torch.equal(weight_of(config_of(choice), source, stored), exact.bfloat16())


def decompressed(scheme: Any, choice: Choice, stored: dict[str, Tensor]) -> Tensor:
    name = choice.format if "quantized" in choice.format else "pack-quantized"
    state = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in stored.items()}
    return BaseCompressor.get_value_from_registry(name).decompress(state, scheme)["weight"]


@pytest.mark.parametrize("choice", [
    *(choice for choice in CHOICES if "quantized" in choice.format), Choice("awq", group_size=32),
    Choice("awq", group_size=96), Choice("fp8", group_size=24),
], ids=id_of)  # fmt: skip
def test_transformers_and_compressed_tensors_decompress_to_the_same(choice, tmp_path):
    """AWQ by the conversion to compressed-tensors."""
    if choice.desc_act or (choice.format != "fp8" and SHAPE[1] % max(choice.group_size, 1)):
        pytest.skip("the package knows neither order nor ragged groups any more")
    dtype = torch.float16 if choice.format == "awq" else torch.bfloat16
    stored, _, source = one_matrix(tmp_path, choice, dtype)
    config = config_of(choice)
    if choice.format == "fp8":
        codes, scales = (stored[f"{MODULE}.{name}"] for name in ("weight", "weight_scale_inv"))
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
    elif choice.format == "awq":
        converter = autoawq.AutoAWQConverter.from_autoawq_config(config)
        scheme = converter._build_quant_config().config_groups["config_group_0"]
        expected = decompressed(scheme, choice, converter.process(dict(stored)))
    else:
        scheme = QuantizationScheme(**config["config_groups"]["group_0"])
        expected = decompressed(scheme, choice, stored)
    assert torch.equal(weight_of(config, source, stored, dtype), expected)


def test_three_bits_are_packed_like_autogptq():
    """32 codes in three words, low bits first: the 11th and the 22nd are cut."""
    codes = torch.randint(8, (5, 64), generator=torch.Generator().manual_seed(0))
    packed = pack(codes, 3).long() & 0xFFFFFFFF
    for row, words in zip(codes.tolist(), packed.tolist(), strict=True):
        for k in range(2):
            bits = sum(code << 3 * i for i, code in enumerate(row[32 * k : 32 * k + 32]))
            assert words[3 * k : 3 * k + 3] == [bits >> at & 0xFFFFFFFF for at in (0, 32, 64)]


CONFIG = llama_config(
    num_hidden_layers=4, hidden_size=64, intermediate_size=96, head_dim=16,
    max_position_embeddings=256, eos_token_id=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Choice], Path]:
    """Return a function from a format to a Llama of CONFIG with wide weights: texts vary."""
    tensors = {name: 3 * tensor for name, tensor in llama_tensors(CONFIG).items()}
    plain = write_checkpoint(tmp_path_factory.mktemp("plain"), CONFIG, tensors)

    @functools.cache
    def get(choice: Choice) -> Path:
        folder = tmp_path_factory.mktemp(choice.format) / "m"
        write(plain, folder, choice)
        return folder

    return get


@pytest.mark.parametrize(("choice", "has_kernels"), [
    *((choice, True) for choice in ONE_OF_EACH), (Choice("awq"), False),
], ids=id_of)  # fmt: skip
def test_passes_over_resident_quantised_weights_are_captured(
    choice, has_kernels, checkpoint_of, monkeypatch
):
    """A capture refuses copies of unpinned memory."""
    model = str(checkpoint_of(choice))
    settings = {"dtype": "bfloat16", "drafter": "none", "max_model_len": 64, "device": "cuda"}
    prompt = prompt_of(0, vocab_size=40)
    with fake_gpu(monkeypatch, has_kernels=has_kernels), LLM(model, **settings) as llm:
        captured = say(llm, prompt, 4)
        runner = llm.engine.runner
        passes = runner.replay.__self__._passes.values()
        assert any(graph._captured._replay for graphs in passes for graph in graphs.values())
        monkeypatch.setattr(runner, "replay", None)
        assert say(llm, prompt, 4) == captured


def spoiled(directory: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Change or remove a tensor of a checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed.contiguous()}, path)


SPOILS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda _: None,
    "longer": lambda x: torch.cat((x, x[:1])),
    "flat": lambda x: x.reshape(-1, 1, 1),
    "other dtype": lambda x: x.to(torch.int16 if x.dtype != torch.int16 else torch.int8),
}


@pytest.mark.parametrize("choice", ONE_OF_EACH, ids=id_of)
def test_damaged_tensors_are_refused_by_name(choice, checkpoint_of, tmp_path):
    directory = shutil.copytree(checkpoint_of(choice), tmp_path / "m")
    whole = (directory / "model.safetensors").read_bytes()
    optional = {("missing", "g_idx"), ("missing", "weight_g_idx"), ("missing", "weight_shape")}
    module = "model.layers.2.mlp.up_proj."
    names = [name for name in load_file(directory / "model.safetensors") if name.startswith(module)]
    for name, what in itertools.product(names, SPOILS):
        if (what, name.removeprefix(module)) not in optional:
            (directory / "model.safetensors").write_bytes(whole)
            spoiled(directory, name, SPOILS[what])
            with pytest.raises(CheckpointError, match=name):
                open_checkpoint(directory)


STATE = "weight.quant_state.bitsandbytes__nf4"


def noted(**changes: Any) -> Callable[[Tensor], Tensor]:
    """Other entries in the note of bitsandbytes."""

    def change(x: Tensor) -> Tensor:
        note = json.loads(bytes(x.tolist())) | changes
        return torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(("choice", "name", "change", "message"), [
    (Choice("gptq", desc_act=True), "g_idx", lambda x: x + 1, "not there: needs 0 to 1"),
    (Choice("gptq", desc_act=True), "g_idx", lambda x: x - 1, "groups that are not there"),
    (Choice("pack-quantized", desc_act=True), "weight_g_idx", lambda x: 9 * x, "are not there"),
    (Choice("pack-quantized"), "weight_shape", lambda x: x.flip(0), "another matrix"),
    (Choice("nf4"), "weight.quant_map", lambda x: -x, "not the table of nf4"),
    (Choice("nf4"), STATE, lambda x: x.flip(0), "not JSON"),
    (Choice("nf4"), STATE, noted(shape=[96, 64, 1]), "another matrix"),
    (Choice("nf4"), STATE, noted(blocksize=0), "blocksize is 0"),
    (Choice("nf4"), STATE, noted(nested_blocksize="x"), "nested_blocksize"),
    (Choice("nf4"), STATE, noted(nested_offset=None), "offset"),
])  # fmt: skip
def test_contradictory_tensors_are_refused(choice, name, change, message, checkpoint_of, tmp_path):
    directory = shutil.copytree(checkpoint_of(choice), tmp_path / "m")
    spoiled(directory, f"model.layers.1.mlp.up_proj.{name}", change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(directory)


GPTQ, AWQ, FP8, NF4 = (config_of(Choice(name)) for name in ("gptq", "awq", "fp8", "nf4"))
PACKED = config_of(Choice("pack-quantized"))


def group(**changes: Any) -> dict[str, Any]:
    """PACKED with other weights in its group."""
    template = PACKED["config_groups"]["group_0"]
    changed = {**template, "weights": {**template["weights"], **changes}}
    return {**PACKED, "config_groups": {"group_0": changed}}


@pytest.mark.parametrize(("config", "message"), [
    ({**AWQ, "version": "gemv"}, "version 'gemv' is not understood"),
    ({**AWQ, "backend": "llm-awq"}, "llm-awq"),
    ({**AWQ, "bits": 3}, "bits is 3"),
    ({**GPTQ, "checkpoint_format": "gptq_p"}, "gptq_p"),
    ({**GPTQ, "is_marlin_format": True}, "marlin"),
    ({**GPTQ, "bits": 5}, "bits is 5"),
    ({**GPTQ, "group_size": 0}, "group_size is 0"),
    ({**GPTQ, "group_size": "128"}, "group_size is '128'"),
    ({**GPTQ, "dynamic": {"x": {"bits": 6}}}, "bits is 6"),
    ({**GPTQ, "dynamic": [1]}, "dynamic is no table"),
    ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
    ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size"),
    ({**FP8, "fmt": "e5m2"}, "e5m2"),
    ({**PACKED, "format": "marlin-24"}, "marlin-24"),
    ({**PACKED, "format": "nvfp4-pack-quantized"}, "nvfp4"),
    ({**PACKED, "format": []}, r"format \[\]"),
    ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ({**PACKED, "config_groups": None}, "config_groups"),
    ({**PACKED, "config_groups": {"a": 3}}, "config_groups"),
    (group(num_bits=9), "num_bits is 9"),
    (group(type="float"), "type is 'float'"),
    (group(strategy="token"), "strategy is 'token'"),
    (group(strategy="block", block_structure=[128, 128]), "strategy is 'block'"),
    (group(dynamic=True), "dynamic is True"),
    (group(group_size=-7), "group_size is -7"),
    ({**NF4, "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4'"),
    ({**NF4, "load_in_4bit": False, "load_in_8bit": True}, "load_in_4bit"),
    ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
    ({"quant_method": "torchao"}, "'torchao' is not understood"),
    *((config, "'quantization_config'.*dense") for config in (
        {"quant_method": "exl3"}, {"quant_method": []}, {}, [], "int4", 7,
    )),
])  # fmt: skip
def test_unsupported_layouts_are_refused_by_name(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        format_of(config)


@pytest.mark.parametrize(
    "config", [GPTQ, AWQ, FP8, NF4, PACKED], ids=lambda config: config["quant_method"]
)
def test_any_config_value_is_accepted_or_refused(config):
    nested = [], {}, [[]], {"a": None}, {"a": {"weights": 1}}
    for key in config:
        for value in (None, True, -1, 0, 2**70, 1.5, "", "x", *nested):
            try:
                format_of({**config, key: value})
            except OffloadError as error:
                assert "\n" not in str(error)


def test_groups_can_differ_between_layers(tmp_path, checkpoint_of):
    """For the same module; the view of a block uses the tensors of the block."""
    fmt = format_of(GPTQ)
    stored = []
    for act in (True, False):
        (tmp_path / str(act)).mkdir()
        choice = Choice("gptq", desc_act=act)
        stored.append(one_matrix(tmp_path / str(act), choice, torch.float16))
        fmt.stored(f"{MODULE}.weight", SHAPE, None, stored[-1][2])
        # trivial groups are not loaded
        layer = open_checkpoint(checkpoint_of(choice)).layers[0]
        assert any("g_idx" in record.key for record in layer) == act
    for tensors, exact, source in stored:
        assert torch.equal(weight_of(fmt, source, tensors, torch.float16), exact)


def test_zero_biases_are_dropped_and_others_refused(checkpoint_of, tmp_path):
    directory = shutil.copytree(checkpoint_of(Choice("gptq")), tmp_path / "m")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file({**tensors, name: torch.zeros(64)}, file)
    open_checkpoint(directory)
    save_file({**tensors, name: torch.ones(64)}, file)
    with pytest.raises(CheckpointError, match="belongs to no part"):
        open_checkpoint(directory)


def test_modules_can_differ_in_bits(tmp_path):
    """compressed-tensors by groups, the narrower target first; GPTQ by its overrides."""
    narrow = Choice("pack-quantized", 3)
    first = config_of(Choice("pack-quantized", 8))["config_groups"]["group_0"]
    other = config_of(narrow)["config_groups"]["group_0"]
    groups = {"a": first, "b": {**other, "targets": ["re:.*down_proj"]}}
    dynamic = {"-:.*": {}, "+:.*gate": {"bits": 2}, r".*\.down_proj": {"bits": 8}}
    for choice, config in (
        (narrow, {**PACKED, "config_groups": groups}),
        (Choice("gptq", 8), {**GPTQ, "dynamic": dynamic}),
    ):
        stored, exact, source = one_matrix(tmp_path, choice, torch.float16)
        assert torch.equal(weight_of(config, source, stored, torch.float16), exact)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_single_scale_of_a_matrix(shape, tmp_path):
    codes = torch.randn(SHAPE).to(torch.float8_e4m3fn)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    groups = {"a": {**PACKED["config_groups"]["group_0"], "weights": weights}}
    for config, name in (
        ({**FP8, "weight_block_size": None}, "weight_scale_inv"),
        ({**PACKED, "format": "float-quantized", "config_groups": groups}, "weight_scale"),
    ):
        stored = {f"{MODULE}.weight": codes, f"{MODULE}.{name}": torch.full(shape, 0.3)}
        save_file(stored, tmp_path / "model.safetensors")
        source = Source(read_header(tmp_path / "model.safetensors"))
        expected = codes.float() * 0.3
        assert torch.equal(weight_of(config, source, stored, torch.float32), expected)


def test_quantised_activations_are_ignored_with_a_notice(checkpoint_of):
    assert format_of(PACKED).notice == ""
    group = {**PACKED["config_groups"]["group_0"], "input_activations": {"num_bits": 8}}
    config = {**PACKED, "config_groups": {"a": group}, "kv_cache_scheme": {"a": 1}}
    assert "quantised activations and keys and values" in format_of(config).notice
    with LLM(str(checkpoint_of(Choice("fp8"))), device="cpu") as llm:
        assert "quantised activations" in llm.spec.notice
