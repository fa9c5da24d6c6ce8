"""Programs that use the package. `make lint` checks that mypy accepts and rejects them."""

from offload_rt import LLM, Output, SamplingParams


def run(llm: LLM) -> list[str]:
    """Return generated texts."""
    outputs: list[Output] = llm.generate(["a", "b"], SamplingParams(max_tokens=3))
    outputs += llm.generate([1, 2])
    texts = [output.text for output in outputs]
    return texts + [piece.text for piece in llm.stream("a")]


def run_with_wrong_types(llm: LLM) -> int:
    """Pass and return wrong types: mypy reports an `ignore` without an error."""
    SamplingParams(temperature="warm")  # type: ignore[arg-type]
    return llm.generate("a")[0].text  # type: ignore[return-value]
