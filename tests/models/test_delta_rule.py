"""Gated delta nets in trees: the rule, caches of states, and mixed models."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.tiny import (
    assert_continued,
    generate,
    open_llm,
    prompt_of,
    random_tree,
    runner_of,
    say,
    watch,
)

from bench.models.tiny import config_of as tiny_config
from offload_rt import SamplingParams
from offload_rt.executor.runner import Runner
from offload_rt.executor.step import Segment, Step
from offload_rt.kv.recurrent import Recurrence, RecurrentCache
from offload_rt.kv.split import state_rows
from offload_rt.models.families import parse_architecture
from offload_rt.ops.delta_rule import BLOCK_ROWS, DeltaRows

pytestmark = pytest.mark.numeric


def recurrence(rows, state):
    """Compute outputs and the last state row by row, as the rule is defined."""
    outs = []
    n_shared = rows.v.shape[1] // rows.k.shape[1]
    q, k = (term.repeat_interleave(n_shared, 1) for term in rows[:2])
    for query, key, v, log_decay, beta in zip(q, k, *rows[2:], strict=True):
        state = log_decay.exp()[:, None, None] * state
        u = beta[:, None] * (v - (state * key[..., None]).sum(1))
        state = state + key[..., None] * u[:, None]
        outs.append((state * query[..., None]).sum(1))
    return torch.stack(outs), state


class Net:
    """Two nets with rows from a table by token, and the expected output of each tree node."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.spec = parse_architecture(tiny_config("qwen3_5_text").to_dict())
        self.shape = shape = self.spec.state_shapes[0]
        self.layers = range(len(self.spec.state_shapes))
        self.dims = shape.k_dim, shape.k_dim, shape.v_dim  # of heads of queries, keys and values

        def draw(*sizes):
            return torch.randn(len(self.layers), *sizes, dtype=torch.float64, generator=generator)

        self.x, self.weight = draw(40, sum(shape.widths)), draw(sum(shape.widths), shape.kernel)
        self.log_decays = -draw(40, shape.n_v_heads).abs()
        self.beta = draw(40, shape.n_v_heads).sigmoid()
        self.known = {}

    def expected(self, layer, text):
        """The output of the last token of a text, and the state behind it."""
        shape = self.shape
        if not text:
            sizes = shape.n_v_heads, shape.k_dim, shape.v_dim
            return None, torch.zeros(sizes, dtype=torch.float64)
        if (layer, text) not in self.known:
            _, state = self.expected(layer, text[:-1])
            last = self.x[layer, list(text[-shape.kernel :])]
            mixed = F.silu((last * self.weight[layer, :, -len(last) :].T).sum(0))
            parts = zip(mixed.split(shape.widths), self.dims, strict=True)
            q, k, v = (part.view(1, -1, width) for part, width in parts)
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            rates = (term[layer, text[-1:]] for term in (self.log_decays, self.beta))
            outs, state = recurrence(DeltaRows(q / shape.k_dim**0.5, k, v, *rates), state)
            self.known[layer, text] = outs[0], state
        return self.known[layer, text]

    def run(self, cache, step, n_rows, fails_at):
        """Outputs of a step's rows per layer, some rows at a time; may fail within a layer."""
        tokens = step.tokens
        outs = [[] for _ in self.layers]
        cache.begin(tokens.tolist())
        for layer in self.layers:
            for first in range(0, len(tokens), n_rows):
                if fails_at == (layer, first // n_rows):
                    return None
                part = slice(first, first + n_rows)
                segment = Segment(step, cache, first, min(first + n_rows, len(tokens)), part)
                given = (term[layer, tokens[part]] for term in (self.x, self.log_decays, self.beta))
                x, *rates = given
                inputs = segment.inputs(self.shape.kernel)
                asked = Recurrence(
                    layer, first, step.n_chain, x, self.weight[layer], *rates, inputs,
                    segment.mask(),
                )  # fmt: skip
                outs[layer].append(cache.recur(asked))
        return [torch.cat(parts) for parts in outs]


@pytest.mark.parametrize("seed", range(2))
def test_any_cache_history_equals_its_tokens(seed):
    """Prompts, trees, commits, failed passes and rewinds in random order."""
    net = Net()
    draw = np.random.default_rng(seed)
    seen = Counter()
    cache = RecurrentCache.empty(net.spec, 1000, torch.float64, torch.device("cpu"))
    for turn in range(50):
        before = list(cache.committed)
        if draw.random() < 0.25:
            kept = before[: draw.integers(len(before) + 1)]
            assert cache.rewind_to([*kept, 40]) == cache.n_committed <= len(kept)
            seen["rewound", bool(cache.n_committed)] += 1
            before = list(cache.committed)
        n_lacking = int(draw.choice([0, 0, 0, 1, 7, 90]))
        n_nodes = int(draw.integers(1, 15))
        tree = random_tree(n_nodes, seed=100 * seed + turn, reach=3)
        tokens = draw.integers(40, size=n_lacking + n_nodes).tolist()
        n_chain = n_lacking if draw.random() < 0.8 else 0
        step = Step(0, torch.tensor(tokens), tree.after_chain(n_lacking), 1, 1, n_chain=n_chain)
        fails_at = (int(draw.integers(3)), int(draw.integers(3))) if draw.random() < 0.25 else None
        outs = net.run(cache, step, int(draw.choice([20, 64, 500])), fails_at)
        paths = [[0, *tree.path_to(node)] for node in range(n_nodes)]
        rows = [list(range(n)) for n in range(1, n_lacking + 1)]
        rows += [[*range(n_lacking), *(n_lacking + node for node in path)] for path in paths]
        for layer, out in enumerate(outs or ()):
            wanted = [
                net.expected(layer, (*before, *(tokens[row] for row in path)))[0] for path in rows
            ]
            torch.testing.assert_close(out, torch.stack(wanted), atol=1e-12, rtol=0)
        if outs is not None and draw.random() < 0.9:
            cache.commit(rows[n_lacking + draw.integers(n_nodes)])
        seen["failed" if outs is None else "left"] += not cache.committed[len(before) :]
        cache.discard()
        for n, state in (*cache._kept.items(), (cache.n_committed, cache.state)):
            for layer, memory in enumerate(state.memory):
                _, expected = net.expected(layer, tuple(cache.committed[:n]))
                torch.testing.assert_close(memory, expected, atol=1e-12, rtol=0)
    assert len(seen) == 4 and min(seen.values()) > 0, seen


@pytest.fixture
def saved(model_of):
    return model_of("qwen3_5_text")


@pytest.mark.parametrize("settings", [{}, {"drafter": "lookahead"}, {"draft_model": True}])
def test_batch_texts_equal_transformers(saved, steady, monkeypatch, settings):
    """Prompts end within, at and behind a block border; two prompts share a prefix."""
    model, folder = saved
    n = 12
    settings = {name: str(folder) if value is True else value for name, value in settings.items()}
    prompts = [
        prompt_of(seed, size, 150) for seed, size in ((1, 70), (2, BLOCK_ROWS + 1), (3, 5), (1, 90))
    ]
    with open_llm(folder, "disk", max_model_len=160, max_num_seqs=4, **settings) as llm:
        ((_, passes),) = watch(monkeypatch, runner_of(llm)).items()
        results = llm.generate(prompts, SamplingParams(max_new_tokens=n))
        assert_continued(results, model, prompts, n)
        assert (max(n_rows for _, n_rows in passes[2:]) > len(prompts)) == bool(settings)


def test_second_turn_computes_new_tokens_only(saved, steady, monkeypatch):
    """From the last turn's end or the last stored block border."""
    (model, folder), first = saved, prompt_of(1, 200, 150)
    with open_llm(folder, max_model_len=420) as llm:
        runner = runner_of(llm)
        passes = watch(monkeypatch, runner)[runner]
        answer = say(llm, first, 9)
        for shared, n_known, n_more in (
            (first + answer, 208, 40), (first[:195], 192, 60), (first[:170], 64, 3),
            (first[:60], 0, 60),
        ):  # fmt: skip
            passes.clear()
            prompt = shared + prompt_of(n_more, n_more, 150)
            assert say(llm, prompt, 5) == generate(model, prompt, 5)
            assert passes[0] == (n_known, len(prompt) - n_known)
        (cache,) = runner._caches.values()
        kept = [tensor for state in (cache.state, *cache._kept.values()) for tensor in state]
        spec = runner.spec
        planned = state_rows(spec, 4) * spec.kv_nbytes(4)
        assert sum(tensor.nbytes for tensor in kept) <= planned
        rows = llm.spec.memory.cache_rows * spec.kv_nbytes(4)
        rows += sum(shape.row_nbytes(4) for shape in spec.state_shapes)
        assert llm.plan.reserved.cache == planned + rows


@pytest.mark.parametrize("chunk_rows", [512, 48])
def test_samples_of_a_prompt_share_its_pass(saved, steady, monkeypatch, chunk_rows):
    """Without memory, each sequence computes its own prefix."""
    (model, folder), first = saved, prompt_of(1, 100, 150)
    batch = [
        first, first, first + prompt_of(2, 5, 150), first + prompt_of(2, 9, 150),
        first[:70] + prompt_of(3, 9, 150),
    ]  # fmt: skip
    expected = [generate(model, prompt, 6) for prompt in batch]
    layer = Runner.layers
    fails = iter([False] * 2 + [True])

    def failing(runner, blocks, *args):
        if next(fails, False):
            raise torch.OutOfMemoryError
        layer(runner, blocks, *args)

    with open_llm(folder, max_model_len=160, max_num_seqs=6) as llm:
        runner = runner_of(llm)
        runner._chunk_rows = chunk_rows
        passes = watch(monkeypatch, runner)[runner]
        (both,) = llm.generate(
            first, SamplingParams(max_new_tokens=6, n=2, temperature=1.0, top_k=1)
        )
        assert passes[0] == (0, 100 + 2)
        assert [output.token_ids for output in both.outputs] == expected[:2]
        for is_short in (False, True):
            llm.engine.reset_prefix_cache()
            passes.clear()
            if is_short:
                monkeypatch.setattr(Runner, "layers", failing)
            results = llm.generate(batch, SamplingParams(max_new_tokens=6))
            assert [result.token_ids for result in results] == expected
            assert passes[0] == (0, 100 + 2 + 6 + 5 + 9)
        assert passes[1] == (0, sum(map(len, batch)))
