"""Sample with a temperature: a seed makes answers repeatable, `n` asks for several answers."""

from demo import DRAFT, TARGET

from offload_rt import LLM, SamplingParams

params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=7, n=3)

with LLM(TARGET, draft_model=DRAFT, max_model_len=256) as llm:
    (first,) = llm.generate("Once upon a time", params)
    (second,) = llm.generate("Once upon a time", params)

for answer in first.outputs:
    print(repr(answer.text))
same = [a.token_ids == b.token_ids for a, b in zip(first.outputs, second.outputs, strict=True)]
print("repeatable:", all(same))
