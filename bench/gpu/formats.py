"""Llama2-70B's shape on a card of 24 GB: passes over lossless, int4 and fp8 layers, and with keys
and values on the host.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.common.processes import run_python
from bench.gpu.shapes import TARGET, written
from bench.gpu.streamed import Shapes, link_gbps, measure_passes

EXPECTED_S = 400
_PLAIN = Shapes(n_nodes=(1, 256))
_LOSSLESS = replace(_PLAIN, settings=(("link_format", "lossless"),))
_HOST_KV = replace(_PLAIN, context=3500, settings=(("kv_memory", "512MiB"),))
WAYS = {
    "lossless on the link": (None, _LOSSLESS),
    "int4": ("gptq", _PLAIN),
    "fp8": ("fp8", _PLAIN),
    "keys and values on the host": (None, _HOST_KV),
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
