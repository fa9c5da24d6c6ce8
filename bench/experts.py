"""What does streaming the experts that a pass touches save against streaming whole layers?

`python -m bench.experts` writes two mixtures of random weights, one as Mixtral (8 experts of which a token takes 2) and one as
Qwen3-MoE (128, of which it takes 8), and decodes both ways in a quarter of their memory, in turn, over a link of a set speed;
the tokens, which are drawn by a seed, must be the same. Routers of random weights take every expert about equally often,
whatever came before: the worst case for what is kept. The floor is what the link needs for the bytes that came. The last line
is one JSON object.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from bench.lossless import PacedDisk
from bench.measure import Spread, commit, machine
from bench.paced import PacedLink
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, format_size, parse_size
from offload_rt.weights.checkpoint import Checkpoint

_SHAPE = {
    "vocab_size": 1024, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None, "dtype": "bfloat16",
}  # fmt: skip
_WAYS = ("whole layers", "touched experts")


def configs(nbytes: int) -> dict[str, PreTrainedConfig]:
    """Models of about so many bytes."""

    def n_layers(n_experts: int, width: int) -> int:
        return max(round(nbytes / (n_experts * 3 * width * _SHAPE["hidden_size"] * 2)), 2)

    fine = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 384, "intermediate_size": 384}
    return {
        "mixtral": MixtralConfig(**_SHAPE, intermediate_size=3584, num_hidden_layers=n_layers(8, 3584)),
        "qwen3_moe": Qwen3MoeConfig(**_SHAPE, **fine, num_hidden_layers=n_layers(128, 384)),
    }


def open_paced(folder: Path, way: str, memory: int, gbps: float) -> LLM:
    """A model whose layers and experts come over one link."""
    config = EngineConfig(str(folder), device="cpu", drafter="none", device_memory=memory, max_model_len=64)
    with ExitStack() as stack:
        if way == _WAYS[0]:
            stack.enter_context(patch.object(Checkpoint, "by_expert", lambda _: None))
        llm = LLM.open(config)
    plan, link = llm.engine_plan, PacedLink(gbps)
    assert (plan.experts is None) == (way == _WAYS[0])
    experts = plan.experts and replace(plan.experts, tier=PacedDisk(plan.experts.tier, link))
    llm.engine_plan = replace(plan, disk=PacedDisk(plan.disk, link), experts=experts)
    llm.load()
    return llm


def measure(folder: Path, flags: argparse.Namespace) -> dict[str, object]:
    """Seconds per token and bytes per pass both ways, in turn."""
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    moved: dict[str, list[float]] = {way: [] for way in _WAYS}
    prompts = torch.randint(1024, (flags.rounds + 1, 4), generator=torch.Generator().manual_seed(0)).tolist()
    with ExitStack() as stack:
        llms = {way: stack.enter_context(open_paced(folder, way, flags.memory, flags.gbps)) for way in _WAYS}
        for n, prompt in enumerate(prompts):
            texts, params = [], SamplingParams(max_new_tokens=flags.tokens, temperature=1.0, seed=n)
            for way, llm in llms.items():
                meter, started = llm.engine.runner.streamer.meter, time.perf_counter()
                before = meter.read()[0]
                output = llm.generate(prompt, params)[0]
                seconds[way].append((time.perf_counter() - started) / output.stats.n_passes)
                moved[way].append((meter.read()[0] - before) / output.stats.n_passes)
                texts.append(output.token_ids)
            assert texts[0] == texts[1], "both ways give the same tokens"
        slots = llms[_WAYS[1]].plan
    found: dict[str, object] = {}
    for way in _WAYS:
        time_s, nbytes = Spread.of(seconds[way][1:]), Spread.of(moved[way][1:])  # the first round fills the slots
        floor = nbytes.median / flags.gbps / 1e9
        print(
            f"{way:16s} {time_s} s per token; {format_size(int(nbytes.median))} a pass, {time_s.median / floor:.2f} of it"
        )
        found[way] = {"seconds": asdict(time_s), "nbytes": nbytes.median, "over_floor": time_s.median / floor}
    ratio = Spread.of([b / a for a, b in zip(*(seconds[way][1:] for way in _WAYS), strict=True)])
    print(f"touched / whole  {ratio}; {slots.n_expert_slots} of {slots.experts.n_blocks} experts kept")
    return found | {"ratio": asdict(ratio)}


def main() -> None:
    """Print both models and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("3GB"))
    parser.add_argument("--memory", type=parse_size, default=parse_size("0.75GB"))
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--kinds", default="qwen3_moe,mixtral")
    parser.add_argument("--folder", help="of the models while they are needed; default: that of temporary files")
    flags = parser.parse_args()
    print(f"{machine()}; commit {commit()}; a link of {flags.gbps} GB/s")
    results: dict[str, object] = {"machine": machine(), "commit": commit(), "gbps": flags.gbps}
    for kind in flags.kinds.split(","):
        config = configs(flags.size)[kind]
        with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            print(f"\n## {kind}: {config.num_hidden_layers} layers, {format_size(flags.memory)} of memory")
            results[kind] = measure(Path(folder), flags)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
