"""Drafts in torch for training: DFlash, EAGLE-3 and draft models of some of the target's layers.

All save the tensor names and the config of the published layouts. `offload_rt/models/` contains
the forward passes for inference.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

# Layers of the demonstration target whose outputs its heads read, counted from 1.
DEMO_TAPS = (2, 4, 6)
BLOCK_SIZE = 10
# Token at positions to predict. Prompts contain it only at their start.
MASK_TOKEN = 0
# Training passes of EAGLE-3 on its own outputs, besides the pass on the target's hidden states.
N_OWN_STEPS = 3
# Every how many positions count in the loss of EAGLE-3: logits take half of the time.
_LOSS_SHARE = 2
# Later positions of a block are reached more rarely: decay of their weight, from DFlash.
_DECAY = 7.0


@dataclass(frozen=True)
class Taught:
    """Texts with the target's states.

    tokens     (rows, n)
    taps       (rows, n, taps * hidden) hidden states, concatenated
    final      (rows, n, hidden) states before the output matrix
    is_taught  (rows, n) positions whose prediction counts
    """

    tokens: Tensor
    taps: Tensor
    final: Tensor
    is_taught: Tensor

    def rows(self, places: Tensor) -> "Taught":
        """Select texts, with states in float32."""
        parts = self.tokens, self.taps, self.final, self.is_taught
        tokens, taps, final, is_taught = (part[places] for part in parts)
        return Taught(tokens, taps.float(), final.float(), is_taught)


@torch.no_grad()
def tapped_states(
    target: LlamaForCausalLM, tokens: Tensor, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return `taps` and `final` of `Taught` for tokens (rows, n), in the dtype of the target."""
    states: list[Tensor] = []
    hooks = [
        target.model.layers[tap - 1].register_forward_hook(lambda _, __, out: states.append(out))
        for tap in taps
    ]
    final = target.model(tokens, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    return torch.cat(states, -1), final


def taught(target: LlamaForCausalLM, tokens: Tensor, taps: tuple[int, ...]) -> Taught:
    """Compute the target's hidden states for tokens (rows, n), stored in bf16."""
    parts = (tapped_states(target, part, taps) for part in tokens.split(16))
    stored = [(tapped.bfloat16(), final.bfloat16()) for tapped, final in parts]
    tapped, final = (torch.cat(each) for each in zip(*stored, strict=True))
    return Taught(tokens, tapped, final, torch.ones_like(tokens, dtype=torch.bool))


def divergence(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean KL divergence, in nats, from log-probabilities (n, vocabulary)."""
    each = F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
    return (each * weights).sum() / weights.sum()


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary embeddings to x (rows, heads, n, head_dim) at positions (rows, n)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, :, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Projections of grouped-query attention; DFlash norms queries and keys."""

    def __init__(self, config: Any, n_in: int, qk_norm: bool) -> None:
        super().__init__()
        self.dim = config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        n_q = config.num_attention_heads * self.dim
        n_kv = config.num_key_value_heads * self.dim
        self.q_proj = nn.Linear(n_in, n_q, bias=False)
        self.k_proj = nn.Linear(n_in, n_kv, bias=False)
        self.v_proj = nn.Linear(n_in, n_kv, bias=False)
        self.o_proj = nn.Linear(n_q, config.hidden_size, bias=False)
        if qk_norm:
            self.q_norm = nn.RMSNorm(self.dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.dim, eps=config.rms_norm_eps)
        self.qk_norm = qk_norm

    def heads(self, name: str, x: Tensor, positions: Tensor) -> Tensor:
        """Return rotated queries or keys, or values: (rows, heads, n, head_dim)."""
        out = getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        if name == "v":
            return out
        out = getattr(self, f"{name}_norm")(out) if self.qk_norm else out
        return rotated(out, positions, self.theta)

    def mix(self, out: Tensor) -> Tensor:
        """Project attention outputs (rows, heads, n, head_dim) to the hidden size."""
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated SiLU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, m = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, m, bias=False)
        self.up_proj = nn.Linear(d, m, bias=False)
        self.down_proj = nn.Linear(m, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the change of the residual stream."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Norms, attention and MLP; with `wide` inputs also the second norm of EAGLE-3."""

    def __init__(self, config: Any, wide: bool) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(d, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(d, eps=eps)
        self.self_attn = Attention(config, 2 * d if wide else d, qk_norm=not wide)
        self.mlp = Mlp(config)
        if wide:
            self.hidden_norm = nn.RMSNorm(d, eps=eps)


class DFlash(nn.Module):
    """Block drafter (Chen et al. 2026): masked positions see the target's states and their block.

    Each row predicts the next position, the last token included. Half of the training blocks begin
    with further known tokens, for conditioned blocks.
    """

    def __init__(
        self,
        target: LlamaForCausalLM,
        taps: tuple[int, ...],
        n_layers: int = 3,
        vocabulary: Tensor | None = None,
    ) -> None:
        """Create a drafter whose loss compares the tokens of `vocabulary` (n,), or all."""
        super().__init__()
        config = target.config
        d = config.hidden_size
        self.taps = taps
        self._vocabulary = vocabulary
        self.fc = nn.Linear(len(taps) * d, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, wide=False) for _ in range(n_layers))
        self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        # Start from the target's last layers, on the states between them.
        self.fc.weight.data = torch.eye(d).repeat(1, len(taps)) / len(taps)
        for layer, known in zip(self.layers, target.model.layers[-n_layers:], strict=True):
            layer.load_state_dict(known.state_dict(), strict=False)
        self.norm.load_state_dict(target.model.norm.state_dict())

    def forward(self, taps: Tensor, x: Tensor, starts: Tensor) -> Tensor:
        """Return hidden states (rows, blocks * BLOCK_SIZE, d).

        taps    (rows, n, taps * d) of the text
        x       (rows, blocks * BLOCK_SIZE, d) embedded blocks
        starts  (rows, blocks) positions of their first tokens
        """
        device = x.device
        n = taps.shape[1]
        context = self.hidden_norm(self.fc(taps))
        offsets = torch.arange(BLOCK_SIZE, device=device)
        positions = (starts[..., None] + offsets).flatten(1)
        places = torch.arange(n, device=device).expand(len(taps), n)
        owner = torch.arange(starts.shape[1], device=device).repeat_interleave(BLOCK_SIZE)
        same = (owner[:, None] == owner).expand(len(x), -1, -1)
        before = places[:, None] < starts.repeat_interleave(BLOCK_SIZE, 1)[..., None]
        mask = torch.cat((before, same), -1)[:, None]
        for layer in self.layers:
            attention = layer.self_attn
            h = layer.input_layernorm(x)
            q = attention.heads("q", h, positions)
            k, v = (
                torch.cat(
                    (attention.heads(name, context, places), attention.heads(name, h, positions)), 2
                )
                for name in "kv"
            )
            out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            x = x + attention.mix(out)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def loss(self, target: LlamaForCausalLM, text: Taught, n_blocks: int = 12) -> Tensor:
        """Return the divergence of random blocks of a text from the target."""
        rows, n = text.tokens.shape
        device = text.tokens.device
        starts = torch.randint(1, n - BLOCK_SIZE, (rows, n_blocks), device=device)
        at = starts[..., None] + torch.arange(BLOCK_SIZE, device=device)
        known = torch.randint(1, BLOCK_SIZE, starts.shape, device=device)
        known = torch.where(torch.rand(starts.shape, device=device) < 0.5, known, 0)[..., None]
        ahead = torch.arange(BLOCK_SIZE, device=device) - known
        tokens = text.tokens.gather(1, at.flatten(1)).view_as(at)
        tokens = torch.where(ahead > 0, MASK_TOKEN, tokens).flatten(1)
        embedding = target.get_input_embeddings().weight
        hidden = self(text.taps, F.embedding(tokens, embedding), starts).flatten(0, 1)
        row = torch.arange(rows, device=device)[:, None, None]
        final = text.final[row, at].flatten(0, 2)
        is_predicted = (ahead >= 0).flatten() & text.is_taught[row, at].flatten()
        output = embedding if self._vocabulary is None else embedding[self._vocabulary]
        logits, wanted = (F.linear(part[is_predicted], output) for part in (hidden, final))
        weights = torch.exp(-ahead.flatten()[is_predicted] / _DECAY)
        return divergence(logits, wanted.log_softmax(-1), weights)

    def config(self, target: LlamaForCausalLM) -> dict[str, Any]:
        """Return config.json in the layout of speculators."""
        return {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "speculators_version": "0.9.0",
            "speculators_config": {},
            "aux_hidden_state_layer_ids": list(self.taps),
            "block_size": BLOCK_SIZE,
            "mask_token_id": MASK_TOKEN,
            "sample_from_anchor": True,
            "transformer_layer_config": _layer_config(target, "qwen3", len(self.layers)),
        }


class Eagle3(nn.Module):
    """EAGLE-3 (Li et al. 2025): a layer on embedding and fused states, trained on own outputs."""

    def __init__(
        self, target: LlamaForCausalLM, taps: tuple[int, ...], vocabulary: Tensor | None = None
    ) -> None:
        """Create a head that predicts the tokens of `vocabulary` (n,), ascending, or all."""
        super().__init__()
        config = target.config
        d = config.hidden_size
        self.taps = taps
        self.vocabulary = vocabulary
        self.fc = nn.Linear(len(taps) * d, d, bias=False)
        self.midlayer = Layer(config, wide=True)
        self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.midlayer.mlp.load_state_dict(target.model.layers[-1].mlp.state_dict())
        self.norm.load_state_dict(target.model.norm.state_dict())
        output = self._predicted(target.get_output_embeddings().weight).detach().clone()
        self.lm_head = nn.Linear(d, len(output), bias=False)
        self.lm_head.weight.data = output

    def _predicted(self, matrix: Tensor) -> Tensor:
        """Select the rows of the predicted tokens."""
        return matrix if self.vocabulary is None else matrix[self.vocabulary]

    def forward(self, taps: Tensor, embedded: Tensor) -> Iterator[Tensor]:
        """Yield the outputs (rows, n, d) of passes on states of the target, then of the head.

        taps      (rows, n, taps * d) of tokens 0 to n - 1
        embedded  (rows, n, d) tokens 1 to n

        Row j combines token j + 1 and the state of token j. In pass s its state is the output of
        row j - 1 in pass s - 1. It sees rows up to j - s of the first pass, and its path since.
        """
        layer = self.midlayer
        attention = layer.self_attn
        positions = torch.arange(taps.shape[1], device=taps.device).expand(taps.shape[:2])
        keys: list[tuple[Tensor, Tensor]] = []
        hidden = self.fc(taps)
        while True:
            inputs = (layer.input_layernorm(embedded), layer.hidden_norm(hidden))
            q, k, v = (attention.heads(name, torch.cat(inputs, -1), positions) for name in "qkv")
            keys.append((k, v))
            hidden = hidden + attention.mix(_attend(q, keys))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            yield hidden
            hidden = hidden.roll(1, 1)

    def loss(self, target: LlamaForCausalLM, text: Taught) -> Tensor:
        """Return the mean divergence over the passes, at the same positions in each."""
        rows, places = text.is_taught[:, 1 + N_OWN_STEPS :].nonzero(as_tuple=True)
        chosen = torch.randperm(len(rows), device=rows.device)[: len(rows) // _LOSS_SHARE]
        rows, places = rows[chosen], places[chosen] + N_OWN_STEPS
        output = self._predicted(target.get_output_embeddings().weight)
        wanted = F.linear(text.final[rows, 1 + places], output).log_softmax(-1)
        weights = torch.ones(len(rows), device=rows.device)
        embedded = F.embedding(text.tokens[:, 1:], target.get_input_embeddings().weight)
        passes = islice(self(text.taps[:, :-1], embedded), 1 + N_OWN_STEPS)
        losses = [
            divergence(self.lm_head(self.norm(hidden[rows, places])), wanted, weights)
            for hidden in passes
        ]
        return torch.stack(losses).mean()

    def config(self, target: LlamaForCausalLM) -> dict[str, Any]:
        """Return config.json in SpecForge's layout."""
        return {
            **_layer_config(target, "llama", 1),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.lm_head.weight),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps]},
        }


