"""Compare speculative decoding with plain decoding: the same text in fewer passes.

Greedy text is identical on a CPU. On a GPU, ties within the rounding of bfloat16 may differ.
"""

from demo import DRAFT, TARGET

from offload_rt import LLM, SamplingParams

PROMPT = "The water cycle begins when the sun"
params = SamplingParams(max_tokens=64)

with LLM(TARGET, drafter="none", max_model_len=256) as llm:
    (plain,) = llm.generate(PROMPT, params)
with LLM(TARGET, draft_model=DRAFT, max_model_len=256) as llm:
    (speculative,) = llm.generate(PROMPT, params)

print(speculative.text)
print("identical:", speculative.token_ids == plain.token_ids)
print(f"passes: {plain.stats.n_passes} plain, {speculative.stats.n_passes} speculative")
