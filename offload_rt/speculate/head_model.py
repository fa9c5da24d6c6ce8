"""Drafting by heads on the target's hidden states, which each target pass provides."""

from collections import abc
from dataclasses import replace

import torch
from torch import Tensor

from offload_rt.chunks import CHUNK_ROWS
from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.step import Step
from offload_rt.models.eagle3 import Eagle3
from offload_rt.models.heads import Head, HeadDecoder, Medusa
from offload_rt.ops import to_device
from offload_rt.speculate.draft_model import DraftModel
from offload_rt.speculate.rows import ROWS_PER_NODE
from offload_rt.speculate.tree_state import DraftState, Path, TreeBuilder, TreeState, captured
from offload_rt.tree.topology import Topology

# Hidden states that wait for the next tree; more are converted at once, which bounds memory.
_MOST_WAITING = 64


class HeadState(DraftState):
    """Cache rows of a draft head: row j is token j + 1 with the head's input from token j.

    The input of rows below the root is the head's output for their parents. Therefore accepted rows
    are recomputed with the target's hidden states.

    inputs   (n, hidden_size) inputs of the lacking rows and the root
    outputs  (rows, hidden_size) outputs of the tree's rows
    """

    inputs = outputs = torch.empty(0)

    def step(self, reduce: Reduce | None) -> Step:
        """Return the step to compute, with the input of each row."""
        states = self.inputs
        if self.n_done > 0:
            above = torch.from_numpy(self._tree.parents[self.new_rows])
            states = self.outputs.index_select(0, *to_device([above], self.outputs.device))
        return replace(super().step(reduce), states=states)

    def feed(self) -> None:
        """Prefill a long prompt in chunks, which bounds memory."""
        n = CHUNK_ROWS
        while len(self.lacking) > n:
            tokens, states = torch.tensor(self.lacking[:n]), self.inputs[:n]
            chain = Topology.chain(n)
            step = Step(self.cache, tokens, chain, 1, self.n_prompt, states=states)
            self._runner.forward([step])
            self._runner.commit(self.cache, range(n))
            self.lacking, self.inputs = self.lacking[n:], self.inputs[n:]

    def keep(self, outputs: Tensor) -> None:
        """Store the outputs (n, hidden_size) of the latest rows as inputs of their children."""
        if len(self.outputs) < self.most_rows:
            self.outputs = outputs.new_empty(self.most_rows, outputs.shape[1])
        self.outputs[self.new_rows] = outputs
        self.inputs = outputs[:0]

    def _path(self, tokens: list[int]) -> list[int]:
        """Return the root alone: rows below it lack the target's hidden states."""
        return [0]


class HeadModel(DraftModel):
    """Head with a single decoder layer and a cache per sequence."""

    state_type = HeadState

    def __post_init__(self) -> None:
        super().__post_init__()
        self._inputs: dict[Sequence, tuple[int, Tensor]] = {}  # (first token, inputs from there on)
        # Hidden states of tokens from the first token on, not yet converted to inputs.
        self._waiting: dict[Sequence, list[tuple[int, Tensor]]] = {}

    def can_draft(self, sequence: Sequence) -> bool:
        """Return whether hidden states reach up to the second to last token."""
        none = -1, torch.empty(0)
        first, rows = self._waiting.get(sequence, [self._inputs.get(sequence, none)])[-1]
        return first + len(rows) == len(sequence.tokens) - 1

    @torch.inference_mode()
    def observe(self, sequence: Sequence, first: int, states: abc.Sequence[Tensor]) -> None:
        """Keep hidden states until the next tree needs them."""
        waiting = self._waiting.setdefault(sequence, [])
        waiting.append((first, torch.cat(tuple(states))))
        if sum(len(part) for _, part in waiting) > _MOST_WAITING:
            self._convert(sequence)

    @torch.inference_mode()
    def _convert(self, sequence: Sequence) -> None:
        """Convert waiting hidden states to head inputs, kept until the head computes their rows."""
        waiting = self._waiting.pop(sequence, [])
        if not waiting:
            return
        spec = self.runner.spec
        assert isinstance(spec, Head), "HeadModel requires a head"
        firsts, parts = zip(*waiting, strict=True)
        converted = spec.reduce_states(self.runner.non_layer, torch.cat(parts))
        split = torch.split(converted, [*map(len, parts)])
        for first, inputs in zip(firsts, split, strict=True):
            n_gone, known = self._inputs.get(sequence, (first, inputs[:0]))
            n_again = max(n_gone - first, 0)  # the target may recompute more rows than the head
            both = torch.cat((known[: max(first - n_gone, 0)], inputs[n_again:]))
            self._inputs[sequence] = n_gone, both

    def transfer(self, old: Sequence, new: Sequence, n: int) -> int:
        """Continue if inputs start where the head's cache ends; otherwise the target recomputes."""
        super().transfer(old, new, n)
        self._convert(old)
        n_gone, known = self._inputs.pop(old, (n, torch.empty(0)))
        state = self._states.get(new)
        first = self.runner.rewind(state.cache, new.tokens[1:n]) if state is not None else 0
        if n_gone > first:
            return first
        self._inputs[new] = first, known[first - n_gone : n - n_gone]
        return n

    def end(self, sequence: Sequence) -> None:
        self._inputs.pop(sequence, None)
        self._waiting.pop(sequence, None)
        super().end(sequence)

    def _seen(self, sequence: Sequence) -> list[int]:
        return sequence.tokens[1:]

    def _begin(self, sequence: Sequence, n_nodes: int, is_alone: bool, path: Path) -> TreeState:
        state = super()._begin(sequence, n_nodes, is_alone, path)
        assert isinstance(state, HeadState), "state_type is HeadState"
        self._convert(sequence)
        first, known = self._inputs[sequence]
        n_kept = self.runner.n_committed(state.cache)
        state.inputs = known[n_kept - first :]
        self._inputs[sequence] = n_kept, state.inputs
        state.feed()
        return state

    def _forward(self, builders: abc.Sequence[TreeBuilder]) -> list[Tensor]:
        outs = super()._forward(builders)
        spec = self.runner.spec
        assert isinstance(spec, HeadDecoder), "Medusa heads override this method"
        for builder, tapped in zip(builders, self.runner.tapped, strict=True):
            rows = builder.state.new_rows
            if isinstance(builder.state, HeadState):
                new = tapped[rows.start - rows.stop :, 0]
                builder.state.keep(spec.child_inputs(self.runner.non_layer, new))
        return outs


