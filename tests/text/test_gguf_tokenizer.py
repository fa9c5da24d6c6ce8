"""Tokenizers of GGUF files, with small vocabularies that show one property each."""

# ruff: noqa: RUF001
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from offload_rt.text.detokenize import encode_chat, load_tokenizer
from offload_rt.text.gguf_tokenizer import known_splits

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ALPHABET = sorted(bytes_to_unicode().values())
DIGITS = ["3 3", "33 3", "33 33", "33 333", "333 333"]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
# Pre-tokenizers of the original tokenizer.json.
ORIGINALS = {
    "gpt-2": [BYTES], "smollm": [pre_tokenizers.Digits(individual_digits=True), BYTES],
    "falcon": [pre_tokenizers.Punctuation("contiguous"), BYTES, pre_tokenizers.Digits(),
               pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")],
}  # fmt: skip


def load(path: Path, tokens: dict[str, int], **fields: Any) -> PreTrainedTokenizerBase:
    """Write a file with these tokens and their types, and load its tokenizer."""
    fields |= {"tokens": list(tokens), "token_type": list(tokens.values())}
    metadata: dict[str, Any] = {"general.architecture": "llama"}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    path.write_bytes(write_gguf.file_bytes(metadata, {}))
    return load_tokenizer(path)


def byte_level(path, merges, more=None, **fields):
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = dict.fromkeys([*ALPHABET, *merged], NORMAL) | (more or {})
    return load(path, tokens, model="gpt2", merges=merges, **fields)


def sentencepiece(path: Path, pieces: list[str], **fields: Any) -> PreTrainedTokenizerBase:
    """Earlier pieces have higher scores."""
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL} | {f"<0x{i:02X}>": BYTE for i in range(256)}
    tokens |= dict.fromkeys(pieces, NORMAL)
    fields |= {"scores": [-float(i) for i in range(len(tokens))], "bos_token_id": 1}
    return load(path, tokens, model="llama", unknown_token_id=0, **fields)


def split(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]


@pytest.mark.parametrize("pre", ORIGINALS)
def test_pre_names_the_splits_of_the_original(pre, tmp_path):
    """Digits alone, in groups of three or in any number; `½` is a digit of some."""
    merges = [*DIGITS, "Ġ Â", "Â ½", ". .", "Ġ .."]
    tokenizer = byte_level(tmp_path / "m.gguf", merges, pre=pre)
    original = Tokenizer(models.BPE(tokenizer.get_vocab(), [*map(tuple, map(str.split, merges))]))
    original.pre_tokenizer = pre_tokenizers.Sequence(ORIGINALS[pre])
    for text in ["ied 4 ½ months", *("3" * n for n in range(1, 10)), "a 333.33, 3..", " .. \n 3"]:
        assert split(tokenizer, text) == original.encode(text).tokens


def test_digits_are_grouped_and_whole_words_ignore_merges(tmp_path):
    path = tmp_path / "m.gguf"
    for pre, groups in (
        ("afmoe", ["3", "333", "333"]), ("superbpe", ["3", "333", "333"]), ("default", 7 * ["3"]),
        ("llama-bpe", ["333", "333", "3"]), ("qwen2", 7 * ["3"]), ("gpt-2", ["3333", "333"]),
    ):  # fmt: skip
        merges = [] if pre == "default" else DIGITS
        assert split(byte_level(path, merges, pre=pre), "3333333") == groups
    # Llama 3 has tokens that its merges do not reach.
    for pre, tokens in (("llama-bpe", ["abc"]), ("gpt-2", ["a", "bc"])):
        assert split(byte_level(path, ["b c", "a b", "ab c"], pre=pre), "abc") == tokens


@pytest.mark.parametrize("pre", [*GGUF_PRE_TOKENIZER_SPLITS, *known_splits()])
@pytest.mark.filterwarnings("error")
def test_every_known_pre_keeps_the_text(pre, tmp_path):
    tokenizer = byte_level(tmp_path / "m.gguf", [], pre=pre)
    text = "Don't  say 12345 ½ to K., 我想在 ひら 한국 é́\r\n\n\t<|x|> _a{b}\n   "
    assert "".join(split(tokenizer, text)).count("Ġ") == text.count(" ")


def test_unknown_pre_warns_by_name(tmp_path):
    for pre in ({"pre": "no-such-model"}, {}):
        name = repr(pre.get("pre"))
        with pytest.warns(RuntimeWarning, match=f"tokenizer.ggml.pre={name} is unknown"):
            assert split(byte_level(tmp_path / "m.gguf", [], **pre), "a b") == ["a", "Ġ", "b"]


