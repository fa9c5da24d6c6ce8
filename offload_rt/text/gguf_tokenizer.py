"""Tokenizers of GGUF files: the vocabulary, and the text splits that `tokenizer.ggml.pre` names."""

# ruff: noqa: RUF001
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # The import takes 0.3 s; `offload-rt plan` needs no tokenizer.
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Token types of `tokenizer.ggml.token_type`.
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6

_N = r"\p{N}"
_UP_TO_3 = r"\p{N}{1,3}"
_GROUPS_OF_3 = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_QWEN2 = rf"{_SUFFIXES}|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_SUFFIXES}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIXES"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIXES"
).replace("SUFFIXES", f"{_SUFFIXES}?")
_NO_HAN = _CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
_LATIN_GREEK_CYRILLIC = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

# Expressions that split a text in turn, by values of `tokenizer.ggml.pre`. transformers has more.
# Source: llama.cpp's src/llama-vocab.cpp, with the expressions of the original tokenizer.json.
_SPLITS = {
    "default": _DEFAULT,
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat"
    " a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion granite-docling": (_GPT2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (_N, _GPT2),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "stablelm2 hunyuan solar-open grok-2": (_QWEN2,),
    "laguna": (r"[^\n]+|\n+", _QWEN2),
    "chatglm-bpe glm4 glm5": (_LLAMA3,),
    "minicpm5": (_UP_TO_3, _LLAMA3.replace("{1,3}", "+")),
    "jais-2": (
        _LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
        + "".join(rf"\s{{{2**i}}}(?!\S)|" for i in range(9, 1, -1))
        + r"\s{1,2}(?!\S)|\s",
    ),
    "ufakzeka": (_QWEN2.removeprefix(f"{_SUFFIXES}|"),),
    "seed-coder": (rf"{_SUFFIXES}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    "bailingmoe bailingmoe2 llada-moe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "exaone-moe": (
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"|{_SYMBOLS}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_LATIN_GREEK_CYRILLIC}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _N),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (
        _UP_TO_3,
        _CJK,
        rf"{_PUNCTUATED}[\r\n]*|{_SPACES}",
    ),
    "spark2_5": (_UP_TO_3, _CJK, rf"{_PUNCTUATED}|[\r\n]|\s+(?!\S)|\s+", _N),
    "afmoe": (
        _GROUPS_OF_3,
        "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        rf"{_PUNCTUATED}[\r\n]*|{_SPACES}",
    ),
    "tiny_aya cohere2moe": (
        r"\d{1,3}(?=(?:\d{3})*\b)",
        rf"{_CASED}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_SPACES}",
    ),
    "granite-embed-multi-97m": (rf"{_CASED}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_SPACES}",),
    "youtu": (
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        rf"{_CASED}|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_SPACES}",
    ),
    "kimi-k2": (rf"\p{{Han}}+|{_NO_HAN}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_SPACES}",),
    "poro-chat bloom gpt3-finnish": (_BLOOM,),
    "viking": (_BLOOM, _N),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        _N,
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ),
}
# Vocabularies whose words are tokens even if merges lead elsewhere.
_LLAMA3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_WHOLE_WORDS = f"{_LLAMA3_NAMES} tekken minicpm5 youtu glm4 glm5 granite-embed-multi-97m".split()
# Vocabularies with a begin token unless `tokenizer.ggml.add_bos_token` denies it.
_WITH_BOS = f"{_LLAMA3_NAMES} tekken chameleon".split()


def load_gguf_tokenizer(path: Path) -> "PreTrainedTokenizerBase | None":
    """Build the tokenizer of a GGUF file; returns None for a file without a vocabulary.

    Byte-level BPE ("gpt2") and SentencePiece BPE ("llama") follow the file's metadata.
    transformers converts other vocabularies, and those of the Gemma architectures.
    Warns if `tokenizer.ggml.pre` is missing or unknown.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )
    from transformers.integrations.gguf.reader import read_gguf_metadata

    architecture, content, config = get_gguf_tokenizer(str(path))
    kind = content.get("tokenizer_type")
    if kind is None:
        return None
    if kind == "gpt2":
        backend = _byte_level(content)
        if content.get("pre_tokenizer_type") in _WITH_BOS:
            config.setdefault("add_bos_token", True)
    elif kind == "llama" and not architecture.startswith("gemma"):
        metadata, _ = read_gguf_metadata(str(path))
        key = "tokenizer.ggml.remove_extra_whitespaces"
        backend = _sentencepiece(content, config["unk_token"], metadata.get(key, False))
    else:
        backend, _ = convert_gguf_tokenizer(architecture, content)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config)  # type: ignore[no-untyped-call]


def _byte_level(content: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers.integrations.gguf.gguf_tokenizer_mapping import get_merges

    pre = content.get("pre_tokenizer_type")
    vocab = {token: i for i, token in enumerate(content["tokens"])}
    merges = get_merges(content)  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in _splits(pre)]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, content)
    return tokenizer


def _splits(pre: str | None) -> tuple[str, ...]:
    """Return the expressions of a value of `tokenizer.ggml.pre`."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre in GGUF_PRE_TOKENIZER_SPLITS:
        return (GGUF_PRE_TOKENIZER_SPLITS[pre],)
    for names, splits in _SPLITS.items():
        if pre in names.split():
            return splits
    problem = f"tokenizer.ggml.pre={pre!r} is unknown: token ids may differ from the original's"
    warnings.warn(f"{problem}; use the model's safetensors", RuntimeWarning, stacklevel=2)
    return _DEFAULT


def _sentencepiece(
    content: Mapping[str, Any], unk_token: str | None, removes_extra_whitespaces: bool
) -> "Tokenizer":
    """Build BPE over text with "▁" for spaces, and with a leading space per text segment."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from transformers.tokenization_utils_base import generate_merges

    tokens = content["tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = dict(zip(tokens, content["scores"], strict=True))
    # No merge may produce a control token from plain text.
    unmerged = _of_types(content, (_UNKNOWN, _CONTROL, _BYTE))
    merges = generate_merges(vocab, scores, unmerged)
    tokenizer = Tokenizer(
        BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = content.get("add_prefix_space", True)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps = [normalizers.Prepend("▁"), *steps]
        decoding.append(decoders.Strip(" ", left=1))
    if removes_extra_whitespaces:
        steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " "), *steps]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    _add_tokens(tokenizer, content)
    return tokenizer


def _add_tokens(tokenizer: "Tokenizer", content: Mapping[str, Any]) -> None:
    """Match control and user-defined tokens before the text is split."""
    from tokenizers import AddedToken

    for kind in (_CONTROL, _USER_DEFINED):
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token in _of_types(content, (kind,))
            ]
        )


def _of_types(content: Mapping[str, Any], kinds: tuple[int, ...]) -> list[str]:
    types = content.get("token_type") or [1] * len(content["tokens"])
    return [token for token, kind in zip(content["tokens"], types, strict=True) if kind in kinds]
