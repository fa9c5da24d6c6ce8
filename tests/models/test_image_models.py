"""Vision-language models: texts equal transformers' `generate`, for all ways to run them."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from quantize import Choice, quantized
from quantize import config_of as quantization_config
from safetensors.torch import load_file
from support.heads import PUBLISHED, write_head
from support.images import (
    IMAGE_ID,
    generate_images,
    image_inputs,
    image_logits,
    image_model,
    image_prompt,
)
from support.quantized import rewrite
from support.tiny import ATOL, generate, open_streamed, prompt_of, runner_of

from offload_rt import SamplingParams
from offload_rt.executor.step import Step
from offload_rt.models.image_tower import FAMILIES, ImageTower
from offload_rt.tree.topology import Topology


def one_image(llm, model, kind, seed=1):
    tower = llm.spec.target.checkpoint.spec.images
    return image_prompt(model, tower, [4, image_inputs(kind, seed), 3])


pytestmark = pytest.mark.numeric
N_NEW = 4
GREEDY = SamplingParams(max_tokens=N_NEW, temperature=0)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Of a type: the model in transformers, and its checkpoint."""
    folder = functools.cache(tmp_path_factory.mktemp)
    return functools.cache(lambda kind: (image_model(kind, folder(kind)), folder(kind)))


def say(llm, prompts):
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_text_equals_transformers(model_of, kind):
    """A batch with texts, two images, and an image in another turn or in place of another."""
    model, folder = model_of(kind)
    first, second = (image_inputs(kind, seed) for seed in (1, 2))
    text = prompt_of(9, 12, 140)
    with open_streamed(folder, max_num_seqs=3, max_model_len=240) as llm:
        tower = llm.spec.target.checkpoint.spec.images
        prompts = [image_prompt(model, tower, parts) for parts in (
            [5, first, 7], [5, second, 7], [5, first, 3, second, 2], [5, second, 7, first, 1],
        )]  # fmt: skip
        expected = [generate_images(model, prompt, N_NEW) for prompt in prompts]
        plain = generate(model, text, N_NEW)
        assert say(llm, [prompts[0], text, prompts[2]]) == [expected[0], plain, expected[2]]
        assert say(llm, prompts[1:]) == expected[1:]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_image_crosses_chunks(model_of, kind):
    """Tokens of an image that see each other stay in one chunk; a tree follows the prompt."""
    model, folder = model_of(kind)
    with open_streamed(folder, drafter="none") as llm:
        runner = runner_of(llm)
        runner._chunk_rows = 3
        parts = [4, image_inputs(kind, 1), 3, image_inputs(kind, 2), 1]
        prompt = image_prompt(model, runner.spec.images, parts)
        paths = [[], [7], [9], [7, 5], [7, 3]]
        tree = Topology(np.array([-1, 0, 0, 1, 1])).after_chain(len(prompt) - 1)
        ids = torch.tensor([*prompt.keyed_ids, 7, 9, 5, 3])
        n = len(ids)
        step = Step(runner.new_cache(n), ids, tree, n, n, n_chain=len(prompt) - 1, images=prompt)
        (logits,) = runner.forward([step])
    expected = [image_logits(model, replace(prompt, ids=prompt.ids + path)) for path in paths]
    expected = torch.cat([expected[0], *(rows[-1:] for rows in expected[1:])])
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    "drafter", ["ngram", "lookahead", "recycle", "static_tree", "dynamic_tree", *PUBLISHED]
)
def test_drafters_and_placeholders_of_texts(model_of, tmp_path, drafter):
    """A generated or written placeholder token beside images of other sequences is a token."""
    model, folder = model_of("qwen3_vl")
    settings = {"drafter": drafter}
    if drafter in PUBLISHED:
        settings = write_head(tmp_path / "head", folder, drafter).settings
        del settings["directory"]
    elif "tree" in drafter:
        settings["draft_model"] = str(folder)
    text = [*prompt_of(3, 9, 140), IMAGE_ID, 7, IMAGE_ID]
    with open_streamed(folder, max_num_seqs=2, **settings) as llm:
        prompt = one_image(llm, model, "qwen3_vl")
        expected = [generate_images(model, prompt, N_NEW), generate(model, text, N_NEW)]
        assert say(llm, [prompt, text]) == expected


def test_features_are_computed_once_and_kept(model_of, monkeypatch):
    """Also if the prefix cache has been released, until other images need the memory."""
    model, folder = model_of("llava")
    calls = []
    features = ImageTower.features
    monkeypatch.setattr(ImageTower, "features", lambda *args: calls.append(1) or features(*args))
    with open_streamed(folder, drafter="none") as llm:
        prompt = one_image(llm, model, "llava")
        runner_of(llm)._chunk_rows = 8
        first = say(llm, [prompt])
        llm.engine.reset_prefix_cache()
        assert say(llm, [prompt]) == first
        assert calls == [1]
        runner_of(llm).images.max_rows = len(prompt.images[0].rows)
        say(llm, [one_image(llm, model, "llava", 2)])
        llm.engine.reset_prefix_cache()
        assert say(llm, [prompt]) == first
        assert calls == [1] * 3


def test_prompt_beside_an_answer_is_not_cut_inside_an_image(model_of):
    """The limit of 32 rows lies inside the image; a later row would miss keys of its tokens."""
    model, folder = model_of("gemma3")
    with open_streamed(folder, drafter="none", max_num_seqs=2, max_model_len=200) as llm:
        tower = llm.spec.target.checkpoint.spec.images
        prompt = image_prompt(model, tower, [30, image_inputs("gemma3", 1), 9])
        llm.engine.prompt_seconds = -1.0  # the smallest part
        answer = llm.stream(prompt_of(5, 4, 140), SamplingParams(max_tokens=60, temperature=0))
        next(answer)
        params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1)
        (output,) = llm.generate([prompt], params)
        answer.close()
    tokens = prompt.ids[1:]
    steps = zip(output.prompt_logprobs[1:], tokens, strict=True)
    given = torch.tensor([step[token].logprob for step, token in steps])
    logprobs = image_logits(model, prompt).log_softmax(-1)
    expected = logprobs[range(len(tokens)), tokens]
    torch.testing.assert_close(given, expected, atol=ATOL, rtol=0)


def test_quantised_weights_and_prediction_layer_behind_images(model_of, tmp_path):
    """Matrices of 4 bits, drafter `mtp`; the tower is stored as it is."""
    model, folder = model_of("qwen3_5")
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.language_model."
    last = f"{prefix}layers.3."
    choice = Choice("gptq", group_size=16)
    text = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    stored, exact = quantized(text, choice)
    assert stored.keys() - exact.keys()
    tower = {name: tensor for name, tensor in tensors.items() if name not in text}
    layer = {
        name.replace(last, "mtp.layers.0."): tensor.clone()
        for name, tensor in text.items()
        if name.startswith(last)
    }
    layer["mtp.norm.weight"] = tensors[f"{prefix}norm.weight"].clone()
    layer["mtp.fc.weight"] = torch.eye(64).repeat(1, 2)
    for name in ("embedding", "hidden"):
        layer[f"mtp.pre_fc_norm_{name}.weight"] = torch.zeros(64)
    config = quantization_config(choice)
    tensors = stored | tower | layer
    quantised = rewrite(folder, tmp_path / "coded", tensors, quantization_config=config)
    plain = type(model).from_pretrained(rewrite(folder, tmp_path / "plain", exact | tower))
    with open_streamed(quantised, drafter="mtp") as llm:
        prompt = one_image(llm, model, "qwen3_5")
        assert say(llm, [prompt]) == [generate_images(plain, prompt, N_NEW)]
