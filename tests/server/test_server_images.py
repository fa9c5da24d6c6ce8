"""Images in requests: all APIs, refusals, usage, and URLs."""

import base64
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image
from support.serving import SETTINGS, TURNS, Served, running, script

from offload_rt.errors import PromptError
from offload_rt.models.image_prompt import ImagePrompt
from offload_rt.server import app, prompts


def data_of(*size: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, "teal").save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


DATA = data_of(5, 3)
URL = f"data:image/png;base64,{DATA}"
OPENAI = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
ANTHROPIC = {"type": "image", "source": SOURCE}
N_TOKENS = 5 + 2  # columns, and the tokens of "x"


@pytest.fixture
def processor(served: Served, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Let the model of text accept images, with a token per column. Its answers need `script`."""

    def encode_chat(messages: Any, images: Any, options: Any) -> ImagePrompt:
        return ImagePrompt([7] * sum(image.width for image in images) + served.llm.encode("x"), ())

    processor = Mock(scaled=lambda image: image, encode_chat=Mock(wraps=encode_chat))
    monkeypatch.setattr(served.llm.requests, "images", processor)
    return processor


def chat_of(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 3}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


INPUT = [
    {"type": "input_text", "text": "a"},
    {"type": "input_image", "image_url": URL, "detail": "auto"},
    {"type": "input_text", "text": "b"},
]


@pytest.mark.parametrize(("path", "body"), [
    ("chat/completions", {"messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [text("a"), OPENAI, text("b")]}]}),
    ("responses", {"input": [{"role": "user", "content": INPUT}], "instructions": "S"}),
    ("messages", chat_of(text("a"), ANTHROPIC, text("b")) | {"system": "S"}),
])  # fmt: skip
def test_images_of_all_apis_reach_the_processor_alike(served, processor, monkeypatch, path, body):
    requests = script(served.llm, monkeypatch, "seen")
    status, answer = served.post(f"/v1/{path}", body)
    assert status == 200 and '"seen"' in json.dumps(answer)
    usage = answer["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == N_TOKENS
    if path == "messages":
        assert served.post("/v1/messages/count_tokens", body)[1] == {"input_tokens": N_TOKENS}
    messages, images, options = processor.encode_chat.call_args.args
    parts = [text("a"), {"type": "image"}, text("b")]
    turns = [(turn["role"], turn["content"]) for turn in messages]
    assert turns == [("system", "S"), ("user", parts)]
    assert [(image.size, image.getpixel((0, 0))) for image in images] == [((5, 3), (0, 128, 128))]
    assert options["add_generation_prompt"] is True
    (prompt,) = requests[0][0]
    assert isinstance(prompt, ImagePrompt) and len(prompt) == N_TOKENS


def test_tool_results_contain_images(served, processor, monkeypatch):
    script(served.llm, monkeypatch, "seen")
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("a"), ANTHROPIC]}
    assert served.post("/v1/messages", chat_of(result))[0] == 200
    call = {"type": "function_call_output", "call_id": "1", "output": INPUT[:2]}
    assert served.post("/v1/responses", {"input": [call]})[0] == 200
    for messages, images, _ in (call.args for call in processor.encode_chat.call_args_list):
        assert messages[0]["role"] == "tool" and len(images) == 1
        assert messages[0]["content"] == [text("a"), {"type": "image"}]


@pytest.mark.usefixtures("processor")
def test_wrong_images_are_refused_and_models_describe_their_input(served, monkeypatch):
    models = served.client.models
    assert [model.id for model in models.list()] == ["demo"]
    card = models.retrieve("demo").model_dump()
    assert (card["input_modalities"], card["max_body"]) == (["text", "image"], 200_000)
    wide = f"data:image/png;base64,{data_of(served.llm.max_model_len, 1)}"
    for part, message in (
        ({"type": "image_url", "image_url": wide}, "maximum context length"),
        (OPENAI, "truncate_prompt_tokens"), ({"type": "video_url"}, "[0] of type 'video_url'"),
        ({"type": "image", "image": "/etc/passwd"}, "image 1: no URL"),
        ({"type": "image_url", "image_url": "https://a.example/x"}, "allow_image_urls"),
        ({"type": "image_url", "image_url": URL[:-40]}, "image 1: the image is damaged"),
    ):  # fmt: skip
        body = chat_of(part) | ({"truncate_prompt_tokens": 4} if part == OPENAI else {})
        status, answer = served.post("/v1/chat/completions", body)
        assert status == 400 and message in answer["error"]["message"]
    monkeypatch.setattr(served.llm.requests, "images", None)
    assert models.retrieve("demo").model_dump()["input_modalities"] == ["text"]


def test_urls_are_read_with_permission(served, processor, monkeypatch):
    script(served.llm, monkeypatch, "seen")
    failure = PromptError("a.example answered with status 404")
    fetch = Mock(side_effect=[base64.b64decode(DATA), failure])
    monkeypatch.setattr(app, "ImageFetcher", lambda _: fetch)
    body = chat_of({"type": "image", "source": {"type": "url", "url": "https://a.example/x"}})
    with running(served.llm, settings=replace(SETTINGS, allow_image_urls=True)) as open_server:
        assert open_server.post("/v1/messages", body)[0] == 200
        assert processor.encode_chat.call_args.args[1][0].size == (5, 3)
        status, answer = open_server.post("/v1/messages", body)
    assert status == 400 and "image 1: a.example answered" in answer["error"]["message"]


def test_images_delay_no_request_of_text(served, processor, monkeypatch):
    """Requests of text and /health are answered while more images wait than threads exist."""
    script(served.llm, monkeypatch, "seen")
    are_waiting = threading.Semaphore(0)
    may_go_on = threading.Event()

    def slow(image: Any) -> Any:
        are_waiting.release()
        assert may_go_on.wait(60)
        return image

    monkeypatch.setattr(processor, "scaled", slow)
    path = "/v1/chat/completions"
    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(served.post, path, chat_of(OPENAI)) for _ in range(9)]
        for _ in range(prompts._IMAGE_THREADS):
            assert are_waiting.acquire(timeout=60)
        assert served.request("GET", "/health")[0] == 200
        assert served.post(path, {"messages": TURNS, "max_tokens": 3})[0] == 200
        assert not are_waiting.acquire(blocking=False)
        may_go_on.set()
    assert [future.result()[0] for future in asked] == [200] * 9
