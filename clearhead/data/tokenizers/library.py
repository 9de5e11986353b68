"""Tokenizers of the `tokenizers` library: byte-level BPE trained here, and third-party tokenizers.

Byte-level BPE can encode any text without unknown tokens, and decoding restores it exactly.

A third-party tokenizer.json is WordPiece, Unigram or BPE. If a folder has none, a SentencePiece model is read (see
`sentencepiece.py`), or vocab.txt, or vocab.json with merges.txt (see `vocabulary_files.py`). The special tokens are
read from `tokenizer_config.json` or `special_tokens_map.json`. All of it is data: reading it executes no code."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core.shapes import Int
from clearhead._core.validation import check_int, require
from clearhead.data import files
from clearhead.data.tokenizers.base import (
    BOS,
    EOS,
    FILE_NAME,
    PAD,
    TOKENIZERS_MISSING,
    Tokenizer,
    display_token,
    id_list,
    require_text,
)
from clearhead.data.tokenizers.sentencepiece import FILES, read_sentence_pieces
from clearhead.data.tokenizers.vocabulary_files import has_vocabulary_files, read_vocabulary_files
from clearhead.errors import ConfigError, DataError, StorageError, optional_dependency

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

N_BYTES = 256
_CHUNK_CHARS = 4_096  # characters that are encoded as one text
_CHUNKS_PER_CALL = 4_096
_MAX_VOCAB_SIZE = 1 << 20  # the library allocates memory for all of it before it trains


@cache
def byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter of byte-level BPE: printable bytes as themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = (byte for byte in range(N_BYTES) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(N_BYTES + i): byte for i, byte in enumerate(unprintable)}


def display_bpe_token(piece: str) -> str:
    """Return the display form of a byte-level BPE token, in which each letter represents a byte."""
    letters = byte_of_letter()
    if not all(letter in letters for letter in piece):
        return display_token(piece)  # an added token, which is not written as bytes
    raw = bytes(letters[letter] for letter in piece)
    try:
        return display_token(raw.decode())
    except UnicodeDecodeError:  # a part of a character: show its bytes
        return "".join(chr(b) if 0x20 < b < 0x7F else f"<{b:02X}>" for b in raw)


def _encoding_error(texts: Sequence[str]) -> str:
    """Return why texts could not be encoded."""
    for i, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            position = error.start
            return f"text {i} contains half a surrogate pair at character {position}, which is not valid; remove it"
    return "the texts could not be encoded: expected a sequence of str"


class TokenizersBackend(Tokenizer):
    """A tokenizer of the `tokenizers` library; with `is_bytes` each letter of a token represents a byte."""

    def __init__(self, inner: LibraryTokenizer, *, is_bytes: bool) -> None:
        self._inner = inner
        self._is_bytes = is_bytes
        self._special = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self._size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; ids may have gaps."""
        return self._size

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        texts = [require_text(text) for text in texts]
        try:
            return [row.ids for row in self._inner.encode_batch_fast(texts, add_special_tokens=special)]
        except TypeError as error:
            raise DataError(_encoding_error(texts)) from error
        except Exception as error:  # the library's own, such as a vocabulary that lacks its unknown token
            raise DataError(f"the tokenizer cannot encode this text: {error}; correct its tokenizer.json") from error

    def decode(self, ids: Sequence[int] | Int[Tensor, " T"]) -> str:
        return self._inner.decode(id_list(ids, self.vocab_size), skip_special_tokens=True)

    def tokens(self, ids: Sequence[int] | Int[Tensor, " T"]) -> list[str]:
        return [self._label(i) for i in id_list(ids, self.vocab_size)]

    def _label(self, number: int) -> str:
        piece = self._inner.id_to_token(number)
        if piece is None:
            return f"<{number}>"  # a gap in the vocabulary
        if number in self._special:
            return piece
        return display_bpe_token(piece) if self._is_bytes else display_token(piece.replace("▁", " "))

    def to_json(self) -> str:
        return self._inner.to_str()


