"""`offload-rt calibrate`: measure a pair of models on this machine, for later runs.

The command continues a few prompts to learn acceptance, times passes of several row counts, and
prints the predicted seconds per token by tree size and depth, and the best tree by context and
number of sequences.
"""

import io
import json
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offload_rt.cli.flags import Parser, engine_config, from_flags
from offload_rt.cli.process import command
from offload_rt.cli.run import read_input
from offload_rt.config import EngineConfig, check_folder, check_settings, setting
from offload_rt.cost.pass_times import transfer_s
from offload_rt.cost.tree_size import DraftLimits, sizes_up_to
from offload_rt.errors import CacheError, PromptError, SettingsError
from offload_rt.sampling_params import SamplingParams
from offload_rt.system.files import write_atomically

if TYPE_CHECKING:
    from offload_rt.cost.estimator import CostEstimator
    from offload_rt.llm import LLM

_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
_DEPTHS = (1, 2, 4, 6, 8, 12, 16, 24)
_BATCHES = (1, 2, 4, 8, 16)
_CONTEXTS = (128, 512, 2048, 8192, 32768, 131072)
_PROMPTS = (
    "def read_lines(path, encoding='utf-8'):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    "    def _check_closed(self):\n        if self.closed:\n",
)


@dataclass(frozen=True)
class CalibrateSettings:
    """Prompts to learn from, and output formats."""

    prompt_file: str | None = setting(
        None, "file of prompts, separated by empty lines; default: a few lines of code"
    )
    temperature: float = setting(0.0, "sampling temperature")
    tokens: int = setting(96, "tokens generated per prompt", least=1)
    plot: str | None = setting(None, "PNG file for plots; needs matplotlib")
    json: bool = setting(False, "print one JSON object instead of the table")

    def __post_init__(self) -> None:
        check_settings(self)
        SamplingParams(temperature=self.temperature)


@dataclass(frozen=True)
class Optimum:
    """Tree with the least time per token, for `batch` sequences of `context` tokens in a pass.

    token_s  seconds per token of all sequences together
    plain_s  seconds per token without trees
    """

    batch: int
    context: int
    n_nodes: int
    n_levels: int
    token_s: float
    plain_s: float


@dataclass(frozen=True)
class Findings:
    """Measurements and the predictions derived from them.

    acceptance  (ranks,) acceptance probability by sibling rank
    widths      (m,) rows of a pass
    pass_s      (m,) seconds of a pass, predicted from link and compute
    compute_s   (m,) seconds of compute, measured
    link_s      seconds of the slowest link per pass
    level_s     seconds per draft level
    cost        (sizes, depths) seconds per token of the best tree, NaN for impossible trees
    best        size, levels and seconds per token of the best tree
    optima      best trees, by number of sequences and context
    """

    acceptance: NDArray[np.float64]
    widths: NDArray[np.int64]
    pass_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    link_s: float
    level_s: float
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    cost: NDArray[np.float64]
    best: tuple[int, int, float]
    optima: tuple[Optimum, ...]


new_parser = partial(
    Parser,
    "offload-rt calibrate",
    "Measure a pair of models on this machine, and save the results for later runs.",
    EngineConfig,
    CalibrateSettings,
    examples=(
        "offload-rt calibrate DIR --draft-model DIR",
        "offload-rt calibrate DIR --draft-model DIR --device-memory 10GiB --plot curve.png",
    ),
)


