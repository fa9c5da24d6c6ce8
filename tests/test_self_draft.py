"""The target that drafts itself with copies of its streamed layers at four bits."""

import pytest
import torch
from tiny import Zoo, generate, prompt_of

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.errors import CapacityError
from offload_rt.weights import int4
from offload_rt.weights.formats.dense import Format as Dense
from offload_rt.weights.layout import PackedLayer, host_block, packed_layout

CPU = torch.device("cpu")
SETTINGS = {"device": "cpu", "drafter": "self", "tree_size": 12, "max_model_len": 96}


def open_self(zoo: Zoo, name: str, n_resident: int) -> LLM:
    """With room for so many layers beside three slots and the copies of the others."""
    with pytest.raises(CapacityError) as refused:
        LLM(str(zoo.directory(name, 0)), device_memory=1, **SETTINGS)
    least = int(str(refused.value).split("(")[1].split()[0])
    slot = LLM.open(EngineConfig(str(zoo.directory(name, 0)), device="cpu")).plan.slot_nbytes
    llm = LLM(str(zoo.directory(name, 0)), device_memory=least + (1 + n_resident) * slot, **SETTINGS)
    assert llm.plan.device_nbytes <= llm.plan.budget.device
    assert llm.plan.tiers.count("device") == n_resident
    return llm


@pytest.mark.parametrize(("name", "n_resident"), [("llama", 0), ("qwen2", 0), ("llama", 1)])
def test_the_text_is_that_of_plain_decoding(zoo: Zoo, name: str, n_resident: int) -> None:
    prompts = [prompt_of(0, 12), prompt_of(1, 20)]
    with open_self(zoo, name, n_resident) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=16))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == generate(zoo.model(name, 0), prompt, 16)


def test_a_copy_takes_a_third_and_gives_nearly_the_products() -> None:
    tensors = [
        ("up.weight", (96, 128), torch.bfloat16),
        ("up.bias", (96,), torch.bfloat16),
        ("norm.weight", (96,), torch.bfloat16),
    ]
    layout, x = packed_layout([*tensors, ("odd.weight", (10, 30), torch.bfloat16)]), torch.randn(5, 128).bfloat16()
    layer = PackedLayer(host_block(layout.nbytes), layout)
    for tensor in layout.views(layer.block).values():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    copy = int4.packed(layer, CPU)
    ours, theirs = (
        f.view(one.layout, one.block, int4.DTYPE) for f, one in ((int4.Format(), copy), (Dense(None), layer))
    )
    product, exact = ours.linear(x, "up").float(), theirs.linear(x, "up").float()
    assert (product - exact).norm() < 0.12 * exact.norm()
    codes = sum(one.nbytes for one in copy.layout.entries if one.name.startswith("up.weight."))
    assert codes < 0.3 * 2 * 96 * 128
    assert torch.equal(ours.vector("norm"), theirs.vector("norm"))
    assert torch.equal(ours.linear(x[:, :30], "odd"), theirs.linear(x[:, :30], "odd"))
