"""Mixtures: streamed experts, host experts, eviction and prefetching."""
