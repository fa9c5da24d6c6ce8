"""How many more tokens would a pass accept with acceptance statistics per request?

    python -m bench.speculate.requests [--prompts 12] [--nodes 64]

Continue code (held-out modules), prose (Python's reference, unknown to the pair) and dialogue
(questions of docs/faq.md) with trees of a fixed size. Noise is coupled, so the text of a prompt is
equal in all runs. After a first run over all prompts, measure tokens per pass with

    pair       statistics of the pair, shared by all requests, as in the package
    request    a copy for each request; the pair's observations count as `--weight`
    hindsight  the request's statistics after an equal run: more than a request can know

Print the mean gain over `pair` with its standard error, prompt by prompt.
"""

import copy
import pydoc_data.topics
import re
from collections.abc import Sequence
from statistics import fmean, stdev

from transformers import AutoTokenizer

from bench.common.checkpoints import TARGET, no_pair_stats
from bench.common.measure import ROOT, Benchmark
from bench.common.prompts import held_out_prompts
from bench.speculate.methods import Method
from offload_rt import LLM, SamplingParams
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.tree_drafter import TreeDrafter

# The default trees up to temperature 0.8.
METHOD = Method("dynamic", "dynamic_tree", "coupled")
_N_TOKENS = 64
_QUESTION = re.compile(r"^\*\*(.+?)\*\* (.+?)\n\n", re.MULTILINE | re.DOTALL)


def mixed_prompts(n: int) -> dict[str, list[list[int]]]:
    """Return n prompts of each kind."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 2000]
    prose = [topics[i * len(topics) // n] for i in range(n)]
    faq = _QUESTION.findall((ROOT / "docs/faq.md").read_text(encoding="utf-8"))
    turns = [f"User: {question}\nAssistant: {answer}\n" for question, answer in faq]
    dialogue = ["".join(turns[(i + j) % len(turns)] for j in range(2)) for i in range(n)]
    return {
        "code": held_out_prompts(tokenizer, n, _N_TOKENS),
        **{
            kind: [tokenizer(text).input_ids[:_N_TOKENS] for text in texts]
            for kind, texts in (("prose", prose), ("dialogue", dialogue))
        },
    }


def own(stats: PairStats, weight: float) -> PairStats:
    """Return a copy whose observations count as at most `weight`."""
    stats = copy.deepcopy(stats)
    for estimates in stats.estimates.values():
        for ratios in (estimates.acceptance, estimates.calibration, estimates.bias):
            factor = min(1.0, weight / max(float(ratios.tries.max()), 1.0))
            ratios.hits *= factor
            ratios.tries *= factor
        estimates.acceptance.n_seen = 0
    return stats


def measure(
    llm: LLM, prompts: Sequence[list[int]], n_new: int, temperature: float, weight: float
) -> dict[str, list[float]]:
    """Return tokens per pass of each prompt for each kind of statistics."""
    drafter = llm.engine.drafter
    assert isinstance(drafter, TreeDrafter), "a method with a draft model"

    def generate(i: int, stats: PairStats) -> float:
        if drafter.pair_stats is not stats:
            drafter.pair_stats = stats
            drafter._tables.clear()
        params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
        return llm.generate(prompts[i], params)[0].stats.tokens_per_pass

    # Alternate between the kinds of prompts.
    kinds = 3
    order = [
        i
        for j in range(len(prompts) // kinds)
        for i in range(j, len(prompts), len(prompts) // kinds)
    ]
    pair = drafter.pair_stats
    for i in order:
        generate(i, pair)
    learned = copy.deepcopy(pair)
    rates: dict[str, list[float]] = {
        name: [0.0] * len(prompts) for name in ("pair", "request", "hindsight")
    }
    for i in order:
        rates["pair"][i] = generate(i, pair)
        request = own(learned, weight)
        rates["request"][i] = generate(i, request)
        rates["hindsight"][i] = generate(i, request)
    return rates


def gain(rates: Sequence[float], base: Sequence[float]) -> str:
    """Format the mean relative gain over `base` and its standard error."""
    gains = [a / b - 1 for a, b in zip(rates, base, strict=True)]
    return f"{fmean(gains):+.2%} ± {stdev(gains) / len(gains) ** 0.5:.2%}"


def main() -> None:
    """Print a line for each temperature and kind of prompt."""
    bench = Benchmark("requests", __doc__)
    bench.add("--prompts", type=int, default=12, help="of each kind")
    bench.add("--new-tokens", type=int, default=96)
    bench.add("--nodes", type=int, default=64)
    bench.add("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    bench.add("--weight", type=float, default=32.0, help="observations of the pair for a request")
    flags = bench.start()
    by_kind = mixed_prompts(flags.prompts)
    prompts = [prompt for part in by_kind.values() for prompt in part]
    longest = _N_TOKENS + flags.new_tokens + 1
    results = []
    with no_pair_stats():
        for temperature in flags.temperatures:
            with METHOD.open(TARGET, flags.nodes, "float32", "2GB", longest) as llm:
                rates = measure(llm, prompts, flags.new_tokens, temperature, flags.weight)
            results.append({"temperature": temperature, "rates": rates})
            parts = {"all": slice(None)}
            for k, kind in enumerate(by_kind):
                parts[kind] = slice(k * flags.prompts, (k + 1) * flags.prompts)
            for kind, part in parts.items():
                pair, request, hindsight = (each[part] for each in rates.values())
                print(
                    f"T = {temperature:g}, {kind}: {fmean(pair):.2f} tokens per"
                    f" pass; per request {gain(request, pair)}; hindsight"
                    f" {gain(hindsight, pair)}",
                    flush=True,
                )
    bench.finish(found=results)


if __name__ == "__main__":
    main()
