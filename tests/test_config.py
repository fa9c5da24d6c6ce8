"""Settings: sizes as people write them, flags made of fields, ranges, and no unknown key."""

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload_rt.cli.calibrate import CalibrateSettings
from offload_rt.cli.chat import ChatSettings
from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.run import RunSettings, TemplateSettings
from offload_rt.config import EngineConfig, flag_of, format_size, parse_size
from offload_rt.errors import OffloadError, PromptError, SettingsError
from offload_rt.sampling_params import SamplingParams, StructuredOutputs

CLASSES = (
    EngineConfig, SamplingParams, RunSettings, TemplateSettings, ChatSettings, CalibrateSettings,
)  # fmt: skip
UNITS = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30,
    "Ti": 2**40,
}  # fmt: skip


def flagged(cls: type) -> list[Any]:
    """Fields with a flag."""
    return [item for item in fields(cls) if item.metadata]


# A value of each field that is not its default, as a flag takes it and as the settings hold it.
EXAMPLES: dict[str, tuple[list[str], Any]] = {
    "model": (["some/dir"], "some/dir"), "draft_model": (["org/draft"], "org/draft"),
    "device": (["cpu"], "cpu"), "dtype": (["float32"], "float32"),
    "device_memory": (["22GiB"], "22GiB"), "host_memory": (["1.5GB"], "1.5GB"),
    "link_format": (["raw"], "raw"), "sidecar": (["some/dir"], "some/dir"),
    "kv_memory": (["1GiB"], "1GiB"), "kv_dtype": (["fp8"], "fp8"),
    "max_model_len": (["4096"], 4096), "max_num_seqs": (["3"], 3), "drafter": (["ngram"], "ngram"),
    "rule": (["match"], "match"), "tree_size": (["64"], 64), "tree_depth": (["8"], 8),
    "draft_context": (["256"], 256), "draft_quantize": (["int4"], "int4"),
    "learn_draft": (["keep"], "keep"), "torch_products": ([], True), "exact_parallel": ([], True),
    "activations": (["int8"], "int8"),
    "split_draft": (["on"], "on"), "revision": (["main"], "main"),
    "chat_template": (["chat.jinja"], "chat.jinja"), "hide_thinking": ([], True),
    "plain": ([], True), "offline": ([], True), "pipeline": (["2"], 2),
    "mirror": (["/mnt/second"], "/mnt/second"), "image": (["a.png", "b.png"], ("a.png", "b.png")),
    "max_image_pixels": (["65536"], 65536), "max_tokens": (["7"], 7), "max_new_tokens": (["7"], 7),
    "temperature": (["0.7"], 0.7), "top_p": (["0.9"], 0.9), "top_k": (["40"], 40),
    "min_p": (["0.05"], 0.05), "repetition_penalty": (["1.1"], 1.1), "seed": (["0"], 0),
    "presence_penalty": (["0.5"], 0.5), "frequency_penalty": (["-1.5"], -1.5),
    "logit_bias": (['{"5": -100, "7": 2.5}'], {5: -100.0, 7: 2.5}), "min_tokens": (["3"], 3),
    "ignore_eos": ([], True), "stop": (["a", "b c"], ("a", "b c")),
    "stop_token_ids": (["5", "7"], (5, 7)), "bad_words": (["no", "never"], ("no", "never")),
    "bad_words_ids": (["5,7", "9"], ((5, 7), (9,))), "allowed_token_ids": (["5", "7"], (5, 7)),
    "n": (["2"], 2), "logprobs": (["5"], 5), "prompt_logprobs": (["0"], 0),
    "prompt": (["hello", "you there"], ("hello", "you there")), "prompt_file": (["-"], "-"),
    "chat": ([], True), "plan": ([], True), "json": ([], True), "quiet": ([], True),
    "verbose": ([], True), "show_tree": ([], True), "baseline": ([], True),
    "trace": (["out.json"], "out.json"), "json_schema": (["schema.json"], "schema.json"),
    "regex": (["[a-z]+"], "[a-z]+"), "system": (["be brief"], "be brief"),
    "enable_thinking": ([], True), "chat_template_kwargs": (['{"a": [1]}'], {"a": [1]}),
    "tokens": (["7"], 7), "plot": (["out.png"], "out.png"),
}  # fmt: skip
NEEDED = {EngineConfig: ["--model", "m"], RunSettings: ["--prompt", "p"]}


