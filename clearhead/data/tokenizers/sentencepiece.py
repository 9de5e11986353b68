"""Read SentencePiece models (tokenizer.model, spiece.model, source.spm) without the sentencepiece library.

A model is a protocol buffer with a few fields. It is converted to a tokenizer of the `tokenizers` library."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from clearhead.data.tokenizers.base import TOKENIZERS_MISSING
from clearhead.data.tokenizers.vocabulary_files import read_object, tokenizer_class
from clearhead.errors import ClearheadError, DataError, StorageError, optional_dependency

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

FILES = ("tokenizer.model", "spiece.model", "source.spm")
# Special tokens around a text, by tokenizer class. Other classes map the pieces to other ids.
_TEMPLATES = {"LlamaTokenizer": "<s> $A", "T5Tokenizer": "$A </s>", "MarianTokenizer": "$A </s>"}
_CONTROL = 3  # type of a special piece
_USER_DEFINED = 4  # type of a piece that is never split

# The pieces with scores and types, and the fields of the trainer and normalizer specs by number.
_Model: TypeAlias = tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]


def read_sentence_pieces(path: Path) -> tuple[LibraryTokenizer, dict[str, str]]:
    """Read a SentencePiece model; return the tokenizer and its special tokens by role.

    Raises:
        DataError: The class of the tokenizer is not supported.
        StorageError: The file is not a complete SentencePiece model.
    """
    kind = str(tokenizer_class(path.parent))
    if kind not in _TEMPLATES:
        expected = ", ".join(_TEMPLATES)
        raise DataError(f"{path} belongs to a {kind}, which is not supported; expected {expected}, or a tokenizer.json")
    settings = read_object(path.with_name("tokenizer_config.json"))
    vocabulary = read_object(path.with_name("vocab.json"))
    try:
        return _special_tokenizer(kind, _model(path.read_bytes()), settings, vocabulary)
    except ClearheadError:
        raise
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise StorageError(
            f"{path} is not a complete SentencePiece model that fits its tokenizer_config.json and vocab.json; "
            "download these files again"
        ) from error


def _special_tokenizer(
    kind: str, model: _Model, settings: Mapping[str, Any], vocabulary: Mapping[str, int]
) -> tuple[LibraryTokenizer, dict[str, str]]:
    """Return the tokenizer of a class, and its special tokens by role; a `vocabulary` replaces the ids of the model."""
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import AddedToken, processors

    pieces, trainer, normalizer = model
    if vocabulary:  # pieces of both languages in one vocabulary
        lowest = min(score for _, score, _ in pieces) - 100
        by_text = {piece[0]: piece for piece in pieces}
        pieces = [by_text.get(piece, (piece, lowest, 1)) for piece in sorted(vocabulary, key=vocabulary.__getitem__)]
    inner = sentence_piece_tokenizer(pieces, trainer, normalizer)
    special = [piece for piece, _, form in pieces if form == _CONTROL]
    inner.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    inner.add_tokens([AddedToken(piece, normalized=False) for piece, _, form in pieces if form == _USER_DEFINED])
    if kind == "T5Tokenizer":  # in reverse order
        inner.add_special_tokens([f"<extra_id_{i}>" for i in reversed(range(settings.get("extra_ids", 100)))])
    ends = [(name, inner.token_to_id(name)) for name in _TEMPLATES[kind].split() if name != "$A"]
    inner.post_processor = processors.TemplateProcessing(single=_TEMPLATES[kind], special_tokens=ends)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return inner, {role: name for role, name in roles.items() if inner.token_to_id(name) is not None}


def sentence_piece_tokenizer(
    pieces: list[tuple[str, float, int]], trainer: Mapping[int, Any], normalizer: Mapping[int, Any]
) -> LibraryTokenizer:
    """Return the tokenizer of a SentencePiece model.

    Args:
        pieces: Text, score and type of each id.
        trainer: Fields of the trainer by number: 3 is 1 for unigrams and 2 for BPE, 35 whether bytes are pieces.
        normalizer: Fields of the normalizer by number: 2 its table, 3 whether a space precedes a text, 4 whether
            repeated spaces are merged.
    """
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    number = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    unknown = next(piece for piece, _, form in pieces if form == 2)
    in_bytes = bool(trainer.get(35))
    if trainer.get(3, 1) == 1:
        listed = [(piece, score) for piece, score, _ in pieces]
        inner = Tokenizer(models.Unigram(listed, number[unknown], byte_fallback=in_bytes))
    elif trainer[3] == 2:
        pairs = [
            (score, piece[:i], piece[i:])
            for piece, score, form in pieces
            for i in range(1, len(piece))
            if form == 1 and piece[:i] in number and piece[i:] in number
        ]
        merges = [pair[1:] for pair in sorted(pairs, key=lambda pair: (-pair[0], -len(pair[1]), -len(pair[2])))]
        inner = Tokenizer(models.BPE(number, merges, unk_token=unknown, fuse_unk=True, byte_fallback=in_bytes))
    else:
        raise ValueError("neither unigrams nor pairs")
    steps: list[Any] = [normalizers.Precompiled(normalizer[2])] if normalizer.get(2) else []
    if normalizer.get(4, 1):  # strip spaces at the ends and merge repeated ones
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if normalizer.get(3, 1):  # a space before the first word
        steps.append(normalizers.Prepend("▁"))
        parts.append(decoders.Strip(" ", 1, 0))
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(parts)
    return inner


def _model(data: bytes) -> _Model:
    """Return the content of a model file."""
    pieces: list[tuple[str, float, int]] = []
    settings: dict[int, dict[int, Any]] = {2: {}, 3: {}}
    for field, value in _fields(data):
        if field == 1:
            piece = dict(_fields(value))
            pieces.append((piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, 1)))
        elif field in settings:
            settings[field] = dict(_fields(value))
    if not pieces:
        raise ValueError("no pieces")
    return pieces, settings[2], settings[3]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: number and value (int or bytes)."""
    index = 0

    def read_varint() -> int:
        nonlocal index
        value, shift = 0, 0
        while True:
            byte = data[index]
            index = index + 1
            value = value | (byte & 127) << shift
            shift = shift + 7
            if byte < 128:
                return value

    while index < len(data):
        tag = read_varint()
        if tag & 7 == 0:
            yield tag >> 3, read_varint()
            continue
        size = {1: 8, 5: 4}[tag & 7] if tag & 7 != 2 else read_varint()
        if index + size > len(data):
            raise ValueError("truncated message")
        yield tag >> 3, data[index : index + size]
        index += size