@command(new_parser)
def main(flags: Namespace) -> None:
    """Run the command."""
    settings = from_flags(CalibrateSettings, flags)
    config = engine_config(flags)
    if config.draft_model is None:
        raise SettingsError("calibrate", need="a draft model", change="set --draft-model")
    if config.tree_size == 1:
        change = "raise --tree-size above 1"
        raise SettingsError("calibrate", need="trees of several nodes", change=change)
    if settings.plot is not None:
        if find_spec("matplotlib") is None:
            change = "pip install matplotlib"
            raise SettingsError("--plot", need="matplotlib", have="none", change=change)
        check_folder("--plot", settings.plot)
    prompts: Sequence[str] = _PROMPTS
    if (path := settings.prompt_file) is not None:
        paragraphs = read_input("--prompt-file", path).split("\n\n")
        prompts = [text for text in paragraphs if text.strip()]
        if not prompts:
            raise PromptError(f"--prompt-file {path} is empty", change="write a prompt into it")
    # Only static trees have an expected number of tokens before drafting.
    static = replace(config, drafter="static_tree", rule="auto")
    from offload_rt.llm import LLM

    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheError)
        if config.drafter != "static_tree":
            with LLM.from_config(config) as llm:
                _generate(llm, settings, prompts)
        with LLM.from_config(static) as llm:
            _generate(llm, settings, prompts)
            findings = _find(llm, settings.temperature, min(settings.tokens, llm.max_model_len - 1))
            # Print before the end of this block, which saves statistics and may fail.
            if settings.json:
                text = json.dumps(asdict(findings), default=lambda array: array.tolist())
                print(text.replace("NaN", "null"))
            else:
                _print_table(findings)
            if settings.plot is not None:
                _draw(findings, settings.plot)


def _generate(llm: "LLM", settings: CalibrateSettings, prompts: Sequence[str]) -> None:
    """Continue every prompt to train the drafter, which saves its statistics on close."""
    params = SamplingParams(max_new_tokens=settings.tokens, temperature=settings.temperature)
    drafter = llm.spec.draft.drafting.name
    for prompt in prompts:
        stats = llm.generate(prompt, params)[0].stats
        per_pass, token_s = stats.tokens_per_pass, stats.seconds_per_token
        rates = f"{per_pass:.2f} tokens per pass, {token_s:.4f} s per token"
        print(f"{drafter}: {rates} after {prompt[:40]!r}", file=sys.stderr, flush=True)


def _find(llm: "LLM", temperature: float, context: int) -> Findings:
    from offload_rt.speculate.tree_drafter import TreeDrafter
    from offload_rt.tree.search import search

    drafter = llm.engine.drafter
    cost = llm.engine.cost
    limits = llm.spec.memory.limits
    # static_tree measures its passes
    assert isinstance(drafter, TreeDrafter) and cost.profile.compute is not None
    acceptance = drafter.estimates_at(temperature).acceptance.by_rank()
    table = search(acceptance, limits.n_nodes, limits.n_levels).values
    sizes = tuple(n for n in _SIZES if n <= limits.n_nodes)
    depths = tuple(n for n in _DEPTHS if n <= limits.n_levels)
    draft_s = cost.level(1) * (np.array(depths) - 1)
    seconds = cost.seconds(np.array(sizes)[:, None], context, draft_s)
    widths = sizes_up_to(limits.n_nodes)
    exists = np.array([[n == levels == 1 or 1 < levels <= n for levels in depths] for n in sizes])
    n_rows = llm.spec.memory.cache_rows
    longest = llm.max_model_len - 1
    single = _best(table, cost, 1, context, n_rows)
    contexts = sorted({*(n for n in _CONTEXTS if n < longest), longest})
    batches = [n for n in _BATCHES if n <= limits.n_nodes]
    cells = ((batch, n) for batch in batches for n in contexts if batch * (n + 1) <= n_rows)
    streamed = [
        transfer_s(nbytes, cost.profile.link(tier))
        for tier, nbytes in llm.plan.pass_bytes.at(context).items()
    ]
    return Findings(
        acceptance=acceptance,
        widths=widths,
        pass_s=cost.seconds(widths, context),
        compute_s=cost.profile.compute.at(widths, context),
        link_s=max(streamed, default=0.0),
        level_s=cost.level(1),
        sizes=sizes,
        depths=depths,
        cost=np.where(exists, seconds / table[np.ix_(sizes, depths)], np.nan),
        best=(single.n_nodes, single.n_levels, single.token_s),
        optima=tuple(_best(table, cost, batch, n, n_rows) for batch, n in cells),
    )


