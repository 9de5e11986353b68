"""Sort and remove repeats: `D A A <START>` is to be continued with `A D <STOP>`, by a decoder.

After the Final Exam of 22 January 2025, Problem 2 (deduplicating and sorting). The examples are made when asked for, in
any number. The loss is on the output part alone: what letter comes next in a random input cannot be learnt. Inputs are
kept apart by their content: one in every 32, chosen by a hash, is for validation and never in training."""

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
from clearhead.data.packing import inside, round_up
from clearhead.data.tokenizers.base import Symbols
from clearhead.errors import DataError

START, STOP, PAD = "<START>", "<STOP>", "<PAD>"
_LENGTH, _ORDER, _LETTER, _NARROW, _CONTENT = 307, 311, 313, 317, 331
_VALIDATION = -1  # the stream of the held-out part; the epochs are the others
_ONE_IN = 32
_TRIES = 64
_AT_ONCE = 1 << 14
Letters: TypeAlias = tuple[Int[Tensor, "B T"], Int[Tensor, " B"]]  # the letters of each row, and how many they are


def alphabet(n: int) -> list[str]:
    """The first n of A … Z, AA, AB, …, in their order: the order that sorting means here."""
    words = (itertools.product(string.ascii_uppercase, repeat=width) for width in itertools.count(1))
    return ["".join(letters) for letters in itertools.islice(itertools.chain.from_iterable(words), n)]


def vocabulary(n_symbols: int) -> Symbols:
    """The letters as ids 0 … n − 1, in the order that sorting means, then <START>, <STOP>, <PAD>."""
    return Symbols([*alphabet(n_symbols), START, STOP, PAD], pad=PAD, bos=START, eos=STOP)


