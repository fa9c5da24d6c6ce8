"""Resolve settings to a drafter, a verification rule, tree limits and a draft checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.config import EngineConfig
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.dtypes import DType
from offload_rt.errors import SettingsError
from offload_rt.kv.split import LEAST_BUDGET
from offload_rt.models.architecture import Architecture
from offload_rt.speculate.protocols import DrafterType, VerificationRule
from offload_rt.system import registry
from offload_rt.text.detokenize import load_tokenizer
from offload_rt.weights.checkpoint import Checkpoint, open_checkpoint
from offload_rt.weights.heads import find_mtp, open_head
from offload_rt.weights.locate import locate

if TYPE_CHECKING:  # importing transformers takes a second, and plans need no tokenizer
    from transformers import PreTrainedTokenizerBase

# Share of the memory budget available to default trees.
_TREE_SHARE = 1 / 8
# Growth of the streamed bytes that a doubled tree size may cost. The forecast of a 70B has 8 % more
# tokens per pass with trees of 2,048 instead of 1,024 nodes; SmolLM2's head has 30 % more with 64
# instead of 32 nodes.
_STREAMED_SHARE = 0.03
_STREAMED_SHARE_OF_SMALL = 0.05
_SMALL_NODES = 64


@dataclass(frozen=True)
class Drafting:
    """A drafter with its verification rule and draft checkpoint.

    draft      checkpoint of a draft model or head; None if not used
    rule_name  name of a rule in verify/
    view_rows  budget of verified tokens in self-drafting views
    learning   online learning of the draft model: "off", "on" or "keep"
    rounding   format of a draft model quantised while it is loaded; "none" to keep its weights
    predictions  file of the target's predictions; None: the one beside the draft, if any
    """

    name: str
    type: DrafterType
    rule_name: str
    draft: Checkpoint | None = None
    view_rows: int = 0
    learning: str = "off"
    rounding: str = "none"
    predictions: Path | None = None

    @cached_property
    def rule(self) -> VerificationRule:
        """The rule; a plan needs none."""
        return load_rule(self.rule_name)

    @property
    def child_sampling(self) -> str:
        """Sibling sampling for the drafter; any sampling is valid if the rule accepts all trees."""
        return self.rule.child_sampling or "without_replacement"

    @property
    def reads_target(self) -> bool:
        """Whether drafting reads the target's layers, caches or hidden states."""
        has_heads = self.draft is not None and bool(self.draft.spec.taps)
        return self.type.resources.is_self_draft or has_heads

    def draft_dtype(self, dtype: DType) -> DType:
        """Return the compute dtype of the draft. Heads share weights with the target."""
        return dtype if self.draft is None or self.draft.spec.taps else self.draft.dtype

    def limits(
        self,
        config: EngineConfig,
        tree_nbytes: Callable[[int], int],
        memory_nbytes: int,
        plain_nbytes: int,
        streamed_nbytes: int = 0,
    ) -> DraftLimits:
        """Return tree limits from the settings, or from the drafter's largest default that fits.

        tree_nbytes      bytes for trees of n nodes beyond plain decoding
        memory_nbytes    device memory budget
        plain_nbytes     minimum budget without trees
        streamed_nbytes  layer bytes that a pass streams in plain decoding

        Larger trees replace resident layers. They are selected while each doubling of the size adds
        less traffic than `_STREAMED_SHARE`, or `_STREAMED_SHARE_OF_SMALL`.
        """
        spare = memory_nbytes - plain_nbytes
        room = min(memory_nbytes * _TREE_SHARE, spare)
        sizes = self.type.default_sizes
        largest = next((n for n in sizes if tree_nbytes(n) <= room), sizes[-1])
        for n in sorted(n for n in (*self.type.streamed_sizes, *sizes) if n > largest):
            more = tree_nbytes(n) - tree_nbytes(largest)
            share = _STREAMED_SHARE_OF_SMALL if n <= _SMALL_NODES else _STREAMED_SHARE
            if more > min(share * streamed_nbytes, spare - tree_nbytes(largest)):
                break
            largest = n
        n_nodes = config.tree_size or largest
        n_levels = 1 if n_nodes == 1 else config.tree_depth or self.type.n_levels
        is_size_fixed = config.tree_size is not None
        return DraftLimits(n_nodes, n_levels, is_size_fixed, config.tree_depth is not None)


def drafter_type(name: str) -> DrafterType:
    """Load a drafter by name. Raises SettingsError for an unknown name."""
    entry: DrafterType = registry.find("speculate.draft", name).DRAFTER
    return entry


def load_rule(name: str) -> VerificationRule:
    """Load a verification rule by name. Raises SettingsError for an unknown name."""
    entry: VerificationRule = registry.find("speculate.verify", name).RULE
    return entry


