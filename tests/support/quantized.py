"""Configs and names of quantised formats."""

from quantize import Choice


def id_of(choice: object) -> str | None:
    if not isinstance(choice, Choice):
        return None
    flags = ("-sym" if choice.symmetric else "") + ("-act" if choice.desc_act else "")
    return f"{choice.format}-{choice.bits}-{choice.group_size}{flags}"


MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
}