@given(
    number=st.integers(0, 10**6),
    unit=st.sampled_from(sorted(UNITS)),
    b=st.sampled_from(["", "B", "b"]),
)
def test_size_is_number_times_unit(number, unit, b):
    if not unit + b:
        number += 1000  # smaller numbers need a unit
    for text in (
        f"{number}{unit}{b}",
        f" {number} {unit.upper()}{b} ",
        f"{number}{unit.lower()}{b}",
        f"{number}.0{unit}{b}",
    ):
        assert parse_size(text) == number * UNITS[unit]


@pytest.mark.parametrize("text", ["5", "999", " 24 "])
def test_small_sizes_need_a_unit(text):
    with pytest.raises(SettingsError, match=f'write it like "{text.strip()}GiB"'):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1.5GiB", 3 * 2**29), ("0.5k", 500), ("22GiB", 22 * 2**30), (123, 123)]
)
def test_sizes_can_be_fractions_and_numbers(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", [
    "", "GB", "ten", "1.5.2G", "-1G", "1e9", "5 apples", "1 GiBB", "5i", "0x10", True, None,
    "1,5GB", "inf",
])  # fmt: skip
def test_invalid_size_is_refused_with_an_example(text):
    with pytest.raises(SettingsError, match="22GiB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**45))
@example(1023)
@example(1024)
@example(2**20 - 1)
def test_formatted_size_is_close_to_its_bytes(nbytes):
    text = format_size(nbytes)
    assert abs(parse_size(text) - nbytes) <= max(0.0051 * nbytes, 1)
    assert text.endswith("B")


def test_budgets_are_reported_in_bytes():
    config = EngineConfig("m", device_memory="22GiB", host_memory=7)
    assert (config.device_nbytes, config.host_nbytes) == (22 * 2**30, 7)
    assert EngineConfig("m").device_nbytes is None


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_a_non_default_example(cls):
    for item in flagged(cls):
        assert item.name in EXAMPLES, f"say here what {item.name} looks like on the command line"
        assert item.default is MISSING or EXAMPLES[item.name][1] != item.default


def _parsed(cls: type, arguments: list[str]) -> Any:
    parser = Parser("test", "flags", cls)
    return from_flags(cls, parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, item.name) for cls in CLASSES for item in flagged(cls)]
)
def test_every_field_has_a_flag_that_sets_only_it(cls, name):
    texts, value = EXAMPLES[name]
    needed = [] if name in ("model", "prompt_file", "prompt", "plan") else NEEDED.get(cls, [])
    needed = [*needed, "--chat"] if name == "image" else needed
    flags = [part for text in texts for part in (flag_of(name), text)] or [flag_of(name)]
    got = _parsed(cls, [*needed, *flags])
    is_alias = cls is SamplingParams and name == "max_new_tokens"
    field = "max_tokens" if is_alias else name
    assert getattr(got, field) == value
    assert type(getattr(got, field)) is type(value)
    for item in flagged(cls):
        is_same = {item.name, name} == {"max_tokens", "max_new_tokens"}
        if (
            item.name != name
            and flag_of(item.name) not in needed
            and item.default is not MISSING
            and not is_same
        ):
            assert getattr(got, item.name) == item.default


@pytest.mark.parametrize("cls", CLASSES)
def test_flags_are_kebab_case_and_have_help(cls):
    parser = Parser("test", "flags", cls)
    actions = {
        action.option_strings[0]: action
        for action in parser._actions
        if action.dest != "help" and action.option_strings
    }
    assert sorted(actions) == sorted("--" + item.name.replace("_", "-") for item in flagged(cls))
    assert all(action.help for action in actions.values())
    assert "default: None" not in parser.format_help()


