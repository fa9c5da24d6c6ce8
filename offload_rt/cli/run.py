"""`offload-rt run`: generate from a checkpoint larger than its memory budget.

Text streams to stdout; progress and report go to stderr.
Exit codes: 0 success, 2 input or settings, 3 machine (memory, disk, driver), 130 interrupted.
"""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.process import INTERRUPTED, exit_code, show_any_text
from offload_rt.config import (
    EngineConfig,
    SamplingParams,
    StructuredOutputs,
    check_folder,
    setting,
)
from offload_rt.errors import PromptError, SettingsError

if TYPE_CHECKING:
    from rich.console import Console

    from offload_rt.cli.format import PlainPass
    from offload_rt.executor.stats import PassTimes
    from offload_rt.llm import LLM, Output, Stats


@dataclass(frozen=True)
class RunSettings:
    """Input and output of the command."""

    prompt: tuple[str, ...] = setting((), "text to continue; several times: a batch")
    prompt_file: str | None = setting(None, "file with the text to continue; -: stdin")
    chat: bool = setting(
        False, "apply the model's chat template, with the prompt as the user's turn"
    )
    plan: bool = setting(False, "print placement and predicted time per token, without generating")
    json: bool = setting(
        False,
        "print text, token ids and stats as a JSON object; a list for several prompts",
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
            raise PromptError(
                "the prompt", need="--prompt or --prompt-file", have=have, change="pass exactly one"
            )

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """Format of the answer; None for any text. Raises SettingsError or PromptError."""
        if self.json_schema is None and self.regex is None:
            return None
        schema = None if self.json_schema is None else _read(self.json_schema, "--json-schema")
        return StructuredOutputs(json=schema, regex=self.regex)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for any other text."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


@dataclass(frozen=True)
class TemplateSettings:
    """Variables of the model's chat template."""

    system: str | None = setting(None, "system message")
    enable_thinking: bool | None = setting(
        None,
        "thinking before the answer, for templates with this variable; default: the template's",
        parse=bool,
    )
    chat_template_kwargs: Mapping[str, Any] | None = setting(
        None, """template variables, like '{"reasoning_effort": "low"}'""", parse=json_object
    )

    def encode(self, llm: "LLM", turns: list[dict[str, str]]) -> list[int]:
        """Encode a conversation. Raises PromptError or CapacityError."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        options = {"add_generation_prompt": True, **thinking, **(self.chat_template_kwargs or {})}
        ids = llm.encode_chat([*system, *turns], options)
        llm.check_prompt(ids)
        return ids


@dataclass
class _Progress:
    """Output so far, for an early end.

    as_json     print a JSON object at the end instead of streaming text
    is_quiet    print no speed
    is_printed  stdout has the complete output
    passes      times of the passes so far
    """

    as_json: bool = False
    is_quiet: bool = False
    text: str = ""
    token_ids: tuple[int, ...] = ()
    is_printed: bool = False
    passes: "list[PassTimes]" = field(default_factory=list)

    def tell_rest(self, code: int) -> None:
        """End the streamed text, or print the object of the partial output; then the speed."""
        if self.as_json and (self.token_ids or code == INTERRUPTED) and not self.is_printed:
            reason = "interrupted" if code == INTERRUPTED else "error"
            print(
                json.dumps(_as_json(self.text, list(self.token_ids), reason, None, {})), flush=True
            )
        elif self.text and not self.as_json and not self.is_printed:
            print(flush=True)
        if self.passes and not self.is_quiet and not self.is_printed:
            from offload_rt.cli.format import format_speed

            n = len(self.token_ids)
            seconds = self.passes[-1].ended - self.passes[0].started
            print(
                f"{format_speed(seconds / n)}, {n} tokens in {seconds:.2f} s,"
                f" {n / len(self.passes):.2f} tokens per pass",
                file=sys.stderr,
            )


def new_parser() -> Parser:
    """Return the parser of the command."""
    return Parser(
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
        ),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    show_any_text()
    so_far = _Progress()
    parser = new_parser()
    return exit_code(lambda: _run(parser.parse_args(arguments), so_far), so_far.tell_rest)


def _run(flags: Namespace, so_far: _Progress) -> None:
    settings = from_flags(RunSettings, flags)
    config = from_flags(EngineConfig, flags)
    params = replace(
        from_flags(SamplingParams, flags), structured_outputs=settings.structured_outputs
    )
    template = from_flags(TemplateSettings, flags)
    if template != TemplateSettings() and not settings.chat:
        problem = "--system, --enable-thinking and --chat-template-kwargs need the chat template"
        raise SettingsError(problem, change="add --chat")
    so_far.as_json = settings.json and not settings.plan
    so_far.is_quiet = settings.quiet
    started = time.perf_counter()
    # Imported late: report wrong flags and paths before loading torch, which takes seconds.
    from rich.console import Console

    from offload_rt.weights.locate import check_paths

    check_paths(config)

    from offload_rt.cli.format import follow, load, quiet_libraries
    from offload_rt.cli.plan import print_run_plan
    from offload_rt.llm import LLM
    from offload_rt.system.ranks import is_first
    from offload_rt.system.trace import Trace

    quiet_libraries()
    if settings.plan:
        return print_run_plan(config, flags)
    if not is_first():
        return follow(config)
    if settings.trace is not None:
        check_folder("--trace", settings.trace)
    prompts = list(settings.prompt) or [read_prompt(str(settings.prompt_file))]
    console = Console(stderr=True, quiet=settings.quiet)
    trace = Trace(on=settings.trace is not None)
    if settings.trace is not None:
        # report an unwritable file before the run
        trace.write(Path(settings.trace))
    imported = time.perf_counter()
    with LLM.open(config) as llm:
        ids = [_encode(llm, text, template if settings.chat else None) for text in prompts]
        phases = {"import": imported - started, "plan": time.perf_counter() - imported}
        phases |= load(llm, console, trace, params)
        try:
            if len(ids) == 1:
                _echo(console, prompts[0], so_far)
                outputs = [_stream(llm, ids[0], params, so_far, console)]
            else:
                outputs = llm.generate(ids, params, use_tqdm=not settings.quiet)
        finally:
            if settings.trace is not None:
                trace.write(Path(settings.trace))
        _print_outputs(outputs, prompts, so_far, console)
        _report(llm, outputs, settings, phases, console)


def _report(
    llm: "LLM",
    outputs: list["Output"],
    settings: RunSettings,
    phases: Mapping[str, float],
    console: "Console",
) -> None:
    """Print a report per output to stderr.

    phases  seconds of the phases before the first pass
    """
    from offload_rt.cli.format import report
    from offload_rt.tree.describe import describe

    context = max(len(output.prompt_token_ids) for output in outputs)
    baseline = median(llm.time_plain(context)) if settings.baseline else None
    for n, output in enumerate(outputs, 1):
        heading = f"answer {n}: " if len(outputs) > 1 else ""
        plain = _plain_pass(llm, output.stats, context, baseline)
        text = report(output.stats, plain, phases if n == 1 else {}, settings.verbose)
        console.print(heading + text, highlight=False, soft_wrap=True)
        if settings.show_tree:
            tree = describe(output.topology)
            console.print(tree, highlight=False, soft_wrap=True, markup=False)


def _plain_pass(
    llm: "LLM", stats: "Stats", context: int, measured_s: float | None
) -> "PlainPass | None":
    """Return the time of plain decoding after `context` tokens, measured or by the cost model.

    Returns None if nothing was drafted.
    """
    from offload_rt.cli.format import PlainPass

    if measured_s is not None:
        return PlainPass(measured_s, True)
    if stats.measured_seconds_per_token is None or stats.nodes_per_tree <= 1:
        return None
    import numpy as np

    return PlainPass(float(llm.engine.cost.seconds(np.array([1]), context)[0]), False)


def _echo(console: "Console", prompt: str, so_far: _Progress, n: int = 1) -> None:
    """Print the first line of a prompt to stderr, above its answer."""
    if so_far.as_json:
        return
    first, *more = prompt.strip().splitlines() or [""]
    text = f"[{n}] {first[:72]}{' ...' if more or len(first) > 72 else ''}"
    console.print(text, style="dim", highlight=False, soft_wrap=True, markup=False)


def _encode(llm: "LLM", prompt: str, template: TemplateSettings | None) -> list[int]:
    """Encode a prompt, with the chat template if its settings are given."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise PromptError("--prompt is not UTF-8 text", change="convert it to UTF-8") from error
    if template:
        return template.encode(llm, [{"role": "user", "content": prompt}])
    ids = llm.encode(prompt)
    llm.check_prompt(ids)
    return ids


def _print_outputs(
    outputs: list["Output"], prompts: list[str], so_far: _Progress, console: "Console"
) -> None:
    """Print the outputs that were not streamed."""
    if so_far.as_json:
        objects = [
            _as_json(
                output.text,
                output.token_ids,
                output.finish_reason,
                asdict(output.stats),
                _more(output),
            )
            for output in outputs
        ]
        print(json.dumps(objects if len(objects) > 1 else objects[0]), flush=True)
    elif len(outputs) > 1:
        for n, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
            _echo(console, prompt, so_far, n)
            answers = [output.text, *(answer.text for answer in output.others)]
            print(*answers, sep="\n", end="\n\n", flush=True)
    so_far.is_printed = True


def _stream(
    llm: "LLM", ids: list[int], params: SamplingParams, so_far: _Progress, console: "Console"
) -> "Output":
    from offload_rt.system.progress import progress_bar

    pieces = llm.stream(ids, params)
    with progress_bar(console, "first pass over the weights", is_transient=True):
        first = next(pieces)
    for piece in chain((first,), pieces):
        if piece.index > 0:  # further answers are printed after the first
            continue
        if piece.made_by is not None:
            so_far.passes.append(piece.made_by.times)
        so_far.text += piece.text
        so_far.token_ids += tuple(piece.token_ids)
        if not so_far.as_json:
            print(piece.text, end="", flush=True)
    assert piece.output is not None, "the last piece contains the output"
    if not so_far.as_json:
        print(
            "".join(
                f"\n--- answer {answer.index + 1} of {params.n}\n{answer.text}"
                for answer in piece.output.others
            ),
            flush=True,
        )
        so_far.is_printed = True
    return piece.output


def _more(output: "Output") -> dict[str, Any]:
    """Return the requested log-probabilities by token id, and further answers."""
    more: dict[str, Any] = {}
    for name, rows in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if rows is not None:
            more[name] = [
                row and {token: logprob._asdict() for token, logprob in row.items()} for row in rows
            ]
    if output.others:
        names = ("index", "text", "token_ids", "finish_reason")
        more["outputs"] = [
            {name: getattr(answer, name) for name in names} | _more(replace(answer, others=()))
            for answer in output.outputs
        ]
    return more


def read_prompt(path: str) -> str:
    """Read the text of a file, or of stdin for "-". Raises PromptError."""
    return _read(path, "--prompt-file")


def _read(path: str, flag: str) -> str:
    try:
        with sys.stdin.buffer if path == "-" else Path(path).open("rb") as file:
            return file.read().decode("utf-8")
    except OSError as error:
        raise PromptError(
            f"{flag} {path}: {error.strerror}", change="pass a readable file"
        ) from error
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{flag} {path} is not UTF-8 text", change="convert it to UTF-8"
        ) from error


def _as_json(
    text: str,
    token_ids: list[int],
    finish_reason: str,
    stats: dict[str, Any] | None,
    more: dict[str, Any],
) -> dict[str, Any]:
    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "stats": stats,
    } | more
