"""Which model types of transformers run, and what the general way costs a pass beside the native
decoder.

    python -m bench.models [type ...]     each causal type: greedy tokens equal to `generate`, or
    refused and why python -m bench.models --part 1/8     an eighth of them python -m bench.models
    --cost         a Llama by both ways: host time of a layer, and a streamed pass

Write a tiny random float32 checkpoint of each type. Decode with default settings and empty caches,
then from the disk: without trees, with the trees of `recycle` and `ngram`, and with trees of a
draft model of the same type. The last line is one JSON object; the objects of all parts are in
bench/results/models.jsonl.
"""

import itertools
import json
import logging
import os
import tempfile
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench.measure import commit, flag_parser
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.errors import UserError
from offload_rt.executor.step import Step
from offload_rt.models import families
from offload_rt.models.families import spec_of
from offload_rt.tree.topology import Topology

N_PROMPT = 21
N_NEW = 40
# Of the multimodal types, those that have no causal class of their own.
TYPES = [
    *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "mistral3",
    "qwen3_vl",
    "qwen2_vl",
    "qwen2_5_vl",
    "glm4v",
]
SPREAD = 0.2

# What makes a model small, by the names that configs have for it.
SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64,
    "embedding_size": 64,
    "intermediate_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "d_ff": 96, "n_inner": 96,
    "dff": 96, "dim_ff": 96,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "dim_head": 16,
    "d_kv": 16,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 9999, "pad_token_id": 0,
    "sliding_window": 8, "query_pre_attn_scalar": 16, "rotary_dim": 8, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "ffn_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2,
    "top_k_experts": 2, "moe_top_k": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "n_group": 1,
    "ffn_hidden_size": 96, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_num_shared_experts": 1, "shared_intermediate_size": 32, "dense_intermediate_size": 96,
    "zero_expert_num": 2,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "qk_head_dim": 16,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160, "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "intermediate_size_mlp": 96,
    "attention_chunk_size": 512,
    "activation_dropout": 0.0, "attention_dropout": 0.0, "dropout": 0.0, "hidden_dropout": 0.0,
    "layerdrop": 0.0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "swa_head_dim": 16, "swa_v_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16, "vocab_size_per_layer": 160,
    "num_codebooks": 2,
}  # fmt: skip
# Of one type; None takes a size away, so that the type's own value stays.
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_NOT_SHARED = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_CONVOLUTIONS = {"layer_types": ["full_attention", "conv"] * 2}
_SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
        "longcat_flash"), _LATENT),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _NOT_SHARED),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "glm4v_text"), _SECTIONS),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2": _CONVOLUTIONS, "lfm2_moe": _CONVOLUTIONS,
    "youtu": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, **_LATENT},
    "zaya": {"num_experts_per_tok": 1}, "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
    "moshi": {"sliding_window": 512}, "mamba2": {"head_dim": ...},
    "phi4_multimodal": {"sliding_window": None},
}  # fmt: skip


_OF_WHOLE = {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}


def config_of(kind: str) -> PreTrainedConfig:
    """A small config of a type."""
    return _small(
        CONFIG_MAPPING[kind](), {**SIZES, **OF_TYPE.get(kind, {})}, tuple(OF_TYPE.get(kind, {}))
    )


