"""Images in requests: all APIs, refusals, usage, and URLs."""

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from support.serving import SETTINGS, TURNS, ListingProcessor, Served, read_images, running, script

from offload_rt import SamplingParams
from offload_rt.errors import PromptError
from offload_rt.models.image_prompt import ImagePrompt
from offload_rt.server import app, prompts


def data_of(*size: int, colour: str = "teal") -> str:
    """A PNG in base64."""
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


DATA = data_of(5, 3)
URL = f"data:image/png;base64,{DATA}"
OPENAI = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
ANTHROPIC = {"type": "image", "source": SOURCE}
N_TOKENS = 5 + 2  # columns, and the tokens of "x"


@pytest.fixture
def processor(served: Served, monkeypatch: pytest.MonkeyPatch) -> ListingProcessor:
    return read_images(served.llm, monkeypatch)


def chat_of(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 3}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def ask_chat(served: Served) -> tuple[str | None, Any]:
    parts: Any = [text("a"), OPENAI, text("b")]
    turns: Any = [{"role": "system", "content": "S"}, {"role": "user", "content": parts}]
    answer = served.client.chat.completions.create(model="demo", messages=turns)
    return answer.choices[0].message.content, answer.usage.prompt_tokens


def ask_responses(served: Served) -> tuple[str, Any]:
    texts = [{"type": "input_text", "text": value} for value in "ab"]
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    turns: Any = [{"role": "user", "content": [texts[0], image, texts[1]]}]
    answer = served.client.responses.create(model="demo", input=turns, instructions="S")
    return answer.output_text, answer.usage.input_tokens


def ask_messages(served: Served) -> tuple[str, Any]:
    client = served.anthropic
    turns: Any = [{"role": "user", "content": [text("a"), ANTHROPIC, text("b")]}]
    fields: Any = {"model": "demo", "messages": turns, "system": "S"}
    count = client.messages.count_tokens(**fields)
    answer = client.messages.create(max_tokens=3, **fields)
    assert count.input_tokens == answer.usage.input_tokens
    return answer.content[0].text, answer.usage.input_tokens


@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
def test_images_of_all_apis_reach_the_processor_alike(served, processor, monkeypatch, ask):
    requests = script(served.llm, monkeypatch, "seen")
    assert ask(served) == ("seen", N_TOKENS)
    messages, images, options = processor.calls[-1]
    parts = [text("a"), {"type": "image"}, text("b")]
    turns = [(turn["role"], turn["content"]) for turn in messages]
    assert turns == [("system", "S"), ("user", parts)]
    assert [(image.size, image.getpixel((0, 0))) for image in images] == [((5, 3), (0, 128, 128))]
    assert options["add_generation_prompt"] is True
    (prompt,) = requests[0][0]
    assert isinstance(prompt, ImagePrompt) and len(prompt) == N_TOKENS


def test_answers_of_a_vision_model_equal_those_of_python(vision):
    """The answer depends on the image, and usage counts its 16 tokens."""
    texts = []
    for colour in ("teal", "red"):
        url = f"data:image/png;base64,{data_of(50, 40, colour=colour)}"
        body = chat_of({"type": "image_url", "image_url": {"url": url}}, text("What?"))
        answer = vision.post("/v1/chat/completions", body | {"max_tokens": 6, "temperature": 0})[1]
        image = {"type": "image", "image": Image.new("RGB", (50, 40), colour)}
        turns = [{"role": "user", "content": [image, text("What?")]}]
        expected = vision.llm.chat(turns, SamplingParams(max_tokens=6, temperature=0))[0]
        assert answer["choices"][0]["message"]["content"] == expected.text
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids) > 16
        texts.append(expected.text)
    assert texts[0] != texts[1]


def test_tool_results_contain_images(served, processor, monkeypatch):
    script(served.llm, monkeypatch, "seen")
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("a"), ANTHROPIC]}
    body = chat_of(result)
    assert served.post("/v1/messages", body)[0] == 200
    call = {"type": "function_call_output", "call_id": "1"}
    output = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL}]
    assert served.post("/v1/responses", {"input": [call | {"output": output}]})[0] == 200
    for messages, images, _ in processor.calls:
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


def test_prompts_with_images_are_not_truncated(served, monkeypatch):
    for path, part in (("chat/completions", OPENAI), ("messages", ANTHROPIC)):
        status, answer = served.post(f"/v1/{path}", chat_of(part))
        assert (status, answer["error"]["message"]) == (
            400, "images: needs a model with a vision tower,"
            " has type llama, of which only the text model is supported; leave the images out"
        )  # fmt: skip
    read_images(served.llm, monkeypatch)
    url = f"data:image/png;base64,{data_of(served.llm.max_model_len, 1)}"
    long = chat_of({"type": "image_url", "image_url": url})
    status, answer = served.post("/v1/chat/completions", long)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    body = chat_of(OPENAI) | {"truncate_prompt_tokens": 4}
    status, answer = served.post("/v1/chat/completions", body)
    assert status == 400 and "truncate_prompt_tokens" in answer["error"]["message"]


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
        assert processor.calls[-1][1][0].size == (5, 3)
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
        try:
            for _ in range(prompts._IMAGE_THREADS):
                assert are_waiting.acquire(timeout=60)
            assert served.request("GET", "/health")[0] == 200
            assert served.post(path, {"messages": TURNS, "max_tokens": 3})[0] == 200
            assert not are_waiting.acquire(blocking=False)
        finally:
            may_go_on.set()
    assert [future.result()[0] for future in asked] == [200] * 9
