"""Quantiser of llama.cpp, in the library of the package node-llama-cpp."""

import ctypes
import os
from pathlib import Path

from bench.compare.peers.llama_cpp import PACKAGE

# Values of `llama_ftype`. A type with the suffix M mixes types by matrix.
TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10,
    "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ3_S": 26, "IQ4_NL": 25, "IQ4_XS": 30,
    "BF16": 32,
}  # fmt: skip


class _Params(ctypes.Structure):
    """First fields of `llama_model_quantize_params`; the rest keeps its defaults."""

    _fields_ = (
        ("n_threads", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_type", ctypes.c_int),
        ("embedding_type", ctypes.c_int),
        ("allow_requantize", ctypes.c_bool),
        ("rest", ctypes.c_byte * 256),
    )


def quantized_file(source: Path, type: str, folder: Path) -> Path:
    """Return a GGUF file with matrices of a type, written at first use. Raises RuntimeError."""
    out = folder / f"{source.name.split('.')[0]}-{type}.gguf"
    if not out.exists():
        binaries = PACKAGE.parent / "@node-llama-cpp/linux-x64/bins/linux-x64"
        library = ctypes.CDLL(str(next(binaries.glob("libllama.v*.so"))))
        library.llama_model_quantize_default_params.restype = _Params
        params = library.llama_model_quantize_default_params()
        log_type = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        silence = log_type(lambda *_: None)
        library.llama_log_set(silence, None)
        params.ftype = TYPES[type]
        params.allow_requantize = True
        partial = out.with_suffix(f".{os.getpid()}.partial")
        names = (os.fsencode(source), os.fsencode(partial))
        if library.llama_model_quantize(*names, ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp did not quantise {source} to {type}")
        partial.rename(out)
    return out
