"""The target that drafts itself with copies of its streamed layers at four bits."""

import pytest
from support.tiny import assert_continued, open_unloaded, prompt_of

from offload_rt import LLM, SamplingParams
from offload_rt.cli.plan_tables import placement_table
from offload_rt.errors import CapacityError

pytestmark = pytest.mark.numeric

SETTINGS = {"device": "cpu", "drafter": "self", "tree_size": 12, "max_model_len": 96}


@pytest.mark.parametrize(("name", "n_resident"), [("llama", 0), ("qwen2", 0), ("llama", 1)])
def test_text_equals_plain_decoding(zoo, name, n_resident):
    """With a number of resident layers beside three slots and the copies."""
    directory = str(zoo.directory(name, 0))
    with pytest.raises(CapacityError) as refused:
        LLM(directory, device_memory=1, **SETTINGS)
    least = int(str(refused.value).split("(")[1].split()[0])
    slot = open_unloaded(directory, device="cpu").plan.slot_nbytes
    settings = SETTINGS | {"device_memory": least + (1 + n_resident) * slot}
    prompts = [prompt_of(0, 12), prompt_of(1, 20)]
    with LLM(directory, **settings) as llm:
        assert llm.plan.device_nbytes <= llm.plan.budget.device
        assert llm.plan.tiers.count("device") == n_resident and llm.plan.copies_nbytes > 0
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=16))
        table = placement_table("", llm.plan, llm.spec.memory.cache_rows)
        assert "4-bit copies of the other layers" in list(table.columns[0].cells)
    assert_continued(outputs, zoo.model(name, 0), prompts, 16)
    told = []
    with open_unloaded(directory, **settings) as llm:
        llm.load(progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1][0] == told[0][1], "reads for copies count as loaded"