def pick_drafter(config: EngineConfig) -> Drafting:
    """Select drafter and rule. Raises SettingsError for an invalid combination of settings."""
    name = config.drafter
    if name == "auto":
        name = "recycle" if config.draft_model is None else "adaptive_tree"
    chosen = drafter_type(name)
    resources = chosen.resources
    if config.draft_model is not None and not resources.uses_checkpoint:
        names = registry.names("speculate.draft")
        users = [user for user in names if drafter_type(user).resources.needs_checkpoint]
        need = f"a drafter that uses a draft model: {', '.join(users)}"
        problem = f"--draft-model with --drafter={name}"
        raise SettingsError(problem, need=need, change="omit one of the two")
    if chosen.default_sizes == (1,) and (config.tree_size or config.tree_depth):
        flag = "--tree-size" if config.tree_size else "--tree-depth"
        change = f"omit {flag} or --drafter"
        raise SettingsError(f"{flag} with --drafter={name}", need="a tree drafter", change=change)
    if config.draft_model is None and resources.needs_checkpoint:
        raise SettingsError(f"--drafter={name}", need="a draft model", change="add --draft-model")
    if config.draft_context is not None and (
        resources.view is None or config.draft_context < LEAST_BUDGET
    ):
        problem = f"--draft-context={config.draft_context} with --drafter={name}"
        need = f"at least {LEAST_BUDGET} tokens, and a drafter with views of the target's cache"
        change = f"use --draft-context={LEAST_BUDGET} or more, or omit it"
        raise SettingsError(problem, need=need, change=change)
    rule = chosen.best_rule if config.rule == "auto" else config.rule
    needs_probs = config.rule != "auto" and load_rule(rule).child_sampling is not None
    if needs_probs and not chosen.gives_draft_probs:
        need = "a drafter with draft probabilities"
        raise SettingsError(f"--rule={rule}", need=need, have=name, change="use --rule=match")
    view_rows = 0 if resources.view is None else config.draft_context or resources.view_rows
    predictions = config.draft_predictions and Path(config.draft_predictions)
    if predictions and not predictions.is_file():
        raise SettingsError(f"there is no file {predictions}", change="change --draft-predictions")
    return Drafting(
        name, chosen, rule,
        view_rows=view_rows, learning=config.learn_draft, predictions=predictions or None,
    )  # fmt: skip


def find_draft(
    config: EngineConfig,
    drafting: Drafting | None,
    target: Checkpoint,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> Drafting:
    """Locate the draft checkpoint. Given or built-in heads select their drafter.

    drafting   overrides the settings' drafter
    tokenizer  tokenizer of the target; None without
    Raises SettingsError if target and draft, or draft and drafter, are incompatible.
    """
    chosen = drafting or pick_drafter(config)
    resources = chosen.type.resources
    head = None
    if config.draft_model is not None:
        directory = locate(config.draft_model, None, config.offline)
        head = (resources.find_heads or open_head)(directory, target)
        if head is None and resources.needs_model:
            draft = open_checkpoint(directory)
            check_pair(target.spec, draft.spec, (tokenizer, load_tokenizer(directory)))
            return replace(chosen, draft=draft)
    elif resources.built_in or (config.drafter == "auto" and drafting is None):
        head = (resources.find_heads or find_mtp)(target.path, target)
    if head is None:
        if resources.find_heads is None:
            return chosen
        problem = f"--drafter={chosen.name}"
        need = f"a checkpoint with {chosen.name} heads"
        have = "a checkpoint without heads"
        raise SettingsError(problem, need=need, have=have, change="use another drafter")
    if config.drafter not in ("auto", head.spec.family):
        problem = f"--drafter={config.drafter}"
        change = f"omit --drafter, or use --drafter={head.spec.family}"
        raise SettingsError(problem, need="a complete draft model", have="heads", change=change)
    return replace(drafting or pick_drafter(replace(config, drafter=head.spec.family)), draft=head)


def check_pair(
    target: Architecture,
    draft: Architecture,
    tokenizers: "tuple[PreTrainedTokenizerBase | None, ...]",
) -> None:
    """Check that both models share a tokenizer.

    Raises SettingsError at the first differing token, or at different vocabulary sizes if a
    tokenizer is missing.
    """
    need = f"{target.vocab_size} tokens"
    have = f"{draft.vocab_size} tokens"
    vocabularies = [each.get_vocab().items() for each in tokenizers if each is not None]
    if len(vocabularies) == 2:
        token = min((i for _, i in vocabularies[0] ^ vocabularies[1]), default=None)
        if token is None:
            return
        need, have = (
            next((repr(text) for text, i in vocabulary if i == token), "no token")
            for vocabulary in vocabularies
        )
        need += ", as in the target"
        have += f" for token {token}"
    if have != need:
        problem = "the draft model has a different tokenizer"
        change = "use a draft model of the target's family"
        raise SettingsError(problem, need=need, have=have, change=change)
