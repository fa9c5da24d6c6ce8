"""Draft models quantised while they are loaded: rounding, sizes, effect on the text."""

import pytest
import torch
from support.tiny import begin, drafter_of, generate, logits_of, nearly, open_llm, prompt_of

from offload_rt import SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.dtypes import DType
from offload_rt.engine.draft_rounding import plan_draft
from offload_rt.engine.memory_plan import plan_memory
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CapacityError
from offload_rt.executor.sequence import Sequence
from offload_rt.models.families import parse_architecture
from offload_rt.offload.placement import MemoryBudget
from offload_rt.planning.known_models import KNOWN
from offload_rt.speculate.select import pick_drafter
from offload_rt.weights.formats.dense import Format
from offload_rt.weights.layout import PackedLayer, host_block, packed_layout
from offload_rt.weights.rounding import COPIES, COPY_DTYPE, ROUNDINGS
from offload_rt.weights.rounding import rounded as quantised

pytestmark = pytest.mark.numeric


PAIR = ("llama2-70b", "llama2-7b")


@pytest.mark.parametrize(
    ("rounding", "dtype"), [*((name, DType.FLOAT32) for name in ROUNDINGS), (COPIES, COPY_DTYPE)]
)
def test_matrix_is_rounded_to_the_nearest_code(rounding, dtype):
    """Also the copies of streamed layers. Rows of 30 inputs have no codes of 4 bits."""
    tensors = [
        ("model.embed_tokens.weight", (96, 64), dtype), ("norm.weight", (64,), dtype),
        ("up.weight", (96, 128), dtype), ("up.bias", (96,), dtype), ("odd.weight", (10, 30), dtype),
    ]  # fmt: skip
    layout = packed_layout(tensors)
    layer = PackedLayer(host_block(layout.nbytes), layout)
    generator = torch.Generator().manual_seed(0)
    for tensor in layout.views(layer.block).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    copy = quantised(layer, rounding, torch.device("cpu"))
    ours = Format(None).view(copy.layout, copy.block, dtype.torch)
    plain = Format(None).view(layout, layer.block, dtype.torch)
    exact = ["model.embed_tokens.weight", "norm.weight", "up.bias"]
    for name in exact + ["odd.weight"] * (rounding == "int4"):
        assert torch.equal(ours.tensor(name), plain.tensor(name))
    matrix = plain.tensor("up.weight").float()
    eye = torch.eye(128, dtype=dtype.torch)
    got = (ours.linear(eye, "up") - plain.tensor("up.bias")).float().T
    largest = matrix.abs().amax(1, keepdim=True)
    groups = matrix.view(96, 2, 64)
    step = ((groups.amax(-1) - groups.amin(-1)) / 15).repeat_interleave(64, 1)
    error = {
        "int4": step / 2 + 0.05, "int8": largest / 254,
        "fp8": (matrix.abs() / 16).maximum(largest / 448 / 1024),
    }[rounding]  # fmt: skip
    assert ((got - matrix).abs() <= error + 1e-5).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_text_and_draft_distribution(pair, rounding):
    """The text equals plain decoding; sampled trees carry the distribution of the rounded draft."""
    prompt = prompt_of(0, 12)
    settings = {"draft_model": str(pair.draft), "draft_quantize": rounding}
    with open_llm(pair.target, "disk", **settings) as llm:
        (output,) = llm.generate(prompt, SamplingParams(max_new_tokens=24))
        planned_nbytes = llm.spec.draft.sizes().nbytes
        plain_nbytes = llm.spec.draft.checkpoint.nbytes
        drafter = drafter_of(llm, "static_tree", "traversal", DraftLimits(6, 4))
        sequence = Sequence(prompt, SamplingParams(max_new_tokens=8, temperature=0.8, seed=1), 64)
        begin(llm, drafter, [sequence], 6)
        (tree,) = drafter.propose([sequence], 6)
        model = nearly(pair.draft_model, 0.0)
        weights = dict(model.named_parameters())
        layers = [*llm.engine.draft.resident_layers(), llm.engine.draft.non_layer]
        for i, view in enumerate(layers):
            prefix = f"model.layers.{i}." if i < len(layers) - 1 else ""
            for module, matrix in view.layout.matrices.items():
                eye = torch.eye(matrix.shape[1])
                weights[f"{prefix}{module}.weight"].data = view.linear(eye, module).T.contiguous()
    assert output.token_ids == generate(pair.model, prompt, 24)
    # int4 multiplies in bfloat16.
    atol = 0.02 if rounding == "int4" else 1e-5
    sampled = tree.sampled
    assert sampled.is_sampled.tolist() == [False, *[True] * 5] and not sampled.independent
    for node in {*tree.topology.parents[1:].tolist()}:
        logits = logits_of(model, prompt + tree.path_to(node))[-1]
        expected = torch.softmax(logits / 0.8, -1)
        probs = sampled.draft_probs[sampled.row_of[node]]
        torch.testing.assert_close(probs, expected, atol=atol, rtol=0)
    loaded_nbytes = sum(view.layout.nbytes for view in layers)
    assert loaded_nbytes == planned_nbytes < 0.6 * plain_nbytes


def planned(target, draft, device, draft_quantize="auto", has_card=True, tree_size=None):
    """The draft model of a plan for a GPU, with its memory plan."""
    settings = {"draft_quantize": draft_quantize, "tree_size": tree_size, "max_model_len": 512}
    config = EngineConfig(target, draft, **settings)
    specs = (parse_architecture(KNOWN[name]) for name in (target, draft))
    sizes, draft = (Sizes.of_spec(spec, DType.FLOAT16) for spec in specs)
    budget = MemoryBudget(device, 200 << 30 if has_card else 0, has_card=has_card)

    def fit(draft, config):
        return plan_memory(config, pick_drafter(config), (sizes, draft), DType.FLOAT16, budget)

    return plan_draft(config, draft, True, has_card, fit)


def test_auto_quantises_if_streamed_bytes_and_draft_levels_take_less_time():
    assert planned(*PAIR, 22 << 30, tree_size=256).rounding == "int4"
    automatic = planned(*PAIR, 22 << 30)
    assert automatic.rounding == "int4"
    assert automatic.sizes.nbytes == pytest.approx(3.82e9, rel=0.01)
    plain = planned(*PAIR, 22 << 30, "none")
    assert plain.sizes.nbytes == pytest.approx(13.48e9, rel=0.01)
    # A level of 171 rows decodes the codes, which costs more than the bytes on the link.
    assert planned(*PAIR, 30 << 30, tree_size=4096).rounding == "none"
    assert planned(*PAIR, 200 << 30).rounding == "none"  # resident
    assert planned(*PAIR, 22 << 30, has_card=False).rounding == "none"
    # A small draft saves too few bytes.
    assert planned("llama2-7b", "llama-68m", 8 << 30).rounding == "none"
    with pytest.raises(CapacityError):
        planned(*PAIR, 14 << 30, "none")
    assert planned(*PAIR, 14 << 30).rounding == "int4"
    with pytest.raises(CapacityError, match="GiB"):
        planned(*PAIR, 1 << 30)