def _attend(q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend to rows of the first pass, and to a row of each later pass, the latest the own."""
    n, dim = q.shape[2], q.shape[3]
    share = q.shape[1] // keys[0][0].shape[1]
    first, *later = (
        (k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)) for k, v in keys
    )
    scores = q @ first[0].transpose(-1, -2) / dim**0.5
    rows = torch.arange(n, device=q.device)
    # A row of pass s sees rows of the first pass up to s before its own.
    hidden = rows > rows[:, None] - len(later)
    scores = scores.masked_fill(hidden, -1e4)
    paths = [
        (k.roll(len(later) - 1 - i, 2), v.roll(len(later) - 1 - i, 2))
        for i, (k, v) in enumerate(later)
    ]
    path_scores = [(q * k).sum(-1, keepdim=True) / dim**0.5 for k, _ in paths]
    weights = torch.cat((scores, *path_scores), -1).softmax(-1)
    out = weights[..., :n] @ first[1]
    for i, (_, v) in enumerate(paths):
        out = out + weights[..., n + i, None] * v
    return out


class DraftLayers(nn.Module):
    """Llama with the target's embedding and output, which stay, and some of its layers."""

    def __init__(self, target: LlamaForCausalLM, n_layers: int, vocabulary: Tensor) -> None:
        """Start from the first and last layers; the loss compares `vocabulary` (n,)."""
        super().__init__()
        config = copy.deepcopy(target.config)
        config.num_hidden_layers = n_layers
        self.llama = LlamaForCausalLM(config)
        self.llama.load_state_dict(target.state_dict(), strict=False)
        n_last = n_layers // 2
        for i in range(1, n_last + 1):
            known = target.model.layers[-i].state_dict()
            self.llama.model.layers[-i].load_state_dict(known)
        self.llama.get_input_embeddings().requires_grad_(False)
        self._vocabulary = vocabulary

    def loss(self, _: LlamaForCausalLM, text: Taught) -> Tensor:
        """Return the mean divergence from the target's distribution at half of the positions."""
        rows, places = text.is_taught.nonzero(as_tuple=True)
        chosen = torch.randperm(len(rows), device=rows.device)[: len(rows) // _LOSS_SHARE]
        rows, places = rows[chosen], places[chosen]
        output = self.llama.get_input_embeddings().weight[self._vocabulary]
        hidden = self.llama.model(text.tokens, use_cache=False).last_hidden_state
        logits, wanted = (F.linear(part[rows, places], output) for part in (hidden, text.final))
        return divergence(logits, wanted.log_softmax(-1), torch.ones(len(rows), device=rows.device))


def _layer_config(target: LlamaForCausalLM, model_type: str, n_layers: int) -> dict[str, Any]:
    config = target.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")  # fmt: skip
    sizes = {name: getattr(config, name) for name in names}
    rope = {"rope_theta": config.rope_parameters["rope_theta"]}
    kind = {"model_type": model_type, "num_hidden_layers": n_layers}
    return {**kind, **sizes, **rope, "dtype": "bfloat16"}


def save_head(head: DFlash | Eagle3, target: LlamaForCausalLM, out: Path) -> None:
    """Write the head in bf16; the file of weights is replaced as a whole."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: p.detach().cpu().bfloat16().contiguous() for name, p in head.named_parameters()
    }
    if isinstance(head, Eagle3) and head.vocabulary is not None:
        weights["d2t"] = head.vocabulary - torch.arange(len(head.vocabulary))
        is_predicted = torch.zeros(target.config.vocab_size, dtype=torch.bool)
        is_predicted[head.vocabulary] = True
        weights["t2d"] = is_predicted
    partial = out / "model.safetensors.partial"
    save_file(weights, partial, {"format": "pt"})
    partial.rename(out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(head.config(target), indent=2) + "\n")
