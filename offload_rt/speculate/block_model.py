"""Drafting by a block drafter: trees grow by the token distributions of a block."""

from collections import abc

import torch
from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.kv.cache import KVBuffer
from offload_rt.models.block_head import BlockHead
from offload_rt.ops import to_device
from offload_rt.speculate.draft_model import TreeBuilder, TreeState, captured
from offload_rt.speculate.head_model import HeadModel
from offload_rt.speculate.protocols import ROWS_PER_NODE


class BlockModel(HeadModel):
    """Block drafter with a cache of the target's hidden states per sequence.

    A block is computed once per tree. Row k gives the distribution of all nodes at depth k + 1, so
    a tree needs no further pass.
    """

    def __post_init__(self) -> None:
        spec = self.runner.spec
        assert isinstance(spec, BlockHead), "BlockModel requires a block drafter"
        self.max_levels = min(self.max_levels, spec.n_predicted + 1)
        super().__post_init__()
        self._spec = spec
        self._layers = self.runner.resident_layers()
        self._buffers: dict[Sequence, KVBuffer] = {}
        self._hidden: dict[Sequence, Tensor] = {}  # (n_predicted, hidden_size) of the block

    def transfer(self, old: Sequence, new: Sequence, n: int) -> int:
        """Continue with the cached rows of the shared tokens. See `Drafter.transfer`."""
        self._hidden.pop(old, None)
        buffer = self._buffers.pop(old, None)
        if old not in self._inputs:
            return 0
        first, inputs = self._inputs.pop(old)
        n = min(n, first + len(inputs))
        if buffer is not None:
            self._buffers[new] = buffer
        self._inputs[new] = min(first, n), inputs[: max(n - first, 0)]
        return n

    def end(self, sequence: Sequence) -> None:
        """Release the cache of a sequence."""
        self._hidden.pop(sequence, None)
        self._buffers.pop(sequence, None)
        super().end(sequence)

    @torch.inference_mode()
    def _begin(
        self, sequence: Sequence, n_nodes: int, is_alone: bool, path: abc.Sequence[int] = ()
    ) -> TreeState:
        cached = self._cached(sequence)
        spec = self._spec
        tokens = torch.full((1, spec.block_size), spec.mask_token)
        tokens[0, 0] = sequence.tokens[-1]
        (block,) = to_device([tokens], self.runner.device)
        (self._hidden[sequence],) = spec.block(self._layers, self.runner.non_layer, block, cached)
        state = TreeState(self.vocab_size, ROWS_PER_NODE * n_nodes, sequence, self.runner.device)
        state.clear(sequence.tokens[-1])
        return state

    def _cached(self, sequence: Sequence) -> list[tuple[Tensor, Tensor]]:
        """Add rows for new hidden states; return keys and values of all tokens but the last."""
        first, inputs = self._inputs[sequence]
        n = first + len(inputs)
        buffer = self._buffer(sequence, first, n)
        if len(inputs):
            rows = self._spec.cached_rows(self._layers, inputs, first)
            for i, (keys, values) in enumerate(rows):
                buffer.keys[i, :, first:n] = keys
                buffer.values[i, :, first:n] = values
        self._inputs[sequence] = n, inputs[:0]
        layers = range(self._spec.n_layers)
        return [(buffer.keys[i, :, :n], buffer.values[i, :, :n]) for i in layers]

    def _buffer(self, sequence: Sequence, first: int, n: int) -> KVBuffer:
        """Return memory for n rows; a larger buffer takes over the first rows."""
        old = self._buffers.get(sequence)
        if old is not None and old.capacity >= n:
            return old
        runner = self.runner
        capacity = max(sequence.longest, n)
        new = KVBuffer.empty(self._spec.kv_shapes, capacity, runner.dtype, runner.device)
        if old is not None:
            new.keys[:, :, :first] = old.keys[:, :, :first]
            new.values[:, :, :first] = old.values[:, :, :first]
        self._buffers[sequence] = new
        return new

    def _forward(self, builders: abc.Sequence[TreeBuilder]) -> list[Tensor]:
        outs = []
        for builder in builders:
            state = builder.state
            depths, tokens = to_device(
                [
                    torch.from_numpy(state.new_depths).long(),
                    torch.tensor(state.tokens[state.new_rows]),
                ],
                self.runner.device,
            )
            hidden = self._hidden[state.sequence].index_select(0, depths)
            logits = self._spec.logits(self.runner.non_layer, hidden, tokens)
            reduce = captured(builder)
            outs.append(reduce(logits) if reduce else logits)
        return outs
