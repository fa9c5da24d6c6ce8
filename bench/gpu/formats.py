"""Llama2-70B's shape on a card of 24 GB: passes over lossless, int4 and fp8 layers, and with keys
and values on the host.
"""

from collections.abc import Iterator
from pathlib import Path

from bench.common.processes import run_python
from bench.gpu.shapes import TARGET, written
from bench.gpu.streamed import Shapes, link_gbps, measure_passes

EXPECTED_S = 400
_N_NODES = (1, 256)
WAYS = {
    "lossless on the link": (
        None,
        Shapes(n_nodes=_N_NODES, settings=(("link_format", "lossless"),)),
    ),
    "int4": ("gptq", Shapes(n_nodes=_N_NODES)),
    "fp8": ("fp8", Shapes(n_nodes=_N_NODES)),
    "keys and values on the host": (
        None,
        Shapes(n_nodes=_N_NODES, context=3500, settings=(("kv_memory", "512MiB"),)),
    ),
}


def measure(ways: dict[str, tuple[str | None, Shapes]] = WAYS) -> Iterator[dict[str, object]]:
    """Passes of each way, or why it failed."""
    results: dict[str, object] = {}
    for name, (format, shapes) in ways.items():
        try:
            target = written(TARGET, shapes.target)
            target = target if format is None else quantized(target, format)
            for passes in measure_passes(target, shapes, link_gbps):
                yield results | {name: passes}
            results[name] = passes
        except Exception as error:  # the other ways are measured all the same
            results[name] = {"failed": " ".join(str(error).split())[:300]}
            yield results


def quantized(model: Path, format: str) -> Path:
    """Quantise a checkpoint beside it, unless it is there."""
    out = model.with_name(f"{model.name}-{format}")
    if not out.exists():
        flags = ("--format", format, "--group-size", "128")
        run_python("scripts/quantize.py", str(model), str(out), *flags)
    return out
