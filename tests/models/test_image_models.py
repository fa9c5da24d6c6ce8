"""Vision-language models: texts equal transformers' `generate`, for all ways to run them."""

import pytest
from support.images import generate_images, image_inputs, image_model, image_prompt
from support.tiny import generate, prompt_of

from bench.models.tiny import open_streamed
from offload_rt import SamplingParams
from offload_rt.models.image_tower import FAMILIES

pytestmark = pytest.mark.numeric

GREEDY = SamplingParams(max_tokens=10, temperature=0)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Of a type: the model in transformers, and its checkpoint."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = image_model(kind, folder), folder
        return made[kind]

    return get


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
        expected = [generate_images(model, prompt, 10) for prompt in prompts]
        assert say(llm, [prompts[0], text, prompts[2]]) == [
            expected[0], generate(model, text, 10), expected[2]
        ]  # fmt: skip
        assert say(llm, prompts[1:]) == expected[1:]
