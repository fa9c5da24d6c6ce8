"""Which operation changes bfloat16 texts of transformers?

    python -m bench.compare.rounding [--model demo-cache/SmolLM2-135M-Instruct]

Answer questions greedily with offload_rt. Compute the logits of these texts by transformers, some
of whose operations are replaced by functions of `offload_rt.ops`. A place differs if the most
probable token is another token. Its gap is the difference of the two logits. The last columns are
root mean square differences to the logits of unchanged transformers, and to float32.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from bench.common.measure import ROOT, Benchmark
from offload_rt import LLM, SamplingParams, ops
from offload_rt.ops.linear import linear
from offload_rt.text.detokenize import encode_chat

QUESTIONS = (
    "Why is the sky blue?", "How do plants make food from sunlight?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What should I see in Paris in one day?",
    "Explain in three steps how to make a cup of tea.", "Why do we have seasons?",
    "What caused the First World War?", "How does a bicycle stay upright?",
)  # fmt: skip


def _rms_norm(module: LlamaRMSNorm, x: Tensor) -> Tensor:
    return ops.rms_norm(x[0], module.weight.detach(), module.variance_epsilon)[None]


def _mlp(module: LlamaMLP, x: Tensor) -> Tensor:
    gated: Tensor = ops.silu_mul(module.gate_proj(x)[0], module.up_proj(x)[0])[None]
    out: Tensor = module.down_proj(gated)
    return out


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight.detach())


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, scaling: float, **_: object
) -> tuple[Tensor, None]:
    chain = ops.make_tree_mask(np.arange(-1, q.shape[2] - 1), 0, 0)
    rows = q[0].transpose(0, 1).contiguous()
    out = ops.tree_attention(rows, k[0].contiguous(), v[0].contiguous(), chain, scaling)
    return out[None], None


REPLACEMENTS = {
    "norms": (LlamaRMSNorm, _rms_norm),
    "products": (nn.Linear, _linear),
    "gated SiLU": (LlamaMLP, _mlp),
}
ATTENTION = "attention"


@contextmanager
def replaced(model: LlamaForCausalLM, names: Sequence[str]) -> Iterator[None]:
    """Replace operations of a model; "eager" selects the second attention of transformers."""
    attention = {"eager": "eager", ATTENTION: ATTENTION}
    with ExitStack() as stack:
        for name in names:
            if name in REPLACEMENTS:
                kind, forward = REPLACEMENTS[name]
                stack.enter_context(mock.patch.object(kind, "forward", forward))
        model.set_attn_implementation(next((attention[n] for n in names if n in attention), "sdpa"))
        yield


@torch.inference_mode()
def logits_of(
    model: LlamaForCausalLM, prompts: list[list[int]], texts: list[list[int]]
) -> list[Tensor]:
    """Return the logits (tokens, vocabulary) of each text in float32."""
    return [
        model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].float()
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def difference(logits: list[Tensor], others: list[Tensor]) -> float:
    """Return the root mean square of the differences."""
    squares = [(a - b).square().mean() for a, b in zip(logits, others, strict=True)]
    return float(torch.stack(squares).mean().sqrt())


def gaps(logits: Tensor, text: list[int]) -> list[float]:
    """Return the gap of each place whose most probable token is not the token of the text."""
    best, tokens = logits.max(-1)
    differs = tokens != torch.tensor(text)
    chosen = logits[torch.arange(len(text)), text]
    return [float(gap) for gap in (best - chosen)[differs]]


def main() -> None:
    """Print a line per set of replaced operations."""
    bench = Benchmark("rounding", __doc__)
    bench.add("--model", default=str(ROOT / "demo-cache" / "SmolLM2-135M-Instruct"))
    bench.add("--tokens", type=int, default=96)
    flags = bench.start()
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    options = {"add_generation_prompt": True}
    prompts = [
        encode_chat(tokenizer, [{"role": "user", "content": question}], options)
        for question in QUESTIONS
    ]
    with LLM(flags.model, dtype="bfloat16", drafter="none", max_model_len=512) as llm:
        params = SamplingParams(max_tokens=flags.tokens, temperature=0)
        texts = [output.token_ids for output in llm.generate(prompts, params)]
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    model, wide = (
        AutoModelForCausalLM.from_pretrained(flags.model, dtype=dtype).eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    theirs, exact = (logits_of(each, prompts, texts) for each in (model, wide))
    every = (*REPLACEMENTS, ATTENTION)
    results = {}
    for names in ((), ("eager",), *((name,) for name in every), every):
        with replaced(model, names):
            logits = logits_of(model, prompts, texts)
        places = [gaps(rows, text) for rows, text in zip(logits, texts, strict=True)]
        found = [gap for text in places for gap in text]
        line = (
            f"{sum(not text for text in places)} of {len(texts)} texts equal, {len(found)} places"
            f" differ by up to {max(found, default=0):.2f}; {difference(logits, theirs):.3f} to"
            f" transformers, {difference(logits, exact):.3f} to float32"
        )
        results[" + ".join(names) or "nothing"] = line
        print(f"{' + '.join(names) or 'nothing'}: {line}", flush=True)
    bench.finish(results=results)


if __name__ == "__main__":
    main()
