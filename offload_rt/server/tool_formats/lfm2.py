"""LFM2: calls in Python, which the template does not render."""

from offload_rt.server.call_format import CallFormat, Pairs

MARKS = ("<|tool_list_start|>", "<|tool_call_start|>")
FORMAT = CallFormat(
    begin="<|tool_call_start|>[",
    middle="(",
    closing=")",
    between=", ",
    end="]<|tool_call_end|>",
    pairs=Pairs("", {"string": "='", "integer": "="}, {"string": "'", "integer": ""}, ", "),
    name="lfm2",
)
