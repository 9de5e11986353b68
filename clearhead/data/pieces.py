"""Any tokenizer.json of the `tokenizers` library: WordPiece, Unigram or byte pairs, as its maker wrote it; or a
SentencePiece model, where a folder has no such file.

The file says how text is cut; which of its tokens begin, end and fill a text is said beside it, in
`tokenizer_config.json` or `special_tokens_map.json`. All of it is data: reading it runs no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.data.sentence_pieces import FILES, read_sentence_pieces
from clearhead.data.tokenizers import FILE_NAME, LibraryTokenizer, piece_of_bytes, visible
from clearhead.errors import DataError, StorageError

ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_BESIDE = ("special_tokens_map.json", "tokenizer_config.json")  # the later one counts


def _role(role: str, what: str) -> property:
    def number(self: Pieces) -> int:
        if role not in self.specials:
            raise DataError(f"this tokenizer has no token for {what}: its maker names no {role}")
        return self._inner.token_to_id(self.specials[role])

    return property(number)


class Pieces(LibraryTokenizer):
    """A maker's tokenizer. `encode` adds no special token; `prompt` adds those that the maker's models are given.

    `specials` are the tokens for "bos_token", "eos_token", "pad_token" and the like, as far as there are any."""

    def __init__(self, inner: Any, specials: Mapping[str, str]) -> None:
        super().__init__(inner)
        self._inner.no_truncation()
        self._inner.no_padding()
        self.specials = {role: token for role, token in specials.items() if inner.token_to_id(token) is not None}
        self._special = {i: token.content for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self._is_bytes = '"ByteLevel"' in json.dumps(json.loads(inner.to_str()).get("decoder"))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: makers leave gaps."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    pad_id = _role("pad_token", "filling a text up")
    bos_id = _role("bos_token", "beginning a text")
    eos_id = _role("eos_token", "ending a text")

    def prompt(self, text: str, longest: int | None = None) -> list[int]:
        if longest is not None:
            self._inner.enable_truncation(longest)  # of the text: the special tokens around it stay
        try:
            return self.encode_batch([text], special=True)[0]
        finally:
            self._inner.no_truncation()

    def label(self, number: int) -> str:
        piece = self._inner.id_to_token(number)
        if piece is None:
            return f"<{number}>"  # a gap in the vocabulary
        if number in self._special:
            return piece
        return piece_of_bytes(piece) if self._is_bytes else visible(piece.replace("▁", " "))

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_text, (self.to_json(), dict(self.specials))


def load_pieces(folder: Path) -> Pieces:
    """The tokenizer of a folder that its maker's library wrote."""
    path = folder / FILE_NAME
    specials: dict[str, str] = {}
    for beside in (folder / name for name in _BESIDE):
        specials |= _specials(beside) if beside.is_file() else {}
    if not path.is_file() and (others := [folder / name for name in FILES if (folder / name).is_file()]):
        inner, own = read_sentence_pieces(others[0])
        return Pieces(inner, own | specials)
    try:
        return _from_text(path.read_text(encoding="utf-8"), specials)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is not a tokenizer: {error}") from error


def _from_text(text: str, specials: Mapping[str, str]) -> Pieces:
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_str(text)
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise StorageError(f"this is not a tokenizer of the tokenizers library: {error}") from error
    return Pieces(inner, specials)


def _specials(path: Path) -> dict[str, str]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        pairs = {role: fields.get(role) for role in ROLES}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path} is not an object of JSON: {error}") from error
    # A token is written as its text, or as an object that holds it.
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in pairs.items()}
    return {role: token for role, token in texts.items() if isinstance(token, str)}
