"""Constrain answers by the JSON Schema test suite: `python scripts/check_schemas.py MODEL DIR`.

DIR is tests/draft2020-12 of https://github.com/json-schema-org/JSON-Schema-Test-Suite. Answers at
temperature 0 and 1, with draft trees, are validated with the package `jsonschema`.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from offload_rt import LLM, SamplingParams, StructuredOutputs
from offload_rt.errors import SettingsError

N_TOKENS = 48
PROMPT = "A JSON value: "


def schemas(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and schema of each group of tests."""
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            yield f"{path.stem}: {group['description']}", group["schema"]


def outcome(llm: LLM, schema: Any, temperature: float, seed: int) -> tuple[str, str]:
    """Return the kind of an answer, and the answer or the reason of a refusal."""
    try:
        outputs = StructuredOutputs(json=schema)
        params = SamplingParams(
            max_tokens=N_TOKENS, temperature=temperature, seed=seed, structured_outputs=outputs
        )
        answer = llm.generate(PROMPT, params)[0].outputs[0]
    except SettingsError as error:
        return "refused", str(error)
    if answer.finish_reason == "length":
        return "cut", answer.text
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
    except re.error:
        return "of a pattern unknown to Python", answer.text
    except (jsonschema.ValidationError, ValueError):
        return "invalid", answer.text
    return "valid", answer.text


def main(model: str, folder: str) -> None:
    """Print invalid answers, reasons of refusals, and the number of each kind."""
    for temperature in (0.0, 1.0):
        kinds: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        with LLM(model, drafter="ngram", tree_size=16) as llm:
            for seed, (name, schema) in enumerate(schemas(Path(folder))):
                kind, text = outcome(llm, schema, temperature, seed)
                kinds[kind] += 1
                reasons[text[:80]] += kind == "refused"
                if kind == "invalid":
                    print(f"{name}: {text}", flush=True)
        for text, n in (+reasons).most_common():
            print(f"{n:4} {text}")
        print(f"temperature {temperature}: {dict(kinds)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
