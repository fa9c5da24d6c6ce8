"""Forecasts of `offload-rt plan` from its settings: the machine, the models, the acceptance."""

from contextlib import suppress
from dataclasses import replace

from offload_rt.cli.plan_settings import DISK, RAM, PlanSettings
from offload_rt.config import EngineConfig, format_size, parse_size
from offload_rt.engine.memory_plan import DRIVER
from offload_rt.errors import OffloadError, SettingsError
from offload_rt.planning.acceptance import RECYCLE, SELF, Assumed, assume
from offload_rt.planning.forecast import Forecast, PlanRequest, predict, predict_if_it_fits
from offload_rt.planning.hardware import find_card, parse_rate
from offload_rt.planning.known_models import has_no_weights, known_name
from offload_rt.planning.machine import Machine
from offload_rt.planning.ranks import Parallelism
from offload_rt.planning.sizes import copies, find_models, lossless


def with_card(settings: PlanSettings, config: EngineConfig) -> Machine:
    """Describe a machine with the GPU of the settings. Raises SettingsError."""
    card = find_card(settings.gpu)
    ram = parse_size(settings.ram or RAM)
    link = None if settings.link is None else parse_rate(settings.link, "--link")
    available = card.free_nbytes - DRIVER
    if config.device_nbytes is not None and config.device_nbytes > available:
        need = f"at most {format_size(available)}, the available memory of this card"
        problem = f"--device-memory={config.device_memory}"
        raise SettingsError(problem, need=need, change="lower --device-memory")
    machine = Machine.with_card(card, ram, settings.disk_gbps, config.device_nbytes, link)
    defaults = (("--ram", settings.ram, RAM), ("--disk", settings.disk, DISK))
    assumed = tuple(f"{flag}: {rate} assumed" for flag, value, rate in defaults if value is None)
    ranks = Parallelism.for_cards(
        max(settings.ranks, config.pipeline), card, link or card.link.gbps,
        None if settings.network is None else parse_rate(settings.network, "--network"),
        exact=config.exact_parallel,
        pipeline=config.pipeline > 1, shared_link=settings.shared_link,
        split_draft=config.split_draft == "on",
    )  # fmt: skip
    return replace(machine, sources=(*machine.sources, *assumed)).of_rank(ranks)


def without_weights(settings: PlanSettings, config: EngineConfig) -> Machine:
    """Describe this machine, for models whose weights are elsewhere."""
    from offload_rt.planning.local import this_machine

    source = f"--disk: {DISK} assumed" if settings.disk is None else settings.disk_source
    return this_machine(config, settings.disk_gbps, source, settings.ram)


