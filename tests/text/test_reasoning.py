"""Reasoning tags: every way to cut a text into pieces gives the same parts."""

from itertools import groupby

import pytest

from offload_rt.text.reasoning import THINK, ReasoningSplitter

CASES = [
    ("<think>\nfirst\n</think>\n\nanswer", False, [("first\n", True), ("answer", False)]),
    ("in the template</think>answer", True, [("in the template", True), ("answer", False)]),
    ("no tags < think", False, [("no tags < think", False)]),
    (" <think>b</think>c<think>d", False, [("b", True), ("c<think>d", False)]),
    ("a <think>b</think>", False, [("a <think>b</think>", False)]),
    ("\n a", False, [("\n a", False)]),
    ("cut off <thi", False, [("cut off <thi", False)]),
    ("", False, []),
]


def joined(pieces: list[str], starts_inside: bool) -> list[tuple[str, bool]]:
    splitter = ReasoningSplitter(starts_inside)
    parts = [part for text in pieces[:-1] for part in splitter.add(text)]
    parts += splitter.add(pieces[-1], is_last=True)
    runs = groupby(parts, key=lambda part: part.is_reasoning)
    return [("".join(part.text for part in run), kind) for kind, run in runs]


@pytest.mark.parametrize(("text", "starts_inside", "expected"), CASES)
def test_parts_do_not_depend_on_the_pieces(text, starts_inside, expected):
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert joined(pieces, starts_inside) == expected


def test_text_is_returned_as_soon_as_no_tag_can_follow():
    splitter = ReasoningSplitter()
    for piece, parts in (
        ("\n<th", []),
        ("ink>a <", ["a "]),
        ("b", ["<b"]),
        ("</think>c <", ["c <"]),
    ):
        assert [part.text for part in splitter.add(piece)] == parts
    assert THINK.opens("<|assistant|>\n<think>\n")
    assert not THINK.opens("<think>\n\n</think>\n\n")
    assert THINK.closes("<think>\n\n</think>\n\n")
