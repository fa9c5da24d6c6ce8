"""`offload-rt run`: generate from a checkpoint larger than its memory budget.

Text goes to stdout as it is produced; progress and the report go to stderr. Exit codes: 0 done, 2 the user's input or
settings, 3 the machine could not (memory, disk, driver), 130 interrupted.
"""

import json
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.process import INTERRUPTED, exit_code
from offload_rt.config import EngineConfig, SamplingParams, check_folder, setting
from offload_rt.errors import PromptError

if TYPE_CHECKING:
    from offload_rt.llm import LLM, Output


@dataclass(frozen=True)
class RunSettings:
    """What the command line does beyond building an engine and sampling."""

    prompt: str | None = setting(None, "text to continue")
    prompt_file: str | None = setting(None, "file with the text to continue; - is stdin")
    chat: bool = setting(False, "take the prompt as the user's turn, through the model's chat template")
    plan: bool = setting(False, "print what would lie where and what a token would cost, and end")
    json: bool = setting(False, "print one JSON object with text, token ids and stats instead of text")
    quiet: bool = setting(False, "no progress bar and no report")
    show_tree: bool = setting(False, "print the largest tree that was verified")
    baseline: bool = setting(False, "afterwards time passes of plain decoding, and say how many times faster it was")
    trace: str | None = setting(None, "file for the timeline of the run, as a Chrome trace")

    def __post_init__(self) -> None:
        if self.plan:
            return
        if (self.prompt is None) == (self.prompt_file is None):
            have = "neither" if self.prompt is None else "both"
            raise PromptError("the prompt", need="--prompt or --prompt-file", have=have, change="give one of them")


@dataclass
class _Progress:
    """The output so far, for a run that ends early: printed as one object at the end, or as it comes.

    is_told  all of it is on stdout
    """

    as_json: bool = False
    text: str = ""
    token_ids: tuple[int, ...] = ()
    is_told: bool = False

    def tell_rest(self, code: int) -> None:
        """End the text where it is, or print the object of what there is of it."""
        if self.as_json and (self.token_ids or code == INTERRUPTED) and not self.is_told:
            _print_json(self.text, list(self.token_ids), "interrupted" if code == INTERRUPTED else "error", None, {})
        elif self.text and not self.as_json and not self.is_told:
            print()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    # A character that stdout's encoding lacks is replaced: the run matters more than the character.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    so_far = _Progress()
    text = "Generate from a model larger than the memory of its device."
    parser = Parser("offload-rt run", text, EngineConfig, RunSettings, SamplingParams)
    return exit_code(lambda: _run(parser.parse_args(arguments), so_far), so_far.tell_rest)


def _run(flags: Namespace, so_far: _Progress) -> None:
    settings, config = from_flags(RunSettings, flags), from_flags(EngineConfig, flags)
    params = from_flags(SamplingParams, flags)
    so_far.as_json = settings.json and not settings.plan
    if settings.trace is not None:
        check_folder("--trace", settings.trace)
    # Not at the top: a wrong flag is told before the seconds that torch takes to load.
    from rich.console import Console

    from offload_rt.cli.format import quiet_libraries, report
    from offload_rt.llm import LLM
    from offload_rt.system.progress import loading_bar
    from offload_rt.system.trace import Trace
    from offload_rt.tree.describe import describe

    quiet_libraries()
    if settings.plan:
        return _print_plan(config, flags)
    prompt = _prompt(settings)
    console = Console(stderr=True, quiet=settings.quiet)
    trace = Trace(on=settings.trace is not None)
    if settings.trace is not None:
        trace.write(Path(settings.trace))  # a file that cannot be written is told before the work, not after
    with LLM.open(config) as llm:
        ids = llm.encode(prompt, settings.chat)
        llm.check_prompt(ids)
        with loading_bar(console) as bar:
            llm.load(trace, bar)
        taken = ", ".join(f"{name} {x}" for name, x in params.left_to(llm.get_default_sampling_params()).items())
        by_model = f"from generation_config.json: {taken}" if taken else ""
        for notice in filter(None, (llm.engine_plan.notice, llm.engine.notice, by_model)):
            console.print(notice, highlight=False, soft_wrap=True)
        try:
            output = _generate(llm, ids, params, so_far)
        finally:
            if settings.trace is not None:
                trace.write(Path(settings.trace))
        if settings.json:
            _print_json(output.text, output.token_ids, output.finish_reason, asdict(output.stats), _more(output))
            so_far.is_told = True
        plain = median(llm.time_plain(len(ids))) if settings.baseline else None
        console.print(report(output.stats, llm.plan.pass_bytes, plain), highlight=False, soft_wrap=True)
        if settings.show_tree:
            console.print(describe(output.topology), highlight=False, soft_wrap=True, markup=False)


