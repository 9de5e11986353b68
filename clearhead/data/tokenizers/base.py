"""The tokenizer interface, and two simple tokenizers: characters, and words of a fixed vocabulary.

`library.py` contains the tokenizers of the `tokenizers` library. Every tokenizer is stored as one `tokenizer.json`,
which is data: reading it executes no code."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from clearhead._core.atomic_io import write_atomically
from clearhead._core.shapes import Int
from clearhead._core.validation import require
from clearhead.errors import ConfigError, DataError, StorageError

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
FILE_NAME = "tokenizer.json"
TOKENIZERS_MISSING = "this tokenizer needs the tokenizers package: pip install 'clearhead[text]'"


class Tokenizer(ABC):
    """Interface of tokenizers. `encode` adds no special tokens, and `decode` skips them."""

    pad_id: int
    bos_id: int
    eos_id: int

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, including special tokens."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | Int[Tensor, " T"]) -> str:
        """Return the text of ids, without special tokens."""

    @abstractmethod
    def tokens(self, ids: Sequence[int] | Int[Tensor, " T"]) -> list[str]:
        """Return a readable label for each id, for plots and tables."""

    def prompt(self, text: str, longest: int | None = None) -> list[int]:
        """Return the ids of a text with the special tokens that the model expects, truncated to `longest` ids."""
        return self.encode(text)[:longest]

    @abstractmethod
    def to_json(self) -> str:
        """Return the content of tokenizer.json."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts, in parallel if the tokenizer supports it."""
        return [self.encode(text) for text in texts]

    def encode_long(self, text: str) -> Int[Tensor, " T"]:
        """Encode a long text, such as a corpus, as one int32 tensor."""
        return torch.tensor(self.encode(text), dtype=torch.int32)

    def save(self, folder: Path | str) -> Path:
        """Write `tokenizer.json` atomically into a folder and return its path."""
        path = Path(folder) / FILE_NAME
        write_atomically(path, self.to_json().encode())
        return path


def id_list(ids: Sequence[int] | Tensor, vocab_size: int) -> list[int]:
    """Return ids as a list, or raise DataError if one is outside the vocabulary."""
    numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if odd := [number for number in numbers if not 0 <= number < vocab_size]:
        raise DataError(f"id {odd[0]} is outside the vocabulary: expected 0 to {vocab_size - 1}")
    return numbers


_VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥"}


def display_token(piece: str) -> str:
    """Return a display form of a token: symbols for line ends and control characters, ␣ for tokens of spaces.

    A space before a word is kept, so that the joined tokens of a printable text are the text."""
    if piece and not piece.strip(" "):
        return "␣" * len(piece)
    return "".join(
        _VISIBLE.get(c, c if c == " " or c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode())
        for c in piece
    )


def require_text(text: object) -> str:
    """Return the text, or raise DataError if it is not a str."""
    if not isinstance(text, str):
        raise DataError(f"a tokenizer reads text, and this is a {type(text).__name__}: {text!r:.60}")
    return text


class CharTokenizer(Tokenizer):
    """One id per character of an alphabet.

    Args:
        alphabet: The characters.
        unknown: Whether other characters become <unk>; by default they raise DataError.
    """

    def __init__(self, alphabet: Iterable[str], *, unknown: bool = False) -> None:
        self.alphabet = "".join(alphabet)
        require(len(set(self.alphabet)) == len(self.alphabet), "an alphabet must have each character once")
        self.unknown = unknown
        self._names = [PAD, BOS, EOS, *([UNK] if unknown else [])]
        self.pad_id = 0
        self.bos_id = 1
        self.eos_id = 2
        # Of the special tokens only <unk> represents a character of the text.
        self._letters = ["", "", "", *(["\N{REPLACEMENT CHARACTER}"] if unknown else []), *self.alphabet]
        # One entry per code point, so that encoding is a table lookup.
        self._id_of = torch.full((0x110000,), 3 if unknown else -1, dtype=torch.int32)
        ids = torch.arange(len(self.alphabet), dtype=torch.int32) + len(self._names)
        self._id_of[_code_points(self.alphabet)] = ids

    @classmethod
    def of(cls, text: str, *, unknown: bool = False) -> CharTokenizer:
        """Create a tokenizer with the characters of a text, in the order of their code points."""
        return cls(sorted(set(text)), unknown=unknown)

    @property
    def vocab_size(self) -> int:
        return len(self._names) + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        return self.encode_long(text).tolist()

    def encode_long(self, text: str) -> Int[Tensor, " T"]:
        ids = self._id_of[_code_points(require_text(text))]
        if len(unknown := (ids < 0).nonzero()):
            index = int(unknown[0])
            raise DataError(
                f"character {text[index]!r} (number {index} of the text) is not in the alphabet of "
                f"{len(self.alphabet)}: remove it, or use CharTokenizer(…, unknown=True), which reads it as {UNK}"
            )
        return ids

    def decode(self, ids: Sequence[int] | Int[Tensor, " T"]) -> str:
        return "".join(self._letters[i] for i in id_list(ids, self.vocab_size))

    def tokens(self, ids: Sequence[int] | Int[Tensor, " T"]) -> list[str]:
        first = len(self._names)
        numbers = id_list(ids, self.vocab_size)
        return [display_token(self.alphabet[i - first]) if i >= first else self._names[i] for i in numbers]

    def to_json(self) -> str:
        return json.dumps({"type": "characters", "alphabet": self.alphabet, "unknown": self.unknown}, indent=1)


