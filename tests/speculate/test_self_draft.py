"""The target that drafts itself with copies of its streamed layers at four bits."""

import pytest
import torch
from support.tiny import Zoo, generate, open_unloaded, prompt_of
from transformers import Phi3Config, Phi3ForCausalLM

from offload_rt import LLM, SamplingParams
from offload_rt.cli.format import placement_table
from offload_rt.dtypes import DType
from offload_rt.errors import CapacityError, UnsupportedModelError
from offload_rt.weights.formats.dense import Format as Dense
from offload_rt.weights.layout import PackedLayer, host_block, packed_layout
from offload_rt.weights.rounding import COPIES, COPY_DTYPE, rounded

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
SETTINGS = {"device": "cpu", "drafter": "self", "tree_size": 12, "max_model_len": 96}


def open_self(zoo: Zoo, name: str, n_resident: int) -> LLM:
    """Open a model with a number of resident layers beside three slots and the copies."""
    with pytest.raises(CapacityError) as refused:
        LLM(str(zoo.directory(name, 0)), device_memory=1, **SETTINGS)
    least = int(str(refused.value).split("(")[1].split()[0])
    slot = open_unloaded(zoo.directory(name, 0), device="cpu").plan.slot_nbytes
    llm = LLM(
        str(zoo.directory(name, 0)), device_memory=least + (1 + n_resident) * slot, **SETTINGS
    )
    plan = llm.plan
    assert plan.device_nbytes <= plan.budget.device
    assert (plan.copies_nbytes > 0) == (n_resident < len(plan.tiers))
    assert llm.plan.tiers.count("device") == n_resident
    return llm


@pytest.mark.parametrize(("name", "n_resident"), [("llama", 0), ("qwen2", 0), ("llama", 1)])
def test_text_equals_plain_decoding(zoo, name, n_resident):
    prompts = [prompt_of(0, 12), prompt_of(1, 20)]
    with open_self(zoo, name, n_resident) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=16))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == generate(zoo.model(name, 0), prompt, 16)


def test_copy_takes_a_third_and_rounds_to_half_a_step():
    tensors = [
        ("up.weight", (96, 128), DType.BFLOAT16),
        ("up.bias", (96,), DType.BFLOAT16),
        ("norm.weight", (96,), DType.BFLOAT16),
    ]
    layout = packed_layout([*tensors, ("odd.weight", (10, 30), DType.BFLOAT16)])
    x = torch.randn(5, 128).bfloat16()
    layer = PackedLayer(host_block(layout.nbytes), layout)
    for tensor in layout.views(layer.block).values():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    copy = rounded(layer, COPIES, CPU)
    ours, theirs = (
        f.view(stored.layout, stored.block, COPY_DTYPE.torch)
        for f, stored in ((Dense(None), copy), (Dense(None), layer))
    )
    matrix = theirs.tensor("up.weight").float()
    bias = theirs.tensor("up.bias").float()
    got = (ours.linear(torch.eye(128, dtype=COPY_DTYPE.torch), "up").float() - bias).T
    steps = (matrix.view(96, 2, 64).amax(-1) - matrix.view(96, 2, 64).amin(-1)) / 15
    # Half a step, and what bfloat16 rounds of scales, zero points and sums.
    assert ((got - matrix).abs().view(96, 2, 64).amax(-1) < 0.5 * steps + 0.05).all()
    codes = sum(
        entry.nbytes for entry in copy.layout.entries if entry.name.startswith("up.weight.")
    )
    assert codes < 0.3 * 2 * 96 * 128
    assert torch.equal(ours.vector("norm"), theirs.vector("norm"))
    assert torch.equal(ours.linear(x[:, :30], "odd"), theirs.linear(x[:, :30], "odd"))


def test_reads_for_copies_count_as_loaded(zoo):
    with open_self(zoo, "llama", 0) as llm:
        budget = llm.plan.budget.device
        told = []
    with open_unloaded(zoo.directory("llama", 0), device_memory=budget, **SETTINGS) as llm:
        llm.load(progress=lambda done, total: told.append((done, total)))
    assert max(done for done, _ in told) == told[0][1]


def test_plan_shows_the_copies(zoo):
    with open_self(zoo, "llama", 1) as llm:
        table = placement_table("", llm.plan, llm.spec.memory.cache_rows)
    assert "4-bit copies of the other layers" in list(table.columns[0].cells)


def test_general_models_have_no_copies(tmp_path):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Phi3Config(vocab_size=64, pad_token_id=0, **sizes)
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="a model of type phi3 cannot draft for itself"):
        LLM(str(tmp_path), **SETTINGS)
