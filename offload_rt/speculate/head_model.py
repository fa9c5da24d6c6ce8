"""Drafting by heads that see the target's hidden states, which arrive with each of its passes."""

from collections.abc import Sequence as Several
from dataclasses import replace

import torch
from torch import Tensor

from offload_rt.chunks import CHUNK_ROWS
from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.step import Step
from offload_rt.models.heads import Head, HeadDecoder, Medusa
from offload_rt.ops import to_device
from offload_rt.speculate.draft_model import DraftModel, DraftState, TreeBuilder, TreeState, captured
from offload_rt.speculate.protocols import ROWS_PER_NODE
from offload_rt.system.trace import Trace
from offload_rt.tree.topology import Topology


class HeadState(DraftState):
    """Rows of a head with a cache: row j is token j + 1 beside what the head takes of the target behind token j.

    Of rows below the root it takes what the head gave for their parents, so they are computed anew once they are accepted.

    taken  (n, hidden_size) of the lacking rows and the root
    """

    taken = given = torch.empty(0)

    def step(self, reduce: Reduce | None) -> Step:
        """What is to be computed, with what each row takes."""
        return replace(super().step(reduce), states=self._states())

    def feed(self) -> None:
        """Compute what is lacking of a long prompt, part by part, so that there is memory for few rows at once."""
        n = CHUNK_ROWS
        while len(self.lacking) > n:
            tokens = torch.tensor(self.lacking[:n])
            self._runner.forward([Step(self.cache, tokens, Topology.chain(n), 1, self.n_prompt, states=self.taken[:n])])
            self._runner.commit(self.cache, range(n))
            self.lacking, self.taken = self.lacking[n:], self.taken[n:]

    def keep(self, given: Tensor) -> None:
        """What the rows below take (n, hidden_size) of the rows computed last; the target's states have been used."""
        if len(self.given) < self._most_rows:
            self.given = given.new_empty(self._most_rows, given.shape[1])
        self.given[self.new_rows] = given
        self.taken = given[:0]

    def _states(self) -> Tensor:
        if self.n_done == 0:
            return self.taken
        above = torch.from_numpy(self._tree.parents[self.new_rows])
        return self.given.index_select(0, *to_device([above], self.given.device))

    def _path(self, tokens: list[int]) -> list[int]:
        """The root alone: the rows below were not computed with the target's states."""
        return [0]


class HeadModel(DraftModel):
    """A head of one decoder layer, with a cache for each sequence."""

    state_type = HeadState

    def __init__(
        self, runner: Runner, vocab_size: int, max_levels: int, trace: Trace, context: int | None = None
    ) -> None:
        super().__init__(runner, vocab_size, max_levels, trace, context)
        self._taken: dict[Sequence, tuple[int, Tensor]] = {}  # from which token on, what it takes behind each

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether the target has computed all of the sequence but its last token."""
        first, states = self._taken.get(sequence, (-1, ()))
        return first + len(states) == len(sequence.tokens) - 1

    @torch.inference_mode()
    def observe(self, sequence: Sequence, first: int, states: Several[Tensor]) -> None:
        """Keep what the head takes of the target's hidden states, until rows of it have been computed with them."""
        spec = self._runner.spec
        assert isinstance(spec, Head), "it drafts by a head"
        taken = torch.cat([spec.take(self._runner.non_layer, one) for one in states])
        if sequence in self._taken:
            n_gone, known = self._taken[sequence]
            n_again = max(n_gone - first, 0)  # a state of the target's goes back further than rows do
            first, taken = n_gone, torch.cat((known[: max(first - n_gone, 0)], taken[n_again:]))
        self._taken[sequence] = first, taken

    def follow(self, old: Sequence, new: Sequence, n: int) -> int:
        """See `Drafter.follow`: what is kept goes on where the rows of the head end, or the target computes it again."""
        super().follow(old, new, n)
        (n_gone, known), state = self._taken.pop(old, (n, torch.empty(0))), self._states.get(new)
        first = self._runner.rewind(state.cache, new.tokens[1:n]) if state is not None else 0
        if n_gone > first:
            return first
        self._taken[new] = first, known[first - n_gone : n - n_gone]
        return n

    def end(self, sequence: Sequence) -> None:
        """Release what is held for a sequence."""
        self._taken.pop(sequence, None)
        super().end(sequence)

    def _seen(self, sequence: Sequence) -> list[int]:
        return sequence.tokens[1:]

    def _begin(self, sequence: Sequence, n_nodes: int, is_alone: bool, path: Several[int] = ()) -> TreeState:
        state = super()._begin(sequence, n_nodes, is_alone, path)
        assert isinstance(state, HeadState), "so they are made"
        first, known = self._taken[sequence]
        n_kept = self._runner.n_committed(state.cache)
        state.taken = known[n_kept - first :]
        self._taken[sequence] = n_kept, state.taken
        state.feed()
        return state

    def _forward(self, builders: Several[TreeBuilder]) -> list[Tensor]:
        outs, spec = super()._forward(builders), self._runner.spec
        assert isinstance(spec, HeadDecoder), "it drafts by one"
        for one, tapped in zip(builders, self._runner.tapped, strict=True):
            rows = one.state.new_rows
            if isinstance(one.state, HeadState):
                one.state.keep(spec.give(self._runner.non_layer, tapped[rows.start - rows.stop :, 0]))
        return outs


class MedusaModel(HeadModel):
    """Medusa's heads, which have no cache: each tells one level of a tree from the target's last hidden state."""

    def __init__(
        self, runner: Runner, vocab_size: int, max_levels: int, trace: Trace, context: int | None = None
    ) -> None:
        super().__init__(runner, vocab_size, min(max_levels, runner.spec.n_layers + 1), trace)
        self._layers = runner.resident_layers()
        self._logits: dict[Sequence, Tensor] = {}  # (heads, vocabulary): of the tokens below nodes of each depth

    def follow(self, old: Sequence, new: Sequence, n: int) -> int:
        """See `Drafter.follow`: the next pass gives the one hidden state that is needed."""
        self.end(old)
        return n

    def end(self, sequence: Sequence) -> None:
        """Release what is held for a sequence."""
        self._logits.pop(sequence, None)
        super().end(sequence)

    @torch.inference_mode()
    def _begin(self, sequence: Sequence, n_nodes: int, is_alone: bool, path: Several[int] = ()) -> TreeState:
        state = TreeState(self.vocab_size, ROWS_PER_NODE * n_nodes, sequence, self._runner.device)
        (first, known), spec = self._taken[sequence], self._runner.spec
        assert isinstance(spec, Medusa), "it drafts by Medusa's heads"
        last = known[-1:].clone()
        self._taken[sequence] = first + len(known) - 1, last
        self._logits[sequence] = torch.cat([spec.predict(weights, last) for weights in self._layers])
        state.clear(sequence.tokens[-1])
        return state

    def _forward(self, builders: Several[TreeBuilder]) -> list[Tensor]:
        depths = to_device([torch.from_numpy(one.state.new_depths).long() for one in builders], self._runner.device)
        outs = []
        for one, rows in zip(builders, depths, strict=True):
            logits, reduce = self._logits[one.state.sequence].index_select(0, rows), captured(one)
            outs.append(reduce(logits) if reduce else logits)
        return outs
