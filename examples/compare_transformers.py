"""Check greedy tokens against transformers' `generate`, in float32."""

import torch
from demo import DRAFT, TARGET
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload_rt import LLM, SamplingParams

PROMPT = "The water cycle begins when the sun"
N_TOKENS = 32

tokenizer = AutoTokenizer.from_pretrained(TARGET)
model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
prompt = tokenizer(PROMPT, return_tensors="pt")
expected = model.generate(**prompt, max_new_tokens=N_TOKENS, do_sample=False)[0]
expected = expected[prompt.input_ids.shape[1] :].tolist()

with LLM(TARGET, draft_model=DRAFT, dtype="float32", max_model_len=256) as llm:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=N_TOKENS))

print(output.text)
print("equal to transformers:", output.token_ids == expected)
