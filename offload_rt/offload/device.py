"""Layers that live on the device and are computed where they lie."""

from offload_rt.offload.memory import MemoryTier


class DeviceTier(MemoryTier):
    """Resident layers: images whose blocks are on the device, never copied into a slot."""