def test_help_is_grouped_and_names_choices_and_defaults():
    parser = Parser("test", "flags", EngineConfig, SamplingParams, examples=("test DIR",))
    words = " ".join(parser.format_help().split())
    for text in (
        "usage: test [MODEL] [OPTIONS]", "--device {auto,cpu,cuda} where",
        "of auto, adaptive_tree, ", "coupled, ", "--top-p TOP_P keep", "--min-tokens MIN_TOKENS",
        "default: 0", "examples: test DIR",
        *("model:", "memory:", "drafting:", "ranks:", "sampling:"),
    ):  # fmt: skip
        assert text in words, text


def test_model_and_prompt_may_be_given_without_their_flags():
    parser = Parser("test", "flags", EngineConfig, RunSettings)
    by_position = parser.parse_args(["DIR", "--tree-size", "3", "hello", "--prompt", "there"])
    assert (by_position.model, by_position.prompt) == ("DIR", ["there", "hello"])
    with_flag = parser.parse_args(["--model", "DIR", "hello"])
    assert (with_flag.model, with_flag.prompt) == ("DIR", ["hello"])
    with pytest.raises(SettingsError, match="unrecognized arguments: more"):
        parser.parse_args(["DIR", "hello", "more"])
    with pytest.raises(SettingsError, match="needs a model"):
        parser.parse_args(["--prompt", "hello"])


@pytest.mark.parametrize("arguments", [
    [], ["--model", "m", "--max-model-len", "many"], ["--model", "m", "--device", "tpu"],
    ["--model", "m", "--devic", "cpu"],
])  # fmt: skip
def test_unreadable_flags_are_refused(arguments):
    with pytest.raises(SettingsError):
        _parsed(EngineConfig, arguments)


@pytest.mark.parametrize(
    ("flag", "hint"),
    [("--device-memroy=4GB", "did you mean --device-memory?"), ("--xyzzy", "see test --help")],
)
def test_unknown_flag_is_one_sentence_with_a_hint(flag, hint):
    with pytest.raises(SettingsError) as refused:
        _parsed(EngineConfig, ["--model", "m", flag])
    assert refused.value.for_command_line == (
        f"unrecognized arguments: {flag.replace('=', ' ')}; {hint}"
    )


@pytest.mark.parametrize(("cls", "name", "wrong", "right"), [
    (SamplingParams, "max_new_tokens", [0, -1], [1, None]),
    (SamplingParams, "max_tokens", [0, -1], [1, None]),
    (SamplingParams, "temperature", [-0.1, float("nan"), float("inf"), "warm"], [0.0, 100.0, None]),
    (SamplingParams, "top_p", [0.0, 1.1, -1.0, float("nan")], [1e-9, 1.0]),
    (SamplingParams, "top_k", [-2], [-1, 0, 1, None]),
    (SamplingParams, "min_p", [-0.1, 1.1, float("nan")], [0.0, 1.0]),
    (SamplingParams, "repetition_penalty", [0.0, -1.0, float("inf"), float("nan")], [0.5, 2.0]),
    (SamplingParams, "seed", [-1, 2**63], [0, 2**63 - 1, None]),
    (SamplingParams, "presence_penalty", [-2.1, 2.1, float("nan")], [-2.0, 2.0]),
    (SamplingParams, "frequency_penalty", [-2.1, 2.1, float("nan")], [-2.0, 2.0]),
    (SamplingParams, "logit_bias", [{3: float("inf")}, {"3": 1.0}, [3], {3: None}], [{},
        {3: float("-inf")}, None]),
    (SamplingParams, "min_tokens", [-1], [0, 5]),
    (SamplingParams, "n", [0], [1, 5]),
    (SamplingParams, "logprobs", [-2], [-1, 0, None]),
    (SamplingParams, "prompt_logprobs", [-2], [-1, 0, None]),
    (SamplingParams, "stop_token_ids", [(-1,), ("a",)], [(), (5,), [5]]),
    (SamplingParams, "stop", [("",), ("a", "")], [(), ("a",), "a"]),
    (EngineConfig, "max_model_len", [0, -5], [1, None]),
    (EngineConfig, "tree_size", [0], [1]),
    (EngineConfig, "tree_depth", [0], [1]),
    (EngineConfig, "device_memory", [0, -1, "0", "lots"], [1, "1GB", None]),
    (EngineConfig, "host_memory", [0, -1, "0"], [1]),
    (EngineConfig, "kv_memory", [0, -1, "0"], [1]),
    (EngineConfig, "device", ["tpu", ""], ["cpu", "cuda", "auto"]),
    (EngineConfig, "dtype", ["int8", "bf16"], ["bfloat16", "float64"]),
])  # fmt: skip
def test_values_out_of_range_are_refused(cls, name, wrong, right):
    needed = {"model": "m"} if cls is EngineConfig else {}
    for value in right:
        cls(**needed, **{name: value})
    for value in wrong:
        with pytest.raises(SettingsError) as caught:
            cls(**needed, **{name: value})
        assert caught.value.exit_code == 2
        assert name in str(caught.value).replace("-", "_") or repr(value) in str(caught.value)


