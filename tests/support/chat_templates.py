"""Short chat templates, one for each kind of tool calls."""


def template(call: str, between: str = "", begin: str = "", end: str = "", text: str = "") -> str:
    """Build a template from Jinja texts around and for a call, with its function `f`.

    text  content and reasoning of a message `m`
    """
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}"
        + (text or "{{ m.content }}")
        + "{% if m.tool_calls %}"
        + begin
        + "{% for c in m.tool_calls %}{% set f = c.function %}"
        + call
        + "{% if not loop.last %}"
        + between
        + "{% endif %}{% endfor %}"
        + end
        + "{% endif %}<|im_end|>{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
    )


def pairs(pair: str, between: str = "") -> str:
    """Build the text of arguments: for each key `k` with value `v`."""
    separator = "{% if not loop.last %}" + between + "{% endif %}"
    return "{% for k, v in f.arguments.items() %}" + pair + separator + "{% endfor %}"


_JSON = "{{ f.arguments | tojson }}"
_VALUE = "{{ v if v is string else v | tojson }}"
_LINE = "{{ '\\n' }}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": ' + _JSON + "}"
TEMPLATES = {
    "hermes": template(f"<tool_call>\n{_OBJECT}\n</tool_call>", _LINE),
    "llama": template(
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        '{"name": "{{ f.name }}", "parameters": ' + _JSON + "}"
    ),
    "mistral_list": template(
        "{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
        + _OBJECT[:-1] + ', "id": "{{ c.id }}"}',
        ", ", "[TOOL_CALLS][", "]",
    ),
    "mistral": template("[TOOL_CALLS]{{ f.name }}[ARGS]" + _JSON),
    "mistral_ids": template("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]" + _JSON),
    "qwen3_coder": template(
        "<tool_call>\n<function={{ f.name }}>\n"
        + pairs("<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n")
        + "</function>\n</tool_call>",
        _LINE,
    ),
    "glm45": template(
        "<tool_call>{{ f.name }}\n"
        + pairs("<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>\n")
        + "</tool_call>",
        _LINE,
    ),
    "line_before_end": template(
        "<tool_call>{{ f.name }}\n"
        + pairs("<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>")
        + "\n</tool_call>",
        _LINE,
    ),
    "function_key": template('{"{{ f.name }}": ' + _JSON + "}", ", ", "<|tools|>[", "]<|/tools|>"),
    "numbered": template(
        "<|call|>functions.{{ f.name }}:{{ loop.index0 }}<|args|>" + _JSON + "<|/call|>",
        "", "<|calls|>", "<|/calls|>",
    ),
    "named_ids": template(
        "<|call|>{{ c.id }}<|args|>" + _JSON + "<|/call|>", "", "<|calls|>", "<|/calls|>"
    ),
    "typed": template(
        '<invoke name="{{ f.name }}">\n'
        + pairs(
            '<parameter name="{{ k }}" string="{{ \'true\' if v is string else \'false\' }}">'
            + _VALUE + "</parameter>\n"
        )
        + "</invoke>\n",
        "", "<calls>\n", "</calls>",
    ),
    "python": template(
        "{{ f.name }}("
        + pairs("{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v | tojson }}{% endif %}", ", ")
        + ")",
        ", ", "<|tool_call_start|>[", "]<|tool_call_end|>",
    ),
    "quoted": template(
        "<|tool_call>call:{{ f.name }}{{ '{' }}"
        + pairs("{{ k }}:{{ '<|q|>' ~ v ~ '<|q|>' if v is string else v | tojson }}", ",")
        + "}<tool_call|>"
    ),
    "key_tags": template(
        '<call name="{{ f.name }}">' + pairs("<{{ k }}>" + _VALUE + "</{{ k }}>") + "</call>"
    ),
    "nested_tags": "{% macro tags(v) %}{% if v is mapping %}"
    + "{% for k, w in v.items() %}<{{ k }}>{{ tags(w) }}</{{ k }}>{% endfor %}"
    + "{% elif v is iterable and v is not string %}"
    + "{% for w in v %}<item>{{ tags(w) }}</item>{% endfor %}"
    + "{% else %}" + _VALUE + "{% endif %}{% endmacro %}"
    + template(
        '<call name="{{ f.name }}">' + pairs("<{{ k }}>{{ tags(v) }}</{{ k }}>") + "</call>"
    ),
    "hidden_tools": template("<call>{{ f.name }}<sep>" + _JSON + "</call>").replace(
        "tools or ", ""
    ),
    "recipient": template(
        "{{ f.name }}\n{{ f.arguments + '' }}", ">>>",
        text="{{ '>>>' if m.role == 'assistant' }}"
        "{% if m.content %}all\n{{ m.content }}{% endif %}",
    ).replace("assistant{{ '\\n' }}{% endif %}", "assistant{{ '\\n' }}>>>{% endif %}"),
}  # fmt: skip
