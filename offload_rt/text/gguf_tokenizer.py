"""Tokenizers of GGUF files: the vocabulary, and the text splits that `tokenizer.ggml.pre` names."""

import json
import mmap
import warnings
from collections.abc import Mapping
from functools import partial
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

_LLAMA3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_SPLITS = Path(__file__).with_name("gguf_splits.json")
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
    fields = {name.removeprefix(_PREFIX): value for name, value in metadata.items()}
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


def known_splits() -> dict[str, list[str]]:
    """Return the expressions that split a text in turn, by value of `tokenizer.ggml.pre`.

    Source: llama.cpp's src/llama-vocab.cpp, with the expressions of the original tokenizer.json.
    transformers has more.
    """
    entries = json.loads(_SPLITS.read_text(encoding="utf-8")).items()
    return {name: splits for names, splits in entries for name in names.split()}


def _splits(pre: str | None) -> list[str]:
    splits = known_splits()
    if pre in splits:
        return splits[pre]
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre in GGUF_PRE_TOKENIZER_SPLITS:
        return [GGUF_PRE_TOKENIZER_SPLITS[pre]]
    problem = f"tokenizer.ggml.pre={pre!r} is unknown: token ids may differ from the original's"
    warnings.warn(f"{problem}; use the model's safetensors", RuntimeWarning, stacklevel=2)
    return splits["default"]


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
        added = partial(AddedToken, normalized=False, special=kind == _CONTROL)
        tokenizer.add_tokens([*map(added, _of_types(fields, (kind,)))])


def _of_types(fields: Mapping[str, Any], kinds: tuple[int, ...]) -> list[str]:
    types = fields.get("token_type") or [1] * len(fields["tokens"])
    return [token for token, kind in zip(fields["tokens"], types, strict=True) if kind in kinds]
