"""Sort letters and remove repeats: a decoder continues `D A A <START>` with `A D <STOP>`.

This is Problem 2 (deduplicating and sorting) of the Final Exam of 22 January 2025. Examples are generated on demand, in
any number. The loss covers the output only, because the letters of a random input cannot be predicted. A hash of the
content assigns one in 32 inputs to validation; these never occur in training."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from clearhead._core import counter_rng
from clearhead._core.shapes import Bool, Int
from clearhead._core.validation import PositiveInt, Probability, require
from clearhead.config import Validated
from clearhead.data.batch import Split, TokenBatch
from clearhead.data.packing import length_mask, round_up
from clearhead.data.tokenizers.base import WordLevelTokenizer
from clearhead.errors import DataError

START, STOP, PAD = "<START>", "<STOP>", "<PAD>"
_LENGTH = 307
_ORDER = 311
_LETTER = 313
_NARROW = 317
_CONTENT = 331
_VALIDATION = -1  # RNG stream of the held-out part; the others are the epochs
_HELD_OUT_RATIO = 32
_MAX_TRIALS = 64
_ROWS_PER_CHUNK = 1 << 14
Letters: TypeAlias = tuple[Int[Tensor, "B T"], Int[Tensor, " B"]]  # the letters of each row, and their number


def alphabet(n: int) -> list[str]:
    """Return the first n of A … Z, AA, AB, …, in sorting order."""
    words = (itertools.product(string.ascii_uppercase, repeat=width) for width in itertools.count(1))
    return ["".join(letters) for letters in itertools.islice(itertools.chain.from_iterable(words), n)]


def vocabulary(n_symbols: int) -> WordLevelTokenizer:
    """Return a tokenizer with the letters as ids 0 … n − 1 in sorting order, then <START>, <STOP>, <PAD>."""
    return WordLevelTokenizer([*alphabet(n_symbols), START, STOP, PAD], pad=PAD, bos=START, eos=STOP)


def sorted_without_repeats(letters: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Letters:
    """Return each row's distinct letters in order, and their number; the columns after them are undefined."""
    beyond = int(letters.max()) + 1 if letters.numel() else 1
    real = length_mask(lengths, letters.shape[1])
    in_order = letters.masked_fill(~real, beyond).sort(dim=1).values
    first = torch.ones_like(real)
    first[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    first &= in_order != beyond
    # A stable sort of "not first" moves the first occurrences to the left and keeps their order.
    return in_order.gather(1, torch.argsort((~first).to(torch.int8), dim=1, stable=True)), first.sum(1)


@dataclass(frozen=True, kw_only=True)
class LetterInputs(Validated):
    """Distribution of the inputs: alphabet size and lengths."""

    n_symbols: PositiveInt = 26
    lengths: tuple[PositiveInt, ...] = tuple(range(1, 33))
    narrow: Probability = 0.5  # share of inputs from a random part of the alphabet, with many repeats
    seed: int = 0

    def validate(self) -> None:
        require(bool(self.lengths), "LetterInputs: lengths is empty; expected at least one length")

    def draw(self, rows: Int[Tensor, " B"], *, stream: int, trial: int = 0) -> Letters:
        """Return random letters, (B, longest length), and lengths for the rows of an RNG stream."""
        keys = (self.seed, stream, trial, rows)
        wide = (self.seed, stream, trial, rows[:, None])
        choices = torch.tensor(self.lengths, device=rows.device)
        lengths = choices[counter_rng.randint(len(choices), _LENGTH, *keys)]
        is_narrow = counter_rng.uniform(_NARROW, 0, *keys) < self.narrow
        # A narrow example uses only the first few letters of an alphabet in random order.
        n_used = torch.where(is_narrow, counter_rng.randint(self.n_symbols, _NARROW, 1, *keys) + 1, self.n_symbols)
        symbols = torch.arange(self.n_symbols, device=rows.device)
        columns = torch.arange(max(self.lengths), device=rows.device)
        order = torch.argsort(counter_rng.random_bits(_ORDER, *wide, symbols), dim=1)  # (B, n_symbols)
        return order.gather(1, counter_rng.randint(n_used[:, None], _LETTER, *wide, columns)), lengths


def is_held_out(letters: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Return whether inputs are reserved for validation, which depends on their letters only."""
    columns = torch.arange(letters.shape[1], device=letters.device)
    content = (
        counter_rng.random_bits(_CONTENT, letters, columns)
        .masked_fill(~length_mask(lengths, letters.shape[1]), 0)
        .sum(1)
    )
    return counter_rng.randint(_HELD_OUT_RATIO, _CONTENT, lengths, content) == 0


def held_out(inputs: LetterInputs, n_examples: int) -> Letters:
    """Return up to `n_examples` distinct inputs that training never uses."""
    distinct: dict[tuple[int, ...], None] = {}  # ordered
    # One draw in 32 is held out, so twice as many draws are enough unless there are few distinct inputs.
    for rows in torch.arange(max(_ROWS_PER_CHUNK, 2 * _HELD_OUT_RATIO * n_examples)).split(_ROWS_PER_CHUNK):
        letters, n_in = inputs.draw(rows, stream=_VALIDATION)
        is_reserved = is_held_out(letters, n_in)
        for row, n in zip(letters[is_reserved].tolist(), n_in[is_reserved].tolist(), strict=True):
            distinct[tuple(row[:n])] = None
        if len(distinct) >= n_examples:
            break
    examples = list(distinct)[:n_examples]
    if not examples:
        raise DataError(f"{inputs}: too few distinct inputs for validation; increase n_symbols or the lengths")
    widest = max(inputs.lengths)
    return torch.tensor([(*row, *[0] * (widest - len(row))) for row in examples]), torch.tensor(
        list(map(len, examples))
    )


class SortSplit(Split[TokenBatch]):
    """Fixed examples, or new ones in every epoch that are not held out."""

    device_attrs: ClassVar[tuple[str, ...]] = ("_letters", "_n_in")

    def __init__(self, inputs: LetterInputs, n_examples: int, fixed: Letters | None = None) -> None:
        self.inputs = inputs
        self.n_examples = n_examples
        self._is_fixed = fixed is not None
        # If the examples are not fixed, only the device of these tensors is used.
        self._letters, self._n_in = fixed if fixed is not None else (torch.zeros(0, 0), torch.zeros(0))
        self.tokenizer = vocabulary(inputs.n_symbols)
        self._lengths: tuple[int, Tensor] | None = None  # epoch and lengths of the last call

    def __len__(self) -> int:
        return len(self._n_in) if self._is_fixed else self.n_examples

    def letters(self, rows: Int[Tensor, " B"], epoch: int = 0) -> Letters:
        """Return the input of each row: its letters and their number."""
        rows = rows.to(self._n_in.device)
        if self._is_fixed:
            return self._letters[rows], self._n_in[rows]
        letters, n_in = self.inputs.draw(rows, stream=epoch)
        for trial in range(1, _MAX_TRIALS):
            again = is_held_out(letters, n_in).nonzero().flatten()
            if not len(again):
                return letters, n_in
            letters[again], n_in[again] = self.inputs.draw(rows[again], stream=epoch, trial=trial)
        raise DataError(
            f"{self.inputs}: too few distinct inputs, nearly all of them held out; increase n_symbols or the lengths"
        )

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        if self._lengths is None or self._lengths[0] != epoch:
            parts = []
            for rows in torch.arange(len(self)).split(_ROWS_PER_CHUNK):
                letters, n_in = self.letters(rows, epoch)
                parts.append((n_in + 1 + sorted_without_repeats(letters, n_in)[1]).cpu())
            self._lengths = epoch, torch.cat(parts)[:, None]
        return self._lengths[1]

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> TokenBatch:
        return make_batch(*self.letters(rows, epoch), self.tokenizer, multiple=multiple)


def make_batch(
    letters: Int[Tensor, "B T"], n_in: Int[Tensor, " B"], tokenizer: WordLevelTokenizer, *, multiple: int = 1
) -> TokenBatch:
    """Return a batch with the inputs `letters <START> output` and the labels `output <STOP>` from <START> on."""
    output, n_out = sorted_without_repeats(letters, n_in)
    lengths = n_in + 1 + n_out  # the input of the model: without <STOP>
    width = round_up(int(lengths.max()), multiple)
    # One column more than the model's input: inputs drop the last token, labels the first.
    position = torch.arange(width + 1, device=letters.device).expand(len(letters), -1)
    output_index = position - n_in[:, None] - 1  # index in the output; −1 is <START>
    columns = letters.shape[1] - 1
    input_letters = letters.gather(1, position.clamp(max=columns))
    output_letters = output.gather(1, output_index.clamp(min=0, max=columns))
    tokens = torch.where(output_index < 0, input_letters, output_letters).masked_fill(
        output_index == -1, tokenizer.bos_id
    )
    tokens = tokens.masked_fill(output_index == n_out[:, None], tokenizer.eos_id)
    tokens = tokens.masked_fill(output_index > n_out[:, None], tokenizer.pad_id)
    real = length_mask(lengths, width)
    is_label = real & (position[:, 1:] > n_in[:, None])
    return TokenBatch(
        ids=tokens[:, :-1].masked_fill(~real, tokenizer.pad_id),
        lengths=lengths,
        labels=tokens[:, 1:].contiguous(),
        weights=is_label.to(torch.float32),
        n_tokens=int(lengths.sum()),
        n_padded=len(letters) * width,
        n_labels=int((n_out + 1).sum()),
    )


class SortDedup:
    """The task of sorting letters and removing repeats. `unseen_lengths` occur in validation only."""

    name = "sort-dedup"

    def __init__(
        self,
        *,
        n_symbols: int = 26,
        max_length: int = 32,
        unseen_lengths: Sequence[int] = (),
        narrow: float = 0.5,
        n_train: int = 1 << 16,
        n_validation: int = 1 << 11,
        seed: int = 0,
    ) -> None:
        lengths = tuple(range(1, max_length + 1))
        excluded = tuple(unseen_lengths)
        train_lengths = tuple(length for length in lengths if length not in excluded)
        require(bool(train_lengths), f"max_length is {max_length} and unseen_lengths {excluded}; no length remains")
        self.max_length = max_length
        self.longest = max_length + 1 + min(n_symbols, max_length)  # maximum number of tokens of an example
        self.tokenizer = vocabulary(n_symbols)
        inputs = LetterInputs(n_symbols=n_symbols, lengths=lengths, narrow=narrow, seed=seed)
        self.train = SortSplit(replace(inputs, lengths=train_lengths), n_train)
        self.validation = SortSplit(inputs, n_validation, held_out(inputs, n_validation))
