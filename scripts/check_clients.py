"""Run clients of the APIs of OpenAI and Anthropic against a server of any model.

    pip install openai anthropic langchain-openai litellm mcp instructor
    python scripts/check_clients.py http://127.0.0.1:8000 [CLIENT ...]

Covers chat, streaming, token counts, log-probabilities, schemas and tools. Stops at a failure.
`check_clients.mjs` has the clients for Node.
"""

import json
import sys
from typing import Any, Literal
from urllib.request import urlopen

from pydantic import BaseModel

TURNS: Any = [{"role": "user", "content": "Name a city in Norway."}]


class City(BaseModel):
    """Arguments and answers."""

    name: Literal["Oslo", "Bergen"]
    is_capital: bool


SCHEMA = City.model_json_schema()
TOOLS: Any = [{"type": "function", "function": {"name": "add_city", "parameters": SCHEMA}}]
FORCED: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


def _check_openai(url: str, model: str) -> None:
    from openai import OpenAI

    client: Any = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask = client.chat.completions.create
    fields = {"model": model, "messages": TURNS, "max_tokens": 60}
    answer = ask(**fields, logprobs=True, top_logprobs=2)
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)
    chunks = [*ask(**fields, stream=True, stream_options={"include_usage": True})]
    assert len(chunks) > 2 and chunks[-1].usage.total_tokens
    (call,) = ask(**fields, **FORCED).choices[0].message.tool_calls
    assert City.model_validate_json(call.function.arguments)
    turns = [*TURNS, {"role": "assistant", "tool_calls": [call.model_dump()]}]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "stored"})
    assert ask(**fields | {"messages": turns}, tools=TOOLS).usage.completion_tokens
    assert client.chat.completions.parse(**fields, response_format=City).choices[0].message.parsed
    fields = {"model": model, "input": "A city?", "max_output_tokens": 60}
    assert client.responses.parse(**fields, text_format=City).output_parsed
    with client.responses.stream(**fields) as events:
        assert {event.type for event in events} >= {"response.created", "response.output_text.done"}
    (choice,) = client.completions.create(model=model, prompt="Hi", echo=True, logprobs=1).choices
    assert choice.text.startswith("Hi") and choice.logprobs.tokens[0] == "Hi"


def _check_anthropic(url: str, model: str) -> None:
    from anthropic import Anthropic

    messages: Any = Anthropic(base_url=url, api_key="none", max_retries=0).messages
    fields = {"model": model, "messages": TURNS, "max_tokens": 60}
    assert messages.create(**fields).usage.output_tokens
    with messages.stream(**fields) as stream:
        assert "".join(stream.text_stream)
    tool = {"name": "add_city", "input_schema": SCHEMA}
    answer = messages.create(**fields, tools=[tool], tool_choice={"type": "any"})
    assert City.model_validate(answer.content[-1].input)
    assert messages.parse(**fields, output_format=City).parsed_output
    assert messages.count_tokens(model=model, messages=TURNS).input_tokens


def _check_langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    fields: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "max_tokens": 60}
    for responds in (False, True):
        chat: Any = ChatOpenAI(**fields, use_responses_api=responds)
        assert chat.invoke("Hi").usage_metadata["output_tokens"] and len([*chat.stream("Hi")]) > 2
        assert isinstance(chat.with_structured_output(City, strict=True).invoke("A city?"), City)
        answer = chat.bind_tools([City], tool_choice="required").invoke("A city?")
        assert City.model_validate(answer.tool_calls[0]["args"])
    assert ChatOpenAI(**fields, logprobs=True).invoke("Hi").response_metadata["logprobs"]["content"]


def _check_litellm(url: str, model: str) -> None:
    from litellm import completion

    for provider, path in (("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")):
        fields: Any = {"model": f"{provider}/{model}", "api_base": url + path, "api_key": "none"}
        fields |= {"messages": TURNS, "max_tokens": 60}
        assert completion(**fields).usage.completion_tokens
        assert len([*completion(**fields, stream=True)]) > 2
        (call,) = completion(**fields, **FORCED).choices[0].message.tool_calls
        assert City.model_validate_json(call.function.arguments)
        answer = completion(**fields, response_format=City)
        assert City.model_validate_json(answer.choices[0].message.content)


def _check_instructor(url: str, model: str) -> None:
    from instructor import Mode, from_openai
    from openai import OpenAI

    for mode in (Mode.JSON_SCHEMA, Mode.TOOLS, Mode.TOOLS_STRICT):
        client: Any = from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        fields = {"model": model, "messages": TURNS, "response_model": City, "max_tokens": 60}
        assert isinstance(client.chat.completions.create(**fields), City)
        assert [*client.chat.completions.create_partial(**fields)][-1].name


def main(url: str, *names: str) -> None:
    """Check the named clients, or all."""
    model = json.load(urlopen(f"{url}/v1/models"))["data"][0]["id"]
    checks = {name[7:]: f for name, f in globals().items() if name.startswith("_check_")}
    for name in names or checks:
        checks[name](url, model)
        print(f"{name}: passed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