def _small(
    config: PreTrainedConfig, sizes: dict[str, Any], forced: tuple[str, ...] = ()
) -> PreTrainedConfig:
    made = type(config)
    own = {**config.__dict__, **made.attribute_map}
    parts = {
        name: _small(own[name], {**sizes, **OF_TYPE.get(own[name].model_type, {})}).to_dict()
        for name in made.sub_configs
        if isinstance(own.get(name), PreTrainedConfig)
    }
    known = {name for name in sizes if name in own or name in forced}
    if not parts.keys().isdisjoint({"text_config", "decoder"}):
        known &= _OF_WHOLE
    return made(**{name: sizes[name] for name in known if sizes[name] is not ...}, **parts)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of any type whose every weight counts."""
    is_causal = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = (
        transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText
    )
    model = auto.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    for one in model.parameters():
        middle = float(one.dim() == 1 and bool(one.mean() == 1))
        one.data = middle + SPREAD * torch.randn(one.shape, generator=generator)
    return model


def generated(model: PreTrainedModel, prompt: list[int], n_new: int) -> list[int]:
    """The greedy continuation by transformers."""
    ids = torch.tensor([prompt])
    options = {
        "max_new_tokens": n_new,
        "min_new_tokens": n_new,
        "do_sample": False,
        "pad_token_id": 0,
    }
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, len(prompt) :
    ].tolist()


def outcome(kind: str, folder: Path) -> tuple[str, str]:
    """What becomes of a type: "equal", "refused" or another word, and how or why."""
    word = "no reference"  # unless transformers gets as far
    try:
        config = config_of(kind)
        spec_of(json.loads(config.to_json_string(use_diff=False)))
        model = random_model(config)
        prompt = torch.randint(
            3, 150, (N_PROMPT,), generator=torch.Generator().manual_seed(1)
        ).tolist()
        want = generated(model, prompt, N_NEW)
        model.save_pretrained(folder)
        word = "FAILED"
        return compared(model, folder, prompt, want)
    except UserError as refusal:
        return "refused", str(refusal)
    except Exception as error:
        return word, said(error)


def compared(
    model: PreTrainedModel, folder: Path, prompt: list[int], want: list[int]
) -> tuple[str, str]:
    """Whether a checkpoint gives the logits of its model and, in every way, this continuation."""
    if (off := tree_difference(model, folder, prompt)) > 1e-3:
        return "DIFFERS", f"logits of a tree, by {off:.1e} of the largest"
    greedy = SamplingParams(max_new_tokens=N_NEW, temperature=0.0)
    ways = {
        "plain": {"drafter": "none"},
        "recycle": {"drafter": "recycle"},
        "ngram": {"drafter": "ngram"},
    }
    ways["draft"] = {"draft_model": str(folder)}
    opened = {way: partial(open_streamed, folder, **settings) for way, settings in ways.items()}
    opened = {"default": partial(LLM, str(folder), device="cpu")} | opened
    for way, open_llm in opened.items():
        with open_llm() as llm:
            if llm.generate(prompt, greedy).pop().token_ids != want:
                return "DIFFERS", way
    return "equal", f"{len(set(want))} different tokens of {N_NEW}; logits within {off:.0e}"


@torch.no_grad()
def tree_difference(model: PreTrainedModel, folder: Path, prompt: list[int]) -> float:
    """The greatest difference of a logit of the nodes of a tree behind a prompt from transformers',
    by the largest logit.
    """
    parents = [-1, 0, 0, 1, 1, 2, 4, 6]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    drafted = torch.randint(
        3, 150, (len(parents),), generator=torch.Generator().manual_seed(2)
    ).tolist()
    with open_streamed(folder, drafter="none") as llm:
        runner = llm.engine.runner
        cache = runner.new_cache(len(prompt) + len(parents))
        for tokens, shape in (
            (prompt, Topology.chain(len(prompt))),
            (drafted, Topology(np.array(parents))),
        ):
            (logits,) = runner.forward(
                [Step(cache, torch.tensor(tokens), shape, len(tokens), len(prompt))]
            )
            runner.commit(cache, range(len(prompt)) if tokens is prompt else ())
    worst = []
    for node, path in enumerate(paths):
        ids = torch.tensor([prompt + [drafted[one] for one in path]])
        named = {
            "position_ids": torch.arange(ids.shape[1])[None],
            "attention_mask": torch.ones_like(ids),
        }
        want = model(ids, use_cache=False, **named).logits[0, -1].float()
        worst.append(float((logits[node] - want).abs().max() / want.abs().max()))
    return max(worst)


def said(error: Exception) -> str:
    """One line of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def open_streamed(folder: Path, **settings: Any) -> LLM:
    """An LLM whose layers all come from the disk."""
    settings = {"device": "cpu", "max_model_len": 128, **settings}
    settings |= {} if settings.get("drafter") == "none" else {"tree_size": 16}
    with LLM.open(EngineConfig(str(folder), **settings)) as unloaded:
        plan = unloaded.plan
    return LLM(str(folder), device_memory=plan.reserved.total + 2 * plan.slot_nbytes, **settings)


def sweep(kinds: list[str]) -> dict[str, Any]:
    """Prints what becomes of each type."""
    found: dict[str, Any] = {"transformers": transformers.__version__, "commit": commit()}
    for kind in kinds:
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.dict(os.environ, XDG_CACHE_HOME=f"{folder}/cache"),
        ):
            word, how = outcome(kind, Path(folder))
        found.setdefault(word, {})[kind] = how
        print(f"{kind:28s} {word:13s} {how}", flush=True)
    return found


def llama(folder: Path, **sizes: int) -> None:
    """A random Llama in bfloat16."""
    known = {
        name: one for name, one in SIZES.items() if name in transformers.LlamaConfig().__dict__
    }
    config = transformers.LlamaConfig(
        **{**known, "head_dim": 64, "max_position_embeddings": 2048, **sizes}
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def pass_seconds(folder: Path, n_rows: int, is_general: bool, is_streamed: bool) -> list[float]:
    """Of some passes, by the native decoder or the general way."""
    with ExitStack() as stack:
        if is_general:
            stack.enter_context(patch.dict(families.FAMILIES, clear=True))
        settings = {"drafter": "none", "device": "cpu", "max_model_len": 512}
        llm = stack.enter_context(
            open_streamed(folder, **settings) if is_streamed else LLM(str(folder), **settings)
        )
        return llm.time_passes(Topology.chain(n_rows), 200, 8)


def cost(n_rounds: int = 3) -> dict[str, Any]:
    """Prints host time of a layer, from a model in which nothing is to compute, and passes over the
    disk of a larger one.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
        llama(Path(small), num_hidden_layers=24)
        llama(
            Path(large), hidden_size=2048, intermediate_size=5632, num_hidden_layers=8,
            num_attention_heads=32,
            num_key_value_heads=8,
        )  # fmt: skip
        for n_rows in (1, 64):
            for folder, is_streamed in ((small, False), (large, True)):
                seconds: dict[bool, list[float]] = {False: [], True: []}
                for _, way in itertools.product(range(n_rounds), seconds):
                    seconds[way] += pass_seconds(Path(folder), n_rows, way, is_streamed)
                native, general = (median(seconds[way]) for way in (False, True))
                if is_streamed:
                    found[f"pass of {n_rows} rows, general / native"] = round(general / native, 3)
                else:
                    of_layer = {
                        way: 1e6 * one / 24
                        for way, one in (("native", native), ("general", general))
                    }
                    found[f"host us of a layer, {n_rows} rows"] = {
                        way: round(one) for way, one in of_layer.items()
                    }
    for name, value in found.items():
        print(f"{name}: {value}")
    return found


def main() -> None:
    """The command."""
    parser = flag_parser(__doc__)
    parser.add_argument("types", nargs="*", help="model types; all where none is given")
    parser.add_argument("--part", default="1/1", help="which part of all types")
    parser.add_argument(
        "--cost", action="store_true", help="measure the general way beside the native decoder"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    part, n_parts = map(int, args.part.split("/"))
    print(json.dumps(cost() if args.cost else sweep(args.types or TYPES[part - 1 :: n_parts])))


if __name__ == "__main__":
    main()
