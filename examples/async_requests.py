"""Serve concurrent requests from asyncio. Requests share each pass over the weights."""

import asyncio

from demo import DRAFT, TARGET

from offload_rt import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Plants make food from", "def read_lines(path):\n"]


async def answer(llm: LLM, prompt: str) -> str:
    """Collect the streamed answer of one prompt."""
    params = SamplingParams(max_tokens=24)
    return "".join([piece.text async for piece in llm.astream(prompt, params)])


async def main() -> None:
    """Answer all prompts at the same time."""
    with LLM(TARGET, draft_model=DRAFT, max_model_len=256, max_num_seqs=3) as llm:
        answers = await asyncio.gather(*(answer(llm, prompt) for prompt in PROMPTS))
    for prompt, text in zip(PROMPTS, answers, strict=True):
        print(repr(prompt + text))


asyncio.run(main())