@pytest.mark.parametrize(("cls", "name", "wrong", "right"), [
    (SamplingParams, "max_tokens", [2.5, "5"], np.int64(5)),
    (SamplingParams, "seed", [1.5], 1),
    (SamplingParams, "n", [True], 2),
    (SamplingParams, "temperature", [True], np.float32(0.5)),
    (SamplingParams, "ignore_eos", ["no", 1], True),
    (SamplingParams, "allowed_token_ids", [[1.5]], [1]),
    (StructuredOutputs, "choice", ["ab", 3], ["ab"]),
    (EngineConfig, "model", [5, None], Path("m")),
    (EngineConfig, "drafter", [3], "none"),
    (EngineConfig, "mirror", [3], Path("m")),
    (EngineConfig, "device_memory", [1.5], 10**9),
    (EngineConfig, "offline", ["x"], True),
])  # fmt: skip
def test_other_types_are_refused(cls, name, wrong, right):
    needed = {"model": "m"} if cls is EngineConfig else {}
    made = getattr(cls(**{**needed, name: right}), name)
    assert made == (str(right) if isinstance(right, Path) else type(made)(right))
    for value in wrong:
        with pytest.raises(SettingsError, match=f"^(structured_outputs: )?{name} ") as caught:
            cls(**{**needed, name: value})
        assert "--" not in str(caught.value)


def test_sampling_params_show_only_changes():
    assert repr(SamplingParams(stop="x", seed=1)) == "SamplingParams(stop=('x',), seed=1)"
    params = replace(SamplingParams(max_new_tokens=7), max_tokens=9)
    assert repr(params) == "SamplingParams(max_tokens=9)"


def test_max_tokens_has_the_names_of_vllm_and_transformers():
    assert SamplingParams(max_new_tokens=7) == SamplingParams(max_tokens=7, max_new_tokens=7)
    assert (SamplingParams(max_new_tokens=7).max_tokens, SamplingParams().max_tokens) == (7, 64)
    with pytest.raises(SettingsError, match="needs a single value"):
        SamplingParams(max_tokens=8, max_new_tokens=7)


def test_single_stop_text_becomes_a_tuple():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize("given_", [{}, {"prompt": ("a",), "prompt_file": "b"}])
def test_run_requires_one_prompt(given_):
    with pytest.raises(PromptError, match="prompt or prompt_file"):
        RunSettings(**given_)
    RunSettings(plan=True, **given_)


def test_error_names_required_value_actual_value_and_setting():
    error = OffloadError("the cache", need="9 rows", have="8", change="lower --tree-size")
    assert str(error) == "the cache: needs 9 rows, has 8; lower tree_size"
    assert error.for_command_line == "the cache: needs 9 rows, has 8; lower --tree-size"
    assert str(OffloadError("the disk is gone")) == "the disk is gone"
    asked = SettingsError("--link-format=raw and --ranks=2", change="run `x --ranks 2`, not a--b")
    assert str(asked) == 'link_format="raw" and ranks=2; run `x --ranks 2`, not a--b'
    expected = "--link-format raw and --ranks 2; run `x --ranks 2`, not a--b"
    assert asked.for_command_line == expected
    assert (error.need, error.have, error.change, error.exit_code) == (
        "9 rows", "8", "lower --tree-size", 3,
    )  # fmt: skip
