"""`offload-rt run`: generate from a checkpoint larger than its memory budget.

Text streams to stdout; progress and report go to stderr.
Exit codes: 0 success, 2 input or settings, 3 machine (memory, disk, driver), 130 interrupted.
"""

import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from offload_rt.cli.answers import Answers
from offload_rt.cli.conversation import Message, image_url, user_turn
from offload_rt.cli.flags import Parser, engine_config, from_flags
from offload_rt.cli.process import exit_code
from offload_rt.config import EngineConfig, check_folder, setting
from offload_rt.errors import PromptError, SettingsError
from offload_rt.sampling_params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from offload_rt.engine.request_builder import RequestBuilder
    from offload_rt.llm import LLM, Output
    from offload_rt.models.image_prompt import EncodedPrompt


@dataclass(frozen=True)
class RunSettings:
    """Input and output of the command."""

    prompt: tuple[str, ...] = setting((), "text to continue; several times: a batch")
    prompt_file: str | None = setting(None, "file with the text to continue; -: stdin")
    chat: bool = setting(
        False, "apply the model's chat template, with the prompt as the user's turn"
    )
    image: tuple[str, ...] = setting(
        (), "image before the prompt in the user's turn, with --chat (repeatable)"
    )
    plan: bool = setting(False, "print placement and predicted time per token, without generating")
    json: bool = setting(
        False, "print text, token ids and stats as a JSON object; a list for several prompts"
    )
    quiet: bool = setting(False, "no prompt, no progress bar and no report on stderr")
    verbose: bool = setting(False, "report trees, drafting and the link, too")
    show_tree: bool = setting(False, "print the largest verified tree")
    baseline: bool = setting(False, "afterwards measure plain decoding and print the speedup")
    trace: str | None = setting(None, "file for the timeline, as a Chrome trace")
    json_schema: str | None = setting(None, "file with a JSON schema that the answer satisfies")
    regex: str | None = setting(None, "regular expression that the answer matches")

    def __post_init__(self) -> None:
        if self.plan:
            return
        if bool(self.prompt) == (self.prompt_file is not None):
            have = "both" if self.prompt else "neither"
            change = "write the prompt after the model, or --prompt-file -: stdin"
            need = "--prompt or --prompt-file"
            raise PromptError("the prompt", need=need, have=have, change=change)
        try:
            "".join(self.prompt).encode()
        except UnicodeEncodeError as error:
            raise PromptError("--prompt is not UTF-8 text", change="convert it to UTF-8") from error
        if self.image and not self.chat:
            raise SettingsError("--image", need="--chat", change="add it")


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError or TypeError for other text."""
    return dict(json.loads(text))


@dataclass(frozen=True)
class TemplateSettings:
    """Variables of the model's chat template."""

    system: str | None = setting(None, "system message")
    enable_thinking: bool | None = setting(
        None,
        "thinking before the answer, for templates with this variable; default: the template's",
    )
    chat_template_kwargs: Mapping[str, Any] | None = setting(
        None, """template variables, like '{"reasoning_effort": "low"}'""", parse=json_object
    )

    def encode(self, requests: "RequestBuilder", turns: list[Message]) -> "EncodedPrompt":
        """Encode a conversation that may be too long. Raises PromptError."""
        if self.system is not None:
            turns = [{"role": "system", "content": self.system}, *turns]
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        options = {"add_generation_prompt": True, **thinking, **(self.chat_template_kwargs or {})}
        return requests.encode_messages(turns, options)


