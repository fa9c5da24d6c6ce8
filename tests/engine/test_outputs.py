"""Prompts in all accepted forms, and the results that users print."""

import json

import pytest
from support.checkpoints import speaking_checkpoint

from offload_rt import SamplingParams
from offload_rt.cli import run
from offload_rt.errors import SettingsError


@pytest.mark.parametrize(
    "settings",
    [{"stop": 3}, {"stop": ["a", 3]}, {"bad_words": "x"}, {"bad_words_ids": [3]}, {"stop": [""]}],
)
def test_sampling_parameter_of_a_wrong_type_is_a_settings_error(settings):
    with pytest.raises(SettingsError, match=next(iter(settings))):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_json_lists_all_answers_as_outputs(tmp_path, capsys):
    given = [
        str(speaking_checkpoint(tmp_path)),
        "the fox",
        "--device",
        "cpu",
        "--max-model-len",
        "64",
        "--quiet",
    ]
    assert run.main([*given, "--json", "--n", "3", "--temperature", "1", "--max-tokens", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [answer["index"] for answer in record["outputs"]] == [0, 1, 2]
    assert record["outputs"][0]["text"] == record["text"]