class LevelModel(HeadModel):
    """Heads that predict all levels of a tree at once, before the tree grows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._logits: dict[Sequence, Tensor] = {}  # (levels, vocabulary), indexed by parent depth

    def end(self, sequence: Sequence) -> None:
        self._logits.pop(sequence, None)
        super().end(sequence)

    def _tree_state(self, sequence: Sequence, n_nodes: int) -> TreeState:
        """Return the state of a tree without draft rows."""
        return TreeState(self.vocab_size, ROWS_PER_NODE * n_nodes, sequence, self.runner.device)

    def _forward(self, builders: abc.Sequence[TreeBuilder]) -> list[Tensor]:
        outs = []
        for builder in builders:
            logits = self._logits_of(builder.state)
            reduce = captured(builder)
            outs.append(reduce(logits) if reduce else logits)
        return outs

    def _logits_of(self, state: TreeState) -> Tensor:
        logits = self._logits[state.sequence]
        depths = torch.from_numpy(state.new_depths).long()
        return logits.index_select(0, *to_device([depths], logits.device))


class MedusaModel(LevelModel):
    """Medusa heads: each predicts a tree level from the target's last hidden state. No cache."""

    def __post_init__(self) -> None:
        self.max_levels = min(self.max_levels, self.runner.spec.n_layers + 1)
        super().__post_init__()
        self._layers = self.runner.resident_layers()

    def transfer(self, old: Sequence, new: Sequence, n: int) -> int:
        """Drop the state: the next target pass provides the only hidden state needed."""
        self.end(old)
        return n

    @torch.inference_mode()
    def _begin(self, sequence: Sequence, n_nodes: int, is_alone: bool, path: Path) -> TreeState:
        self._convert(sequence)
        first, known = self._inputs[sequence]
        spec = self.runner.spec
        assert isinstance(spec, Medusa), "MedusaModel requires Medusa heads"
        last = known[-1:].clone()
        self._inputs[sequence] = first + len(known) - 1, last
        predicted = [spec.predict(weights, last) for weights in self._layers]
        self._logits[sequence] = torch.cat(predicted)
        return self._tree_state(sequence, n_nodes)


class ParallelModel(LevelModel):
    """P-EAGLE: rows with unknown tokens follow the last token, in the same pass."""

    def __post_init__(self) -> None:
        spec = self.runner.spec
        assert isinstance(spec, Eagle3), "ParallelModel requires a P-EAGLE head"
        self.max_levels = min(self.max_levels, spec.n_parallel + 1)
        super().__post_init__()
        self._spec = spec
        self._masked = spec.masked_input(self.runner.non_layer)

    @torch.inference_mode()
    def _begin(self, sequence: Sequence, n_nodes: int, is_alone: bool, path: Path) -> TreeState:
        rows = super()._begin(sequence, n_nodes, is_alone, path)
        assert isinstance(rows, HeadState), "state_type is HeadState"
        n_masked = min(self.max_levels - 1, ROWS_PER_NODE * n_nodes) - 1
        for parent in range(n_masked):
            rows.add([parent], [self._spec.mask_token])
        rows.inputs = torch.cat((rows.inputs, self._masked.expand(n_masked, -1)))
        (self._logits[sequence],) = self.runner.forward([rows.step(None)])
        rows.computed()
        rows.inputs = rows.inputs[:0]
        return self._tree_state(sequence, n_nodes)
