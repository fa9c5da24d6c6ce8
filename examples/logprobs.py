"""Read log-probabilities: the best alternatives of each new token, and the perplexity of a text."""

import math

from demo import TARGET

from offload_rt import LLM, SamplingParams

TEXT = "The sun rises in the east and sets in the west."

with LLM(TARGET, max_model_len=256) as llm:
    (output,) = llm.generate(TEXT, SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=0))
    for token, best in zip(output.token_ids, output.logprobs, strict=True):
        alternatives = {llm.tokenizer.decode([i]): round(p.logprob, 2) for i, p in best.items()}
        print(repr(llm.tokenizer.decode([token])), alternatives)

# The first prompt token has no log-probability.
pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
logprobs = [entry[token].logprob for token, entry in pairs]
print(f"perplexity of the prompt: {math.exp(-sum(logprobs) / len(logprobs)):.1f}")