class ByteLevelBPE(TokenizersBackend):
    """Byte-level byte-pair encoding. Any text has ids, and `decode(encode(text)) == text`.

    The name of a special token in a text is encoded as ordinary text.

    Args:
        inner: The tokenizer of the `tokenizers` library.

    Raises:
        ConfigError: A special token is missing.
    """

    def __init__(self, inner: LibraryTokenizer) -> None:
        super().__init__(inner, is_bytes=True)
        self._inner.encode_special_tokens = True
        ids = {name: number for name in (PAD, BOS, EOS) if (number := inner.token_to_id(name)) is not None}
        missing = ", ".join(name for name in (PAD, BOS, EOS) if name not in ids)
        expected = f"expected {PAD}, {BOS} and {EOS}: train one with train_bpe"
        require(not missing, f"this tokenizer has no {missing}; {expected}")
        self.pad_id = ids[PAD]
        self.bos_id = ids[BOS]
        self.eos_id = ids[EOS]

    def encode_long(self, text: str) -> Int[Tensor, " T"]:
        import numpy

        # No token crosses a single line end between two words, so encoding chunks in parallel gives the ids of the
        # whole text with less memory. Chunks of a few thousand characters take half the time of single lines.
        text = require_text(text)
        cuts = [0]
        for match in re.finditer(r"\S\n(?=\S)", text):
            if match.end() - cuts[-1] >= _CHUNK_CHARS:
                cuts.append(match.end())
        pieces = [text[start:stop] for start, stop in pairwise([*cuts, len(text)])]
        parts = [torch.zeros(0, dtype=torch.int32)]
        for first in range(0, len(pieces), _CHUNKS_PER_CALL):
            ids = chain.from_iterable(self.encode_batch(pieces[first : first + _CHUNKS_PER_CALL]))
            parts.append(torch.from_numpy(numpy.fromiter(ids, dtype=numpy.int32)))
        return torch.cat(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Copied and pickled as JSON, because the library's pickle loses `encode_special_tokens`.
        return from_json, (self.to_json(),)


def from_json(text: str) -> ByteLevelBPE:
    return ByteLevelBPE(_inner(text))


def _inner(text: str) -> LibraryTokenizer:
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import Tokenizer as Inner

    try:
        return Inner.from_str(text)
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise ConfigError(str(error)) from error


def train_bpe(
    source: Path | Iterable[str | Path], vocab_size: int, specials: Sequence[str] = (), *, min_frequency: int = 2
) -> ByteLevelBPE:
    """Train byte-level BPE. The same texts always produce the same tokenizer.

    Args:
        source: Texts, or paths of text files whose lines are used.
        vocab_size: Maximum vocabulary size: <pad>, <bos>, <eos>, `specials`, the 256 bytes, and the merges.
        specials: Additional special tokens.
        min_frequency: Minimum number of occurrences of a merged pair.

    Returns:
        The tokenizer; its vocabulary is smaller than requested if the texts contain too few pairs to merge.

    Raises:
        ConfigError: The vocabulary is too small or too large, or a special token is repeated.
        DataError: `source` is a single str.
    """
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

    if isinstance(source, str):
        raise DataError(f"source is the text {source[:40]!r}; expected a list of texts, or a Path of a file")
    names = [PAD, BOS, EOS, *specials]
    always = f"each must be there once, and {PAD}, {BOS}, {EOS} always are"
    require(len(set(names)) == len(names), f"special tokens {names}: {always}")
    check_int(vocab_size, "vocab_size", maximum=_MAX_VOCAB_SIZE)
    why = f"{len(names)} special tokens and {N_BYTES} bytes need {len(names) + N_BYTES}"
    require(vocab_size >= len(names) + N_BYTES, f"vocab_size {vocab_size} is too small: {why}")
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=names,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_texts(source), trainer)
    return ByteLevelBPE(inner)


def _texts(source: Path | Iterable[str | Path]) -> Iterator[str]:
    for item in [source] if isinstance(source, Path) else source:
        if isinstance(item, Path):
            for _, line in files.read_lines(item):
                yield (line or b"").decode(errors="ignore")
        else:
            yield item


# ---------------------------------------------------------------------- third-party tokenizers

ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_CONFIG_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the later one has precedence


def _role(role: str, purpose: str) -> property:
    """Return a property with the id of the special token of a role."""

    def number(self: HFTokenizer) -> int:
        if role not in self.specials:
            raise DataError(f"this tokenizer has no token for {purpose}: its files define no {role}")
        token_id = self._inner.token_to_id(self.specials[role])
        assert token_id is not None  # `specials` contains only tokens of the vocabulary
        return token_id

    return property(number)