def sorted_without_repeats(letters: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Letters:
    """Each row's distinct letters in order, and how many; what stands to their right means nothing."""
    beyond = int(letters.max()) + 1 if letters.numel() else 1
    real = inside(lengths, letters.shape[1])
    in_order = letters.masked_fill(~real, beyond).sort(dim=1).values
    first = torch.ones_like(real)
    first[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    first &= in_order != beyond
    # A stable sort of "not first" brings the firsts to the left and keeps their order.
    return in_order.gather(1, torch.argsort((~first).to(torch.int8), dim=1, stable=True)), first.sum(1)


@dataclass(frozen=True, kw_only=True)
class Inputs(Validated):
    """What inputs there are: how many different letters, and which lengths."""

    n_symbols: PositiveInt = 26
    lengths: tuple[PositiveInt, ...] = tuple(range(1, 33))
    narrow: Probability = 0.5  # what part is drawn from a random part of the alphabet, where repeats are many
    seed: int = 0

    def validate(self) -> None:
        require(bool(self.lengths), "Inputs: lengths is empty; expected at least one")

    def draw(self, rows: Int[Tensor, " B"], *, stream: int, trial: int = 0) -> Letters:
        """Random letters (as wide as the longest length there is) and lengths, for each row of a stream."""
        keys = (self.seed, stream, trial, rows)
        wide = (self.seed, stream, trial, rows[:, None])
        places = torch.tensor(self.lengths, device=rows.device)
        lengths = places[counter_rng.randint(len(places), _LENGTH, *keys)]
        is_narrow = counter_rng.uniform(_NARROW, 0, *keys) < self.narrow
        # A narrow example uses only the first few letters of an alphabet in random order.
        known = torch.where(is_narrow, counter_rng.randint(self.n_symbols, _NARROW, 1, *keys) + 1, self.n_symbols)
        symbols = torch.arange(self.n_symbols, device=rows.device)
        columns = torch.arange(max(self.lengths), device=rows.device)
        order = torch.argsort(counter_rng.random_bits(_ORDER, *wide, symbols), dim=1)  # (B, n_symbols)
        return order.gather(1, counter_rng.randint(known[:, None], _LETTER, *wide, columns)), lengths


def is_held_out(letters: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether an input is one of those kept for validation: a property of its letters alone."""
    columns = torch.arange(letters.shape[1], device=letters.device)
    content = (
        counter_rng.random_bits(_CONTENT, letters, columns).masked_fill(~inside(lengths, letters.shape[1]), 0).sum(1)
    )
    return counter_rng.randint(_ONE_IN, _CONTENT, lengths, content) == 0


def held_out(inputs: Inputs, n_examples: int) -> Letters:
    """A fixed choice of the inputs that training never has, each once, as far as there are so many."""
    found: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    # One draw in 32 is held out: twice that many are enough unless there are few different inputs.
    for rows in torch.arange(max(_AT_ONCE, 2 * _ONE_IN * n_examples)).split(_AT_ONCE):
        letters, n_in = inputs.draw(rows, stream=_VALIDATION)
        held = is_held_out(letters, n_in)
        for row, n in zip(letters[held].tolist(), n_in[held].tolist(), strict=True):
            found[tuple(row[:n])] = None
        if len(found) >= n_examples:
            break
    chosen = list(found)[:n_examples]
    if not chosen:
        raise DataError(f"{inputs}: too few different inputs to hold any out: raise n_symbols or the lengths")
    widest = max(inputs.lengths)
    return torch.tensor([(*row, *[0] * (widest - len(row))) for row in chosen]), torch.tensor(list(map(len, chosen)))


class SortSplit(Split[TokenBatch]):
    """Examples made from inputs: a choice of them or, without one, new ones in every epoch, none of them held out."""

    device_attrs: ClassVar[tuple[str, ...]] = ("_letters", "_n_in")

    def __init__(self, inputs: Inputs, n_examples: int, chosen: Letters | None = None) -> None:
        self.inputs, self.n_examples, self._is_chosen = inputs, n_examples, chosen is not None
        # Without a choice these only say on which device examples are made.
        self._letters, self._n_in = chosen if chosen is not None else (torch.zeros(0, 0), torch.zeros(0))
        self.tokenizer = vocabulary(inputs.n_symbols)
        self._lengths: tuple[int, Tensor] | None = None  # of the epoch last asked for

    def __len__(self) -> int:
        return len(self._n_in) if self._is_chosen else self.n_examples

    def letters(self, rows: Int[Tensor, " B"], epoch: int = 0) -> Letters:
        """The input of each row as letters and their number."""
        rows = rows.to(self._n_in.device)
        if self._is_chosen:
            return self._letters[rows], self._n_in[rows]
        letters, n_in = self.inputs.draw(rows, stream=epoch)
        for trial in range(1, _TRIES):
            again = is_held_out(letters, n_in).nonzero().flatten()
            if not len(again):
                return letters, n_in
            letters[again], n_in[again] = self.inputs.draw(rows[again], stream=epoch, trial=trial)
        raise DataError(
            f"{self.inputs}: too few different inputs, nearly all of them held out: raise n_symbols or the lengths"
        )

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        if self._lengths is None or self._lengths[0] != epoch:
            parts = []
            for rows in torch.arange(len(self)).split(_AT_ONCE):
                letters, n_in = self.letters(rows, epoch)
                parts.append((n_in + 1 + sorted_without_repeats(letters, n_in)[1]).cpu())
            self._lengths = epoch, torch.cat(parts)[:, None]
        return self._lengths[1]

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> TokenBatch:
        return make_batch(*self.letters(rows, epoch), self.tokenizer, multiple=multiple)


def make_batch(
    letters: Int[Tensor, "B T"], n_in: Int[Tensor, " B"], tokenizer: Symbols, *, multiple: int = 1
) -> TokenBatch:
    """`letters <START> output` as input; `output <STOP>` as the labels that count, from <START> on."""
    output, n_out = sorted_without_repeats(letters, n_in)
    lengths = n_in + 1 + n_out  # the input of the model: without <STOP>
    width = round_up(int(lengths.max()), multiple)
    # One row more than the model's input is wide: what is shifted off at one end is new at the other.
    place = torch.arange(width + 1, device=letters.device).expand(len(letters), -1)
    after = place - n_in[:, None] - 1  # place in the output; −1 is <START>
    columns = letters.shape[1] - 1
    given, wanted = letters.gather(1, place.clamp(max=columns)), output.gather(1, after.clamp(min=0, max=columns))
    whole = torch.where(after < 0, given, wanted).masked_fill(after == -1, tokenizer.bos_id)
    whole = whole.masked_fill(after == n_out[:, None], tokenizer.eos_id)
    whole = whole.masked_fill(after > n_out[:, None], tokenizer.pad_id)
    real = inside(lengths, width)
    learnt = real & (place[:, 1:] > n_in[:, None])
    return TokenBatch(
        ids=whole[:, :-1].masked_fill(~real, tokenizer.pad_id),
        lengths=lengths,
        labels=whole[:, 1:].contiguous(),
        weights=learnt.to(torch.float32),
        n_tokens=int(lengths.sum()),
        n_padded=len(letters) * width,
        n_labels=int((n_out + 1).sum()),
    )


class SortDedup:
    """The task: sort letters and remove repeats. `unseen_lengths` are left out of training, not of validation."""

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
        lengths, unseen = tuple(range(1, max_length + 1)), tuple(unseen_lengths)
        seen = tuple(length for length in lengths if length not in unseen)
        require(bool(seen), f"max_length {max_length} without {unseen}: no length is left to train on")
        self.max_length = max_length
        self.longest = max_length + 1 + min(n_symbols, max_length)  # tokens of an example, in any epoch
        self.tokenizer = vocabulary(n_symbols)
        inputs = Inputs(n_symbols=n_symbols, lengths=lengths, narrow=narrow, seed=seed)
        self.train = SortSplit(replace(inputs, lengths=seen), n_train)
        self.validation = SortSplit(inputs, n_validation, held_out(inputs, n_validation))
