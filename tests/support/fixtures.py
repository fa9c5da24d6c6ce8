"""Fixtures of every test. `tests/conftest.py` registers them."""

import functools
import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file, save_file

from bench.models.tiny import config_of, random_model
from offload_rt.cli import run
from support.checkpoints import add_tokenizer
from support.command_line import Line
from support.processes import handled
from support.quantized import MXFP4_CONFIG
from support.texts import small_model
from support.tiny import CASES, Pair, Zoo, byte_level, keep_steady, save_pair

EIGHT_EXPERTS = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 8)
# A busy machine is no failure, and every run tries the same examples.
settings.register_profile("offload_rt", deadline=None, derandomize=True)
settings.load_profile("offload_rt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a CUDA device if none is available."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of this run, no requests to the hub, and a terminal of 100 columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setenv("COLUMNS", "100")
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Numbers that a test draws without a generator do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without measurements of earlier tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def steady(empty_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tree sizes independent of the clock and of earlier tests."""
    keep_steady(monkeypatch)


@pytest.fixture
def line(capfd: pytest.CaptureFixture[str]) -> Iterator[Line]:
    """Call a command's main function; returns exit code, stdout and stderr."""

    def call(*arguments: str, main: Callable[[list[str]], int] = run.main) -> tuple[int, str, str]:
        capfd.readouterr()
        return main(list(arguments)), *capfd.readouterr()

    with handled(signal.SIGTERM, signal.getsignal(signal.SIGTERM)):
        yield call


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Tiny checkpoints of every family, made when they are first asked for."""
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def pair(zoo: Zoo) -> Pair:
    """A small Llama with a draft model."""
    return zoo.pair("llama", 0)


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer."""
    path = tmp_path_factory.mktemp("speaking")
    CASES["llama"].build(0, vocab_size=320).save_pretrained(path)
    add_tokenizer(path, byte_level(320))
    return path


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A small draft that is its target."""
    model = small_model(64, n_layers=2)
    return save_pair(tmp_path_factory.mktemp("twin"), model, model)


@pytest.fixture(scope="session")
def mxfp4_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint as gpt-oss is published."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(0))
    random_model(config_of("gpt_oss")).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    experts = ("experts.gate_up_proj", "experts.down_proj")
    for name in [name for name in tensors if name.endswith(experts)]:
        n, n_in, n_out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = draw(256, (n, n_out, n_in // 32, 16)).byte()
        tensors[f"{name}_scales"] = draw(121, 126, (n, n_out, n_in // 32)).byte()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4_CONFIG}))
    return folder


def random_models(tmp_path_factory, **sizes):
    """Return a function from model type to a random model of these sizes, and its folder."""

    @functools.cache
    def get(kind):
        config = config_of(kind.removesuffix(" alibi"))
        if kind == "falcon alibi":
            config.alibi = True
            config.new_decoder_architecture = config.multi_query = False
        for name in filter(partial(hasattr, config), sizes):
            setattr(config, name, sizes[name])
        model = random_model(config)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        return model, folder

    return get


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """Return a function from model type to a tiny random model and its checkpoint."""
    return random_models(tmp_path_factory)


@pytest.fixture(scope="session")
def mixture_of(tmp_path_factory):
    """Return a function from model type to a model of eight experts and its checkpoint."""
    return random_models(tmp_path_factory, **EIGHT_EXPERTS)
