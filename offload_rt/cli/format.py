"""Placement tables and the closing report of a run."""

import os
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from offload_rt.config import EngineConfig, SamplingParams, format_size
from offload_rt.cost.pass_times import PassBytes, transfer_s
from offload_rt.offload.placement import Plan
from offload_rt.system.progress import loading_bar

if TYPE_CHECKING:  # A plan does not need them, and importing them lasts seconds.
    from offload_rt.llm import LLM, Stats
    from offload_rt.system.trace import Trace


def load(llm: "LLM", console: Console, trace: "Trace", params: SamplingParams) -> None:
    """Load a model with a progress bar, and print its notices."""
    with loading_bar(console) as bar:
        llm.load(trace, bar)
    defaults = ", ".join(
        f"{name} {x}" for name, x in params.left_to(llm.get_default_sampling_params()).items()
    )
    sampling = f"from generation_config.json: {defaults}" if defaults else ""
    for notice in filter(None, (llm.spec.notice, llm.engine.notice, sampling)):
        console.print(notice, highlight=False, soft_wrap=True)


def follow(config: EngineConfig) -> None:
    """Worker loop for ranks > 0; the first rank alone reads prompts, serves and prints."""
    from offload_rt.llm import LLM

    with LLM.open(config) as llm:
        llm.load()


def placement_table(title: str, plan: Plan, cache_rows: int) -> Table:
    """Return the placement as a table."""
    table = Table(title=title.replace("torch.", ""))
    table.add_column("item")
    table.add_column("where")
    table.add_column("size", justify="right")
    reserved = plan.reserved
    split = plan.split
    n_rows = cache_rows if split is None else split.n_on_device
    on_device = {
        "embedding, last norm, head": reserved.non_layer,
        f"cache of {n_rows} tokens{'' if split is None else ', its slots'}": reserved.cache,
        "activations": reserved.scratch,
        "draft model, its cache and distributions": reserved.draft,
        "4-bit copies of the other layers": plan.copies_nbytes,
        "reserved for libraries": reserved.libraries,
        "CUDA graphs": reserved.graphs,
        f"{plan.n_slots} slots": plan.n_slots * plan.slot_nbytes,
        f"{plan.n_expert_slots} experts of {plan.experts.n_blocks if plan.experts else 0}": (
            reserved.experts
        ),
        "buffers of lossless weights": plan.link.buffer if plan.n_slots else 0,
    }
    for item, nbytes in on_device.items():
        if nbytes:
            table.add_row(item, "device", format_size(nbytes))
    if split is not None:
        offloaded = split.n_blocks * split.block_nbytes * len(plan.tiers)
        table.add_row(f"cache of {split.n_offloaded} tokens", plan.kv_tier, format_size(offloaded))
    for tier in ("device", "host", "disk"):
        if plan.tiers.count(tier):
            table.add_row(
                f"{plan.tiers.count(tier)} of {len(plan.tiers)} layers",
                tier,
                format_size(plan.on(tier)),
            )
    if plan.n_host_slots:
        table.add_row(
            f"{plan.n_host_slots} slots",
            "host",
            format_size(plan.n_host_slots * plan.host_slot_nbytes),
        )
    used = f"{format_size(plan.device_nbytes)} of {format_size(plan.budget.device)}"
    table.add_row("used of the budget", "device", used, end_section=True)
    return table


def quiet_libraries() -> None:
    """Restrict transformers' log to errors; its warnings quote arbitrary config contents."""
    # transformers reads the variable when it loads.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def print_table(table: Table) -> None:
    """Print to stdout. Raises OSError for a closed pipe, where rich would exit."""
    console = Console()
    with console.capture() as captured:
        console.print(table)
    print(captured.get(), end="", flush=True)


def report(stats: "Stats", moved: PassBytes, plain_s: float | None = None) -> str:
    """Return the closing report.

    plain_s  measured seconds of a pass of plain decoding; None if not measured
    """
    lines = [
        f"{stats.n_tokens} tokens in {stats.seconds:.2f} s ({stats.prefill_seconds:.2f} s of it the"
        f" first pass): {stats.seconds_per_token:.3f} s per token, {stats.tokens_per_pass:.2f}"
        " tokens per pass"
    ]
    if stats.measured_seconds_per_token is not None and stats.nodes_per_tree > 1:
        lines.append(
            f"trees of {stats.nodes_per_tree:.0f} nodes on {stats.levels_per_tree:.1f} levels;"
            f" after the first pass {stats.measured_seconds_per_token:.3f} s per token,"
            f" {stats.predicted_seconds_per_token:.3f} s predicted; drafting"
            f" {stats.draft_seconds / stats.seconds:.0%} of the time, verifying"
            f" {stats.verify_seconds / stats.seconds:.0%}, waiting for a layer"
            f" {stats.wait_seconds / stats.seconds:.0%}"
        )
    if plain_s is not None and stats.measured_seconds_per_token is not None:
        lines.append(
            f"a pass of plain decoding takes {plain_s:.3f} s (measured): "
            f"{plain_s / stats.measured_seconds_per_token:.2f} times faster"
        )
    lines.append(_link_line(stats, moved))
    return "\n".join(lines)


def _link_line(stats: "Stats", moved: PassBytes) -> str:
    streamed = sum(nbytes for _, nbytes in moved.streamed)
    if moved.rows is not None:  # The number of KV rows depends on the context lengths.
        streamed = stats.link_bytes // stats.n_passes
    if not streamed or not stats.link_gbps:
        return "all weights resident: nothing crossed a link"
    floor = transfer_s(streamed, stats.link_gbps) / stats.tokens_per_pass
    return (
        f"{streamed / 1e9:.2f} GB per pass at {stats.link_gbps:.2f} GB/s, link busy"
        f" {stats.link_busy:.0%} of the time; floor at this rate {floor:.3f} s per token"
    )
