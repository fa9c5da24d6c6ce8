"""Settings: sizes as people write them, flags made of fields, ranges, and no unknown key."""

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_rt.cli.calibrate import CalibrateSettings
from offload_rt.cli.chat import ChatSettings
from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.run import RunSettings, TemplateSettings
from offload_rt.config import EngineConfig, flag_of, format_size, parse_size, parser_of
from offload_rt.errors import OffloadError, PromptError, SettingsError
from offload_rt.sampling_params import SamplingParams, StructuredOutputs

CLASSES = (
    EngineConfig, SamplingParams, RunSettings, TemplateSettings, ChatSettings, CalibrateSettings,
)  # fmt: skip


def flagged(cls: type) -> list[Any]:
    return [item for item in fields(cls) if item.metadata]


# Values of fields with several parts, as their flags take them and as the settings hold them.
EXAMPLES: dict[str, tuple[list[str], Any]] = {
    "image": (["a.png", "b.png"], ("a.png", "b.png")), "stop": (["a", "b c"], ("a", "b c")),
    "prompt": (["hello", "you there"], ("hello", "you there")),
    "bad_words": (["no", "never"], ("no", "never")),
    "bad_words_ids": (["5,7", "9"], ((5, 7), (9,))),
    "stop_token_ids": (["5", "7"], (5, 7)), "allowed_token_ids": (["5", "7"], (5, 7)),
    "logit_bias": (['{"5": -100, "7": 2.5}'], {5: -100.0, 7: 2.5}),
    "chat_template_kwargs": (['{"a": [1]}'], {"a": [1]}),
}  # fmt: skip
NAN, INF = float("nan"), float("inf")
NEEDED = {EngineConfig: ["--model", "m"], RunSettings: ["--prompt", "p"]}


def example_of(item: Any) -> tuple[list[str], Any]:
    """A value that is not the default: texts of the flag, and the setting."""
    kind = parser_of(item)
    if item.name in EXAMPLES:
        return EXAMPLES[item.name]
    if kind is bool:
        return [], True
    text = [{int: "7", float: "0.5"}.get(kind, "22GiB"), *item.metadata["choices"]][-1]
    return [text], kind(text)


def test_sizes_are_fractions_with_a_unit_or_numbers():
    sizes = {
        "1.5GiB": 3 * 2**29, "0.5k": 500, "22GiB": 22 * 2**30, 123: 123, "1000": 1000, "7B": 7,
        " 3 KI ": 3 << 10, "4.0mib": 4 << 20, "5Tib": 5 << 40, "6MB": 6 * 10**6, "7g": 7 * 10**9,
        "8 TB": 8 * 10**12, "0": 0,
    }  # fmt: skip
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "ten", "1.5.2G", "-1G", "1e9", "5 apples", "1 GiBB", "5i", "0x10", True,
                 None, "1,5GB", "inf"):  # fmt: skip
        with pytest.raises(SettingsError, match="22GiB") as caught:
            parse_size(text)
        assert repr(text) in str(caught.value)
    for text in ("5", "999", " 24 "):
        with pytest.raises(SettingsError, match=f'write it like "{text.strip()}GiB"'):
            parse_size(text)
    for nbytes in (0, 1023, 1024, 2**20 - 1, 3 * 10**9, 2**45):
        assert abs(parse_size(format_size(nbytes)) - nbytes) <= max(0.0051 * nbytes, 1)
    config = EngineConfig("m", device_memory="22GiB", kv_memory=7)
    assert (config.device_nbytes, config.kv_nbytes) == (22 * 2**30, 7)
    assert EngineConfig("m").device_nbytes is None


@pytest.mark.parametrize(
    ("cls", "chosen"), [(cls, item) for cls in CLASSES for item in flagged(cls)]
)
def test_every_field_has_a_flag_that_sets_only_it(cls, chosen):
    name = chosen.name
    texts, value = example_of(chosen)
    needed = [] if name in ("model", "prompt_file", "prompt", "plan") else NEEDED.get(cls, [])
    needed = [*needed, "--chat"] if name == "image" else needed
    flags = [part for text in texts for part in (flag_of(name), text)] or [flag_of(name)]
    got = from_flags(cls, Parser("test", "flags", cls).parse_args([*needed, *flags]))
    field = "max_tokens" if name == "max_new_tokens" and cls is SamplingParams else name
    found = getattr(got, field)
    assert found == value and type(found) is type(value)
    for item in flagged(cls):
        if item.name == name:
            assert item.default is MISSING or value != item.default
        elif flag_of(item.name) not in needed and item.default is not MISSING:
            is_same = {item.name, name} == {"max_tokens", "max_new_tokens"}
            assert is_same or getattr(got, item.name) == item.default


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
    for line, prompt in (
        ("DIR --tree-size 3 hello --prompt there", ["there", "hello"]),
        ("--model DIR hello", ["hello"]),
    ):
        parsed = parser.parse_args(line.split())
        assert (parsed.model, parsed.prompt) == ("DIR", prompt)
    for line, message in (
        ("DIR hello more", "unrecognized arguments: more"), ("--prompt hello", "needs a model"),
        ("m --max-model-len many", "max-model-len"), ("m --device tpu", "device"),
        ("m --devic cpu", "unrecognized arguments: --devic cpu; did you mean --device"),
        ("m --device-memroy=4GB", "--device-memroy 4GB; did you mean --device-memory"),
        ("m --xyzzy", "unrecognized arguments: --xyzzy; see test --help"),
    ):  # fmt: skip
        with pytest.raises(SettingsError) as refused:
            parser.parse_args(line.split())
        assert message in refused.value.for_command_line
    for given_ in ({}, {"prompt": ("a",), "prompt_file": "b"}):
        with pytest.raises(PromptError, match="prompt or prompt_file"):
            RunSettings(**given_)
        RunSettings(plan=True, **given_)


