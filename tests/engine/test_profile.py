"""Measured rates of memory and link."""

import pytest
import torch
from support.fake_gpu import fake_gpu

from offload_rt.engine import profile


def test_memory_rate_is_measured_beyond_the_caches(monkeypatch):
    linear = profile.linear
    read = []
    monkeypatch.setattr(
        profile, "linear", lambda x, matrix: read.append(matrix.nbytes) or linear(x, matrix)
    )
    monkeypatch.setattr(profile, "cache_nbytes", lambda: 100 << 20)
    assert profile.memory_gbps(torch.bfloat16, torch.device("cpu")) > 0 and set(read) == {400 << 20}
    monkeypatch.setattr(profile, "memory_free", lambda: 64 << 20)
    profile.memory_gbps(torch.bfloat16, torch.device("cpu"))
    assert read[-1] == 16 << 20, "at most a quarter of free memory"


class Clock:
    """CUDA event of a device on which each piece of work takes 10 ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Clock") -> float:
        return 10.0


def test_gpu_rates_use_cuda_events(monkeypatch):
    with fake_gpu(monkeypatch, nbytes=256 << 20):
        monkeypatch.setattr(torch.cuda, "Event", Clock)
        card = torch.device("cuda", 0)
        assert profile.memory_gbps(torch.float16, card) == pytest.approx((64 << 20) / 0.01 / 1e9)
        assert profile.upload_gbps(card, 32 << 20) == pytest.approx((32 << 20) / 0.01 / 1e9)
