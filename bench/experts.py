"""What does streaming the experts that a pass touches save against streaming whole layers?

`python -m bench.experts` writes two mixtures of random weights, one as Mixtral (8 experts of which
a token takes 2) and one as Qwen3-MoE (128, of which it takes 8), and decodes both ways in a quarter
of their memory, in turn, over a link of a set speed; the tokens, which are drawn by a seed, must be
the same. Routers of random weights take every expert about equally often, whatever came before: the
worst case for what is kept. The floor is what the link needs for the bytes that came.

`--host` compares others: touched experts that lie in memory behind such a link, all of them moved,
or those computed there that are there sooner, by a thread of its own. What plays the device
computes on another one. The last line is one JSON object.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from bench.measure import Spread, commit, flag_parser, machine, print_result
from bench.paced import PacedTier, pace
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, format_size, parse_size
from offload_rt.offload.host_experts import HostExperts
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.tier import read_parallel
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import PackedLayer, host_block

_SHAPE = {
    "vocab_size": 1024, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None, "dtype": "bfloat16",
}  # fmt: skip
_WAYS = ("whole layers", "touched experts")
_HOST_WAYS = ("always moved", "host computes")


def configs(nbytes: int) -> dict[str, PreTrainedConfig]:
    """Models of about so many bytes."""

    def n_layers(n_experts: int, width: int) -> int:
        return max(round(nbytes / (n_experts * 3 * width * _SHAPE["hidden_size"] * 2)), 2)

    fine = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "intermediate_size": 384,
    }
    return {
        "mixtral": MixtralConfig(
            **_SHAPE, intermediate_size=3584, num_hidden_layers=n_layers(8, 3584)
        ),
        "qwen3_moe": Qwen3MoeConfig(**_SHAPE, **fine, num_hidden_layers=n_layers(128, 384)),
    }


def open_paced(folder: Path, way: str, memory: int, gbps: float) -> LLM:
    """A model whose layers and experts come over one link."""
    config = EngineConfig(
        str(folder), device="cpu", drafter="none", device_memory=memory, max_model_len=64
    )
    with ExitStack() as stack:
        if way == _WAYS[0]:
            stack.enter_context(patch.object(Checkpoint, "by_expert", lambda _: None))
        llm = LLM.open(config)
    assert (llm.spec.files.experts is None) == (way == _WAYS[0])
    pace(llm, gbps)
    llm.load()
    return llm


def open_beside_host(folder: Path, way: str, memory: int, gbps: float) -> LLM:
    """A model whose experts lie in memory behind a link, where a thread may compute them."""
    llm = LLM.open(
        EngineConfig(
            str(folder), device="cpu", drafter="none", device_memory=memory, max_model_len=64
        )
    )
    files = llm.spec.files
    plan = llm.plan
    images = MemoryTier()
    assert files.experts is not None and plan.experts is not None
    with closing(files.experts.tier) as tier:
        for i in range(len(files.experts.records)):
            images.put(i, PackedLayer(host_block(tier.layout(i).nbytes), tier.layout(i)))
            read_parallel(tier.reads(i, images.image(i).block), tier.n_parallel)
    experts = replace(files.experts, tier=PacedTier(images, gbps))
    llm.spec = replace(llm.spec, files=replace(files, experts=experts))
    llm.load()
    runner = llm.engine.runner
    copy_s = plan.experts.nbytes / gbps / 1e9
    view = partial(runner.format.view, dtype=runner.dtype)
    host = runner.experts.host = HostExperts(
        images, view, copy_s, runner.device, torch.get_num_threads()
    )
    host.is_on = way == _HOST_WAYS[1]
    return llm


def measure(folder: Path, flags: argparse.Namespace) -> dict[str, object]:
    """Seconds per token and bytes per pass both ways, in turn."""
    ways, open_way = (_HOST_WAYS, open_beside_host) if flags.host else (_WAYS, open_paced)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    moved: dict[str, list[float]] = {way: [] for way in ways}
    prompts = torch.randint(
        1024, (flags.rounds + 1, 4), generator=torch.Generator().manual_seed(0)
    ).tolist()
    with ExitStack() as stack:
        llms = {
            way: stack.enter_context(open_way(folder, way, flags.memory, flags.gbps))
            for way in ways
        }
        for n, prompt in enumerate(prompts):
            texts = []
            params = SamplingParams(max_new_tokens=flags.tokens, temperature=1.0, seed=n)
            for way, llm in llms.items():
                meter = llm.engine.runner.streamer.meter
                started = time.perf_counter()
                before = meter.read()[0]
                output = llm.generate(prompt, params)[0]
                seconds[way].append((time.perf_counter() - started) / output.stats.n_passes)
                moved[way].append((meter.read()[0] - before) / output.stats.n_passes)
                texts.append(output.token_ids)
            assert texts[0] == texts[1], "both ways give the same tokens"
        slots = llms[ways[1]].plan
        host = llms[ways[1]].engine.runner.experts.host
    found: dict[str, object] = {}
    if host is not None:
        found["host_s"] = host.times.seconds
        found["copy_s"] = host.copy_s
        print(
            f"an expert: {host.copy_s:.5f} s on the link, {host.times.seconds} s on the host with"
            f" {host.times.widths} rows"
        )
    for way in ways:
        # the first round fills the slots
        time_s, nbytes = Spread.of(seconds[way][1:]), Spread.of(moved[way][1:])
        floor = nbytes.median / flags.gbps / 1e9
        print(
            f"{way:16s} {time_s} s per token; {format_size(int(nbytes.median))} a pass,"
            f" {time_s.median / floor:.2f} of it"
        )
        found[way] = {
            "seconds": asdict(time_s),
            "nbytes": nbytes.median,
            "over_floor": time_s.median / floor,
        }
    ratio = Spread.of([b / a for a, b in zip(*(seconds[way][1:] for way in ways), strict=True)])
    print(
        f"{ways[1]} / {ways[0]}  {ratio}; {slots.n_expert_slots} of {slots.experts.n_blocks}"
        " experts kept"
    )
    return found | {"ratio": asdict(ratio)}


def main() -> None:
    """Print both models and one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--size", type=parse_size, default=parse_size("3GB"))
    parser.add_argument("--memory", type=parse_size, default=parse_size("0.75GB"))
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument(
        "--host",
        action="store_true",
        help="compare moving experts with computing some where they lie",
    )
    parser.add_argument("--kinds", default="qwen3_moe,mixtral")
    parser.add_argument(
        "--folder", help="of the models while they are needed; default: that of temporary files"
    )
    flags = parser.parse_args()
    print(f"{machine()}; commit {commit()}; a link of {flags.gbps} GB/s")
    results: dict[str, object] = {}
    for kind in flags.kinds.split(","):
        config = configs(flags.size)[kind]
        with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            print(
                f"\n## {kind}: {config.num_hidden_layers} layers, {format_size(flags.memory)} of"
                " memory"
            )
            results[kind] = measure(Path(folder), flags)
    print_result("experts", flags, **results)


if __name__ == "__main__":
    main()
