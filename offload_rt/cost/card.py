"""Specification of a GPU, from which pass times are predicted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HostLink:
    """Link between host and GPU; `gbps` is the GB/s of copies from pinned memory."""

    name: str
    gbps: float
    source: str


@dataclass(frozen=True)
class Card:
    """A GPU.

    memory_nbytes  nominal memory, without error correction
    tflops         10^12 operations per second in matrix products
    memory_gbps    GB/s of device memory
    nvlink_gbps    GB/s received over NVLink; 0 without NVLink, or if it is an optional accessory
    """

    name: str
    title: str
    memory_nbytes: int
    tflops: float
    memory_gbps: float
    link: HostLink
    source: str
    nvlink_gbps: float = 0.0

    @property
    def free_nbytes(self) -> int:
        """Bytes available to a program: without 1.5 % for the driver and 0.5 GiB of CUDA context.

        An RTX 4090 of 24 GiB reports 23.65 GiB.
        """
        return self.memory_nbytes * 197 // 200 - 2**29
