"""Dtypes without torch, for the sizes of weights and caches."""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class DType(StrEnum):
    """Dtype with torch's name and its bytes per element."""

    itemsize: int

    FLOAT64 = "float64", 8
    FLOAT32 = "float32", 4
    FLOAT16 = "float16", 2
    BFLOAT16 = "bfloat16", 2
    FLOAT8_E4M3FN = "float8_e4m3fn", 1
    FLOAT8_E5M2 = "float8_e5m2", 1
    FLOAT8_E8M0FNU = "float8_e8m0fnu", 1
    INT64 = "int64", 8
    INT32 = "int32", 4
    INT16 = "int16", 2
    INT8 = "int8", 1
    UINT8 = "uint8", 1
    BOOL = "bool", 1

    def __new__(cls, name: str, itemsize: int) -> "DType":
        member = str.__new__(cls, name)
        member._value_ = name
        member.itemsize = itemsize
        return member

    @classmethod
    def from_torch(cls, dtype: "torch.dtype") -> "DType":
        """Return the member of a torch dtype."""
        return DTYPES[str(dtype).removeprefix("torch.")]

    @property
    def torch(self) -> "torch.dtype":
        """The torch dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


DTYPES = {dtype.value: dtype for dtype in DType}
