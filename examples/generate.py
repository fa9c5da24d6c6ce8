"""Continue several prompts with a model that is limited to a memory budget."""

from demo import TARGET

from offload_rt import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Plants make food from", "def read_lines(path):\n"]

with LLM(TARGET, device_memory="500MiB", max_model_len=256) as llm:
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=24)):
        print(repr(output.text))
        print(f"  {output.stats.n_tokens} tokens, {output.stats.n_passes} passes over the weights")
