"""Layers in CPU memory, registered with the driver where there is a GPU so that copies run by themselves."""

import torch

from offload_rt.tiers._memory import MemoryTier
from offload_rt.weights._image import LayerImage

_SUCCESS = 0


class HostTier(MemoryTier):
    """Blocks in CPU memory.

    register  pin the pages of each block with the CUDA driver as it is put
    """

    def __init__(self, register: bool = False) -> None:
        super().__init__()
        self._register = register
        self._registered: list[int] = []

    @property
    def is_registered(self) -> bool:
        """Whether every block is pinned; False once the driver has refused one."""
        return self._register

    def put(self, i: int, image: LayerImage) -> None:
        """Keep a layer; where the driver refuses to pin it (WSL, limits), keep it unpinned and remember that."""
        super().put(i, image)
        if self._register:
            address, cudart = image.block.data_ptr(), torch.cuda.cudart()
            self._register = int(cudart.cudaHostRegister(address, len(image.block), 0)) == _SUCCESS
            self._registered += [address] if self._register else []

    def close(self) -> None:
        """Unpin and release the blocks."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        super().close()
