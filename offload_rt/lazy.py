"""Modules imported at their first use: a plan reads shapes and needs neither torch nor kernels."""

from importlib import import_module
from typing import Any


class LazyModule:
    """A module imported at the first access of an attribute; later accesses cost the same."""

    __slots__ = ("__dict__", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        self.__dict__ = vars(import_module(self._name))
        return self.__dict__[name]


torch: Any = LazyModule("torch")
ops: Any = LazyModule("offload_rt.ops")
decoder_cpu: Any = LazyModule("offload_rt.ops.decoder_cpu")
dequantize: Any = LazyModule("offload_rt.ops.dequantize")
linear_cpu: Any = LazyModule("offload_rt.ops.linear_cpu")
products: Any = LazyModule("offload_rt.ops.linear")
tree_mask: Any = LazyModule("offload_rt.ops.tree_mask")
