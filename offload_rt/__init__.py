"""Run a language model larger than its device's memory, exactly, at the speed of the link."""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_rt.llm import LLM, Output, Piece, Stats
    from offload_rt.sampling_params import SamplingParams, StructuredOutputs

# How long the threads of a matrix product spin for each other before they sleep; read when torch
# loads. By default it is milliseconds: beside a busy process they then take the cores from each
# other (`python -m bench.stream.waiting`).
if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
    os.environ["GOMP_SPINCOUNT"] = "1000"

__version__ = "0.1.0"
__all__ = ["LLM", "Output", "Piece", "SamplingParams", "Stats", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    if sys.platform != "linux" and name in __all__:
        raise ImportError("offload_rt needs Linux; on Windows use WSL 2")
    # On demand: `--help` and a wrong flag answer at once instead of after the seconds torch takes
    # to load.
    if name in ("SamplingParams", "StructuredOutputs"):
        from offload_rt import sampling_params

        return getattr(sampling_params, name)
    if name in __all__:
        from offload_rt import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'offload_rt' has no attribute {name!r}")
