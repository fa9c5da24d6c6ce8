"""Prompts in all accepted forms, and the results that users print."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import speaking_checkpoint

from offload_rt import LLM, SamplingParams
from offload_rt.cli import run
from offload_rt.errors import PromptError, SettingsError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", max_model_len=64, drafter="none") as llm:
        yield llm


def test_every_form_of_a_prompt_gives_the_same_answer(llm):
    ids = llm.encode("the fox")
    params = SamplingParams(max_tokens=4)
    by_text, by_ids, by_key, by_key_ids = llm.generate(
        ["the fox", ids, {"prompt": "the fox"}, {"prompt_token_ids": ids}], params
    )
    (alone,) = llm.generate({"prompt": "the fox"}, params)
    outputs = (by_text, by_ids, by_key, by_key_ids, alone)
    assert {tuple(output.token_ids) for output in outputs} == {tuple(by_text.token_ids)}
    assert [output.prompt for output in outputs] == ["the fox", None, "the fox", None, "the fox"]


@pytest.mark.parametrize("prompt", [{}, {"text": "the"}, {"prompt": "the", "image": 1}])
def test_unknown_keys_of_a_prompt_are_rejected_by_name(llm, prompt):
    with pytest.raises(PromptError, match='needs "prompt" or "prompt_token_ids"') as raised:
        llm.generate(prompt)
    assert all(repr(key) in str(raised.value) for key in set(prompt) - {"prompt"})


@pytest.mark.parametrize(
    "settings",
    [{"stop": 3}, {"stop": ["a", 3]}, {"bad_words": "x"}, {"bad_words_ids": [3]}, {"stop": [""]}],
)
def test_sampling_parameter_of_a_wrong_type_is_a_settings_error(settings):
    with pytest.raises(SettingsError, match=next(iter(settings))):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_representation_of_an_output_fits_on_a_screen(llm):
    (output,) = llm.generate("the fox", SamplingParams(max_tokens=4, logprobs=5))
    assert len(repr(output)) < 400 and "the fox" in repr(output)


def test_json_lists_all_answers_as_outputs(model, capsys):
    given = [str(model), "the fox", "--device", "cpu", "--max-model-len", "64", "--quiet"]
    assert run.main([*given, "--json", "--n", "3", "--temperature", "1", "--max-tokens", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [answer["index"] for answer in record["outputs"]] == [0, 1, 2]
    assert record["outputs"][0]["text"] == record["text"]
