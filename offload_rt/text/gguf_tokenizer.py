"""Tokenizers of GGUF files: the vocabulary, and the text splits that `tokenizer.ggml.pre` names."""

# ruff: noqa: RUF001
import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.system.gguf_fields import Fields

if TYPE_CHECKING:  # The import takes 0.3 s; `offload-rt plan` needs no tokenizer.
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_PREFIX = "tokenizer.ggml."
_ARRAYS = "tokens", "merges", "scores", "token_type"
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
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

_LLAMA3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
# Expressions that split a text in turn, by values of `tokenizer.ggml.pre`. transformers has more.
# Source: llama.cpp's src/llama-vocab.cpp, with the expressions of the original tokenizer.json.
_SPLITS = {
    "default": _DEFAULT,
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat"
    " a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion granite-docling": (_GPT2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (_N, _GPT2),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "stablelm2 hunyuan solar-open grok-2 qwen2 deepseek-r1-qwen kormo f2llmv2 megrez": (_QWEN2,),
    f"{_LLAMA3_NAMES} dbrx smaug-bpe": (_LLAMA3,),
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

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _, metadata = Fields(data).metadata([_PREFIX + name for name in _ARRAYS])
    fields = {
        name.removeprefix(_PREFIX): value
        for name, value in metadata.items()
        if name.startswith(_PREFIX)
    }
    kind = fields.get("model")
    if kind is None:
        return None
    architecture = metadata["general.architecture"]
    if kind == "gpt2":
        backend = _byte_level(fields)
    elif kind == "llama" and not architecture.startswith("gemma"):
        backend = _sentencepiece(fields)
    else:
        from transformers.integrations.gguf import gguf_tokenizer_mapping  # imports in 0.3 s

        _, content, config = gguf_tokenizer_mapping.get_gguf_tokenizer(str(path))
        backend, _ = gguf_tokenizer_mapping.convert_gguf_tokenizer(architecture, content)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **config)  # type: ignore[no-untyped-call]
    config = {name: _special_token(fields, key) for name, key in _SPECIAL_TOKENS.items()}
    config |= {key: fields[key] for key in ("add_bos_token", "add_eos_token") if key in fields}
    if kind == "llama" or fields.get("pre") in _WITH_BOS:
        config.setdefault("add_bos_token", True)
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config)  # type: ignore[no-untyped-call]


def _special_token(fields: Mapping[str, Any], key: str) -> str | None:
    """Return the token whose id is a field."""
    return None if fields.get(key) is None else fields["tokens"][fields[key]]


def _byte_level(fields: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    pre = fields.get("pre")
    vocab = {token: i for i, token in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in _splits(pre)]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, fields)
    return tokenizer


def _splits(pre: str | None) -> tuple[str, ...]:
    """Return the expressions of a value of `tokenizer.ggml.pre`."""
    for names, splits in _SPLITS.items():
        if pre in names.split():
            return splits
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre in GGUF_PRE_TOKENIZER_SPLITS:
        return (GGUF_PRE_TOKENIZER_SPLITS[pre],)
    problem = f"tokenizer.ggml.pre={pre!r} is unknown: token ids may differ from the original's"
    warnings.warn(f"{problem}; use the model's safetensors", RuntimeWarning, stacklevel=2)
    return _DEFAULT


def _sentencepiece(fields: Mapping[str, Any]) -> "Tokenizer":
    """Build BPE over text with "▁" for spaces, and with a leading space per text segment."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from transformers.tokenization_utils_base import generate_merges

    tokens = fields["tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = dict(zip(tokens, fields["scores"], strict=True))
    # No merge may produce a control token from plain text.
    unmerged = _of_types(fields, (_UNKNOWN, _CONTROL, _BYTE))
    merges = generate_merges(vocab, scores, unmerged)
    unknown = _special_token(fields, "unknown_token_id")
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = fields.get("add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps = [normalizers.Prepend("▁"), *steps]
        decoding.append(decoders.Strip(" ", left=1))
    if fields.get("remove_extra_whitespaces", False):
        steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " "), *steps]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    _add_tokens(tokenizer, fields)
    return tokenizer


def _add_tokens(tokenizer: "Tokenizer", fields: Mapping[str, Any]) -> None:
    """Match control and user-defined tokens before the text is split."""
    from tokenizers import AddedToken

    for kind in (_CONTROL, _USER_DEFINED):
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token in _of_types(fields, (kind,))
            ]
        )


def _of_types(fields: Mapping[str, Any], kinds: tuple[int, ...]) -> list[str]:
    types = fields.get("token_type") or [1] * len(fields["tokens"])
    return [token for token, kind in zip(fields["tokens"], types, strict=True) if kind in kinds]
