"""Specification of the drafter: sizes of its model for planning, loading, opening."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import median

import torch

from offload_rt.cost.estimator import CostEstimator
from offload_rt.dtypes import DType
from offload_rt.engine import profile
from offload_rt.engine.loader import Loader, open_files
from offload_rt.engine.memory_plan import MemoryPlan
from offload_rt.engine.model_sizes import Sizes
from offload_rt.engine.target_spec import TargetSpec
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.executor.captured_passes import capture_passes
from offload_rt.executor.cuda_graphs import CudaCapture, GraphShape
from offload_rt.executor.runner import Runner
from offload_rt.models.heads import Head
from offload_rt.models.layers import LayerWeights
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.placement import Plan
from offload_rt.offload.streamer import LayerSources
from offload_rt.parallel.tensor_parallel import SharedWeights
from offload_rt.speculate.draft_model import SelfDraftModel
from offload_rt.speculate.learner import Learner, learning_nbytes
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.predictions import PREDICTIONS_FILE, StoredPredictions
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.select import Drafting
from offload_rt.system.trace import Trace
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.formats import dense
from offload_rt.weights.layout import PAGE, Layout, PackedLayer, align_up
from offload_rt.weights.lossless import EncodedImage
from offload_rt.weights.rounding import COPIES, COPY_DTYPE, rounded, rounded_layout

# Repetitions; the median counts.
_N_TIMES = 3
# Acceptance per token in self-drafting by a part of the cache, before any pass: MagicDec published
# .79 to .84 for 512 rows of 4,000 to 100,000.
_SELF_ACCEPTANCE = 0.8


@dataclass(frozen=True)
class DraftSpec:
    """The drafter, its verification rule and its model, before loading."""

    drafting: Drafting
    target: TargetSpec

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The draft model, heads, or this rank's part; None if not used."""
        return self.drafting.draft

    @property
    def dtype(self) -> DType:
        """Compute dtype of the draft model."""
        return self.drafting.draft_dtype(self.target.dtype)

    @property
    def copies_target(self) -> bool:
        """Whether the draft model consists of quantised copies of the target's layers."""
        return self.drafting.type.resources.copies_target

    def sizes(self) -> Sizes | None:
        """Sizes of the draft model or of the target's copies; raises SettingsError."""
        if self.drafting.learning != "off":
            self._check_learning()
        draft = self.checkpoint
        if draft is None:
            return self._copies_sizes() if self.copies_target else None
        sizes = Sizes.of_checkpoint(draft, self.dtype)
        if self.drafting.learning == "off":
            return sizes.rounded(self.drafting.rounding)
        nbytes = learning_nbytes(draft.spec, draft.dtype, self.target.device)
        return replace(sizes, view_nbytes=sizes.view_nbytes + nbytes)

    @property
    def can_round(self) -> bool:
        """Whether the weights are unquantised and remain unchanged."""
        draft = self.checkpoint
        is_plain = draft is not None and draft.format.name == "dense"
        return is_plain and self.drafting.learning == "off"

    def rounded(self, rounding: str) -> "DraftSpec":
        """Return the specification with the draft model in a format of `weights.rounding`."""
        return replace(self, drafting=replace(self.drafting, rounding=rounding))

    def _check_learning(self) -> None:
        draft = self.checkpoint
        resources = self.drafting.type.resources
        can_learn = resources.needs_model and resources.view is None
        is_plain = draft is not None and draft.format.name == "dense"
        if draft is None or not (is_plain and can_learn and draft.spec.supports_training):
            need = "unquantised weights of a whole draft model, of a native family, and trees by it"
            change = "leave it out, or set such a --draft-model"
            raise SettingsError("--learn-draft", need=f"{need} alone", change=change)

    def _copies_sizes(self) -> Sizes:
        target = self.target.checkpoint
        if target.format.name != "dense":
            problem = f"--drafter={self.drafting.name}"
            have = f"weights of format {target.format.name}"
            change = "write them by `offload-rt convert --dequantize`, or set a draft model"
            raise SettingsError(problem, need="unquantised weights", have=have, change=change)
        sizes = Sizes.of_copies(target.spec, [layer.layout.tensors for layer in target.layers])
        return replace(sizes, view_nbytes=Sizes.of_checkpoint(target, COPY_DTYPE).view_nbytes)

    def check_placement(self, plan: Plan) -> None:
        """Raise CapacityError if a self-drafting target would be streamed for each draft level."""
        n_streamed = len(plan.tiers) - plan.tiers.count("device")
        if self.drafting.type.resources.view is not None and n_streamed:
            problem = f"--drafter={self.drafting.name}"
            have = f"{n_streamed} of {len(plan.tiers)} elsewhere"
            change = "raise --device-memory, or use another drafter"
            raise CapacityError(problem, need="all layers on the device", have=have, change=change)

    def loaded_nbytes(self, plan: Plan, files: DiskTier | None, stored: DiskTier) -> int:
        """Return the bytes that `build` and `build_copies` read from files of draft and target."""
        nbytes = 0
        if self.checkpoint is not None and files is not None:
            nbytes += sum(files.nbytes(i) for i in range(self.checkpoint.spec.n_layers + 1))
        if self.copies_target:
            # Layers that memory does not hold as in the file are read again.
            again = ("disk",) if self.target.link.sizes is None else ("disk", "host")
            nbytes += sum(stored.nbytes(i) for i, tier in enumerate(plan.tiers) if tier in again)
        return nbytes

    def build(self, loader: Loader, files: DiskTier | None) -> Runner | None:
        """Load the draft model."""
        draft = self.checkpoint
        if draft is None or files is None:
            return None
        sources = loader.resident(draft, files, self.drafting.rounding)
        # The trace shows draft passes as levels of a tree; layers would flood it.
        return loader.runner(draft, self.dtype.torch, sources, Trace(on=False))

    def build_copies(self, loader: Loader, sources: LayerSources, stored: DiskTier) -> Runner:
        """Load a self-drafting target: its resident layers and copies of its streamed layers."""
        resident = loader.new_tier()
        for i, tier in enumerate((*sources.streamed, None)):
            if tier is None:
                resident.put(i, sources.resident.image(i))
                continue
            layer = tier.image(i) if isinstance(tier, MemoryTier) else None
            if layer is None or isinstance(layer, EncodedImage):
                layer = loader.reader(stored, i)()
            resident.put(i, rounded(layer, COPIES, loader.device))
        copies = LayerSources(resident, (None,) * len(sources.streamed), 0)
        model = replace(self.target.checkpoint, format=dense.Format())
        return loader.runner(model, COPY_DTYPE.torch, copies, Trace(on=False))

    def connect(
        self, target: Runner, draft: Runner | None, shared: LayerWeights | SharedWeights
    ) -> None:
        """Connect heads to the target's hidden states and to its weights outside the layers."""
        if draft is None or not isinstance(draft.spec, Head):
            return
        target.taps = draft.spec.taps
        draft.taps = (draft.spec.n_layers,)
        draft.non_layer = draft.spec.weights_beside(draft.non_layer, shared, self.target.device)

    def weights_nbytes(self, plan: Plan) -> int:
        """Return the weight bytes that a draft level reads."""
        sizes = self.sizes()
        if self.checkpoint is not None and sizes is not None:
            return sizes.nbytes
        return self.target.checkpoint.spec.n_layers * plan.reserved.stand_in

    def open_drafter(
        self, memory: MemoryPlan, runner: Runner, draft: Runner | None, cost: CostEstimator,
        trace: Trace,
    ) -> Drafter:  # fmt: skip
        """Open the drafter with the target, the draft model and the statistics of earlier runs."""
        drafting = self.drafting
        resources = drafting.type.resources
        n_levels = memory.limits.n_levels
        identity = self.target.checkpoint.identity
        n_tokens = runner.spec.vocab_size
        draft_model = self_model = None
        pair_stats = PairStats.load(identity, drafting.name)
        if draft is not None:
            context = resources.draft_context
            draft_model = resources.open_model(draft, n_tokens, n_levels, trace, context)
            pair_stats = PairStats.load(identity, self._identity)
        if resources.view is not None:
            self_model = SelfDraftModel(
                runner, n_tokens, n_levels, trace,
                kind=resources.view, budget=drafting.view_rows, n_rows=memory.view_rows,
            )  # fmt: skip
            view = f"{drafting.name} {drafting.view_rows}"
            pair_stats = PairStats.load(identity, view, _SELF_ACCEPTANCE)
        learner = None
        if draft is not None and drafting.learning != "off":
            kept = pair_stats.pair if drafting.learning == "keep" else None
            learner = Learner(draft, runner.streamer.meter, kept)
            runner.meanwhile = learner.work
        return drafting.type.open(DraftParts(
            memory.limits, cost, drafting.child_sampling, drafting.rule.coupled_up_to,
            draft_model, self_model, pair_stats,
            learner=learner, predictions=self._predictions(n_tokens),
        ))  # fmt: skip

    def _predictions(self, vocab_size: int) -> StoredPredictions | None:
        path = self.drafting.predictions
        if path is None and self.checkpoint is not None:
            beside = self.checkpoint.path / PREDICTIONS_FILE
            path = beside if beside.is_file() else None
        return None if path is None else StoredPredictions(path, vocab_size)

    @property
    def _identity(self) -> str:
        if self.checkpoint is None:
            return COPIES
        rounding = self.drafting.rounding
        return self.checkpoint.identity + ("" if rounding == "none" else f" {rounding}")

    def level_seconds(self, n_rows: int) -> float:
        """Measure a draft level of `n_rows` rows; 0 without a draft model.

        All ranks call this together if the model is sharded. No weight is read: all weights
        are zeros that exceed the device's caches.
        """
        draft = self.checkpoint
        if draft is None:
            return 0.0
        device = self.target.device
        with ExitStack() as closes:
            files = closes.enter_context(closing(open_files(draft, ReadSettings(), device)))
            resident = closes.enter_context(closing(MemoryTier()))
            layouts = [files.layout(i) for i in range(draft.spec.n_layers + 1)]
            if (rounding := self.drafting.rounding) != "none":
                layouts = [rounded_layout(layout.tensors, rounding) for layout in layouts]
            _fill_with_zeros(resident, layouts, device)
            loader = Loader(device, resident, closes)
            sources = LayerSources(resident, (None,) * draft.spec.n_layers, 0)
            runner = loader.runner(draft, self.dtype.torch, sources, Trace(on=False))
            if device.type == "cuda":
                shape = GraphShape(2 * n_rows, 2 * n_rows + 1, n_rows)
                capture_passes(runner, shape, CudaCapture())
            return median(profile.seconds_of_passes(runner, [(n_rows, n_rows)] * _N_TIMES))


def _fill_with_zeros(tier: MemoryTier, layouts: Sequence[Layout], device: torch.device) -> None:
    """Put zero blocks into a tier. They share memory just above the size of the device's caches."""
    nbytes = align_up(max(layout.nbytes for layout in layouts), PAGE)
    n_distinct = min(-(-profile.beyond_caches(device) // nbytes), len(layouts))
    zeros = torch.zeros(n_distinct, nbytes, dtype=torch.uint8, device=device)
    for i, layout in enumerate(layouts):
        tier.put(i, PackedLayer(zeros[i % n_distinct, : layout.nbytes], layout))