def _best(
    table: NDArray[np.float64], cost: "CostEstimator", batch: int, context: int, n_rows: int
) -> Optimum:
    """Select the best tree for each of `batch` sequences.

    table   (nodes + 1, levels + 1) expected tokens
    n_rows  cache rows for all contexts and trees

    A draft level is assumed to cost the same for all sequences as for a single sequence,
    since it reads the same weights.
    """
    n_nodes = min((len(table) - 1) // batch, n_rows // batch - context)
    tree = cost.best_tree(table, DraftLimits(n_nodes, table.shape[1] - 1), context, batch)
    plain_s = float(cost.seconds(np.array([batch]), context, n_sequences=batch)[0]) / batch
    return Optimum(batch, context, tree.n_nodes, tree.n_levels, tree.token_s / batch, plain_s)


def _print_table(findings: Findings) -> None:
    from offload_rt.cli.format import print_rows

    rows = ((n, *("" if np.isnan(cost) else f"{cost:.4f}" for cost in costs)) for n, costs in
            zip(findings.sizes, findings.cost, strict=True))  # fmt: skip
    title = "seconds per token by size (rows) and levels (columns) of the tree"
    print_rows(("nodes", *findings.depths), rows, title)
    trees: dict[int, list[object]] = {}
    for best in findings.optima:
        tree = f"{best.n_nodes}, {best.n_levels}, {best.plain_s / best.token_s:.2f}"
        trees.setdefault(best.batch, [best.batch]).append(tree)
    title = (
        "best tree by sequences in a pass (rows) and tokens before it (columns): nodes, levels,"
        " times plain"
    )
    contexts = sorted({best.context for best in findings.optima})
    print_rows(("sequences", *contexts), trees.values(), title)
    ranks = ", ".join(f"{p:.3f}" for p in findings.acceptance[:8])
    n_nodes, n_levels, seconds = findings.best
    print(f"acceptance by rank: {ranks} ...")
    print(
        f"best: {n_nodes} nodes on {n_levels} levels, {seconds:.4f} s per token; plain"
        f" {findings.pass_s[0]:.4f} s; link {findings.link_s:.4f} s per pass, draft level"
        f" {findings.level_s:.4f} s"
    )


def _draw(findings: Findings, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 4.5), layout="constrained")
    ranks, passes, cost, optima = figure.subplots(1, 4)
    ranks.plot(np.arange(1, 17), findings.acceptance[:16], "o", color="tab:blue")
    ranks.set(title="acceptance by rank", xlabel="rank among siblings")
    ranks.set(ylabel="probability", yscale="log")
    widths = findings.widths
    passes.plot(widths, findings.pass_s, label="pass, predicted", color="tab:blue")
    passes.plot(widths, findings.compute_s, "--", label="compute, measured", color="tab:orange")
    passes.axhline(findings.link_s, ls=":", color="tab:gray", label="link")
    passes.legend()
    for depth, costs in zip(findings.depths, findings.cost.T, strict=True):
        cost.plot(findings.sizes, costs, marker=".", label=f"{depth} levels")
    n_nodes, n_levels, seconds = findings.best
    label = f"best: {n_nodes} nodes, {n_levels} levels"
    cost.plot([n_nodes], [seconds], "*", ms=14, color="black", label=label)
    cost.legend(fontsize="small")
    for plot, title, x in (
        (passes, "pass time by width", "rows of a pass"),
        (cost, "seconds per token", "nodes of the tree"),
    ):
        plot.set(title=title, xlabel=x, ylabel="seconds", xscale="log", ylim=(0, None))
    for batch in sorted({best.batch for best in findings.optima}):
        row = [best for best in findings.optima if best.batch == batch]
        places = [(best.context, best.n_nodes) for best in row]
        (drawn,) = optima.loglog(*zip(*places, strict=True), marker=".", label=str(batch), base=2)
        color = drawn.get_color()
        for place, best in zip(places, row, strict=True):
            levels = str(best.n_levels)
            optima.annotate(levels, place, (0, 4), textcoords="offset points", color=color)
    optima.set(title="best tree (numbers: levels)", xlabel="tokens before the pass", ylabel="nodes")
    optima.legend(title="sequences", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(Path(path), picture.getvalue())
