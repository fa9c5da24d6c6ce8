"""Memory of a model's KV caches."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from offload_rt.kv.cache import ContiguousCache, KVBuffer, KVCache
from offload_rt.kv.recurrent import RecurrentCache
from offload_rt.kv.split import KVShare
from offload_rt.models.architecture import Architecture


@dataclass
class KVMemory:
    """Caches with all rows on the device; subclasses store rows elsewhere or share a buffer."""

    spec: Architecture
    dtype: torch.dtype
    device: torch.device

    def new_cache(
        self, capacity: int, is_alone: bool = False, share: KVShare | None = None
    ) -> KVCache:
        """Create an empty cache, alone or not; `share` limits its rows on the device."""
        kind = RecurrentCache if self.spec.state_shapes else ContiguousCache
        return kind.empty(self.spec, capacity, self.dtype, self.device)

    def new_buffer(self, capacity: int) -> KVBuffer:
        """Allocate uninitialised rows on the device, for layers of equal shape."""
        return KVBuffer.empty(self.spec.kv_shapes, capacity, self.dtype, self.device)

    def load(self, caches: Sequence[KVCache]) -> AbstractContextManager[None]:
        """Load the rows that caches read in a sweep, in the order of their calls of `attend`."""
        return nullcontext()
