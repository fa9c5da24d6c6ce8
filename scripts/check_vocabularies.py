"""Compare token ids with the vocabularies of llama.cpp: `python scripts/check_vocabularies.py DIR`.

DIR is `models` of llama.cpp's sources, also in the source archive of llama-cpp-python. Files `.inp`
contain texts, files `.out` the ids by the original tokenizer.
"""

import sys
from pathlib import Path

from offload_rt.errors import CheckpointError
from offload_rt.text.detokenize import load_tokenizer

_SEPARATOR = "\n__ggml_vocab_test__\n"


def check(path: Path) -> str:
    """Return the number of equal texts, and the unequal ones."""
    texts = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split(_SEPARATOR)
    rows = path.with_suffix(".gguf.out").read_text(encoding="utf-8").splitlines()
    try:
        tokenizer = load_tokenizer(path)
    except CheckpointError as error:
        return str(error)
    assert tokenizer is not None
    unequal = [
        text
        for text, row in zip(texts, rows, strict=False)
        if tokenizer.encode(text, add_special_tokens=False) != [int(i) for i in row.split()]
    ]
    return " ".join([f"{len(rows) - len(unequal)} of {len(rows)}", *map(repr, unequal)])


if __name__ == "__main__":
    for texts_path in sorted(Path(sys.argv[1]).glob("*.gguf.inp")):
        vocabulary = texts_path.with_suffix("")
        print(f"{vocabulary.stem.removeprefix('ggml-vocab-')}: {check(vocabulary)}", flush=True)