def test_added_tokens_are_matched_first_and_control_tokens_are_text_in_messages(tmp_path):
    """Spaces of MPT longest first, before words with a leading space; markers of DeepSeek."""
    more = {"  ": USER_DEFINED, "   ": USER_DEFINED}
    tokenizer = byte_level(tmp_path / "m.gguf", ["Ġ a"], more, pre="mpt")
    assert split(tokenizer, " a  a   a") == ["Ġa", "  ", "a", "   ", "a"]
    tokenizer = byte_level(tmp_path / "m.gguf", [], {"<｜User｜>": CONTROL}, pre="deepseek-v3")
    assert split(tokenizer, "a<｜User｜>") == ["a", "<｜User｜>"]
    tokenizer.chat_template = "<｜User｜>{{ messages[0].content }}"
    ids = encode_chat(tokenizer, [{"content": "<｜User｜>"}], {})
    assert tokenizer.convert_ids_to_tokens(ids).count("<｜User｜>") == 1


def test_begin_token(tmp_path):
    """Old files of Llama 3 have no `add_bos_token`."""
    bos = {"<|begin|>": CONTROL}
    for fields, has_bos in (
        ({"pre": "llama-bpe"}, True), ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "gpt-2"}, False), ({"pre": "gpt-2", "add_bos_token": True}, True),
    ):  # fmt: skip
        tokenizer = byte_level(tmp_path / "m.gguf", [], bos, bos_token_id=len(ALPHABET), **fields)
        assert (tokenizer.encode("a")[0] == len(ALPHABET)) is has_bos


def test_leading_space(tmp_path):
    """The prefix is added also to text that starts with a space."""
    pieces = ["Hi", "▁Hi", "▁▁", "▁", "H", "i"]
    prefixing = sentencepiece(tmp_path / "m.gguf", pieces)
    plain = sentencepiece(tmp_path / "m.gguf", pieces, add_space_prefix=False)
    for text, with_prefix, without in (
        ("Hi", ["▁Hi"], ["Hi"]), (" Hi", ["▁", "▁Hi"], ["▁Hi"]), (" ", ["▁▁"], ["▁"]),
        ("  Hi", ["▁▁", "▁Hi"], ["▁", "▁Hi"]), ("Hi Hi", ["▁Hi", "▁Hi"], ["Hi", "▁Hi"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"], ["<0xC3>", "<0xA9>"]),
    ):  # fmt: skip
        assert (split(prefixing, text), split(plain, text)) == (with_prefix, without)
    # Behind a control token as in llama.cpp and the original tokenizers of Llama 2.
    ids = prefixing.encode("Hi<s>Hi", add_special_tokens=False)
    assert prefixing.convert_ids_to_tokens(ids) == ["▁Hi", "<s>", "▁Hi"]
    for removes, expected in ((True, "a a"), (False, "  a   a ")):
        tokenizer = sentencepiece(tmp_path / "m.gguf", ["▁", "a"], remove_extra_whitespaces=removes)
        assert tokenizer.decode(tokenizer.encode("  a   a ", add_special_tokens=False)) == expected


def test_text_never_merges_to_a_control_token(tmp_path):
    """Neither to `<s>` nor to a byte."""
    pieces = ["<s", "<0x41", "<0x4", "<0x", "<0", "▁", "<", "s", ">", "0", "x", "4", "1"]
    tokenizer = sentencepiece(tmp_path / "m.gguf", pieces)
    ids = tokenizer.encode("<s><0x41>", add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁", "<s", ">", "<0x41", ">"]


def merge_best_pairs(text: str, pieces: list[str]) -> list[str]:
    """SentencePiece by brute force: merge the adjacent pair of the best score, the left one."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while ranked := [
        (pieces.index(a + b), i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces
    ]:
        best, i = min(ranked)
        symbols[i : i + 2] = [pieces[best]]
    return symbols


@given(st.text("abc ", min_size=1))
def test_merges_follow_the_scores(tmp_path_factory, text):
    pieces = ["bc", "▁a", "ab", "▁ab", "abc", "ca", "▁abc", "a", "b", "c", "▁"]
    path = tmp_path_factory.mktemp("scores") / "m.gguf"
    assert split(sentencepiece(path, pieces), text) == merge_best_pairs(text, pieces)
