"""Figures of a graphics card that its pass times follow from."""

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class HostLink:
    """What a card hangs on.

    gbps    GB/s at which pinned memory is copied to the card
    source  of that rate
    """

    name: str
    gbps: float
    source: str


@dataclass(frozen=True)
class Card:
    """A graphics card.

    memory_nbytes  nominal, without the share of error correction
    tflops         10^12 operations a second in matrix products
    memory_gbps    GB/s of its memory
    source         of these figures
    nvlink_gbps    GB/s at which others of it are heard by NVLink; 0: it has none, or one that is
                   bought besides
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
        """Bytes that a program may allocate: without 1.5 % for the driver and 0.5 GiB for the
        program's context.

        An RTX 4090 of 24 GiB reports 23.65 GiB.
        """
        return self.memory_nbytes * 197 // 200 - (_GIB >> 1)
