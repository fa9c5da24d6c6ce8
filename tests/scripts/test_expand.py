"""An expanded checkpoint computes the text of its source and looks like a real model on disk."""

import json
import math
import shutil
from types import SimpleNamespace

import expand
import expansion
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.serving import MODELS
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from offload_rt.models.families import parse_architecture
from offload_rt.weights.checkpoint import open_checkpoint

TINY = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "tie_word_embeddings": True,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-3, "eos_token_id": None,
}  # fmt: skip
# Hidden size, layers, heads, key-value heads, head size and MLP width.
WIDER = (128, 3, 8, 4, 8, 160)
LARGER_HEADS = (64, 3, 4, 2, 32, 64)
EXACT = [WIDER, LARGER_HEADS, (160, 3, 16, 2, 8, 48), (224, 5, 8, 8, 8, 100), (32, 8, 4, 2, 8, 48),
         (640, 7, 32, 4, 32, 300)]  # fmt: skip
ROUNDED = [(80, 4, 8, 4, 8, 64), (64, 3, 4, 2, 16, 64)]


def make_source(directory, model=LlamaForCausalLM, config=LlamaConfig, **changes):
    """A random model of no small weights, norms included, so that every misplaced one shows."""
    torch.manual_seed(1)
    net = model(config(**TINY | changes))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    net.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "source")


def flags_of(sizes):
    names = "hidden-size", "layers", "heads", "kv-heads", "head-dim", "intermediate-size"
    return [f"--{name}={value}" for name, value in zip(names, sizes, strict=True)]


def run(source, out, *flags, rc=0):
    assert expand.main(["--source", str(source), "--out", str(out), *flags]) == rc
    return out


