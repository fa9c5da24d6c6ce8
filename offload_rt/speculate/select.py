"""From settings to a drafter: which one, with which rule, how large its trees may be, and the draft model it needs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from offload_rt.config import EngineConfig
from offload_rt.dtypes import DType
from offload_rt.errors import SettingsError
from offload_rt.kv.split import LEAST_BUDGET
from offload_rt.models.architecture import Architecture
from offload_rt.speculate.protocols import DrafterType, DraftLimits, VerificationRule, whole_model
from offload_rt.system import registry
from offload_rt.text.detokenize import load_tokenizer
from offload_rt.weights.checkpoint import Checkpoint, locate, open_checkpoint
from offload_rt.weights.heads import find_mtp, open_head

if TYPE_CHECKING:  # a plan needs none
    from transformers import PreTrainedTokenizerBase

# Part of the memory budget that a default tree may take.
_TREE_SHARE = 1 / 8


@dataclass(frozen=True)
class Drafting:
    """A drafter, the rule its trees are verified by, and the draft model's checkpoint where it has one.

    rule_name  in verify/
    view_rows  verified tokens in a view of the target's cache, where the target drafts itself
    learning   of the draft model: "off", "on" or "keep"
    """

    name: str
    type: DrafterType
    rule_name: str
    draft: Checkpoint | None = None
    view_rows: int = 0
    learning: str = "off"

    @cached_property
    def rule(self) -> VerificationRule:
        """The rule; a plan needs none."""
        return rule_of(self.rule_name)

    @property
    def child_sampling(self) -> str:
        """How the drafter is to draw siblings."""
        return self.rule.child_sampling or "without_replacement"

    def draft_dtype(self, dtype: DType) -> DType:
        """What drafts are computed in beside a target in `dtype`; a head shares weights and hidden states with it."""
        return dtype if self.draft is None or self.draft.spec.taps else self.draft.dtype

    def limits(self, config: EngineConfig, extra: Callable[[int], int], budget: int, least: int) -> DraftLimits:
        """How large trees may be: the settings, or the largest of the drafter's sizes that fits.

        extra   bytes that trees of so many nodes take beyond plain decoding
        budget  bytes on the device
        least   the smallest budget that would do without trees
        """
        room, sizes = min(budget * _TREE_SHARE, budget - least), self.type.default_sizes
        n_nodes = config.tree_size or next((n for n in sizes if extra(n) <= room), sizes[-1])
        n_levels = 1 if n_nodes == 1 else config.tree_depth or self.type.n_levels
        return DraftLimits(n_nodes, n_levels, config.tree_size is not None, config.tree_depth is not None)


def drafter_type(name: str) -> DrafterType:
    """The drafter of a name. Raises SettingsError if there is none."""
    found: DrafterType = registry.find("speculate.draft", name).DRAFTER
    return found


def rule_of(name: str) -> VerificationRule:
    """The verification rule of a name. Raises SettingsError if there is none."""
    found: VerificationRule = registry.find("speculate.verify", name).RULE
    return found


def pick_drafter(config: EngineConfig) -> Drafting:
    """Drafter and rule of the settings. Raises SettingsError for a combination that does not work."""
    name = config.drafter
    if name == "auto":
        name = "recycle" if config.draft_model is None else "adaptive_tree"
    chosen = drafter_type(name)
    if config.draft_model is not None and not (chosen.needs_model or name == "mtp"):
        users = [other for other in registry.names("speculate.draft") if drafter_type(other).needs_model]
        raise SettingsError(
            f"--draft-model with --drafter {name}", need="a drafter that uses one", have=name,
            change=f"leave it out, or use --drafter {' or '.join(users)}",
        )  # fmt: skip
    if name == "none" and (config.tree_size or config.tree_depth):
        flag = "--tree-size" if config.tree_size else "--tree-depth"
        raise SettingsError(f"{flag} with --drafter none", need="a drafter of trees", change="leave one of them out")
    if config.draft_model is None and chosen.needs_model:
        raise SettingsError(f"--drafter {name}", need="a draft model", change="give one by --draft-model")
    has_draft = chosen.needs_model and chosen.model is whole_model
    if config.draft_context is not None and (not (chosen.view or has_draft) or config.draft_context < LEAST_BUDGET):
        problem = f"--draft-context {config.draft_context} with --drafter {name}"
        need = f"at least {LEAST_BUDGET}, and a draft model or a drafter of long texts"
        raise SettingsError(problem, need=need, change="raise it, or leave it out")
    rule = chosen.best_rule if config.rule == "auto" else config.rule
    if config.rule != "auto" and rule_of(rule).child_sampling is not None and not chosen.gives_draft_probs:
        raise SettingsError(
            f"--rule {config.rule}", need="a drafter that draws by probabilities", have=name, change="use --rule match"
        )
    learning = config.learn_draft
    if chosen.view is None:
        return Drafting(name, replace(chosen, draft_context=config.draft_context), rule, learning=learning)
    return Drafting(name, chosen, rule, view_rows=config.draft_context or chosen.view_rows, learning=learning)


def find_draft(
    config: EngineConfig, drafting: Drafting | None, target: Checkpoint, tokenizer: "PreTrainedTokenizerBase | None"
) -> Drafting:
    """What is to draft, with the checkpoint that it drafts by. Heads that are given or come with the target pick their drafter.

    drafting  instead of that of the settings
    Raises SettingsError where target and draft, or draft and drafter, do not belong together.
    """
    chosen, head = drafting or pick_drafter(config), None
    if config.draft_model is not None:
        directory = locate(config.draft_model, None, config.offline)
        head = (find_mtp if chosen.name == "mtp" else open_head)(directory, target)
        if head is None and chosen.type.model is whole_model:
            draft = open_checkpoint(directory)
            check_pair(target.spec, draft.spec, (tokenizer, load_tokenizer(directory)))
            return replace(chosen, draft=draft)
    elif chosen.name == "mtp" or (config.drafter == "auto" and drafting is None):
        head = find_mtp(target.path, target)
    if head is None:
        if chosen.type.model is whole_model:
            return chosen
        need, have = f"a checkpoint that has {chosen.name} heads", "one without"
        raise SettingsError(f"--drafter {chosen.name}", need=need, have=have, change="use another drafter")
    if config.drafter not in ("auto", head.spec.family):
        change = f"leave --drafter out, or use --drafter {head.spec.family}"
        raise SettingsError(f"--drafter {config.drafter}", need="a whole draft model", have="heads", change=change)
    return replace(drafting or pick_drafter(replace(config, drafter=head.spec.family)), draft=head)


def check_pair(
    target: Architecture, draft: Architecture, tokenizers: "tuple[PreTrainedTokenizerBase | None, ...]"
) -> None:
    """Raises SettingsError where draft and target do not mean the same by a token, naming the first that differs."""
    ours, theirs = tokenizers
    have, need = (f"{one.vocab_size} tokens" for one in (draft, target))
    if ours is not None and theirs is not None:
        of_target, of_draft = ({i: text for text, i in one.get_vocab().items()} for one in (ours, theirs))
        known = sorted({*of_target, *of_draft})
        token = next((one for one in known if of_target.get(one) != of_draft.get(one)), None)
        if token is None:
            return
        have, need = (repr(one[token]) if token in one else "no such token" for one in (of_draft, of_target))
        have, need = f"{have} for token {token}", f"{need}, as the target has"
    if have != need:
        problem, change = "the draft model has another tokenizer", "give a draft of the target's family"
        raise SettingsError(problem, need=need, have=have, change=change)
