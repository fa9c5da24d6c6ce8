"""Prompts with images: processors of transformers, their limits, and the forms of a request."""

import base64
import functools
import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.images import IMAGE_ID, image_model
from support.tiny import open_streamed, open_unloaded
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offload_rt import SamplingParams
from offload_rt.errors import PromptError
from offload_rt.models.processors import load_processor

GREEDY = SamplingParams(max_tokens=8, temperature=0)
_NAMES = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
_TEMPLATE = (
    "{% for turn in messages %}<turn> {% for part in turn.content %}"
    "{{ 'PLACE' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
)
_PROCESSORS = {
    "llava": (
        "LlavaProcessor", "<image>",
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32},
         "crop_size": {"height": 32, "width": 32}},
        {"patch_size": 8, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1},
    ),
    "qwen2_vl": (
        "Qwen2VLProcessor", "<|vision_start|> <|image_pad|> <|vision_end|>",
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2,
         "temporal_patch_size": 2, "min_pixels": 16 * 16, "max_pixels": 64 * 64},
        {},
    ),
    "gemma3": (
        "Gemma3Processor", "<boi>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
        {"image_seq_length": 4},
    ),
}  # fmt: skip


def picture(seed, size=(48, 32)):
    pixels = torch.randint(
        256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(pixels.byte().numpy())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of a type: model and processor of transformers, and their checkpoint."""

    @functools.cache
    def get(kind):
        folder = tmp_path_factory.mktemp(kind)
        return image_model(kind, folder), save_processor(kind, folder), folder

    return get


def save_processor(kind, folder):
    name, place, images, options = _PROCESSORS[kind]
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    words = ["<unk>", "<turn>", "<boi>", "<eoi>", "<|vision_start|>", "<|vision_end|>"]
    words += [f"w{i}" for i in range(len(words), IMAGE_ID)]
    placeholder = "<|image_pad|>" if kind == "qwen2_vl" else "<image>"
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = _NAMES if kind == "gemma3" else [*words[1:6], placeholder, "<|video_pad|>"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", extra_special_tokens=special,
        chat_template=_TEMPLATE.replace("PLACE", place),
    )  # fmt: skip
    fast.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **options}))
    processor = load_processor(folder, fast, kind)
    processor.__class__ = type(processor).__base__  # transformers' class
    return processor


@pytest.mark.parametrize("kind", _PROCESSORS)
def test_chat_with_images_equals_transformers(saved, kind):
    model, processor, folder = saved(kind)
    images = [picture(1), picture(2, (32, 64))]
    parts = [
        {"type": "text", "text": "w20 w21"}, {"type": "image", "image": images[0]},
        {"type": "image", "image": images[1]}, {"type": "text", "text": "w22 w23"},
    ]  # fmt: skip
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    expected = model.generate(
        **inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
    )[0].tolist()
    with open_streamed(folder, max_model_len=160) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
        assert output.prompt_token_ids + output.token_ids == expected
        place = _PROCESSORS[kind][1]
        text = f"<turn> w20 w21 {place} {place} w22 w23"
        (output,) = llm.generate({"prompt": text, "multi_modal_data": {"image": images}}, GREEDY)
        assert output.prompt_token_ids + output.token_ids == expected


def test_large_images_are_scaled_down(saved):
    _, _, folder = saved("qwen2_vl")
    with open_streamed(folder, max_image_pixels=32 * 32) as llm:
        image = llm.requests.images.scaled(picture(1, (128, 128)))
        assert image.size == (32, 32)
        assert len(llm.requests.images.encode("<|image_pad|>", [image])) == (32 // 16) ** 2
        # Scaling the shorter side up would need a thousand times the memory of the strip.
        with pytest.raises(PromptError, match="factor of at most 200, has 1 x 201 pixels"):
            llm.requests.images.scaled(Image.new("RGB", (1, 201)))


def test_placeholders_in_a_text_are_no_images(saved):
    """A client's text cannot name the place of an image."""
    _, _, folder = saved("qwen2_vl")
    parts = [{"type": "text", "text": "<|image_pad|> w20"}, {"type": "image", "image": picture(1)}]
    with open_streamed(folder) as llm:
        prompt = llm.requests.images.encode_chat(
            [{"role": "user", "content": [parts[0], {"type": "image"}]}], [picture(1)], {}
        )
        assert len(prompt.images) == 1
        with pytest.raises(PromptError, match="tokens"):
            llm.generate({"prompt": "w20", "multi_modal_data": {"image": picture(1)}}, GREEDY)


def test_tower_without_pixels_or_memory_is_not_loaded(saved):
    """Texts run as without a tower; a notice names the reason."""
    _, _, folder = saved("llava")
    messages = [{"role": "user", "content": [{"type": "image", "image": picture(1)}]}]
    settings = {"device": "cpu", "drafter": "none", "max_model_len": 64}
    with open_streamed(folder, max_image_pixels=0, **settings) as llm:
        assert not llm.supports_images
        assert llm.plan.reserved.images == 0
        with pytest.raises(PromptError, match="vision tower"):
            llm.chat(messages, GREEDY)
        least = llm.plan.reserved.total + 3 * llm.plan.slot_nbytes
    for budget, has_tower in ((least, False), (None, True)):
        with open_unloaded(folder, device_memory=budget, **settings) as llm:
            assert (llm.plan.reserved.images > 0) == has_tower
            assert ("vision tower" in llm.spec.notice) != has_tower


def resident(name):
    """Bytes of the process by /proc: VmRSS, or VmHWM for the peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) << 10


def test_peak_memory_does_not_grow_with_the_number_of_images(saved):
    """Each image is scaled down before the next is decoded; a prompt holds no patches."""
    _, _, folder = saved("qwen2_vl")
    n_images = 8
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((2000, 2000)).convert("RGB").save(buffer, "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": url}] * n_images
    n_pixels = 500 * 500
    with open_streamed(folder, max_image_pixels=n_pixels) as llm:
        processor = llm.requests.images._processor.image_processor
        processor.size = {"shortest_edge": 256, "longest_edge": n_pixels}
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        before = resident("VmRSS")
        prompt = llm.encode_messages([{"role": "user", "content": parts}], {})
        growth = resident("VmHWM") - before
    assert len(prompt.images) == n_images and len(prompt.images[0].rows) > 900
    assert all(set(image.inputs) == {"image_grid_thw"} for image in prompt.images)
    # All decoded images need 96 MB.
    assert growth < 85_000_000