def load(directory):
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def assert_same_function(small, large):
    ids = torch.randint(small.config.vocab_size, (2, 24))
    expected = small(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(large(ids).logits, expected, atol=1e-4, rtol=0)
    options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(large.generate(ids[:1], **options), small.generate(ids[:1], **options))


@pytest.mark.parametrize("sizes", EXACT + ROUNDED, ids=str)
def test_expanded_logits_and_text_equal_the_source(source, tmp_path, sizes, capsys):
    out = run(source, tmp_path / "out", *flags_of(sizes))
    assert ("powers of two only" in capsys.readouterr().err) == (sizes in EXACT)
    large = load(out)
    assert (large.config.hidden_size, large.config.num_hidden_layers) == sizes[:2]
    assert_same_function(load(source), large)


def test_scaled_rope_and_more_positions(tmp_path):
    parameters = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
    parameters |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    source = make_source(tmp_path / "source", rope_parameters=parameters)
    flags = [*flags_of(LARGER_HEADS), "--max-position-embeddings", "512"]
    out = run(source, tmp_path / "out", *flags)
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 512
    assert_same_function(load(source), load(out))


@pytest.mark.parametrize("limit", [40_000, 400_000, 10**9])
def test_shards_keep_their_size_and_whole_layers(source, tmp_path, limit):
    flags = [*flags_of(LARGER_HEADS), "--shard-size", str(limit)]
    out = run(source, tmp_path / "out", *flags)
    shards = sorted(out.glob("model-*.safetensors"))
    assert all(path.stat().st_size <= limit for path in shards)
    checkpoint = open_checkpoint(out)
    where = json.loads((out / "model.safetensors.index.json").read_text())
    assert where["metadata"]["total_size"] == checkpoint.nbytes
    nbytes = max(sum(record.stop - record.start for record in layer) for layer in checkpoint.layers)
    if nbytes < 0.9 * limit:
        assert all(len({record.path for record in layer}) == 1 for layer in checkpoint.layers)
    else:
        assert len(shards) > 3
    with safe_open(shards[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_stale_or_damaged_expansion_is_written_again(source, tmp_path, monkeypatch, capsys):
    flags = flags_of(WIDER)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        run(source, tmp_path / "out", *flags, rc=2)
    assert "too full" in capsys.readouterr().err and not (tmp_path / "out").exists()
    out = run(source, tmp_path / "out", *flags)

    def stats() -> dict[str, tuple[int, int]]:
        """State of the folder that writes would change; reads may change access times."""
        found = {path.name: path.stat() for path in (out, *out.iterdir())}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}

    before = stats()
    assert {"tokenizer_config.json", "generation_config.json", "expansion.json"} <= set(before)
    run(source, out, *flags)
    assert "already there" in capsys.readouterr().err
    run(source, out, *flags_of(LARGER_HEADS), rc=2)
    run(source, source, *flags, rc=2)
    assert capsys.readouterr().err.count("already has other contents") == 2
    assert stats() == before
    path, shard = source / "model.safetensors", next(out.glob("model-*.safetensors"))
    weights = {name: tensor * 0.9 for name, tensor in load_file(path).items()}
    for spoil in (
        lambda: save_file(weights, path, metadata={"format": "pt"}),
        lambda: shard.write_bytes(shard.read_bytes()[:-9]),
        (out / "tokenizer_config.json").unlink,
    ):
        spoil()
        run(source, out, *flags)
        assert (out / "tokenizer_config.json").exists()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "source"]
        assert_same_function(load(source), load(out))
    (tmp_path / "empty").mkdir()
    run(source, tmp_path / "empty", *flags)


def test_unsuitable_sizes_and_sources_are_refused(source, tmp_path, capsys):
    for flags, words in (
        ("--hidden-size 16", "--hidden-size"), ("--layers 2", "--layers"),
        ("--layers 0", "from 1 to"), ("--heads 0", "config.json"),
        ("--intermediate-size 40", "--intermediate-size"),
        ("--head-dim 12", "a multiple of the source's 8"),
        ("--heads 2 --kv-heads 2", "needs 4 key-value heads of 1 queries each, has 2"),
        ("--max-position-embeddings 64", "--max-position-embeddings"),
        ("--shard-size 2K", "raise --shard-size"), ("--size 20KB", "raise --size"),
        ("--size 20KB --keep-width", "raise --size"),
        ("--size 1GB --layers 9", "either --size or"),
        ("--source nowhere/at/all", "no such directory"),
    ):  # fmt: skip
        run(source, tmp_path / "out", *flags.split(), rc=2)
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    mistral = {"model": MistralForCausalLM, "config": MistralConfig, "sliding_window": None}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for changes, words in (
        ({"attention_bias": True}, "without biases"), ({"mlp_bias": True}, "without biases"),
        (mistral, "has a mistral"), ({"rope_parameters": dynamic}, "rotary"),
    ):  # fmt: skip
        run(make_source(source, **changes), tmp_path / "out", *flags_of(LARGER_HEADS), rc=2)
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("nbytes", [50e6, 300e6, 1.5e9, 3e9, 14e9, 140e9])
def test_shape_of_the_given_size(nbytes):
    config = json.loads((MODELS / "demo-target" / "config.json").read_text())
    source = parse_architecture(config)
    shape = expand.shape_for(int(nbytes), source, 2)
    target = parse_architecture(config | vars(shape) | {"tie_word_embeddings": False})
    expand.check(source, target)
    size = 2 * sum(math.prod(piece.shape) for group in expansion.pieces(target) for piece in group)
    assert abs(size / nbytes - 1) < 0.03
    assert shape.num_hidden_layers >= max(8, shape.hidden_size // 128)
    assert shape.hidden_size == shape.num_attention_heads * shape.head_dim
    assert math.log2(expand.residual_of(source, target).mean_square) % 2 == 0


@torch.no_grad()
def test_kept_width_has_the_hidden_states_of_the_source(source, tmp_path):
    """Therefore draft heads of the source fit."""
    out = run(source, tmp_path / "out", "--size", "500KB", "--keep-width")
    assert abs(open_checkpoint(out).nbytes / 500e3 - 1) < 0.03
    ids = torch.randint(96, (2, 24))
    small, large = (load(path)(ids, output_hidden_states=True) for path in (source, out))
    for states, expanded in zip(small.hidden_states, large.hidden_states, strict=True):
        torch.testing.assert_close(expanded, states, atol=1e-5, rtol=1e-5)
