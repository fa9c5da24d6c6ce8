"""Pipelines of ranks give the tokens of one rank, with any tiers of the ranks."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.heads import few_tokens, write_head
from support.programs import started
from support.tiny import generate, open_llm, prompt_of

from offload_rt import LLM
from offload_rt.config import EngineConfig
from offload_rt.cost.pass_times import ComputeTimes
from offload_rt.engine import ranks_spec
from offload_rt.errors import SettingsError
from offload_rt.parallel.pipeline_model import divide_layers

pytestmark = pytest.mark.numeric
_SCRIPT = """
import json, os, sys
import torch
from offload_rt import LLM, SamplingParams
from offload_rt.executor import runner
from offload_rt.cost.pass_times import (ComputeTimes)
settings, prompts, params, n_parts = json.loads(sys.argv[1])
runner.CHUNK_ROWS = 64
# Ranks divide the cores; sums with different thread counts round differently.
os.sched_getaffinity = lambda _: {0}
torch.set_num_threads(1)
if n_parts:
    ComputeTimes.n_parts = lambda self, n_rows, n_stages: min(n_rows, n_parts)
with LLM(device="cpu", **settings) as llm:
    for seed in (0, 1):
        sampling = SamplingParams(max_tokens=12, logprobs=3, seed=seed, ignore_eos=True, **params)
        for output in llm.generate(prompts, sampling):
            print(json.dumps([output.token_ids, output.prompt_logprobs, output.logprobs]))
    print(json.dumps(llm.plan.tiers), file=sys.stderr)
"""


def _said(folder: Path, n: int, settings: dict, prompts: list, n_parts: int = 0, **params: object):
    """Return the output of ranks and the tiers of rank 0; `n_parts` fixes the parts of a pass."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    settings = settings | ({"pipeline": n} if n > 1 else {})
    arguments = [json.dumps([settings, prompts, params, n_parts])]
    with started(str(script), arguments, folder, n) as ranks:
        assert [rank.code() for rank in ranks] == [0] * n, [rank.err[-2000:] for rank in ranks]
        assert not any(rank.out for rank in ranks[1:])
        return ranks[0].out, json.loads(ranks[0].err.splitlines()[-1])


def test_streamed_pipeline_equals_one_rank_bit_for_bit(zoo, tmp_path):
    """Read all rows of a prompt of three chunks beside a short prompt."""
    settings = {"model": str(zoo.directory("llama-tied", 0)), "drafter": "none"}
    settings |= {"max_num_seqs": 2, "max_model_len": 180}
    with LLM.open(EngineConfig(**settings, device="cpu")) as whole:
        little = {"device_memory": whole.plan.reserved.total + whole.plan.slot_nbytes}
    prompts = [prompt_of(0, 150), prompt_of(1, 30)]
    params = {"temperature": 0.8, "prompt_logprobs": 0}
    text, tiers = _said(tmp_path / "several", 2, settings | little, prompts, **params)
    assert text == _said(tmp_path / "one", 1, settings, prompts, **params)[0]
    assert len(text.splitlines()) == 4 and "disk" in tiers


def test_pipeline_with_draft_model_gives_the_targets_tokens(pair, tmp_path):
    """The draft is on rank 0; rows of a tree pass in three parts."""
    settings = {"model": str(pair.target), "draft_model": str(pair.draft)}
    settings |= {"max_model_len": 128, "tree_size": 8}
    text, tiers = _said(tmp_path / "ranks", 2, settings, [prompt_of(0)], 3, temperature=0)
    expected = generate(pair.model, prompt_of(0), 12)
    assert [json.loads(line)[0] for line in text.splitlines()] == [expected] * 2
    assert {*tiers} == {"device"}


def test_pipeline_requires_as_many_ranks(zoo):
    with pytest.raises(SettingsError, match="has 1 started, and 6 layers; start it by"):
        LLM(str(zoo.directory("llama", 0)), device="cpu", pipeline=2)


@pytest.mark.parametrize("kind", ["eagle", "peagle", "block"])
def test_heads_of_hidden_states_are_refused_with_a_pipeline(tmp_path, monkeypatch, kind):
    few_tokens().save_pretrained(tmp_path / "target")
    settings = write_head(tmp_path / "head", tmp_path / "target", kind).settings
    two_ranks = SimpleNamespace(rank=0, size=2, n_local=2)
    monkeypatch.setattr(ranks_spec, "joined", lambda: two_ranks)
    with pytest.raises(SettingsError, match=f'drafter="{kind}" with pipeline: needs a drafter'):
        open_llm(pipeline=2, **settings)


@pytest.mark.parametrize("n_stages", [2, 4])
def test_pipeline_parts_minimise_the_pass_time(n_stages):
    """Reading the weights takes as long as computing 50 rows."""
    times = ComputeTimes((1, 512), (64, 128), ((51.0, 562.0), (51.0, 562.0)))

    def seconds(n_rows: int, n_parts: int) -> float:
        ends = [0.0] * n_stages  # of the last part in each stage
        for _ in range(n_parts):
            for stage in range(n_stages):
                ends[stage] = (
                    max(ends[stage], ends[stage - 1] if stage else 0.0)
                    + (50 + n_rows / n_parts) / n_stages
                )
        return ends[-1]

    pipelined = times.pipelined(n_stages)
    falling = ComputeTimes((1, 8), (64, 128), ((2.0, 1.0), (2.0, 1.0)))
    assert falling.n_parts(500, n_stages) >= 1  # as a line through noise may
    for n_rows in (1, 16, 64, 512):
        best = min(seconds(n_rows, n) for n in range(1, min(n_rows, 16) + 1))
        chosen = seconds(n_rows, times.n_parts(n_rows, n_stages))
        assert best <= chosen <= 1.05 * best
        if n_rows in times.widths:
            assert pipelined.at(np.array([n_rows]), 64)[0] == pytest.approx(chosen)
    assert times.n_parts(1, n_stages) == 1 < times.n_parts(512, n_stages)


@pytest.mark.parametrize("seed", range(20))
def test_layer_division_minimises_the_fullest_rank(seed):
    chance = np.random.default_rng(seed)
    n = int(chance.integers(3, 9))
    n_ranks = int(chance.integers(1, 4))
    sizes = chance.integers(1, 10, n).tolist()
    rooms = chance.integers(1, 30, n_ranks).tolist()
    parts = divide_layers(sizes, rooms)

    def load(stops: tuple[int, ...]) -> float:
        ranges = itertools.pairwise((0, *stops, n))
        return max(sum(sizes[a:b]) / room for (a, b), room in zip(ranges, rooms, strict=True))

    best = min(load(stops) for stops in itertools.combinations(range(1, n), n_ranks - 1))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == n
    assert load(tuple(part.stop for part in parts[:-1])) == pytest.approx(best)
