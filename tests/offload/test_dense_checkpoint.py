"""`offload-rt convert --dequantize`: weights, logits and files equal transformers' model."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import write_gguf
from quantize import Choice, quantized, write
from safetensors.torch import load_file
from support.checkpoints import llama_config, llama_tensors, write_checkpoint
from support.gguf_files import build
from support.quantized import id_of
from support.tiny import CASES, generate, open_llm, prompt_of, say
from transformers import AutoModelForCausalLM

from offload_rt.cli import convert
from offload_rt.offload import dense_checkpoint
from offload_rt.text.detokenize import encode_chat, load_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-target"
CONFIG = llama_config(
    num_hidden_layers=4, hidden_size=64, intermediate_size=96, head_dim=16,
    max_position_embeddings=256, eos_token_id=None,
)  # fmt: skip


@pytest.fixture
def dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that runs the command in float32 and returns the new directory."""
    monkeypatch.setattr(dense_checkpoint, "_N_ROWS", 24)  # large matrices are written in parts

    def run(source: Path, *flags: str) -> Path:
        out = tmp_path / "dense"
        flags = ("--dequantize", str(out), *(flags or ("--dtype", "float32")))
        assert convert.main([str(source), *flags]) == 0
        return out

    return run


YARN = {
    "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
    "qwen2.rope.scaling.original_context_length": 64,
}  # fmt: skip
LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0}


@pytest.mark.parametrize(("name", "type", "more"), [
    ("llama", "F16", {}), ("llama-tied", "Q8_0", {}), ("llama-biases", "Q8_0", {}),
    ("qwen2", "Q4_0", YARN), ("qwen3", "Q8_0", {}), ("llama-linear", "Q8_0", LINEAR),
    ("llama-llama3", "Q4_0", {}), ("mixtral", "Q4_0", {}), ("qwen3_moe", "Q8_0", {}),
])  # fmt: skip
def test_every_gguf_family_is_read_and_converted(
    name, type, more, mixture_of, tmp_path, dequantised
):
    """From memory, from disk, and converted; rotations are scaled in all ways of llama.cpp."""
    path = tmp_path / "m.gguf"
    model = CASES[name].build(0) if name in CASES else copy.deepcopy(mixture_of(name)[0])
    model.config.eos_token_id = model.config.sliding_window = None
    for layer in model.model.layers if name not in CASES else ():
        layer.mlp.gate.norm_topk_prob = True
    model = build(path, model, type, more)
    prompt = prompt_of(0)
    expected = generate(model, prompt, 24)
    for place in ("resident", "disk"):
        with open_llm(path, place, dtype="float32") as llm:
            assert say(llm, prompt, 24) == expected
    assert len(set(expected)) > 5
    converted = AutoModelForCausalLM.from_pretrained(dequantised(path))
    assert type == "F16" or converted.dtype == torch.float32
    state = model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in converted.state_dict().items())
    ids = torch.tensor([prompt])
    with torch.no_grad():
        assert torch.equal(converted.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("choice", [
    *(Choice(name) for name in ("awq", "fp8", "nf4", "int-quantized", "float-quantized")),
    *(Choice(name, desc_act=True) for name in ("gptq", "pack-quantized")),
    Choice("mxfp4-pack-quantized"), Choice("gptq_v2", 3),
], ids=id_of)  # fmt: skip
def test_quantised_directory_has_the_reference_weights(choice, tmp_path, dequantised):
    """Both checkpoints have transformers' text, from memory and from disk, plainly and drafted."""
    tensors = {name: 3 * tensor for name, tensor in llama_tensors(CONFIG).items()}
    source = write_checkpoint(tmp_path / "source", CONFIG, tensors)
    write(source, tmp_path / "quantised", choice)
    (tmp_path / "quantised" / "quantize_config.json").write_text("{}")
    (tmp_path / "quantised" / "chat_template.jinja").write_text("{{ messages }}")
    exact = quantized(load_file(source / "model.safetensors"), choice)[1]
    out = dequantised(tmp_path / "quantised")
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == exact.keys()
    assert all(torch.equal(stored[name], exact[name].float()) for name in exact)
    names = {path.name for path in out.iterdir()}
    assert names == {"model.safetensors", "config.json", "chat_template.jinja"}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    prompt = prompt_of(0, vocab_size=40)
    expected = generate(AutoModelForCausalLM.from_pretrained(out).eval(), prompt, 24)
    coded = tmp_path / "quantised"
    for path, place, more in (
        (coded, "disk", {}), (coded, "resident", {"draft_model": str(coded)}), (out, "resident", {})
    ):  # fmt: skip
        with open_llm(path, place, dtype="float32", **more) as llm:
            assert say(llm, prompt, 24) == expected
    assert len(set(expected)) > 5


def test_gguf_file_becomes_a_checkpoint_with_its_tokenizer(tmp_path, dequantised):
    """Weights are rounded once to the dtype of a run."""
    path = tmp_path / "m.gguf"
    template = "{% for turn in messages %}<{{ turn['content'] }}>{% endfor %}"
    more = write_gguf.tokenizer(DEMO / "tokenizer.json") | {
        "tokenizer.chat_template": template,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 3,
    }
    model = build(path, CASES["llama"].build(0), "Q4_0", more)
    assert load_tokenizer(tmp_path) is None  # a directory is asked for its own files
    out = dequantised(path, "--dtype", "auto")
    state = model.state_dict()
    stored = load_file(out / "model.safetensors")
    assert all(torch.equal(tensor, state[key].bfloat16()) for key, tensor in stored.items())
    content = "naïve 12 <|im_end|>\n"
    for tokenizer in map(load_tokenizer, (path, out)):
        ids = encode_chat(tokenizer, [{"role": "user", "content": content}], {})
        assert tokenizer.decode(ids) == f"<{content}>"
    special = json.loads((out / "generation_config.json").read_text())
    assert (special["eos_token_id"], special["pad_token_id"]) == ([2], 3)


def test_failures_leave_no_directory(mxfp4_checkpoint, tmp_path, capfd, monkeypatch):
    model = str(tmp_path / "m.gguf")
    out = str(tmp_path / "dense")
    build(tmp_path / "m.gguf", CASES["llama"].build(0), "Q8_0")
    for flags, message in (
        ((model, "--dequantize", out, "--ranks", "2"), "--dequantize excludes --ranks"),
        ((model, "--dequantize", out, "--stripe", "x"), "--dequantize excludes --stripe"),
        ((model, "--dtype", "float32"), "--dtype is a setting of --dequantize"),
        ((model, "--dequantize", str(tmp_path)), "has contents"),
        ((str(mxfp4_checkpoint), "--dequantize", out), "all experts in one tensor"),
    ):
        assert convert.main([*flags]) == 2
        assert message in capfd.readouterr().err
    monkeypatch.setattr(dense_checkpoint, "check_room", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert.main([model, "--dequantize", out])
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