def _generate(llm: "LLM", ids: list[int], params: SamplingParams, so_far: _Progress) -> "Output":
    for piece in llm.stream(ids, params):
        if piece.index > 0:  # the other answers are printed behind the first
            continue
        so_far.text += piece.text
        so_far.token_ids += tuple(piece.token_ids)
        if not so_far.as_json:
            print(piece.text, end="", flush=True)
    assert piece.output is not None, "the last piece has the whole"
    if not so_far.as_json:
        print(
            "".join(f"\n--- answer {one.index + 1} of {params.n}\n{one.text}" for one in piece.output.others),
            flush=True,
        )
        so_far.is_told = True
    return piece.output


def _more(output: "Output") -> dict[str, Any]:
    """Where they were asked for: log-probabilities by token id, and other answers."""
    more: dict[str, Any] = {}
    for name, found in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if found is not None:
            more[name] = [one and {token: logprob._asdict() for token, logprob in one.items()} for one in found]
    if output.others:
        names = ("text", "token_ids", "finish_reason")
        more["others"] = [{name: getattr(one, name) for name in names} | _more(one) for one in output.others]
    return more


def _prompt(settings: RunSettings) -> str:
    if settings.prompt_file is None:
        name, raw = "--prompt", str(settings.prompt).encode("utf-8", "surrogatepass")
    else:
        name = f"--prompt-file {settings.prompt_file}"
        try:
            with sys.stdin.buffer if settings.prompt_file == "-" else Path(settings.prompt_file).open("rb") as file:
                raw = file.read()
        except OSError as error:
            raise PromptError(f"{name}: {error.strerror}", change="give a file that can be read") from error
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8 text", change="convert it") from error


def _print_plan(config: EngineConfig, flags: Namespace) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    from offload_rt.cli import plan
    from offload_rt.cli.format import plan_table, print_table
    from offload_rt.engine import profile
    from offload_rt.llm import LLM
    from offload_rt.system.machine import pass_time
    from offload_rt.weights.checkpoint import is_here

    models = [(config.model, config.revision), *([(config.draft_model, None)] if config.draft_model else [])]
    if not config.offline and not all(is_here(*one) for one in models):
        print("not all weights are here: planned without them, by configs and the disk's rate", file=sys.stderr)
        rate = profile.disk_gbps(Path(HF_HUB_CACHE))
        return plan.print_plan(Namespace(**vars(flags), disk=f"{rate:.2f}GB/s"))
    with LLM.open(config) as llm:
        engine_plan = llm.engine_plan
        n_layers = engine_plan.checkpoint.spec.n_layers
        measured = profile.profile(engine_plan.disk, n_layers, engine_plan.dtype, engine_plan.device)
    if not flags.json:
        return print_table(plan_table(engine_plan, measured))
    seconds = pass_time(measured, engine_plan.plan.pass_bytes)
    found = {"plan": asdict(engine_plan.plan), "profile": asdict(measured), "predicted_seconds_per_token": seconds}
    print(json.dumps(found, default=str))  # of a dtype


def _print_json(
    text: str, token_ids: list[int], finish_reason: str, stats: dict[str, Any] | None, more: dict[str, Any]
) -> None:
    found = {"text": text, "token_ids": token_ids, "finish_reason": finish_reason, "stats": stats} | more
    print(json.dumps(found), flush=True)
