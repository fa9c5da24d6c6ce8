"""An architecture that is little like the native decoder, and the same model in plain torch, one
text at a time.

Norms come behind attention and MLP; every other layer has no MLP, looks back through a window, and
is of another scale; positions are added to what queries and keys are made of; the embedding is
scaled, and there is no norm before the head.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from offload_rt.models.architecture import Architecture, TensorShape

WINDOW = 5


def has_mlp(i):
    return i % 2 == 0


def scale_of(i):
    return 1.0 / (i + 2)


def window_of(i):
    return None if has_mlp(i) else WINDOW


def waves(positions, width):
    return (positions[:, None] * torch.arange(1, width + 1) / width).sin()


@dataclass(frozen=True)
class PostNorm(Architecture):
    n_heads: int
    mlp_size: int

    def layer_prefix(self, i):
        return f"blocks.{i}."

    def layer_tensors(self, i):
        d = self.hidden_size
        q = self.n_heads * self.head_dim
        kv = self.n_kv_heads * self.head_dim
        tensors = [
            ("query.weight", (q, d)),
            ("query.bias", (q,)),
            ("key.weight", (kv, d)),
            ("value.weight", (kv, d)),
        ]
        tensors += [("mix.weight", (d, q)), ("first.weight", (d,))]
        if has_mlp(i):
            tensors += [
                ("up.weight", (self.mlp_size, d)),
                ("down.weight", (d, self.mlp_size)),
                ("second.weight", (d,)),
            ]
        return tuple(TensorShape(*one) for one in tensors)

    def non_layer_tensors(self):
        table = (self.vocab_size, self.hidden_size)
        return (TensorShape("tokens.weight", table), TensorShape("output.weight", table))

    def is_unused(self, name):
        return False

    def row_inputs(self, positions, lengths, dtype):
        return (waves(positions, self.hidden_size).to(dtype),)

    def embed(self, weights, ids, row_inputs):
        return weights.rows(ids, "tokens") * 3.0, row_inputs

    def layer(self, i, weights, x, context):
        (positions,) = context.row_inputs
        heads = (len(x), -1, self.head_dim)
        q, k = (weights.linear(x + positions, name).view(heads) for name in ("query", "key"))
        out = context.attend(
            i, q, k, weights.linear(x, "value").view(heads), scale=scale_of(i), window=window_of(i)
        )
        x = F.layer_norm(
            x + weights.linear(out.reshape(len(x), -1), "mix"),
            x.shape[-1:],
            weights.vector("first"),
        )
        if not has_mlp(i):
            return x
        x = x + weights.linear(F.gelu(weights.linear(x, "up")), "down")
        return F.layer_norm(x, x.shape[-1:], weights.vector("second"))

    def head(self, weights, x):
        return weights.linear(x, "output")

    def flops(self, i, n_rows, context):
        return 2.0 * n_rows * sum(math.prod(shape) for _, shape in self.layer_tensors(i))

    def scratch_nbytes(self, n_rows, n_logits, itemsize):
        return (
            n_rows * 4 * (self.mlp_size + self.hidden_size) * itemsize
            + n_logits * self.vocab_size * 12
        )


def random_tensors(model, seed=0):
    """A checkpoint's tensors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(model.non_layer_tensors())
    for i in range(model.n_layers):
        shapes |= {model.layer_prefix(i) + name: shape for name, shape in model.layer_tensors(i)}
    return {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


def logits_of(model, tensors, tokens):
    """(n, vocabulary) of a text, head by head, with every row's scores written out."""
    n = len(tokens)
    d = model.head_dim
    x = tensors["tokens.weight"][torch.tensor(tokens)] * 3.0
    positions = waves(torch.arange(n), model.hidden_size)
    back = torch.arange(n)[:, None] - torch.arange(n)
    for i in range(model.n_layers):
        w = {name.removeprefix(f"blocks.{i}."): tensor for name, tensor in tensors.items()}
        q = (x + positions) @ w["query.weight"].T + w["query.bias"]
        k = (x + positions) @ w["key.weight"].T
        v = x @ w["value.weight"].T
        hidden = (back < 0) | (back >= (n if has_mlp(i) else WINDOW))
        outs = []
        for head in range(model.n_heads):
            mine, shared = (
                slice(d * one, d * one + d)
                for one in (head, head * model.n_kv_heads // model.n_heads)
            )
            scores = (q[:, mine] @ k[:, shared].T * scale_of(i)).masked_fill(hidden, -math.inf)
            outs.append(scores.softmax(-1) @ v[:, shared])
        x = F.layer_norm(
            x + torch.cat(outs, -1) @ w["mix.weight"].T, x.shape[-1:], w["first.weight"]
        )
        if has_mlp(i):
            x = x + F.gelu(x @ w["up.weight"].T) @ w["down.weight"].T
            x = F.layer_norm(x, x.shape[-1:], w["second.weight"])
    return x @ tensors["output.weight"].T


def generate(model, tensors, prompt, n_new):
    """The greedy continuation."""
    tokens = list(prompt)
    for _ in range(n_new):
        tokens.append(int(logits_of(model, tensors, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