def _code_points(text: str) -> Tensor:
    """Return the Unicode code points of a text."""
    if not text:
        return torch.zeros(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(text.encode("utf-32-le", "surrogatepass")), dtype=torch.int32).to(torch.int64)


class WordLevelTokenizer(Tokenizer):
    """Words of a fixed vocabulary, separated by spaces. Ids are indices in the list of words.

    Args:
        symbols: The words, in the order of their ids.
        pad: The word for padding.
        bos: The word that starts a sequence.
        eos: The word that ends a sequence.

    >>> s = WordLevelTokenizer(["A", "D", "<PAD>", "<START>", "<STOP>"], pad="<PAD>", bos="<START>", eos="<STOP>")
    >>> s.encode("D A A <START> A D <STOP>")
    [1, 0, 0, 3, 0, 1, 4]
    """

    def __init__(self, symbols: Sequence[str], *, pad: str = PAD, bos: str = BOS, eos: str = EOS) -> None:
        self.symbols = tuple(symbols)
        self._id_of = {symbol: i for i, symbol in enumerate(self.symbols)}
        require(len(self._id_of) == len(self.symbols), "a fixed vocabulary must have each symbol once")
        if odd := [symbol for symbol in self.symbols if symbol.split() != [symbol]]:
            raise ConfigError(f"symbol {odd[0]!r}: expected at least one character and no blanks, which part symbols")
        self.special = (pad, bos, eos)
        if len(set(self.special)) != 3 or not self._id_of.keys() >= set(self.special):
            raise ConfigError(f"pad, bos and eos are {self.special}: expected three different symbols of the list")
        self.pad_id, self.bos_id, self.eos_id = (self._id_of[name] for name in self.special)

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._id_of[symbol] for symbol in require_text(text).split()]
        except KeyError as error:
            examples = " ".join(self.symbols[:12]) + (" …" if len(self.symbols) > 12 else "")
            expected = f"expected blanks between {examples}"
            raise DataError(f"symbol {error.args[0]!r} is not in the vocabulary: {expected}") from error

    def decode(self, ids: Sequence[int] | Int[Tensor, " T"]) -> str:
        return " ".join(symbol for symbol in self.tokens(ids) if symbol not in self.special)

    def tokens(self, ids: Sequence[int] | Int[Tensor, " T"]) -> list[str]:
        return [self.symbols[i] for i in id_list(ids, self.vocab_size)]

    def to_json(self) -> str:
        pad, bos, eos = self.special
        return json.dumps({"type": "symbols", "symbols": self.symbols, "pad": pad, "bos": bos, "eos": eos}, indent=1)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer of a folder or of a `tokenizer.json`.

    Args:
        folder: A folder, or a `tokenizer.json`.

    Returns:
        The tokenizer, of the class that the files describe.

    Raises:
        StorageError: There is no valid tokenizer.
    """
    path = Path(folder)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise StorageError(f"there is no {path}: expected the {FILE_NAME} that a tokenizer's save() writes")
    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ConfigError(f"its content is a {type(fields).__name__}, expected an object")
        match fields:
            case {"type": "characters", "alphabet": str(alphabet), "unknown": bool(unknown)}:
                return CharTokenizer(alphabet, unknown=unknown)
            case {"type": "symbols", "symbols": [*symbols], "pad": str(pad), "bos": str(bos), "eos": str(eos)}:
                return WordLevelTokenizer([str(symbol) for symbol in symbols], pad=pad, bos=bos, eos=eos)
            case {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}:
                from clearhead.data.tokenizers.library import from_json

                return from_json(text)
        raise ConfigError("expected byte-level BPE, characters or symbols")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(f"{path} is not a tokenizer of this project: {type(error).__name__}: {error}") from error
