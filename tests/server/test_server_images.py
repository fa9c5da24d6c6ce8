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


def test_models_describe_their_input(served, processor, monkeypatch):
    assert [model.id for model in served.client.models.list()] == ["demo"]
    card = served.client.models.retrieve("demo").model_dump()
    assert card["input_modalities"] == ["text", "image"]
    assert card["max_body"] == SETTINGS.body_nbytes
    monkeypatch.setattr(served.llm.requests, "images", None)
    assert served.client.models.retrieve("demo").model_dump()["input_modalities"] == ["text"]


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(("path", "part", "message"), [
    ("chat/completions", {"type": "video_url", "video_url": {"url": URL}},
     "content[1] of type 'video_url': needs text, or an image"),
    ("chat/completions", {"type": "input_audio", "input_audio": {}}, "type 'input_audio'"),
    ("chat/completions", {"type": "image_url", "image_url": {"url": "x.png"}},
     "image 1: no URL"),
    ("chat/completions", {"type": "image", "image": "/etc/passwd"}, "image 1: no URL"),
    ("chat/completions", {"type": "image_url", "image_url": {"url": "https://a.example/x"}},
     "allow_image_urls"),
    ("chat/completions", {"type": "image_url", "image_url": {"url": URL[:-40]}},
     "image 1: the image is damaged or incomplete"),
    ("responses", {"type": "input_image", "file_id": "x"}, "image 1: no URL"),
    ("responses", {"type": "input_file", "file_id": "x"}, "content[1] of type 'input_file'"),
    ("messages", {"type": "document", "source": SOURCE}, "content[1] of type 'document'"),
    ("messages", {"type": "image", "source": SOURCE | {"media_type": "text/html"}},
     "image 1: the media type of a data URL"),
])  # fmt: skip
def test_wrong_parts_are_refused_by_name(served, path, part, message):
    content = [{"type": "input_text", "text": "a"}, part]
    turns = [{"role": "user", "content": content}]
    body = {"input": turns} if path == "responses" else {"messages": turns, "max_tokens": 3}
    status, answer = served.post(f"/v1/{path}", body)
    assert status == 400 and message in answer["error"]["message"]


@pytest.mark.usefixtures("processor")
def test_prompts_with_images_are_not_truncated(served):
    url = f"data:image/png;base64,{data_of(served.llm.max_model_len, 1)}"
    for body, message in (
        (chat_of({"type": "image_url", "image_url": url}), "maximum context length"),
        (chat_of(OPENAI) | {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ):
        status, answer = served.post("/v1/chat/completions", body)
        assert status == 400 and message in answer["error"]["message"]


def test_urls_are_read_with_permission(served, processor, monkeypatch):
    def fetch(url: str, _: float) -> bytes:
        if "bad" in url:
            raise PromptError("bad.example answered with status 404")
        return base64.b64decode(DATA)

    script(served.llm, monkeypatch, "seen")
    source = {"type": "url", "url": "https://a.example/x"}
    monkeypatch.setattr(app, "ImageFetcher", lambda _: fetch)
    with running(served.llm, settings=replace(SETTINGS, allow_image_urls=True)) as open_server:
        body = chat_of({"type": "image", "source": source})
        assert open_server.post("/v1/messages", body)[0] == 200
        assert processor.encode_chat.call_args.args[1][0].size == (5, 3)
        body = chat_of({"type": "image", "source": source | {"url": "https://bad.example/x"}})
        status, answer = open_server.post("/v1/messages", body)
    assert status == 400 and "image 1: bad.example answered" in answer["error"]["message"]


def test_images_delay_no_request_of_text(served, processor, monkeypatch):
    """Requests of text and /health are answered while more images wait than threads exist."""
    script(served.llm, monkeypatch, "seen")
    are_waiting = threading.Semaphore(0)
    may_go_on = threading.Event()
    encode = processor.encode_chat

    def slow(*arguments: Any) -> ImagePrompt:
        are_waiting.release()
        assert may_go_on.wait(60)
        return encode(*arguments)

    monkeypatch.setattr(processor, "encode_chat", slow)
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
