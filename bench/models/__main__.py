"""Which model types of transformers run, and how much slower are traced than native models?

    python -m bench.models [TYPE ...] [--part 1/8]    greedy tokens equal to `generate`, or refused
    python -m bench.models --cost                     a Llama by both ways

Write a tiny random float32 checkpoint of each causal type. Decode resident with default settings,
then streamed: plain, with the drafters `recycle` and `ngram`, and with a draft model of the same
type. bench/results/models.jsonl contains the results of all parts.
"""

import itertools
import json
import logging
import tempfile
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from bench.common.checkpoints import no_pair_stats
from bench.common.measure import Benchmark
from bench.models.tiny import SIZES, config_of, open_streamed, random_model
from offload_rt import LLM, SamplingParams
from offload_rt.errors import UserError
from offload_rt.executor.step import Step
from offload_rt.models import families
from offload_rt.models.families import parse_architecture
from offload_rt.tree.topology import Topology

N_PROMPT = 21
N_NEW = 40
# Causal types, and multimodal types without a causal class.
_MULTIMODAL = ("mistral3", "qwen3_vl", "qwen2_vl", "qwen2_5_vl", "glm4v")
TYPES = [*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_MULTIMODAL]


def generated(model: PreTrainedModel, prompt: list[int], n_new: int) -> list[int]:
    """Return the greedy continuation of transformers."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return output[0, len(prompt) :].tolist()


def random_tokens(n: int, seed: int) -> list[int]:
    """Draw n token ids."""
    return torch.randint(3, 150, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def outcome(kind: str, folder: Path) -> tuple[str, str]:
    """Test a type. Return "equal", "refused" or another verdict, and the reason."""
    verdict = "no reference"  # unless transformers generates
    try:
        config = config_of(kind)
        parse_architecture(json.loads(config.to_json_string(use_diff=False)))
        model = random_model(config)
        prompt = random_tokens(N_PROMPT, 1)
        expected = generated(model, prompt, N_NEW)
        model.save_pretrained(folder)
        verdict = "FAILED"
        return compared(model, folder, prompt, expected)
    except UserError as refusal:
        return "refused", str(refusal)
    except Exception as error:
        return verdict, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def compared(
    model: PreTrainedModel, folder: Path, prompt: list[int], expected: list[int]
) -> tuple[str, str]:
    """Compare the logits of a tree, and the greedy tokens of every way, with transformers."""
    if (difference := tree_difference(model, folder, prompt)) > 1e-3:
        return "DIFFERS", f"logits of a tree, by {difference:.1e} of the largest"
    greedy = SamplingParams(max_new_tokens=N_NEW, temperature=0.0)
    ways: dict[str, Any] = {"default": partial(LLM, str(folder), device="cpu")}
    for name in ("none", "recycle", "ngram"):
        ways[name] = partial(open_streamed, folder, drafter=name)
    ways["draft model"] = partial(open_streamed, folder, draft_model=str(folder))
    for name, open_llm in ways.items():
        with open_llm() as llm:
            if llm.generate(prompt, greedy).pop().token_ids != expected:
                return "DIFFERS", name
    n_distinct = len(set(expected))
    return "equal", f"{n_distinct} different tokens of {N_NEW}; logits within {difference:.0e}"


@torch.no_grad()
def tree_difference(model: PreTrainedModel, folder: Path, prompt: list[int]) -> float:
    """Return the maximum difference of logits at tree nodes, relative to the largest logit."""
    parents = [-1, 0, 0, 1, 1, 2, 4, 6]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    drafted = random_tokens(len(parents), 2)
    with open_streamed(folder, drafter="none") as llm:
        runner = llm.engine.runner
        cache = runner.new_cache(len(prompt) + len(parents))
        trees = (Topology.chain(len(prompt)), Topology(np.array(parents)))
        for tokens, topology in zip((prompt, drafted), trees, strict=True):
            step = Step(cache, torch.tensor(tokens), topology, len(tokens), len(prompt))
            (logits,) = runner.forward([step])
            runner.commit(cache, range(len(prompt)) if tokens is prompt else ())
    worst = []
    for node, path in enumerate(paths):
        ids = torch.tensor([prompt + [drafted[i] for i in path]])
        positions = torch.arange(ids.shape[1])[None]
        visible = torch.ones_like(ids)
        output = model(ids, use_cache=False, position_ids=positions, attention_mask=visible)
        expected = output.logits[0, -1].float()
        worst.append(float((logits[node] - expected).abs().max() / expected.abs().max()))
    return max(worst)


def sweep(kinds: list[str]) -> dict[str, Any]:
    """Print the verdict of each type."""
    verdicts: dict[str, Any] = {"transformers": transformers.__version__}
    for kind in kinds:
        with no_pair_stats(), tempfile.TemporaryDirectory() as folder:
            verdict, reason = outcome(kind, Path(folder))
        verdicts.setdefault(verdict, {})[kind] = reason
        print(f"{kind:28s} {verdict:13s} {reason}", flush=True)
    return verdicts


def write_llama(folder: Path, **sizes: int) -> None:
    """Write a random Llama in bfloat16."""
    defaults = transformers.LlamaConfig().__dict__
    small = {name: value for name, value in SIZES.items() if name in defaults}
    more = {"head_dim": 64, "max_position_embeddings": 2048, **sizes}
    config = transformers.LlamaConfig(**{**small, **more})
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def pass_seconds(folder: Path, n_rows: int, is_traced: bool, is_streamed: bool) -> list[float]:
    """Time passes of the native decoder or of the traced model."""
    settings = {"drafter": "none", "device": "cpu", "max_model_len": 512}
    open_llm = open_streamed if is_streamed else lambda path, **more: LLM(str(path), **more)
    with patch.dict(families.FAMILIES, clear=is_traced), open_llm(folder, **settings) as llm:
        return llm.time_passes(Topology.chain(n_rows), 200, 8)


def cost(n_rounds: int = 3) -> dict[str, Any]:
    """Print the host time of a layer without work, and streamed passes of a larger model."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
        write_llama(Path(small), num_hidden_layers=24)
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8}
        write_llama(Path(large), **sizes, **heads)
        for n_rows, is_streamed in itertools.product((1, 64), (False, True)):
            folder = Path(large if is_streamed else small)
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for _, is_traced in itertools.product(range(n_rounds), seconds):
                seconds[is_traced] += pass_seconds(folder, n_rows, is_traced, is_streamed)
            native, traced = (median(seconds[is_traced]) for is_traced in (False, True))
            if is_streamed:
                result[f"pass of {n_rows} rows, traced / native"] = round(traced / native, 3)
            else:
                us = {"native": round(1e6 * native / 24), "traced": round(1e6 * traced / 24)}
                result[f"host us of a layer, {n_rows} rows"] = us
    for name, value in result.items():
        print(f"{name}: {value}")
    return result


def main() -> None:
    """Test types or measure costs."""
    bench = Benchmark("models", __doc__)
    bench.add("types", nargs="*", help="model types; default: all")
    bench.add("--part", default="1/1", help="part of all types")
    bench.add("--cost", action="store_true", help="compare traced with native models")
    flags = bench.start()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    part, n_parts = map(int, flags.part.split("/"))
    types = flags.types or TYPES[part - 1 :: n_parts]
    bench.finish(**(cost() if flags.cost else sweep(types)))


if __name__ == "__main__":
    main()