@dataclass(frozen=True)
class TokenEncoding:
    """The encoding of a text, or of a pair, with its special tokens.

    Attributes:
        ids: Token ids.
        segments: Segment of each token: 1 for the second text of a pair in BERT.
        spans: First and end character of each token in its text.
        sequences: 0 or 1 for tokens of the first or the second text, None for special tokens.
    """

    ids: list[int]
    segments: list[int]
    spans: list[tuple[int, int]]
    sequences: list[int | None]


class HFTokenizer(TokenizersBackend):
    """A third-party tokenizer. `encode` adds no special tokens; `prompt` adds those that the models expect.

    `specials` maps roles ("bos_token", "eos_token", "pad_token", …) to tokens, as far as they are defined."""

    def __init__(self, inner: LibraryTokenizer, specials: Mapping[str, str]) -> None:
        super().__init__(inner, is_bytes='"ByteLevel"' in json.dumps(json.loads(inner.to_str()).get("decoder")))
        self._inner.no_truncation()
        self._inner.no_padding()
        self._lock = threading.RLock()  # truncation is a setting of the library's tokenizer
        self.specials = {role: token for role, token in specials.items() if inner.token_to_id(token) is not None}

    pad_id = _role("pad_token", "padding")
    bos_id = _role("bos_token", "the start of a text")
    eos_id = _role("eos_token", "the end of a text")

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        with self._lock:
            return super().encode_batch(texts, special=special)

    @contextmanager
    def _truncation(self, longest: int | None, **options: Any) -> Iterator[None]:
        """Truncate texts, but not their special tokens, to `longest` tokens inside the block."""
        with self._lock:
            if longest is not None:
                self._inner.enable_truncation(longest, **options)
            try:
                yield
            finally:
                self._inner.no_truncation()

    def prompt(self, text: str, longest: int | None = None) -> list[int]:
        with self._truncation(longest):
            return self.encode_batch([text], special=True)[0]

    def encode_with_spans(
        self, text: str, pair: str | None = None, *, longest: int | None = None, stride: int | None = None
    ) -> list[TokenEncoding]:
        """Return the encodings of a text, or of a pair of texts, with the characters of each token.

        Args:
            text: The text.
            pair: A second text.
            longest: Largest number of tokens; longer texts are truncated.
            stride: If given, the rest of a long second text follows in further encodings with the same first text. They
                overlap by this number of tokens.
        """
        strategy = "longest_first" if stride is None else "only_second"
        try:
            with self._truncation(longest, stride=stride or 0, strategy=strategy):
                first = self._inner.encode(require_text(text), None if pair is None else require_text(pair))
        except Exception as error:  # the library raises bare Exception, also if the first text alone is too long
            raise DataError(f"the text cannot be encoded in {longest} tokens: {error}") from error
        encodings = [first, *(first.overflowing if stride is not None else [])]
        return [TokenEncoding(row.ids, row.type_ids, row.offsets, row.sequence_ids) for row in encodings]

    def __reduce__(self) -> tuple[object, ...]:
        return _from_text, (self.to_json(), dict(self.specials))


def load_hf_tokenizer(folder: Path) -> HFTokenizer:
    """Load the tokenizer of a folder in the format of transformers.

    Raises:
        StorageError: The files are not a tokenizer.
    """
    path = folder / FILE_NAME
    specials: dict[str, str] = {}
    for config_path in (folder / name for name in _CONFIG_FILES):
        specials |= _specials(config_path) if config_path.is_file() else {}
    if not path.is_file():
        models = [folder / name for name in FILES if (folder / name).is_file()]
        if models:
            inner, model_specials = read_sentence_pieces(models[0])
            return HFTokenizer(inner, model_specials | specials)
        if has_vocabulary_files(folder):
            inner, model_specials = read_vocabulary_files(folder)
            return HFTokenizer(inner, model_specials | specials)
    try:
        return _from_text(path.read_text(encoding="utf-8"), specials)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is not a tokenizer: {error}") from error


def _from_text(text: str, specials: Mapping[str, str]) -> HFTokenizer:
    return HFTokenizer(_inner(text), specials)


def _specials(path: Path) -> dict[str, str]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        pairs = {role: fields.get(role) for role in ROLES}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path} is not an object of JSON: {error}") from error
    # A token is a string, or an object with its content.
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in pairs.items()}
    return {role: token for role, token in texts.items() if isinstance(token, str)}
