"""How much time does a grammar add to a pass?

    python -m bench.serve.grammar [--size 600MB] [--gbps 0.5] [--nodes 64]
    python -m bench.serve.grammar --vocabulary 131072 --nodes 256

The expanded demo target verifies trees of the demo draft model, with half its size as budget and a
paced disk, or resident. Prompts are answered in turn with and without a grammar: a JSON object with
texts of any length. Seconds per pass include drafting and verification.

With --vocabulary, a tokenizer of this size is trained on Python's library. Masks of random trees
within the grammar are timed: a thread computes them during a pass, so they are hidden if the pass
takes longer. Their application to random logits follows the pass; its time is compared with
that of the distributions without masks.
"""

import argparse
import random
import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.common.checkpoints import DRAFT
from bench.common.measure import Benchmark, Spread, interleaved, timed
from bench.common.pacing import open_expanded
from bench.common.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams, StructuredOutputs
from offload_rt.executor.grammar import Grammar, GrammarCompiler
from offload_rt.sampling import Context, NodeProbs

_TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": _TEXT,
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "text": _TEXT | {"minLength": 1000},  # answers reach max_tokens
    },
    "required": ["title", "sizes", "text"],
    "additionalProperties": False,
}
ANSWER = '{"title": "A fox", "sizes": [1, 22, 333], "text": "def walk(path): return 1'
_LEVELS = 12
# Files of the tokenizer's text; 4,000 suffice for 131,072 tokens.
_FILES = 4000


def seconds_per_pass(
    llm: LLM, prompt: list[int], outputs: StructuredOutputs | None
) -> tuple[float, float]:
    """Return seconds per pass without the prompt's pass, and nodes per tree."""
    llm.engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=96, temperature=0, structured_outputs=outputs)
    stats = llm.generate([prompt], params)[0].stats
    assert stats.measured_seconds_per_token and stats.measured_tokens_per_pass
    per_pass = stats.measured_seconds_per_token * stats.measured_tokens_per_pass
    return per_pass, stats.nodes_per_tree


def compare_passes(flags: argparse.Namespace) -> dict[str, object]:
    """Print and return seconds per pass with a grammar / without."""
    pairs = []
    trees = {"draft_model": DRAFT, "drafter": "dynamic_tree", "tree_size": flags.nodes}
    with open_expanded(flags, max_model_len=256, **trees) as llm:
        assert llm.tokenizer is not None
        for prompt in held_out_prompts(llm.tokenizer, flags.prompts):
            works = {
                "grammar": partial(seconds_per_pass, llm, prompt, StructuredOutputs(json=SCHEMA)),
                "plain": partial(seconds_per_pass, llm, prompt, None),
            }
            results = interleaved(works, flags.rounds, warm_up=not pairs)
            pairs += zip(results["grammar"], results["plain"], strict=True)
    ratio = Spread.of([grammar[0] / plain[0] for grammar, plain in pairs])
    seconds, nodes = (Spread.of([plain[i] for _, plain in pairs]) for i in range(2))
    grammar_nodes = Spread.of([grammar[1] for grammar, _ in pairs])
    print(f"seconds per pass, grammar / plain, interleaved: {ratio}")
    print(f"plain: {seconds} s; nodes: {nodes} plain, {grammar_nodes} with the grammar")
    return {"ratio": ratio, "plain_s": seconds, "nodes": nodes, "grammar_nodes": grammar_nodes}


def trained_tokenizer(n: int) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer of n tokens on Python's library and installed packages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folders = sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]
    files = sorted({path for folder in folders for path in Path(folder).rglob("*.py")})
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in files[:_FILES])
    trainer = trainers.BpeTrainer(
        vocab_size=n,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,  # llguidance limits the length
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def random_paths(grammar: Grammar, n_nodes: int, numbers: random.Random) -> list[tuple[int, ...]]:
    """Grow a random tree within the grammar."""
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < n_nodes:
        path = numbers.choice([path for path in paths if len(path) < _LEVELS])
        words = grammar.masks_after([path]).numpy().view(np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
        paths.append((*path, int(numbers.choice(allowed))))
    return paths


def distributions(
    logits: Tensor, params: SamplingParams, out: Tensor, masks: Tensor | None = None
) -> Tensor:
    """Compute the distributions of all nodes."""
    return NodeProbs(logits, params, Context(), [], out, masks)[:]


def time_masks(flags: argparse.Namespace) -> dict[str, object]:
    """Print and return the milliseconds of masks, and of distributions with and without them."""
    n = flags.vocabulary
    tokenizer = trained_tokenizer(n)
    compiler = GrammarCompiler(tokenizer, n, {0})
    numbers = random.Random(0)
    outputs = StructuredOutputs(json=SCHEMA)
    logits = torch.randn(flags.nodes, n)
    out = torch.empty_like(logits)
    params = SamplingParams(temperature=flags.temperature)
    masks_ms = []
    masked_ms = []
    plain_ms = []
    committed: list[int] = []
    for token in tokenizer.encode(ANSWER):
        paths = random_paths(at(compiler, outputs, committed), flags.nodes, numbers)
        grammar = at(compiler, outputs, committed)  # without cached masks
        masks_ms.append(1e3 * timed(partial(grammar.masks_after, paths)))
        plain = partial(distributions, logits, params, out)
        masked = partial(plain, grammar.masks_after(paths))
        works = {"masked": partial(timed, masked), "plain": partial(timed, plain)}
        results = interleaved(works, 1)
        masked_ms += [1e3 * seconds for seconds in results["masked"]]
        plain_ms += [1e3 * seconds for seconds in results["plain"]]
        committed.append(token)
    compiler.close()
    spreads = [Spread.of(values) for values in (masks_ms, masked_ms, plain_ms)]
    print(f"masks of {flags.nodes} nodes, ms in a thread beside the pass: {spreads[0]}")
    print(f"distributions, ms after the pass: {spreads[1]} with masks, {spreads[2]} without")
    return {"masks_ms": spreads[0], "masked_ms": spreads[1], "plain_ms": spreads[2]}


def at(compiler: GrammarCompiler, outputs: StructuredOutputs, tokens: list[int]) -> Grammar:
    """Return the grammar behind these tokens."""
    grammar = compiler.compile(outputs)
    for token in tokens:
        grammar.advance(token)
    return grammar


def main() -> None:
    """Print the ratio of seconds per pass, or the time of masks."""
    bench = Benchmark("serve.grammar", __doc__)
    bench.add("--size", default="600MB", help="of the expanded target")
    bench.add("--gbps", type=float, default=0.5, help="rate of its disk; 0: resident")
    bench.add("--nodes", type=int, default=64)
    bench.add("--prompts", type=int, default=4)
    bench.add("--rounds", type=int, default=2)
    bench.add("--vocabulary", type=int, help="time masks for a tokenizer of this size")
    bench.add("--temperature", type=float, default=0.0)
    flags = bench.start()
    bench.finish(**(time_masks(flags) if flags.vocabulary else compare_passes(flags)))


if __name__ == "__main__":
    main()