new_parser = partial(
    Parser,
    "offload-rt run",
    "Generate from a model larger than device memory.",
    EngineConfig,
    RunSettings,
    TemplateSettings,
    SamplingParams,
    examples=(
        'offload-rt run models/demo-target "import os" --max-tokens 32',
        "offload-rt run Qwen/Qwen3-32B --draft-model Qwen/Qwen3-0.6B --device-memory 22GiB"
        " --prompt-file prompt.txt --chat",
        'offload-rt run Qwen/Qwen3-VL-8B-Instruct "What is on it?" --chat --image photo.jpg',
    ),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    answers = Answers()
    parser = new_parser()
    return exit_code(lambda: _run(parser.parse_args(arguments), answers), answers.print_unfinished)


def _run(flags: Namespace, answers: Answers) -> None:
    settings = from_flags(RunSettings, flags)
    params = from_flags(SamplingParams, flags)
    if settings.json_schema is not None or settings.regex is not None:
        path = settings.json_schema
        schema = None if path is None else read_input("--json-schema", path)
        answer_format = StructuredOutputs(json=schema, regex=settings.regex)
        params = replace(params, structured_outputs=answer_format)
    if not (settings.json or params.logprobs is params.prompt_logprobs is None):
        raise SettingsError("--logprobs and --prompt-logprobs", need="--json", change="add --json")
    template = from_flags(TemplateSettings, flags)
    if template != TemplateSettings() and not settings.chat:
        problem = "--system, --enable-thinking and --chat-template-kwargs need the chat template"
        raise SettingsError(problem, change="add --chat")
    answers.as_json = settings.json and not settings.plan
    answers.is_quiet = settings.quiet
    started = time.perf_counter()
    config = engine_config(flags)
    # Imported late: report wrong flags and paths before loading torch, which takes seconds.
    from offload_rt.cli.format import follows, load
    from offload_rt.cli.plan import print_run_plan
    from offload_rt.llm import LLM
    from offload_rt.system.trace import Trace

    if settings.plan:
        return print_run_plan(config, flags)
    if follows(config):
        return
    prompts = list(settings.prompt) or [read_input("--prompt-file", str(settings.prompt_file))]
    console = Console(stderr=True, quiet=settings.quiet)
    trace = Trace(on=settings.trace is not None)
    if settings.trace is not None:
        check_folder("--trace", settings.trace)
        trace.write(Path(settings.trace))  # reports an unwritable file before the run
    imported = time.perf_counter()
    with LLM.open(config) as llm:
        urls = [image_url(Path(path)) for path in settings.image]
        encoded = [
            template.encode(llm.requests, [user_turn(text, urls)]) if settings.chat else text
            for text in prompts
        ]
        # Check prompts and settings before loading.
        pieces = llm.stream_all(encoded, params)
        phases = {"import": imported - started, "plan": time.perf_counter() - imported}
        phases |= load(llm, console, trace, params)
        try:
            outputs = answers.follow(pieces, prompts, params.n, console)
        finally:
            if settings.trace is not None:
                trace.write(Path(settings.trace))
        _report(llm, answers, outputs, settings, phases, params.max_tokens, console)


def _report(
    llm: "LLM",
    answers: Answers,
    outputs: list["Output"],
    settings: RunSettings,
    phases: Mapping[str, float],
    max_tokens: int | None,
    console: Console,
) -> None:
    from offload_rt.cli.format import describe_tree, tree_line

    context = max(len(output.prompt_token_ids) for output in outputs)
    baseline = median(llm.time_plain(context)) if settings.baseline else None
    text = answers.report(baseline, phases, settings.verbose)
    console.print(text, highlight=False, soft_wrap=True)
    answered = [answer for output in outputs for answer in output.outputs]
    cut = [answer for answer in answered if answer.finish_reason == "length"]
    if any(len(answer.token_ids) < (max_tokens or math.inf) for answer in cut):
        limit = f"the context of {llm.max_model_len} tokens is full"
        if llm.requests.has_more_positions:
            limit += "; raise --max-model-len"
        console.print(limit, highlight=False, soft_wrap=True)
    for n, output in enumerate(outputs, 1):
        heading = f"prompt {n}: " if len(outputs) > 1 else ""
        lines = [tree_line(output.stats)] if settings.verbose else []
        lines += [describe_tree(output.topology)] if settings.show_tree else []
        for line in filter(None, lines):
            console.print(heading + line, highlight=False, soft_wrap=True, markup=False)


def read_input(flag: str, path: str) -> str:
    """Read the text of a file, or of stdin for "-". Raises PromptError."""
    source = f"{flag} {path}"
    try:
        with sys.stdin.buffer if path == "-" else Path(path).open("rb") as file:
            return file.read().decode("utf-8")
    except OSError as error:
        raise PromptError(f"{source}: {error.strerror}", change="pass a readable file") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} is not UTF-8 text", change="convert it to UTF-8") from error
