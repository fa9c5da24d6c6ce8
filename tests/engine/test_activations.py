"""`--activations int8`: other logits than exact products, and the same with trees."""

from pathlib import Path

import pytest
from support.gguf_files import build
from support.tiny import CASES, Zoo, open_llm, prompt_of

from offload_rt import SamplingParams
from offload_rt.errors import SettingsError
from offload_rt.ops import cpu

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0"])
def test_rounded_activations_have_the_logits_of_plain_decoding_in_trees(type, tmp_path):
    path = tmp_path / "m.gguf"
    build(path, CASES["llama"].build(0), type)
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=5, ignore_eos=True)

    def logprobs(activations: str, drafter: str) -> object:
        with open_llm(path, activations=activations, drafter=drafter, dtype="float32") as llm:
            return llm.generate(prompt_of(0), params)[0].logprobs

    plain = logprobs("int8", "none")
    assert plain == logprobs("int8", "recycle") != logprobs("exact", "none")


def test_activations_are_rounded_only_for_integer_codes_on_a_cpu(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        SettingsError, match="needs weights of quantised GGUF types or int8, has none"
    ):
        open_llm(zoo.directory("llama", 0), activations="int8")
    build(tmp_path / "m.gguf", CASES["llama"].build(0), "Q8_0")
    monkeypatch.setattr(cpu, "library", lambda: None)
    with pytest.raises(SettingsError, match="needs the CPU library"):
        open_llm(tmp_path / "m.gguf", activations="int8")
    with pytest.raises(SettingsError, match=r"16 or 32 bits, has cpu in torch\.float64"):
        open_llm(tmp_path / "m.gguf", activations="int8", dtype="float64")
