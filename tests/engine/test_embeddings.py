"""Embeddings equal the pooled hidden states of transformers."""

import base64
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from openai import OpenAI
from support.serving import SETTINGS, running
from support.thread_ranks import Board, ThreadRanks
from support.tiny import CASES, SMALLER, byte_level, open_llm, save_pair

from bench.models.tiny import config_of, random_model
from offload_rt import LLM, SamplingParams
from offload_rt.cli import serve
from offload_rt.errors import SettingsError

TEXTS = ["the quick brown fox jumps", "a lazy dog", "fox"]


@pytest.fixture(scope="module")
def model():
    return CASES["qwen3"].build(0, vocab_size=336, **SMALLER)


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("embedded"), model, model, byte_level())


def expected(model, prompt, pooling):
    """(hidden_size,) by transformers"""
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0].float()
    vector = states.mean(0) if pooling == "mean" else states[-1]
    return vector / vector.norm()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_those_of_transformers(model, pair, monkeypatch, pooling):
    """With prompts in a batch, in parts, and after answers to the same prompts."""
    with open_llm(pair.target, max_num_seqs=2) as llm:
        prompts = [llm.encode(text) for text in TEXTS]
        vectors = torch.stack([expected(model, prompt, pooling) for prompt in prompts])
        assert torch.allclose(llm.embed(TEXTS, pooling), vectors, atol=1e-5)
        llm.generate(prompts, SamplingParams(max_tokens=2))
        n_passes = llm.engine.n_passes

        def parts(batch):
            """Divide the first prompt beside others, as a server does."""
            is_long = len(batch) > 1 and len(llm.engine._missing_tokens(batch[0])) > 1
            return {batch[0]: 1} if is_long else {}

        monkeypatch.setattr(llm.engine, "_prompt_parts", parts)
        assert torch.allclose(llm.embed(prompts[:2], pooling), vectors[:2], atol=1e-5)
        assert llm.engine.n_passes == n_passes + 2, "a pass with a part, one with the rest"
        with pytest.raises(SettingsError, match="pooling"):
            llm.embed(TEXTS, "first")
        llm.spec = replace(llm.spec, ranks=replace(llm.spec.ranks, ranks=ThreadRanks(0, Board(2))))
        with pytest.raises(SettingsError, match="embeddings with several ranks"):
            llm.embed(TEXTS)


def test_a_server_refuses_embeddings_of_other_models_before_loading(tmp_path, monkeypatch, capfd):
    random_model(config_of("gpt2")).save_pretrained(tmp_path)
    capfd.readouterr()
    monkeypatch.setattr(LLM, "load", Mock(side_effect=AssertionError("loaded")))
    arguments = [str(tmp_path), "--port", "0", "--device", "cpu", "--embeddings", "mean"]
    assert serve.main(arguments) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "embeddings: needs a native model" in err


def test_embeddings_over_http(model, pair):
    with open_llm(pair.target) as llm:
        prompts = [llm.encode(text) for text in TEXTS]
        vectors = torch.stack([expected(model, prompt, "last") for prompt in prompts]).numpy()
        with running(llm, settings=replace(SETTINGS, embeddings="last")) as served:
            client: OpenAI = served.client
            for content in (TEXTS, prompts):
                answer = client.embeddings.create(model="demo", input=content)
                embeddings = np.array([entry.embedding for entry in answer.data])
                assert np.allclose(embeddings, vectors, atol=1e-5)
                assert answer.usage.total_tokens == sum(map(len, prompts))
            body = {"input": TEXTS[0]}
            plain = served.post("/v1/embeddings", body)[1]["data"][0]["embedding"]
            coded = served.post("/v1/embeddings", body | {"encoding_format": "base64"})[1]
            raw = base64.b64decode(coded["data"][0]["embedding"])
            assert np.frombuffer(raw, np.float32).tolist() == pytest.approx(plain)
            for wrong in ([], [[999999]], ["x"] * 40):
                assert served.post("/v1/embeddings", {"input": wrong})[0] == 400
            assert served.post("/v1/embeddings", {"input": "x", "dimensions": 3})[0] == 400
            assert served.service.n_open == 0
        with running(llm) as served:
            assert served.post("/v1/embeddings", body)[0] == 404
