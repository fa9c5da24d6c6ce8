"""How long do the masks of a draft tree take here and in xgrammar?

    pip install xgrammar
    python -m bench.serve.xgrammar_masks [--vocabulary 131072] [--nodes 64]

Random trees within a JSON schema at each token of an answer. Their masks are computed in turn by
`Grammar.masks_after`, without cached masks, and by xgrammar's `traverse_draft_tree`.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import xgrammar
from torch import Tensor

from bench.common.measure import Benchmark, Spread, interleaved, timed
from bench.serve.grammar import ANSWER, SCHEMA, at, random_paths, trained_tokenizer
from offload_rt import StructuredOutputs
from offload_rt.executor.grammar import Grammar, GrammarCompiler


def links(paths: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return first child, next sibling (-1: none) and token of each node, (n,) int64 each."""
    index = {path: i for i, path in enumerate(paths)}
    first = [-1] * len(paths)
    following = [-1] * len(paths)
    last: dict[int, int] = {}
    for i, path in enumerate(paths[1:], 1):
        parent = index[path[:-1]]
        if parent in last:
            following[last[parent]] = i
        else:
            first[parent] = i
        last[parent] = i
    return [torch.tensor(part) for part in (first, following, [0, *(p[-1] for p in paths[1:])])]


def time_here(grammars: Iterator[Grammar], paths: Sequence[tuple[int, ...]]) -> float:
    """Return the seconds of the masks of the next grammar."""
    return timed(partial(next(grammars).masks_after, paths))


def main() -> None:
    """Print milliseconds of both."""
    bench = Benchmark("serve.xgrammar_masks", __doc__)
    bench.add("--vocabulary", type=int, default=131072)
    bench.add("--nodes", type=int, default=64)
    flags = bench.start()
    tokenizer = trained_tokenizer(flags.vocabulary)
    compiler = GrammarCompiler(tokenizer, flags.vocabulary, {0})
    outputs = StructuredOutputs(json=SCHEMA)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=flags.vocabulary)
    peer = xgrammar.GrammarMatcher(
        xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, any_whitespace=False)
    )
    bits = xgrammar.allocate_token_bitmask(flags.nodes, flags.vocabulary)
    numbers = random.Random(0)
    times: dict[str, list[float]] = {"here": [], "xgrammar": []}
    committed: list[int] = []
    for token in tokenizer.encode(ANSWER):
        paths = random_paths(at(compiler, outputs, committed), flags.nodes, numbers)
        tree = links(paths)
        grammars = iter([at(compiler, outputs, committed) for _ in range(2)])
        works = {
            "here": partial(time_here, grammars, paths),
            "xgrammar": partial(timed, partial(peer.traverse_draft_tree, *tree, bits)),
        }
        for name, seconds in interleaved(works, 2, warm_up=False).items():
            times[name] += [1e3 * value for value in seconds]
        assert peer.accept_token(token)
        committed.append(token)
    compiler.close()
    spreads = {name: Spread.of(values) for name, values in times.items()}
    for name, spread in spreads.items():
        print(f"masks of {flags.nodes} nodes, {name}: {spread} ms")
    bench.finish(**spreads)


if __name__ == "__main__":
    main()
