"""Models of any Llama shape with the functions of the demo pair: a few layers, and a filler."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from bench.common.measure import ROOT
from bench.common.processes import run_python
from offload_rt import LLM
from offload_rt.offload.placement import spread
from offload_rt.offload.streamer import Streamer
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import Checkpoint, open_checkpoint

TARGET = ROOT / "models/demo-target"
DRAFT = ROOT / "models/demo-draft"
# A card of 24 GB reports 23.65 GiB. The context of a program uses about half a GiB.
BUDGET = "22.5GiB"
_N_OWN = {TARGET: 6, DRAFT: 3}


def memory_folder(nbytes: int) -> Path | None:
    """Return a folder in memory with this much room, if there is one."""
    memory = Path("/dev/shm")
    is_large = memory.is_dir() and shutil.disk_usage(memory).free > nbytes
    return memory if is_large else None


def written(source: Path, shape: str, *sizes: str) -> Path:
    """A checkpoint of a shape with the source's own layers and one that changes nothing, in
    /dev/shm if it fits there.

    shape  a name that `scripts/expand.py --like` knows
    sizes  further flags of `scripts/expand.py`
    """
    n_layers = _N_OWN[source] + 1
    home = memory_folder(24 << 30) or ROOT / "demo-cache"
    out = home / f"offload_rt-{source.name}-{shape}"
    flags = ("--like", shape, "--layers", str(n_layers), *sizes)
    run_python("scripts/expand.py", "--source", str(source), "--out", str(out), *flags)
    return out


def repeated(checkpoint: Checkpoint, n_layers: int) -> Checkpoint:
    """Return a checkpoint of `n_layers` layers with the same outputs.

    The last layer adds nothing to the hidden states. Its copies are spread between the layers.
    """
    if n_layers == len(checkpoint.layers):
        return checkpoint
    streamed = checkpoint.layers[:-1]
    filler = checkpoint.layers[-1]
    places = sorted(spread(n_layers, len(streamed)))
    layers = [filler] * n_layers
    for place, layer in zip(places, streamed, strict=True):
        layers[place] = layer
    spec = replace(checkpoint.spec, n_layers=n_layers, windows=(None,) * n_layers)
    return replace(checkpoint, spec=spec, layers=tuple(layers))


def random_tree(n: int, reach: int = 40) -> Topology:
    """A random shape of n nodes, the parent of each among the `reach` nodes before it."""
    random = np.random.default_rng(n)
    return Topology(np.array([-1, *(random.integers(max(i - reach, 0), i) for i in range(1, n))]))


@contextmanager
def opened(
    target: Path, n_layers: int, draft: tuple[Path, int] | None = None, **settings: object
) -> Iterator[LLM]:
    """An LLM over a repeated target and, if one is given, a repeated draft with its number of
    layers; on the GPU in bfloat16 by default.

    Repeated layers are held once by the host, so all of them fit.
    """
    settings = {"device": "cuda", "dtype": "bfloat16", **settings}
    deep = dict([(target, n_layers), *([draft] if draft else [])])

    def opener(path: Path) -> Checkpoint:
        return repeated(open_checkpoint(path), deep[path])

    with (
        patch("offload_rt.llm.open_checkpoint", opener),
        patch("offload_rt.engine.device.memory_free", lambda: 1 << 40),
        LLM(str(target), draft and str(draft[0]), **settings) as llm,
    ):
        yield llm


def park(streamer: Streamer) -> None:
    """Stop the copies of a streamer until its next sweep."""
    with closing(streamer.sweep()) as sweep:
        next(sweep)


def plan_of(llm: LLM) -> dict[str, object]:
    """Describe the placement. Raises RuntimeError for disk layers, which hide the GPU link."""
    plan = llm.plan
    if plan.tiers.count("disk"):
        raise RuntimeError(f"{plan.tiers.count('disk')} layers lie on the disk")
    return {
        "resident_layers": plan.tiers.count("device"), "streamed_layers": plan.tiers.count("host"),
        "n_slots": plan.n_slots,
        "streamed_bytes": plan.on("host"), "notice": llm.engine.notice,
    }  # fmt: skip


if __name__ == "__main__":
    written(TARGET, "llama-2-70b")
