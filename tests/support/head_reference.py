"""Logits of draft heads by their papers, in float64, from transformers' hidden states."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from support.heads import DFLASH2, KEPT, MTP, N_HEADS, Weights, Written

WINDOW = 4
_SELECTOR = "candidate_selector."


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def make_double(model: PreTrainedModel) -> None:
    """Compute in float64, including the norms, which transformers computes in float32."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms, weight=module.weight)  # type: ignore[method-assign]


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Sequence[int]) -> list[Tensor]:
    """(n, d) behind 0, 1, ... all layers, the last norm not applied; and with it."""
    last: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0]))
    ids = torch.tensor([list(tokens)])
    states = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    return [*(state[0] for state in states[:-1]), last[0], states[-1][0]]


def _rotated(x: Tensor, first: int = 0) -> Tensor:
    """Rotary embedding of x (n, heads, dim) at the positions from `first`."""
    dim = x.shape[-1]
    frequencies = 1 / 10000.0 ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(first, first + len(x))[:, None, None].float() * frequencies
    turns = torch.complex(angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    pairs = torch.complex(*x.chunk(2, -1)) * turns
    return torch.cat((pairs.real, pairs.imag), -1)


class Reference:
    """A head that recomputes its rows from the hidden states of the whole text.

    kind, written  see `write_head`
    model          the target
    """

    def __init__(self, kind: str, written: Written, model: PreTrainedModel) -> None:
        self.kind = kind
        self.raw = written.raw
        self.keys = self.raw | {
            key: value
            for name in ("dflash_config", "dspark_config", "eagle_config")
            for key, value in self.raw.get(name, {}).items()
        }
        mask_keys = ("mask_token_id", "pard_token", "ptd_token_id")
        masks = [self.keys[key] for key in mask_keys if self.keys.get(key) is not None]
        self.mask_token = next(iter(masks), 0)
        self.layers = self.raw.get("transformer_layer_config", self.raw)
        self.is_nested = self.layers is not self.raw
        self.model = model
        dtype = model.dtype
        self.w: Weights = {
            name: weight.to(dtype) if weight.is_floating_point() else weight
            for name, weight in written.weights.items()
        }
        self.embedding = model.model.embed_tokens.weight.detach()
        self.output = self.w.get("lm_head.weight", model.lm_head.weight.detach())

    @torch.no_grad()
    def logits(self, tokens: list[int], path: list[int], known: list[int] | None = None) -> Tensor:
        """(vocabulary,) after tokens and a path of a tree.

        known  path within a block; by default the whole path
        """
        states = states_of(self.model, tokens[:-1])
        if self.kind == "medusa":
            return self._medusa(states[-1][-1], len(path))
        if self.kind in ("block", "dflash2"):
            rows = self.block(states, tokens, path if known is None else known, [tokens[-1], *path])
            return rows[len(path)]
        if self.kind in MTP:
            layer = MTP[self.kind][0].format(n=self.model.config.num_hidden_layers)
            n = self.model.config.num_hidden_layers
            names = [name.format(n=n, layer=layer) for name in MTP[self.kind]]
            hidden = states[-2] if self.kind == "mimo" else states[-1]
            return self._recursive(partial(self._mtp, names), hidden, tokens, path)
        return self._eagle(states, tokens, path)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.w[f"{name}.weight"])

    def _expanded(self, logits: Tensor) -> Tensor:
        if "d2t" not in self.w:
            return logits
        whole = logits.new_full((*logits.shape[:-1], len(self.embedding)), -torch.inf)
        return whole.index_copy(-1, torch.tensor(KEPT), logits)

    def _attention(
        self, prefix: str, h: Tensor, visible: Tensor | None = None, before: Tensor | None = None
    ) -> Tensor:
        """Attention of h (n, width) to the rows `before` it and to itself, with one key head.

        visible  (n, n_before + n) bool; None for causal attention
        """
        given = h if before is None else torch.cat((before, h))
        q = self.linear(f"{prefix}self_attn.q_proj", h)
        k, v = (self.linear(f"{prefix}self_attn.{name}_proj", given) for name in "kv")
        q = q.view(len(h), -1, k.shape[-1])
        k, v = k[:, None], v[:, None]
        if f"{prefix}self_attn.q_norm.weight" in self.w:
            q = self._norm(f"{prefix}self_attn.q_norm", q)
            k = self._norm(f"{prefix}self_attn.k_norm", k)
        q, k, v = (x.transpose(0, 1) for x in (_rotated(q, len(given) - len(h)), _rotated(k), v))
        options = {"is_causal": visible is None, "enable_gqa": True}
        out = F.scaled_dot_product_attention(q, k, v, visible, **options)
        return self.linear(f"{prefix}self_attn.o_proj", out.transpose(0, 1).flatten(1))

    def _mlp(self, prefix: str, h: Tensor) -> Tensor:
        gate, up = (self.linear(f"{prefix}mlp.{name}_proj", h) for name in ("gate", "up"))
        return self.linear(f"{prefix}mlp.down_proj", F.silu(gate) * up)

    def _medusa(self, x: Tensor, i: int) -> Tensor:
        assert i < N_HEADS
        return self.linear(f"{i}.1", x + F.silu(self.linear(f"{i}.0.linear", x)))

    def _recursive(
        self,
        step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        hidden: Tensor,
        tokens: list[int],
        path: list[int],
    ) -> Tensor:
        """Each further row of a path has the output of the row before in place of a state.

        step  maps embeddings and hidden states to logits, and to inputs of further rows
        """
        inputs = tokens[1:]
        for token in [*path, None]:
            logits, given = step(self.embedding[inputs], hidden)
            hidden = torch.cat((hidden, given[-1:]))
            inputs = [*inputs, token]
        return logits[-1]

    def _mtp(self, names: list[str], embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        prefix, of_embedding, of_hidden, project, last = names
        parts = self._norm(of_embedding, embedded), self._norm(of_hidden, hidden)
        x = self.linear(project, torch.cat(parts[::-1] if self.kind == "mimo" else parts, 1))
        x = x + self._attention(prefix, self._norm(f"{prefix}input_layernorm", x))
        x = x + self._mlp(prefix, self._norm(f"{prefix}post_attention_layernorm", x))
        given = self._norm(last, x)
        return F.linear(given, self.output), given

    def _eagle(self, states: list[Tensor], tokens: list[int], path: list[int]) -> Tensor:
        n = len(states) - 2
        taps = self.raw.get("eagle_aux_hidden_state_layer_ids", (2, n // 2, n - 3))
        hidden = self._fused(torch.stack([states[i] for i in taps], 1))
        if self.raw.get("embed_requires_grad", self.kind == "peagle"):
            self.embedding = self.w["embed_tokens.weight"]
        if self.kind == "eagle":
            return self._recursive(self._eagle_step, hidden, tokens, path)
        masked = self._fused(self.w["mask_hidden"].view(1, 3, -1)).expand(len(path), -1)
        text = [*tokens, *[self.mask_token] * len(path)]
        return self._recursive(self._eagle_step, torch.cat((hidden, masked)), text, [])

    def _fused(self, taps: Tensor) -> Tensor:
        if self.raw.get("fc_norm"):
            taps = torch.stack([self._norm(f"fc_norm.{i}", taps[:, i]) for i in range(3)], 1)
        fused = taps.flatten(1)
        if self.raw.get("norm_before_fc"):
            fused = self._norm("input_norm", fused)
        return self.linear("fc", fused)

    def _eagle_step(self, embedded: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        for i in range(self.layers["num_hidden_layers"]):
            prefix = f"layers.{i}." if i or self.is_nested else "midlayer."
            h = self._norm(f"{prefix}hidden_norm" if i == 0 else f"{prefix}input_layernorm", x)
            if i == 0:
                x = h if self.raw.get("norm_before_residual") else x
                h = torch.cat((self._norm(f"{prefix}input_layernorm", embedded), h), 1)
            x = x + self._attention(prefix, h)
            x = x + self._mlp(prefix, self._norm(f"{prefix}post_attention_layernorm", x))
        output = self._norm("norm", x)
        is_normed = self.raw.get("norm_output", not self.is_nested)
        feeds_normed = self.is_nested and is_normed
        logits = self.linear("lm_head", output if self.is_nested or is_normed else x)
        return self._expanded(logits), output if feeds_normed else x

    def block(
        self, states: list[Tensor], tokens: list[int], known: list[int], previous: list[int]
    ) -> Tensor:
        """(n, vocabulary) of the first n predictions of a block.

        known     tokens assumed to follow the last, within the block
        previous  (n,) tokens before each prediction
        """
        keys = self.keys
        size = keys["block_size"]
        taps = [i + 1 for i in keys.get("target_layer_ids", ())]
        taps = taps or self.raw["aux_hidden_state_layer_ids"]
        fused = self.linear("fc", torch.cat([states[i] for i in taps], 1))
        context = self._norm("hidden_norm", fused)
        masks = [self.mask_token] * (size - 1 - len(known))
        x = self.embedding[[tokens[-1], *known, *masks]] * keys.get("input_embedding_scale", 1)
        for i in range(2):
            prefix = f"layers.{i}."
            visible = self._visible(i, len(context), size)
            h = self._norm(f"{prefix}input_layernorm", x)
            x = x + self._convolved(
                f"{prefix}attention_conv",
                h,
                lambda h, p=prefix, v=visible: self._attention(p, h, v, context),
            )
            h = self._norm(f"{prefix}post_attention_layernorm", x)
            x = x + self._convolved(f"{prefix}mlp_conv", h, partial(self._mlp, prefix))
        hidden = self._norm("norm", x)
        is_anchored = self.raw.get("sample_from_anchor", "markov_rank" in keys)
        hidden = hidden[0 if is_anchored else 1 :][: len(previous)]
        logits = F.linear(hidden, self.output) * keys.get("output_multiplier", 1)
        if cap := keys.get("final_logit_softcapping"):
            logits = cap * (logits / cap).tanh()
        return self._after_tokens(hidden, logits, previous)

    def _visible(self, i: int, n: int, size: int) -> Tensor:
        """(size, n + size) bool for the rows of a block behind n tokens."""
        is_windowed = self.layers.get("layer_types", [""] * 2)[i] == "sliding_attention"
        keys = self.keys
        is_free = self.is_nested and "conv_kernel_size" in keys
        is_free |= keys.get("sliding_window_non_causal", False)
        is_causal = keys.get("causal_head") or keys.get("causal", is_windowed and not is_free)
        rows = torch.arange(n, n + size)[:, None]
        columns = torch.arange(n + size)
        visible = (columns <= rows) | (not is_causal)
        is_near = columns >= n - WINDOW if self.is_nested else (rows - columns).abs() < WINDOW
        return visible & (is_near | (not is_windowed))

    def _convolved(self, name: str, h: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Convolve input and output of a sublayer, with DFlash2 alone.

        Row t is the sum of rows t - k times (base[k] + dynamic[t, k, group]) for t, k >= 0.
        """
        if f"{name}.base_kernel" not in self.w:
            return layer(h)
        n_taps, size = DFLASH2["conv_kernel_size"], DFLASH2["conv_group_size"]
        dynamic = self.linear(f"{name}.kernel_projection", h).view(len(h), 2, n_taps, -1)
        kernels = self.w[f"{name}.base_kernel"] + dynamic.repeat_interleave(size, -1)

        def convolve(x: Tensor, side: int) -> Tensor:
            out = torch.zeros_like(x)
            for t in range(len(x)):
                for k in range(min(t + 1, n_taps)):
                    out[t] += kernels[t, side, k] * x[t - k]
            return out

        return convolve(layer(convolve(h, 0)), 1)

    def _after_tokens(self, hidden: Tensor, logits: Tensor, previous: list[int]) -> Tensor:
        """Add what the preceding tokens change: DSpark's matrices, DFlash2's selector."""
        w = self.w
        if "markov_rank" in self.keys:
            before = w["markov_head.markov_w1.weight"][previous]
            if self.keys["markov_head_type"] == "gated":
                both = torch.cat((hidden, before), 1)
                before = before * self.linear("markov_head.gate_proj", both).sigmoid()
            logits = logits + self.linear("markov_head.markov_w2", before)
        if "conv_kernel_size" in self.keys:
            context = self.linear(f"{_SELECTOR}hidden_projection", hidden)
            context = context * w[f"{_SELECTOR}predecessor_codebook"][previous]
            last = logits.sort(descending=True).values[:, DFLASH2["selector_top_k"] - 1, None]
            scores = logits + context @ w[f"{_SELECTOR}successor_codebook"].T
            return scores.masked_fill(logits < last, -torch.inf)
        return self._expanded(logits)
