"""The target that drafts itself with copies of its streamed layers at four bits."""

import pytest
from support.tiny import assert_continued, open_unloaded, prompt_of
from transformers import Phi3Config, Phi3ForCausalLM

from offload_rt import LLM, SamplingParams
from offload_rt.cli.plan_tables import placement_table
from offload_rt.errors import CapacityError, UnsupportedModelError

pytestmark = pytest.mark.numeric

SETTINGS = {"device": "cpu", "drafter": "self", "tree_size": 12, "max_model_len": 96}


def open_self(zoo, name, n_resident):
    """Open a model with a number of resident layers beside three slots and the copies."""
    directory = str(zoo.directory(name, 0))
    with pytest.raises(CapacityError) as refused:
        LLM(directory, device_memory=1, **SETTINGS)
    least = int(str(refused.value).split("(")[1].split()[0])
    slot = open_unloaded(directory, device="cpu").plan.slot_nbytes
    llm = LLM(directory, device_memory=least + (1 + n_resident) * slot, **SETTINGS)
    assert llm.plan.device_nbytes <= llm.plan.budget.device
    assert llm.plan.tiers.count("device") == n_resident and llm.plan.copies_nbytes > 0
    return llm


@pytest.mark.parametrize(("name", "n_resident"), [("llama", 0), ("qwen2", 0), ("llama", 1)])
def test_text_equals_plain_decoding(zoo, name, n_resident):
    prompts = [prompt_of(0, 12), prompt_of(1, 20)]
    with open_self(zoo, name, n_resident) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=16))
        table = placement_table("", llm.plan, llm.spec.memory.cache_rows)
        assert "4-bit copies of the other layers" in list(table.columns[0].cells)
        budget = llm.plan.budget.device
    assert_continued(outputs, zoo.model(name, 0), prompts, 16)
    told = []
    with open_unloaded(zoo.directory(name, 0), device_memory=budget, **SETTINGS) as llm:
        llm.load(progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1][0] == told[0][1], "reads for copies count as loaded"


def test_general_models_have_no_copies(tmp_path):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    heads = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    config = Phi3Config(vocab_size=64, pad_token_id=0, **sizes, **heads)
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="a model of type phi3 cannot draft for itself"):
        LLM(str(tmp_path), **SETTINGS)
