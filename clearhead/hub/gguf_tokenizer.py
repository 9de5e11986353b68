"""Tokenizers of GGUF files, in both directions: byte-level BPE ("gpt2") and SentencePiece ("llama" and "t5").

A file names the rule that splits a text into words before BPE ("pre-tokenizer") and does not contain it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.data.tokenizers.base import TOKENIZERS_MISSING
from clearhead.data.tokenizers.library import HFTokenizer
from clearhead.data.tokenizers.sentencepiece import sentence_piece_tokenizer
from clearhead.errors import DataError, StorageError, optional_dependency
from clearhead.hub.family import KeyValues

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of tokens
# The published patterns of Llama 3 and of Qwen 2, which differ in the number of digits of a word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS.replace("DIGITS", "{1,3}"), _WORDS.replace("DIGITS", "")
_DIGITS = "digits"  # single digits, then the pattern of GPT-2
# The rule of each pre-tokenizer: a pattern, `_DIGITS`, or None for the pattern of GPT-2.
_RULES: dict[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "phi-2"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
}
_PREFIX = "tokenizer.ggml."
_ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def read_tokenizer(path: Path, fields: Mapping[str, Any]) -> HFTokenizer:
    """Return the tokenizer of a file from its metadata.

    Raises:
        DataError: The kind of tokenizer, or its pre-tokenizer, is not supported.
    """
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import AddedToken, processors

    kind = fields.get(f"{_PREFIX}model")
    tokens = fields.get(f"{_PREFIX}tokens", [])
    kinds = fields.get(f"{_PREFIX}token_type") or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        inner = _byte_level(path, fields, tokens)
    elif kind in ("llama", "t5"):
        inner = _sentence_pieces(path, fields, tokens, kinds, is_unigram=kind == "t5")
    else:
        raise DataError(
            f"{path} has a {kind!r} tokenizer; expected 'gpt2', 'llama' or 't5'. Load the same model from its Hugging "
            "Face folder"
        )
    special = [token for token, form in zip(tokens, kinds, strict=False) if form == _CONTROL]
    added = [token for token, form in zip(tokens, kinds, strict=False) if form == _USER_DEFINED]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    inner.add_tokens([AddedToken(token, normalized=False) for token in added])
    ids = {role: fields.get(f"{_PREFIX}{name}_token_id") for role, name in _ROLES.items()}
    names = {role: tokens[id_] for role, id_ in ids.items() if id_ is not None and 0 <= id_ < len(tokens)}
    adds_bos = fields.get(f"{_PREFIX}add_bos_token", kind == "llama") and "bos_token" in names
    adds_eos = fields.get(f"{_PREFIX}add_eos_token", kind == "t5") and "eos_token" in names
    if adds_bos or adds_eos:
        first, last = (names[role] if adds else "" for role, adds in (("bos_token", adds_bos), ("eos_token", adds_eos)))
        ends = [(names[role], ids[role]) for role, adds in (("bos_token", adds_bos), ("eos_token", adds_eos)) if adds]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}".strip(), special_tokens=list(dict.fromkeys(ends))
        )
    return HFTokenizer(inner, names)


def _byte_level(path: Path, fields: Mapping[str, Any], tokens: list[str]) -> Any:
    """Return byte-level BPE with the pre-tokenizer that the file names."""
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import Tokenizer, decoders, models

    name = fields.get(f"{_PREFIX}pre", "default")
    if name not in _RULES:
        raise DataError(
            f"{path} has a tokenizer with the pre-tokenizer {name!r}; expected one of {', '.join(_RULES)}. Load the "
            "same model from its Hugging Face folder"
        )
    merges = [tuple(merge.split(" ")) for merge in fields.get(f"{_PREFIX}merges", [])]
    # The text of a word that is a token is not merged from its parts in Llama 3.
    is_llama3 = _RULES[name] == _LLAMA3
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=is_llama3))
    inner.pre_tokenizer = _pre_tokenizer(name)
    inner.decoder = decoders.ByteLevel()
    return inner


def _pre_tokenizer(name: str) -> Any:
    """Return the pre-tokenizer of a name."""
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import Regex, pre_tokenizers

    rule = _RULES[name]
    if rule is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = pre_tokenizers.Split(Regex(rule), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentence_pieces(
    path: Path, fields: Mapping[str, Any], tokens: list[str], kinds: list[int], *, is_unigram: bool
) -> Any:
    """Return a SentencePiece tokenizer from pieces, scores and types."""
    scores = fields.get(f"{_PREFIX}scores")
    if scores is None or not len(tokens) == len(scores) == len(kinds) or _UNKNOWN not in kinds:
        raise DataError(f"{path} has a SentencePiece tokenizer without a score and a type of each token")
    charsmap = bytes(value & 0xFF for value in fields.get(f"{_PREFIX}precompiled_charsmap") or [])
    return sentence_piece_tokenizer(
        list(zip(tokens, scores, kinds, strict=True)),
        {3: 1 if is_unigram else 2, 35: _BYTE in kinds},
        {
            2: charsmap,
            3: fields.get(f"{_PREFIX}add_space_prefix", True),
            4: fields.get(f"{_PREFIX}remove_extra_whitespaces", is_unigram),
        },
    )


def tokenizer_fields(tokenizer: HFTokenizer, vocab_size: int) -> KeyValues:
    """Return the metadata of a tokenizer, after `tokenizer.ggml.`, with a token for each of `vocab_size` ids.

    Raises:
        StorageError: GGUF files cannot express the tokenizer.
    """
    data = json.loads(tokenizer.to_json())
    model = data["model"]
    if model["type"] != "BPE":
        raise StorageError(f"the tokenizer is {model['type']}; only BPE can be written to a GGUF file")
    added = {token["id"]: token for token in data["added_tokens"]}
    by_id = {id_: token for token, id_ in model["vocab"].items()}
    by_id |= {id_: token["content"] for id_, token in added.items()}
    if max(by_id) >= vocab_size:
        raise StorageError(f"the tokenizer has {max(by_id) + 1} ids, and the model has {vocab_size}")
    tokens = [by_id.get(id_, f"[PAD{id_}]") for id_ in range(vocab_size)]
    kinds = [_token_type(id_, by_id, added, model.get("unk_token")) for id_ in range(vocab_size)]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    fields: KeyValues = {"tokens": tokens, "token_type": kinds}
    if model.get("byte_fallback"):
        fields |= {"model": "llama", "scores": _scores(tokens, merges)}
        fields["add_space_prefix"] = '"prepend"' in json.dumps(data["normalizer"])
    else:
        fields |= {"model": "gpt2", "pre": _rule_name(data), "merges": [" ".join(merge) for merge in merges]}
        fields["add_space_prefix"] = False
    return fields | _special_fields(tokenizer, data, tokens)


def _token_type(id_: int, by_id: Mapping[int, str], added: Mapping[int, Any], unknown: str | None) -> int:
    """Return the type of a token."""
    if id_ not in by_id:
        return _UNUSED
    token = by_id[id_]
    if token == unknown:
        return _UNKNOWN
    if id_ in added:
        return _CONTROL if added[id_]["special"] else _USER_DEFINED
    return _BYTE if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else _NORMAL


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Return the scores of pieces: earlier merges score higher."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _rule_name(data: Mapping[str, Any]) -> str:
    """Return the name of a pre-tokenizer."""
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import Tokenizer, models

    for name in _RULES:
        inner: Any = Tokenizer(models.BPE())
        inner.pre_tokenizer = _pre_tokenizer(name)
        if _significant(json.loads(inner.to_str())["pre_tokenizer"]) == _significant(data["pre_tokenizer"]):
            return name
    raise StorageError(
        "the tokenizer splits words by a rule without a name in GGUF files; expected that of GPT-2, SmolLM, Llama 3 or "
        "Qwen 2"
    )


def _significant(rule: Any) -> Any:
    """Return a pre-tokenizer without options that change no ids, and without a sequence of one."""
    if isinstance(rule, list):
        return [_significant(part) for part in rule]
    if not isinstance(rule, dict):
        return rule
    if rule.get("type") == "Sequence" and len(rule["pretokenizers"]) == 1:
        return _significant(rule["pretokenizers"][0])
    return {key: _significant(value) for key, value in rule.items() if key != "trim_offsets"}


def _special_fields(tokenizer: HFTokenizer, data: Mapping[str, Any], tokens: list[str]) -> KeyValues:
    """Return the ids of special tokens, and which are added to a text."""
    ids = {token: id_ for id_, token in enumerate(tokens)}
    fields: KeyValues = {
        f"{name}_token_id": ids[tokenizer.specials[role]] for role, name in _ROLES.items() if role in tokenizer.specials
    }
    template = json.dumps(data.get("post_processor"), ensure_ascii=False)
    for role in ("bos", "eos"):
        token = tokenizer.specials.get(f"{role}_token")
        fields[f"add_{role}_token"] = token is not None and json.dumps(token, ensure_ascii=False) in template
    return fields
