"""A vision tower without room for all its blocks: they are read from disk for each image."""

from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from support.fake_gpu import fake_gpu
from support.images import generate_images, image_inputs, image_model, image_prompt
from support.tiny import open_unloaded, runner_of
from torch.profiler import ProfilerActivity, profile

from offload_rt import LLM, SamplingParams, ops
from offload_rt.engine import loader
from offload_rt.executor.image_encoder import KEPT_IMAGES
from offload_rt.models.image_prompt import PromptImage
from offload_rt.offload import stream_threads

pytestmark = pytest.mark.numeric
GREEDY = SamplingParams(max_tokens=6, temperature=0)
SETTINGS = {"max_model_len": 200, "drafter": "none"}


def open_streamed_tower(folder, device="cpu"):
    """Open an LLM with a byte less than streamed layers and a resident tower need."""
    with open_unloaded(folder, device=device, **SETTINGS) as unloaded:
        plan = unloaded.plan
        assert plan.reserved.images
        assert not plan.reserved.streamed_images
        assert "vision tower" not in unloaded.spec.notice
    budget = plan.reserved.total + min(2 * plan.slot_nbytes, sum(plan.layer_nbytes)) - 1
    llm = LLM(str(folder), device=device, device_memory=budget, **SETTINGS)
    assert llm.plan.reserved.streamed_images
    assert "the vision tower is streamed" in llm.spec.notice
    return llm


def prompt_of(kind, model, llm):
    parts = [5, image_inputs(kind, 1), 7, image_inputs(kind, 2), 2]
    return image_prompt(model, llm.spec.target.checkpoint.spec.images, parts)


def features_of(llm, prompt):
    encoder = runner_of(llm).images
    with torch.inference_mode():
        features = [encoder.features(image) for image in prompt.images]
    return [ops.to_host([image.rows, *image.deep]) for image in features]


@pytest.mark.parametrize(("kind", "device"), [
    *((kind, "cpu") for kind in ("qwen3_vl", "gemma4", "mistral3", "llava_next")),
    ("llava", "cuda"),
])  # fmt: skip
def test_features_and_texts_of_a_streamed_tower(tmp_path, monkeypatch, kind, device):
    """They equal the resident tower's, bit for bit; the blocks are read once per image."""
    model = image_model(kind, tmp_path)
    with fake_gpu(monkeypatch) if device == "cuda" else nullcontext():
        with LLM(str(tmp_path), device=device, **SETTINGS) as llm:
            prompt = prompt_of(kind, model, llm)
            resident = features_of(llm, prompt)
        with open_streamed_tower(tmp_path, device) as llm:
            blocks = llm.spec.files.images
            reads = blocks.reads
            n_reads = Counter()

            def count(i, into):
                n_reads[i] += 1
                return reads(i, into)

            monkeypatch.setattr(blocks, "reads", count)
            runner_of(llm)._chunk_rows = 4  # several chunks read the features of an image
            (output,) = llm.generate(prompt, GREEDY)
            assert output.token_ids == generate_images(model, prompt, 6)
            # The first two blocks are read ahead: once before `count` and after the last image.
            # A GPU's host slots are filled further ahead.
            n_more = int(device == "cuda")
            assert all(n_reads[i] - len(prompt.images) in (0, n_more) for i in (2, 3))
            assert max(n_reads.values()) <= len(prompt.images) + n_more
            streamed = features_of(llm, prompt)
    for features, expected in zip(streamed, resident, strict=True):
        assert len(features) == len(expected)
        assert all(map(torch.equal, features, expected))


def test_weights_of_a_streamed_tower_fit_the_plan(tmp_path, monkeypatch):
    """Compare allocated bytes with those of a run of text with equal placement of the layers."""
    model = image_model("qwen3_vl", tmp_path)
    nbytes = []

    def allocate(n, allocated=loader.host_block):
        nbytes.append(n)
        return allocated(n)

    for module in (loader, stream_threads):
        monkeypatch.setattr(module, "host_block", allocate)
    with open_streamed_tower(tmp_path) as llm:
        plan = llm.plan
        spec = llm.spec.target.checkpoint.spec
        llm.generate(prompt_of("qwen3_vl", model, llm), GREEDY)
        whole = llm.spec.target.checkpoint.images
        scratch = spec.images.scratch_nbytes(llm.spec.target.image_pixels, KEPT_IMAGES, 4)
    with_images = sum(nbytes)
    nbytes.clear()
    budget = plan.budget.device - plan.reserved.images
    with LLM(
        str(tmp_path), device="cpu", device_memory=budget, max_image_pixels=0, **SETTINGS
    ) as llm:
        assert (llm.plan.tiers, llm.plan.n_slots) == (plan.tiers, plan.n_slots)
        llm.generate([1, 2, 3], GREEDY)
    assert with_images - sum(nbytes) == plan.reserved.images - scratch
    assert plan.reserved.images - scratch < sum(block.nbytes for block in whole)


@pytest.mark.parametrize(
    ("kind", "n_rows"),
    [("qwen2_vl", 324), ("glm4v", 324), ("mistral3", 324), ("gemma4", 144), ("llava", 16)],
)
def test_activations_of_a_large_image_fit_the_plan(tmp_path, kind, n_rows):
    """Compute the features of an image of 36 x 36 patches of 8 x 8 pixels, or of one tile."""
    image_model(kind, tmp_path)
    n = 36
    if kind == "llava":
        inputs = image_inputs(kind, 0)
    else:
        places = torch.cartesian_prod(*[torch.arange(n)] * 2)[None]
        grid = (n * n, 3 * 2 * 8 * 8), "image_grid_thw", torch.tensor([[1, n, n]])
        shape, name, about = {
            "mistral3": ((1, 3, 8 * n, 8 * n), "image_sizes", torch.tensor([[8 * n, 8 * n]])),
            "gemma4": ((1, n * n, 3 * 8 * 8), "image_position_ids", places),
        }.get(kind, grid)
        inputs = {"pixel_values": torch.zeros(shape), name: about}
    with LLM(str(tmp_path), device="cpu", **SETTINGS) as llm, torch.inference_mode():
        encoder = runner_of(llm).images
        copies = {name: value.clone() for name, value in inputs.items()}
        image = PromptImage(-1, np.arange(n_rows), {}, lambda: copies)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            encoder.features(image)
        events = recorded.profiler.kineto_results.events()
        nbytes = np.cumsum([event.nbytes() for event in events if event.name() == "[memory]"])
        assert nbytes.max() <= encoder.tower.scratch_nbytes((8 * n) ** 2, KEPT_IMAGES, 4)
