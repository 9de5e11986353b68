"""Byte-level byte pairs: a tokenizer that can write any text, trained and run by the `tokenizers` library.

Nothing is ever unknown, and decoding gives back exactly what was encoded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead._shapes import Int
from clearhead.data import files
from clearhead.data.tokenizers import BOS, EOS, N_BYTES, PAD, LibraryTokenizer, as_text, piece_of_bytes
from clearhead.errors import ConfigError, DataError
from clearhead.values import require

_PIECE = 4_096  # characters that are encoded as one text
_PIECES_AT_ONCE = 4_096


class BytePairs(LibraryTokenizer):
    """Byte-level byte-pair encoding. Any text has ids, and `decode(encode(text)) == text`.

    A special token's name inside a text is text like any other: only `pad_id` and its like stand for the
    tokens themselves."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._inner.encode_special_tokens = True
        ids = {name: inner.token_to_id(name) for name in (PAD, BOS, EOS)}
        missing = ", ".join(name for name, number in ids.items() if number is None)
        expected = f"expected {PAD}, {BOS} and {EOS}: train one with train_bpe"
        require(not missing, f"this tokenizer has no {missing}; {expected}")
        self.pad_id, self.bos_id, self.eos_id = ids[PAD], ids[BOS], ids[EOS]
        self._special = {i: token.content for i, token in inner.get_added_tokens_decoder().items()}

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size()

    def encode_long(self, text: str) -> Int[Tensor, " T"]:
        import numpy

        # Where a single line end stands between two words no token can reach across it, so the ids are those of the
        # whole text, while the pieces run in parallel and only some of them are held as Python objects at a time. A few
        # thousand characters at once take the library half the time of single lines.
        text, cuts = as_text(text), [0]
        for match in re.finditer(r"\S\n(?=\S)", text):
            if match.end() - cuts[-1] >= _PIECE:
                cuts.append(match.end())
        pieces = [text[one:other] for one, other in pairwise([*cuts, len(text)])]
        parts = [torch.zeros(0, dtype=torch.int32)]
        for first in range(0, len(pieces), _PIECES_AT_ONCE):
            ids = chain.from_iterable(self.encode_batch(pieces[first : first + _PIECES_AT_ONCE]))
            parts.append(torch.from_numpy(numpy.fromiter(ids, dtype=numpy.int32)))
        return torch.cat(parts)

    def label(self, number: int) -> str:
        return self._special.get(number) or piece_of_bytes(self._inner.id_to_token(number))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and pickled by what is stored: the library's own way forgets that special names are text.
        return from_json, (self.to_json(),)


def from_json(text: str) -> BytePairs:
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_str(text)
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise ConfigError(str(error)) from error
    return BytePairs(inner)


def train_bpe(
    source: Path | Iterable[str | Path], vocab_size: int, specials: Sequence[str] = (), *, min_frequency: int = 2
) -> BytePairs:
    """Train byte-level byte pairs on texts, or on the lines of files (given as `Path`).

    The vocabulary is <pad>, <bos>, <eos>, then `specials`, the 256 bytes, and as many merged pairs as are
    left up to `vocab_size` and occur at least `min_frequency` times. The same texts give the same tokenizer."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if isinstance(source, str):
        then = "give a list of texts, or a Path where a file is meant"
        raise DataError(f"source is the text {source[:40]!r}, whose letters would be taken for texts: {then}")
    names = [PAD, BOS, EOS, *specials]
    always = f"each must be there once, and {PAD}, {BOS}, {EOS} always are"
    require(len(set(names)) == len(names), f"special tokens {names}: {always}")
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
    return BytePairs(inner)


def _texts(source: Path | Iterable[str | Path]) -> Iterator[str]:
    for item in [source] if isinstance(source, Path) else source:
        if isinstance(item, Path):
            for _, line in files.lines(item):
                yield (line or b"").decode(errors="ignore")
        else:
            yield item
