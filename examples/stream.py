"""Print text while it is generated. One pass over the weights may add several tokens."""

from demo import DRAFT, TARGET

from offload_rt import LLM, SamplingParams

with LLM(TARGET, draft_model=DRAFT, max_model_len=256) as llm:
    for piece in llm.stream("Three reasons to read books:\n", SamplingParams(max_tokens=48)):
        print(piece.text, end="", flush=True)
    print()