def of_run(settings: PlanSettings, config: EngineConfig, is_clipped: bool = False) -> Forecast:
    """Predict a run by its own memory plan; `is_clipped` shortens context and answer to it."""
    from offload_rt.engine import profile
    from offload_rt.llm import LLM
    from offload_rt.planning.local import this_machine, with_measured_passes

    config = replace(config, host_memory=settings.ram or config.host_memory)
    with LLM.open(config) as llm:
        spec = llm.spec
        disk_gbps, disk = settings.disk_gbps, settings.disk_source
        if settings.disk is None:
            disk = "disk: measured with the model's files"
            disk_gbps = profile.link_gbps(spec.files.disk, spec.target.checkpoint.spec.n_layers)
    machine = this_machine(config, disk_gbps, disk)
    target = spec.target.sizes
    is_whole = spec.ranks.ranks is None and target.link is None and target.spec.mixture is None
    if spec.device.type == "cpu" and is_whole:
        machine = with_measured_passes(machine, config, spec)
    draft = spec.draft.sizes()
    config = replace(config, drafter=spec.draft.drafting.name)
    drafter = SELF if draft is not None and draft.stand_in else config.drafter
    acceptance = assumed(settings.acceptance, settings.temperature, config, drafter)
    context, tokens = settings.context, settings.max_new_tokens
    if is_clipped:
        tokens = min(tokens, max(spec.memory.max_model_len // 2, 1))
        context = min(context, spec.memory.max_model_len - tokens)
    request = PlanRequest(config, (target, draft), acceptance, context, tokens)
    return predict(request, machine, (spec.memory, spec.pass_bytes))


def request_of(settings: PlanSettings, config: EngineConfig, machine: Machine) -> PlanRequest:
    """Return the request of a forecast for a described machine. Raises SettingsError."""
    target, draft = find_models(config)
    ranks = machine.ranks
    target = ranks.part(target)
    draft = ranks.part(draft) if draft and ranks.split_draft else draft
    if config.link_format == "lossless":
        target = lossless(target, machine.budget.has_card)
    drafter = config.drafter
    if drafter == SELF:
        draft = copies(target)
    elif draft is None:
        drafter = RECYCLE if drafter == RECYCLE else "none"
    elif config.draft_model is None:
        drafter = "mtp"
    elif drafter == "auto":
        drafter = "adaptive_tree"
    if draft is None and (config.tree_size or config.tree_depth):
        flag = "--tree-size" if config.tree_size else "--tree-depth"
        raise SettingsError(flag, need="a drafter", change="set --draft-model, or --drafter=self")
    acceptance = assumed(settings.acceptance, settings.temperature, config, drafter)
    config = replace(config, drafter=drafter)
    context, tokens = settings.context, settings.max_new_tokens
    return PlanRequest(config, (target, draft), acceptance, context, tokens)


def by_place(split: str, request: PlanRequest, machine: Machine) -> dict[str, Forecast]:
    """Predict a draft model on one GPU and on all, fastest first; empty for a single place."""
    (target, draft), ranks = request.models, replace(machine.ranks, split_draft=True)
    if split != "auto" or ranks.n_parts == 1 or draft is None or draft.stand_in:
        return {}
    places = {"on the first card": predict_if_it_fits(request, machine)}
    with suppress(OffloadError):  # The draft model cannot be sharded.
        sharded = replace(request, models=(target, ranks.part(draft)))
        cards = replace(machine, ranks=ranks)
        places["sharded over all cards"] = predict_if_it_fits(sharded, cards)
    fitting = [(place, forecast) for place, forecast in places.items() if forecast is not None]
    return dict(sorted(fitting, key=lambda item: item[1].run.seconds_per_token))


def assumed(name: str, temperature: float, config: EngineConfig, drafter: str) -> Assumed:
    """Return the acceptance of the models of a config; `name` as in `assume`."""
    models = config.model, config.draft_model or ""
    target, draft = (known_name(model) or model.lower() for model in models)
    draft = drafter if drafter in (SELF, RECYCLE) else draft
    pair = _identities(config, drafter) if name == "auto" and drafter != "none" else ("", "")
    acceptance = assume(name, pair, (target, draft), temperature)
    is_dynamic = temperature == 0 and drafter in ("adaptive_tree", "dynamic_tree")
    return acceptance.with_dynamic_trees() if is_dynamic else acceptance


def _identities(config: EngineConfig, drafter: str) -> tuple[str, str]:
    """Return the identities of local checkpoints; empty strings without local files or a draft."""
    from offload_rt.speculate.select import find_draft
    from offload_rt.weights.checkpoint import open_checkpoint
    from offload_rt.weights.locate import locate
    from offload_rt.weights.rounding import COPIES

    if has_no_weights(config.model, config.draft_model):
        return "", ""
    try:
        target = open_checkpoint(locate(config.model, config.revision, offline=True))
        if drafter == SELF:
            return target.identity, COPIES
        if drafter == RECYCLE:
            return target.identity, RECYCLE
        draft = find_draft(replace(config, offline=True), None, target, None).draft
    except OffloadError:
        return "", ""
    return target.identity, draft.identity if draft else ""
