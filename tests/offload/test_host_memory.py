"""Host memory with a device stays within its budget, also while loading."""

import pytest
from support.fake_gpu import fake_gpu
from support.host_memory import CountingHost, pin_at_most
from support.tiny import CASES, generate, keep_steady, open_unloaded, prompt_of, save_pair, say

from offload_rt import LLM
from offload_rt.engine import profile
from offload_rt.engine.memory_plan import READ_BUFFERS
from offload_rt.offload.disk import ReadSettings
from offload_rt.weights.layout import PAGE

N_NEW = 4


@pytest.mark.slow
def test_host_memory_stays_within_its_budget(tmp_path, monkeypatch):
    """From one layer on its way to all of them, pinned or not."""
    keep_steady(monkeypatch)
    model, draft = (CASES["llama"].build(0, num_hidden_layers=n) for n in (7, 2))
    pair = save_pair(tmp_path, model, draft)
    wanted = generate(model, prompt_of(0), N_NEW)
    mixes = set()
    settings = {"device": "cuda", "max_model_len": 128, "tree_size": 8}
    settings |= pair.settings("static_tree", "match")
    with fake_gpu(monkeypatch):
        with open_unloaded(pair.target, **settings) as unloaded:
            nbytes = unloaded.plan.slot_nbytes
            # three slots and a layer
            settings["device_memory"] = unloaded.plan.reserved.total + 4 * nbytes
        for n_blocks, n_pinned in ((1, 100), (5, 100), (9, 100), (5, 0), (9, 2), (9, 0)):
            pin_at_most(monkeypatch, n_pinned)
            with monkeypatch.context() as patch:
                host = CountingHost(patch)
                budget = READ_BUFFERS + n_blocks * nbytes + nbytes // 2
                with LLM(str(pair.target), host_memory=budget, **settings) as llm:
                    assert say(llm, prompt_of(0), N_NEW) == wanted
                    mixes.add(tuple(sorted(set(llm.plan.tiers))))
                    assert llm.plan.host_nbytes <= budget
                assert host.most["layers"] <= budget - READ_BUFFERS, (n_blocks, nbytes)
                assert host.most["buffers"] <= READ_BUFFERS
                assert host.now["layers"] == 0
    assert mixes == {("device", "disk"), ("device", "disk", "host"), ("device", "host")}


def test_read_buffers_stay_within_their_reserve():
    """Two buffer sets: one loads a draft model while the other reads layers."""
    for settings in (*profile._CANDIDATES, ReadSettings()):
        assert 2 * settings.n_parallel * (settings.request_nbytes + 2 * PAGE) <= READ_BUFFERS