@pytest.mark.parametrize(("cls", "name", "wrong", "right"), [
    *((SamplingParams, name, wrong, right) for name, wrong, right in (
        ("max_new_tokens", [0, -1], [1, None]),
        ("max_tokens", [0, -1, 2.5, "5"], [1, np.int64(5), None]),
        ("temperature", [-0.1, NAN, INF, "warm", True], [0.0, np.float32(0.5), 100.0, None]),
        ("top_p", [0.0, 1.1, -1.0, NAN], [1e-9, 1.0]), ("top_k", [-2], [-1, 0, 1, None]),
        ("min_p", [-0.1, 1.1, NAN], [0.0, 1.0]), ("n", [0, True], [1, 5]),
        ("repetition_penalty", [0.0, -1.0, INF, NAN], [0.5, 2.0]),
        ("seed", [-1, 1.5, 2**63], [0, 2**63 - 1, None]), ("ignore_eos", ["no", 1], [True]),
        ("presence_penalty", [-2.1, 2.1, NAN], [-2.0, 2.0]),
        ("frequency_penalty", [-2.1, 2.1, NAN], [-2.0, 2.0]),
        ("logit_bias", [{3: INF}, {"3": 1.0}, [3], {3: None}], [{}, {3: -INF}, None]),
        ("min_tokens", [-1], [0, 5]), ("logprobs", [-2], [-1, 0, None]),
        ("prompt_logprobs", [-2], [-1, 0, None]),
        ("stop_token_ids", [(-1,), ("a",)], [(), (5,), [5]]),
        ("stop", [("",), ("a", ""), 3, ["a", 3]], [(), ("a",), "a"]),
        ("allowed_token_ids", [[1.5]], [[1]]),
        ("bad_words", ["x", [" "]], [["x"]]), ("bad_words_ids", [[3], [[]]], [[[3]]]))),
    *((EngineConfig, name, wrong, right) for name, wrong, right in (
        ("max_model_len", [0, -5], [1, None]), ("tree_size", [0], [1]), ("tree_depth", [0], [1]),
        ("device_memory", [0, -1, 1.5, "0", "lots"], [1, "1GB", 10**9, None]),
        ("host_memory", [0, -1, "0"], [1]), ("kv_memory", [0, -1, "0"], [1]),
        ("device", ["tpu", ""], ["cpu", "cuda", "auto"]),
        ("dtype", ["int8", "bf16"], ["bfloat16", "float64"]), ("model", [5, None], [Path("m")]),
        ("drafter", [3], ["none"]), ("mirror", [3], [Path("m")]), ("offline", ["x"], [True]))),
    (StructuredOutputs, "choice", ["ab", 3], [["ab"]]),
])  # fmt: skip
def test_values_out_of_range_and_of_other_types_are_refused(cls, name, wrong, right):
    needed = {"model": "m"} if cls is EngineConfig else {}
    for value in right:
        made = getattr(cls(**{**needed, name: value}), name)
        assert not isinstance(value, Path) or made == str(value)
    for value in wrong:
        with pytest.raises(SettingsError) as caught:
            cls(**{**needed, name: value})
        assert caught.value.exit_code == 2 and "--" not in str(caught.value)
        assert name in str(caught.value) or repr(value) in str(caught.value)


def test_sampling_params_show_only_changes_and_have_names_of_vllm_and_transformers():
    assert repr(SamplingParams(stop="x", seed=1)) == "SamplingParams(stop=('x',), seed=1)"
    params = replace(SamplingParams(max_new_tokens=7), max_tokens=9)
    assert repr(params) == "SamplingParams(max_tokens=9)"
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(max_new_tokens=7) == SamplingParams(max_tokens=7, max_new_tokens=7)
    assert (SamplingParams(max_new_tokens=7).max_tokens, SamplingParams().max_tokens) == (7, 64)
    with pytest.raises(SettingsError, match="needs a single value"):
        SamplingParams(max_tokens=8, max_new_tokens=7)


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
