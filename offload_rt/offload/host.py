"""Layers in CPU memory, registered with the driver where there is a GPU so that copies run by themselves."""

from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.pinning import pin, unpin
from offload_rt.weights.layout import PackedLayer


class HostTier(MemoryTier):
    """Blocks in CPU memory.

    register  pin the pages of each block with the CUDA driver as it is put
    """

    n_parallel = 4  # copies at once, where the driver pins nothing and threads must bring the blocks into pinned slots

    def __init__(self, register: bool = False) -> None:
        super().__init__()
        self._register = register
        self._pinned: dict[int, PackedLayer] = {}  # by address: layers may share a block

    def is_pinned(self, i: int) -> bool:
        """Whether the device copies layer i by itself; not where the driver refused to pin it (WSL, limits)."""
        return self.image(i).block.data_ptr() in self._pinned

    @property
    def is_refused(self) -> bool:
        """Whether the driver was asked to pin a block and refused."""
        return self._register and any(not self.is_pinned(i) for i in self._images)

    def put(self, i: int, image: PackedLayer) -> None:
        """Keep a layer, pinned if the driver agrees."""
        super().put(i, image)
        if self._register and not self.is_pinned(i) and pin(image.block):
            self._pinned[image.block.data_ptr()] = image

    def close(self) -> None:
        """Unpin and release the blocks."""
        for image in self._pinned.values():
            unpin(image.block)
        self._pinned.clear()
        super().close()
