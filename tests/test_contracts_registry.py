"""The folder is the registry: a file is an entry by being there, and fits the contract of its folder."""

import inspect
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import offload_rt.drafters
from offload_rt import plugins
from offload_rt.errors import SettingsError
from offload_rt.models._spec import spec_of
from offload_rt.tree.topology import DraftTree, Topology, Verdict

FOLDERS = ("models", "weights", "tiers", "stream", "rules", "drafters")
PACKAGE = Path(offload_rt.__file__).parent


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_entries_of_a_folder_are_its_files_without_an_underscore(folder: str) -> None:
    files = {path.stem for path in (PACKAGE / folder).glob("*.py")}
    wanted = sorted(name for name in files if not name.startswith("_"))
    assert list(plugins.names(folder)) == wanted
    assert wanted
    for name in wanted:
        assert plugins.find(folder, name).__name__ == f"offload_rt.{folder}.{name}"


@pytest.mark.parametrize("name", ["_spec", "__init__", "nothing", "", "llama.py", "../models/llama", "models.llama"])
def test_what_is_no_entry_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(SettingsError, match="llama, mistral, qwen2, qwen3") as caught:
        plugins.find("models", name)
    assert repr(name) in str(caught.value)


def test_a_new_file_is_an_entry_by_being_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brandnew.py").write_text("ANSWER = 42\n")
    (tmp_path / "_shared.py").write_text("")
    monkeypatch.setattr(offload_rt.drafters, "__path__", [*offload_rt.drafters.__path__, str(tmp_path)])
    assert "brandnew" in plugins.names("drafters")
    assert "_shared" not in plugins.names("drafters")
    assert plugins.find("drafters", "brandnew").ANSWER == 42


# models/

SIZES = {
    "vocab_size": 48, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize("name", plugins.names("models"))
def test_a_family_says_what_it_is(name: str) -> None:
    family = plugins.find("models", name)
    assert family.CONFIG.model_type == name
    assert isinstance(family.ARCHITECTURE, str)
    assert set(map(type, (*family.REQUIRED, *family.KEYS))) <= {str}
    assert list(inspect.signature(family.spec).parameters) == ["config"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("switch", [None, "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("name", plugins.names("models"))
def test_a_familys_tensors_are_those_of_transformers(name: str, switch: str | None, tied: bool) -> None:
    family = plugins.find("models", name)
    if switch is not None and switch not in family.KEYS:
        pytest.skip(f"{name} has no {switch}")
    known = set(inspect.signature(family.CONFIG).parameters) | {"num_key_value_heads"}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    raw = {"model_type": name, "architectures": [family.ARCHITECTURE], "tie_word_embeddings": tied, **sizes}
    raw |= {switch: True} if switch else {}
    spec = spec_of(raw)
    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(family.CONFIG(**{k: v for k, v in raw.items() if k != "model_type"}))
    assert type(peer).__name__ == family.ARCHITECTURE
    wanted = {key: tuple(tensor.shape) for key, tensor in peer.named_parameters()}
    ours = dict(spec.outer_tensors())
    for i in range(spec.n_layers):
        ours |= {spec.layer_prefix(i) + key: shape for key, shape in spec.layer_tensors()}
    assert ours == wanted


# rules/


def _tree() -> DraftTree:
    """A root with two children, the first of which has one."""
    import numpy as np

    return DraftTree(Topology(np.array([-1, 0, 0, 1])), torch.tensor([5, 1, 2, 3]))


@pytest.mark.parametrize("name", plugins.names("rules"))
def test_a_rule_gives_a_path_from_the_root_down_and_a_token_of_the_law(name: str) -> None:
    rule = plugins.find("rules", name)
    assert isinstance(rule.NEEDS_LAWS, bool)
    assert list(inspect.signature(rule.verify).parameters) == ["tree", "target", "generator"]
    assert not rule.NEEDS_LAWS or rule.CHILD_LAW in ("without_replacement", "independent")
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        laws = torch.rand(4, 7, generator=generator).pow(4)
        laws[:, 0] = 0
        verdict = rule.verify(_tree(), laws / laws.sum(-1, keepdim=True), generator)
        assert isinstance(verdict, Verdict)
        assert verdict.path in ((), (1,), (2,), (1, 3))
        assert 1 <= verdict.bonus < 7
