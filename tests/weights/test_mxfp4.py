"""gpt-oss in MXFP4 through the general architecture: weights and tokens equal transformers."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import pack
from support.quantized import MXFP4_CONFIG
from support.tiny import check_tree, generate, open_llm, prompt_of, runner_of, say
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offload_rt.errors import CheckpointError
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.formats import Source, format_of
from offload_rt.weights.header import read_header

pytestmark = pytest.mark.numeric
PROJ = "model.layers.1.mlp.experts.gate_up_proj"


def test_tokens_equal_transformers_with_dequantised_weights(mxfp4_checkpoint):
    """Streamed from the disk, plain and by trees."""
    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.float32}
    model = GptOssForCausalLM.from_pretrained(mxfp4_checkpoint, **options).eval()
    prompt = prompt_of(0, 15, 150)
    expected = generate(model, prompt, 24)
    for drafter in ("none", "recycle"):
        with open_llm(mxfp4_checkpoint, "disk", dtype="float32", drafter=drafter) as llm:
            check_tree(runner_of(llm), model)
            assert say(llm, prompt, 24) == expected
    assert len(set(expected)) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_and_scale_equals_transformers(dtype, tmp_path):
    """Zeros of both signs and powers of two outside of a dtype's range; a scale of 255 is NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    blocks = codes.view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = codes[:255].view(1, 255, 1).repeat(1, 1, 16)
    tensors = {"e.0.blocks": blocks, "e.0.scales": scales}
    save_file(tensors, tmp_path / "m.safetensors")
    fmt = format_of(MXFP4_CONFIG)
    source = Source(read_header(tmp_path / "m.safetensors"))
    stored = fmt.stored("e.0.weight", (255, 512), None, source)
    packed = pack(tensors, {"e.0": stored})
    mine = fmt.view(packed.layout, packed.block, dtype).rows(torch.arange(255), "e.0")
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].T
    assert torch.equal(mine, theirs)
    assert torch.equal(mine.signbit(), theirs.signbit())


@pytest.mark.parametrize(("part", "change"), [
    ("blocks", lambda x: x[:3]), ("blocks", lambda x: torch.cat((x, x[:1]))),
    ("blocks", lambda x: x[:, :, :1]), ("scales", lambda x: x[:, 1:]),
    ("scales", lambda x: x.short()), ("scales", lambda x: x[:0]),
])  # fmt: skip
def test_contradictory_tensors_are_refused(mxfp4_checkpoint, part, change, tmp_path):
    tensors = load_file(mxfp4_checkpoint / "model.safetensors")
    tensors[f"{PROJ}_{part}"] = change(tensors[f"{PROJ}_{part}"]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((mxfp4_checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match=PROJ):
        open_checkpoint(tmp_path)
