"""The models of this project as steppers: what differs between a decoder and an encoder-decoder is said here, once.

A decoder continues its prompts. Prompts of different lengths share a batch by padding on the left, so that all of them
end at the same place; a mask hides the padding and explicit positions leave it out of the count, and each row gets what
it would get alone. An encoder-decoder reads its prompts once, and continues a start that is the same for all.

    B prompts   R rows at the moment   T ids   S source ids   M model width   V vocabulary"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._shapes import Float, Int
from clearhead.attention import KVCache
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.generation.fast import Fast
from clearhead.generation.limits import Limited, Limits
from clearhead.generation.program import why_not
from clearhead.generation.prompts import Prompt, beside, frames_of, padded, rows_of
from clearhead.generation.quiet import evaluating, parts_of
from clearhead.generation.stepper import Grouped, Sliding, Stepper
from clearhead.masks import padding
from clearhead.masks.operators import is_causal, is_translation_invariant
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.models.recurrent import NextToken, Recurrent, RecurrentCache
from clearhead.models.recurrent_seq2seq import RecurrentSeq2Seq
from clearhead.positions import LearnedPositions

_Cache = KVCache | RecurrentCache
_ROOM_AHEAD = 512  # how many new tokens a cache makes room for at the start; beyond, it grows


def stepper_for(
    model: nn.Module,
    prompt: Prompt,
    *,
    start: int | Sequence[int] | None,
    max_new: int,
    use_cache: bool,
    slide: bool = False,
    limits: Limits | None = None,
    stops: tuple[int, ...] = (),
) -> Stepper:
    """The stepper of a model that goes on from `prompt`; everything that can be refused is refused here."""
    kind = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if isinstance(kind, (EncoderDecoder, RecurrentSeq2Seq)):
        stepper, begun = _reading(model, kind, prompt, start, max_new, use_cache)
    elif not isinstance(kind, (Decoder, Recurrent)):
        raise DtypeError(
            f"got a {type(model).__name__}; expected a Decoder, EncoderDecoder, Recurrent or RecurrentSeq2Seq "
            "(anything else that gives logits can be searched as a Stepper, with `search`)"
        )
    elif start is not None:
        raise ConfigError(f"start is {start!r}, but a {type(kind).__name__} goes on from its prompt; leave start out")
    else:
        stepper, begun = _continuing(model, kind, prompt, max_new, use_cache, slide)
    return stepper if limits is None else Limited(stepper, limits, begun, max_new=max_new, stops=stops)


def _batched(rows: Sequence[Tensor], alike: bool, stepper: Callable[[Sequence[Tensor]], Stepper]) -> Stepper:
    """`stepper(rows)`, or one for each length where a pattern is not `alike` with padding beside it."""
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(0 if alike else len(row), []).append(place)
    members = list(groups.values())
    if len(members) == 1:
        return stepper(rows)
    return Grouped([stepper([rows[place] for place in group]) for group in members], members)


def _continuing(
    model: nn.Module, kind: Decoder | Recurrent, prompt: Prompt, max_new: int, use_cache: bool, slide: bool
) -> tuple[Stepper, Sequence[Tensor]]:
    """A stepper for prompts to go on from, and these."""
    mask = None
    if isinstance(kind, Decoder):
        mask = kind.config.seen(kind.config.mask)
        if kind.config.cross_attention:
            raise ConfigError(
                "this Decoder reads a memory (cross_attention=True); "
                "give generate the EncoderDecoder that it belongs to"
            )
    elif not isinstance(kind.config.task, NextToken):
        raise ConfigError("this Recurrent classifies; expected one made with task=NextToken(), which predicts ids")
    rows = rows_of(prompt, kind.config.vocab_size)

    def continued(rows: Sequence[Tensor], max_new: int) -> Stepper:
        def stepper(own: Sequence[Tensor]) -> Stepper:
            longest = max(len(row) for row in own)
            cached = use_cache and (mask is None or is_causal(mask, longest, longest + max_new))
            if cached and isinstance(kind, Decoder) and why_not(kind) is None:
                return Fast(kind, own, max_new)
            return _plain_continued(model, kind, own, _cache(kind, longest, max_new) if cached else None)

        return _batched(rows, mask is None or is_translation_invariant(mask), stepper)

    table = getattr(kind, "positions", None)
    longest = max(len(row) for row in rows)
    if slide and isinstance(table, LearnedPositions) and longest + max_new - 1 > table.length:
        return Sliding(rows, table.length, continued), rows
    for place, row in enumerate(rows):
        _check_room(kind, len(row), max_new, f"prompt {place}")
    return continued(rows, max_new), rows


def _reading(
    model: nn.Module,
    kind: EncoderDecoder | RecurrentSeq2Seq,
    prompt: Prompt,
    start: int | Sequence[int] | None,
    max_new: int,
    use_cache: bool,
) -> tuple[Stepper, Sequence[Tensor]]:
    """A stepper that writes after `start` what it has read in the prompts, and the start of each."""
    config = kind.config
    if (heard := getattr(config, "n_features", None)) is None:
        rows = rows_of(prompt, config.source_vocab_size or config.vocab_size)
    else:
        rows = frames_of(prompt, heard)
    first = _start(start, config.vocab_size)
    alike = True  # whether sources of different lengths may share a batch
    if isinstance(kind, EncoderDecoder):
        for place, row in enumerate(rows):
            _check_room(kind.encoder, len(row), 1, f"prompt {place}")
        _check_room(kind.decoder, len(first), max_new, "start")
        seen = kind.config.seen(kind.config.decoder_mask)
        use_cache = use_cache and is_causal(seen, len(first), len(first) + max_new)
        # Padding on the right moves nothing; only a pattern that is drawn anew for every length notices it.
        alike = not kind.config.seen(kind.config.encoder_mask).depends_on_length
    begun = [torch.tensor(first)] * len(rows)

    def stepper(own: Sequence[Tensor]) -> Stepper:
        if use_cache and isinstance(kind, EncoderDecoder) and why_not(kind) is None:
            return Fast(kind, begun[: len(own)], max_new, own)
        return _plain_read(model, own, first, _cache(kind, len(first), max_new) if use_cache else None)

    return _batched(rows, alike, stepper), begun


class _Plain:
    """A model that is called as it is, quietly: with the newest ids where there is a cache, else with all of them.

    `taken` are tensors (R, …) that rows take along; `call(ids, cache, taken)` gives the logits of all ids."""

    def __init__(
        self, model: nn.Module, ids: Tensor, cache: _Cache | None, taken: dict[str, Tensor], call: Callable[..., Tensor]
    ) -> None:
        self._parts = parts_of(model)
        self._ids, self._cache, self._taken, self._call = ids, cache, taken, call

    def begin(self) -> Float[Tensor, "B V"]:
        # Step by step, and not around the whole search: a stream hands control back between steps.
        with evaluating(self._parts), torch.inference_mode():
            return self._call(self._ids, self._cache, self._taken)[:, -1]

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        newest = ids[:, None]
        self._ids = newest if self._cache is not None else torch.cat((self._ids, newest), dim=1)
        return self.begin()

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        rows = rows.to(self._ids.device)
        self._ids = self._ids.index_select(0, rows)
        with torch.inference_mode():
            if self._cache is not None:
                self._cache.reorder(rows)
            self._taken |= {name: x.index_select(0, rows) for name, x in self._taken.items()}


def _plain_continued(
    model: nn.Module, kind: Decoder | Recurrent, rows: Sequence[Tensor], cache: _Cache | None
) -> _Plain:
    """A decoder (or a recurrent language model) with prompts padded on the left."""
    whole = padded(rows, left=True).to(next(model.parameters()).device)
    before = torch.tensor([whole.shape[1] - len(row) for row in rows], device=whole.device)
    adds_positions = isinstance(kind, Decoder) and kind.adds_positions

    def call(ids: Tensor, cache: _Cache | None, taken: dict[str, Tensor]) -> Tensor:
        if (before := taken.get("before")) is None:
            return model(ids, cache=cache)
        first = 0 if cache is None else cache.length
        return model(ids, cache=cache, **beside(before, first, ids.shape[1], adds_positions=adds_positions))

    return _Plain(model, whole, cache, {"before": before} if bool(before.any()) else {}, call)


def _plain_read(model: Any, rows: Sequence[Tensor], start: Sequence[int], cache: _Cache | None) -> _Plain:
    """An encoder-decoder: sources padded on the right, encoded once, and one start for every row."""
    device, lengths = next(model.parameters()).device, [len(row) for row in rows]
    taken = {"source": padded(rows).to(device)}  # (B, S), or frames (B, T, F)
    if len(set(lengths)) > 1:
        taken["lengths"] = torch.tensor(lengths, device=device)

    def call(ids: Tensor, cache: _Cache | None, taken: dict[str, Tensor]) -> Tensor:
        mask = padding(taken["lengths"]) if "lengths" in taken else None
        if "source" in taken:
            taken["memory"] = model.encode(taken.pop("source"), mask=mask)  # (R, S, M)
        return model.decode(ids, taken["memory"], memory_mask=mask, cache=cache)

    return _Plain(model, torch.tensor(start, device=device).expand(len(rows), -1), cache, taken, call)


def _cache(kind: nn.Module, prompt: int, max_new: int) -> _Cache:
    if isinstance(kind, (Recurrent, RecurrentSeq2Seq)):
        return RecurrentCache()
    return KVCache(capacity=prompt + min(max_new, _ROOM_AHEAD))


def _start(start: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    if start is None:
        raise ConfigError(
            "an encoder-decoder writes after a start: give start=, the id that every target of its training begins with"
        )
    ids = [start] if isinstance(start, int) else list(start)
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
        raise ConfigError(
            f"start is {start!r}; expected one id, or several, from the target's vocabulary, 0 … {vocab_size - 1}"
        )
    return ids


def _check_room(stack: nn.Module, length: int, max_new: int, what: str) -> None:
    """Refuses what would run off a table of learned positions. The last new id is not read again and needs no row."""
    table = getattr(stack, "positions", None)
    if not isinstance(table, LearnedPositions):
        return
    room = table.length
    if length > room:
        raise ShapeError(
            f"{what} has {length} ids, but the model's table of learned positions has {room} rows; "
            "shorten it, or make another table with `.resized(new_length)`"
        )
    if length + max_new - 1 > room:
        raise ShapeError(
            f"{what} has {length} ids and max_new is {max_new}, which needs {length + max_new - 1} "
            f"positions, but the model's table of learned positions has {room} rows; "
            f"give max_new={room - length + 1} or less, a shorter prompt, or slide=True (--slide), which goes on over "
            f"the last {room} ids"
        )
