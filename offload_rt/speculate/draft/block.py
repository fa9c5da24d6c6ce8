"""Block drafters (DFlash, arXiv 2602.06036; JetSpec, arXiv 2606.18394; DSpark).

Trees grow best-first by the distributions of a block's positions (DDTree, arXiv 2604.12989). While
the link limits a pass, further blocks contain the tokens of the best partial paths.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from offload_rt.chunks import CHUNK_ROWS
from offload_rt.executor.sequence import Sequence
from offload_rt.kv.cache import KVBuffer
from offload_rt.models.block_head import BlockHead
from offload_rt.ops import to_device
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.head_model import LevelModel
from offload_rt.speculate.pair_stats import Estimates
from offload_rt.speculate.protocols import DraftParts, DraftResources
from offload_rt.speculate.rows import ROWS_PER_NODE
from offload_rt.speculate.static_builder import StaticTreeBuilder
from offload_rt.speculate.tree_drafter import TreeDrafter
from offload_rt.speculate.tree_state import Path, TreeState
from offload_rt.speculate.tree_types import tree_drafter
from offload_rt.tree.topology import path_up
from offload_rt.weights.heads import open_head


class BlockState(TreeState):
    """Rows of a tree, each with the block that predicts its children.

    Block 0 has masks after the last token. Further blocks contain the path of their row. Memory for
    parent states in the plan limits their number.
    cached      keys and values of all tokens but the last, per layer
    blocks      (n_blocks, n_at_once, hidden_size)
    recomputes  compute blocks for the rows to add, instead of using those of their parents
    n_passes    passes over blocks
    """

    recomputes = True
    n_passes = 0

    def __init__(
        self,
        vocab_size: int,
        most_rows: int,
        sequence: Sequence,
        device: torch.device,
        cached: list[tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__(vocab_size, most_rows, sequence, device)
        self.cached = cached
        self.blocks = torch.empty(0)
        self._block_of = np.zeros(most_rows, dtype=np.int64)

    @property
    def n_recomputable(self) -> int:
        """Maximum rows of a round with new blocks: of a chunk, and those that fit in memory."""
        n_predicted = self.blocks.shape[1]
        n_left = 2 * (CHUNK_ROWS + self.most_rows) // n_predicted - len(self.blocks)
        return max(min(n_left, CHUNK_ROWS // (n_predicted + 1)), 0)

    def is_recomputed(self, row: int) -> bool:
        """Return whether a row does not depend on the block of its parent."""
        return row == 0 or bool(self._block_of[row] != self._block_of[self._tree.parents[row]])

    def path(self, row: int) -> list[int]:
        """Return the tokens from the child of the root to a row."""
        return [self.tokens[place] for place in path_up(self._tree.parents, row)]

    def inherit(self) -> None:
        """Let new rows use the blocks of their parents."""
        rows = self.new_rows
        if rows.start:
            self._block_of[rows] = self._block_of[self._tree.parents[rows]]

    def append(self, blocks: Tensor) -> None:
        """Store blocks for the first new rows."""
        n = len(self.blocks)
        first = self.new_rows.start
        self._block_of[first : first + len(blocks)] = np.arange(n, n + len(blocks))
        self.blocks = torch.cat((self.blocks, blocks)) if n else blocks
        self.n_passes += 1

    def hidden(self) -> Tensor:
        """Return the hidden states (n, hidden_size) that predict the children of the new rows."""
        indices = self._block_of[self.new_rows], self.new_depths
        host = [torch.from_numpy(part).long() for part in indices]
        return self.blocks[tuple(to_device(host, self.blocks.device))]


class BlockModel(LevelModel):
    """Block drafter with a cache of the target's hidden states per sequence.

    Row k of a block gives the distribution of the nodes at depth k + 1, so a tree needs no further
    pass. Blocks that contain the tokens of a path predict its continuations better.
    """

    def __post_init__(self) -> None:
        spec = self.runner.spec
        assert isinstance(spec, BlockHead), "BlockModel requires a block drafter"
        self.max_levels = min(self.max_levels, spec.n_at_once + 1)
        super().__post_init__()
        self._spec = spec
        self._layers = self.runner.resident_layers()
        self._buffers: dict[Sequence, KVBuffer] = {}

    def transfer(self, old: Sequence, new: Sequence, n: int) -> int:
        """Continue with the cached rows of the shared tokens. See `Drafter.transfer`."""
        buffer = self._buffers.pop(old, None)
        self._convert(old)
        if old not in self._inputs:
            return 0
        first, inputs = self._inputs.pop(old)
        n = min(n, first + len(inputs))
        if buffer is not None:
            self._buffers[new] = buffer
        self._inputs[new] = min(first, n), inputs[: max(n - first, 0)]
        return n

    def end(self, sequence: Sequence) -> None:
        self._buffers.pop(sequence, None)
        super().end(sequence)

    @torch.inference_mode()
    def _begin(self, sequence: Sequence, n_nodes: int, is_alone: bool, path: Path) -> TreeState:
        cached = self._cached(sequence)
        size = self.vocab_size, ROWS_PER_NODE * n_nodes
        state = BlockState(*size, sequence, self.runner.device, cached)
        state.append(self._blocks(state, [[]]))
        return state

    def _blocks(self, state: BlockState, paths: abc.Sequence[list[int]]) -> Tensor:
        """Compute a block for each path: (n, n_at_once, hidden_size)."""
        spec = self._spec
        tokens = torch.full((len(paths), spec.block_size), spec.mask_token)
        for row, path in zip(tokens, paths, strict=True):
            row[: 1 + len(path)] = torch.tensor([state.tokens[0], *path])
        (tokens,) = to_device([tokens], self.runner.device)
        return spec.block(self._layers, self.runner.non_layer, tokens, state.cached)

    def _cached(self, sequence: Sequence) -> list[tuple[Tensor, Tensor]]:
        """Add rows for new hidden states; return keys and values of all tokens but the last."""
        self._convert(sequence)
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

    def _logits_of(self, state: TreeState) -> Tensor:
        assert isinstance(state, BlockState), "created by _begin"
        state.inherit()
        rows = state.new_rows
        if rows.start and state.recomputes and (n := state.n_recomputable):
            chosen = range(rows.start, rows.stop)[:n]
            state.append(self._blocks(state, [state.path(row) for row in chosen]))
        (tokens,) = to_device([torch.tensor(state.tokens[rows])], self.runner.device)
        return self._spec.logits(self.runner.non_layer, state.hidden(), tokens)


@dataclass(eq=False)
class BlockTreeBuilder(DynamicTreeBuilder):
    """Grow a tree by conditioned blocks while they pay, then by the blocks of parent rows.

    The estimates of the base class apply to the root.
    conditioned  estimates of rows with a block for their path
    inherited    estimates of rows with the block of their parent
    """

    conditioned: Estimates
    inherited: Estimates

    def _next_round(self, waiting: np.ndarray) -> np.ndarray:
        """Condition the best nodes if the gain covers the drafting time; else inherit blocks.

        The most probable child is accepted more often with a conditioned block. That difference,
        weighted by the chances of the nodes, is a lower bound of the gain in tokens.
        """
        state = cast(BlockState, self.state)
        places = self._best(waiting)
        best = places[: state.n_recomputable]
        rates = (each.acceptance.by_rank()[0] for each in (self.conditioned, self.inherited))
        conditioned_rate, inherited_rate = rates
        chances = self._nodes.chances
        gain = (conditioned_rate - inherited_rate) * chances[best].sum()
        rate = self.cost.best(chances, state.n_passes)[1]
        state.recomputes = bool(gain > rate * self.cost.level_s)
        return best if state.recomputes else places

    def _estimates_of(self, row: int) -> Estimates:
        if row == 0:
            return self.estimates
        is_conditioned = cast(BlockState, self.state).is_recomputed(row)
        return self.conditioned if is_conditioned else self.inherited


# Prior acceptance of the most probable child with the block of its parent, relative to that with a
# conditioned block. Published: 0.22 below siblings, 0.65 to 0.84 on the most probable path (vLLM
# pull request 42910).
_INHERITED = 0.6


class BlockDrafter(TreeDrafter):
    """Grow dynamic trees from blocks; draw static trees for rules that need draft probabilities."""

    def __init__(self, parts: DraftParts, is_dynamic: tuple[bool, bool]) -> None:
        super().__init__(parts, is_dynamic)
        self._n_at_once = self._model.max_levels - 1

    def _grow(self, builders: abc.Sequence[StaticTreeBuilder | DynamicTreeBuilder]) -> int:
        super()._grow(builders)
        states = (builder.state for builder in builders)
        return max((state.n_passes for state in states if isinstance(state, BlockState)), default=0)

    def _dynamic_type(self, sequence: Sequence) -> Callable[..., DynamicTreeBuilder]:
        temperature = sequence.temperature
        prefix = "coupled-" if self._is_coupled(temperature) else ""
        conditioned = self.pair_stats.at(f"{prefix}conditioned", temperature)
        inherited = self.pair_stats.at(f"{prefix}inherited", temperature)
        root = self.estimates_at(temperature)
        conditioned.acceptance.first = float(root.acceptance.by_rank()[0])
        inherited.acceptance.first = _INHERITED * float(conditioned.acceptance.by_rank()[0])
        return partial(BlockTreeBuilder, conditioned=conditioned, inherited=inherited)


_RESOURCES = DraftResources(find_heads=open_head, model="draft.block.BlockModel")
# Coupled noise works with dynamic trees at every temperature.
DRAFTER = replace(
    tree_drafter(dynamic_at_zero=True, resources=_RESOURCES),
    open=lambda parts: BlockDrafter(parts, is_dynamic=(True, False)),
    best_rule="coupled",
)
