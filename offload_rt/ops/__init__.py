"""One entry point per op. The plain torch reference serves wherever no kernel of our own is built."""

from offload_rt.ops.reference import rms_norm, rotate, tree_attention

__all__ = ["rms_norm", "rotate", "tree_attention"]
