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
from clearhead.generation.fast import EVERYTHING_AFTER, Fast
from clearhead.generation.limits import Limited, Limits
from clearhead.generation.patterns import looks_ahead, speaks_of_distance_only
from clearhead.generation.program import why_not
from clearhead.generation.prompts import Prompt, frames_of, padded, rows_of, sources_of
from clearhead.generation.quiet import evaluating, parts_of
from clearhead.generation.stepper import Grouped, Sliding, Stepper
from clearhead.masks import Mask, padding
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.models.recurrent import NextToken, Recurrent, RecurrentCache
from clearhead.models.recurrent_seq2seq import RecurrentSeq2Seq
from clearhead.positions.learned import LearnedPositions

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
    alone = limits is None  # nothing stands between it and a search
    if isinstance(kind, (EncoderDecoder, RecurrentSeq2Seq)):
        stepper, begun = _reading(model, kind, prompt, start, max_new, use_cache, alone)
    elif not isinstance(kind, (Decoder, Recurrent)):
        raise DtypeError(
            f"got a {type(model).__name__}; expected a Decoder, EncoderDecoder, Recurrent or RecurrentSeq2Seq "
            "(anything else that gives logits can be searched as a Stepper, with `search`)"
        )
    elif start is not None:
        raise ConfigError(f"start is {start!r}, but a {type(kind).__name__} goes on from its prompt; leave start out")
    else:
        stepper, begun = _continuing(model, kind, prompt, max_new, use_cache, slide, alone)
    return stepper if limits is None else Limited(stepper, limits, begun, max_new=max_new, stops=stops)


def _batched(rows: Sequence[Tensor], alike: bool, alone: bool, stepper: Callable[..., Stepper]) -> Stepper:
    """`stepper(rows, alone)`, or one for each length where a pattern is not `alike` with padding beside it."""
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(0 if alike else len(row), []).append(place)
    members = list(groups.values())
    if len(members) == 1:
        return stepper(rows, alone)
    return Grouped([stepper([rows[place] for place in group], False) for group in members], members)


def _continuing(
    model: nn.Module, kind: Decoder | Recurrent, prompt: Prompt, max_new: int, use_cache: bool, slide: bool, alone: bool
) -> tuple[Stepper, Sequence[Tensor]]:
    """A stepper for prompts to go on from, and these."""
    mask = None
    if isinstance(kind, Decoder):
        mask = kind.config.seen(kind.config.mask)
        if kind.config.cross_attention:
            raise ConfigError(
                "this Decoder reads a memory (cross_attention=True); give generate the EncoderDecoder that it belongs "
                "to"
            )
    elif not isinstance(kind.config.task, NextToken):
        raise ConfigError("this Recurrent classifies; expected one made with task=NextToken(), which predicts ids")
    rows = rows_of(prompt, kind.config.vocab_size)

    def continued(rows: Sequence[Tensor], max_new: int, alone: bool = False) -> Stepper:
        def stepper(own: Sequence[Tensor], alone: bool) -> Stepper:
            longest = max(len(row) for row in own)
            cached = use_cache and not (mask is not None and looks_ahead(mask, longest, longest + max_new))
            if cached and isinstance(kind, Decoder) and why_not(kind) is None:
                return Fast(kind, own, max_new, alone=alone)
            return _Continue(model, kind, own, _cache(kind, longest, max_new) if cached else None)

        return _batched(rows, mask is None or speaks_of_distance_only(mask), alone, stepper)

    table = getattr(kind, "positions", None)
    longest = max(len(row) for row in rows)
    if slide and isinstance(table, LearnedPositions) and longest + max_new - 1 > table.length:
        return Sliding(rows, table.length, continued), rows
    for place, row in enumerate(rows):
        _check_room(kind, len(row), max_new, f"prompt {place}")
    return continued(rows, max_new, alone), rows


def _reading(
    model: nn.Module,
    kind: EncoderDecoder | RecurrentSeq2Seq,
    prompt: Prompt,
    start: int | Sequence[int] | None,
    max_new: int,
    use_cache: bool,
    alone: bool,
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
        use_cache = use_cache and not looks_ahead(seen, len(first), len(first) + max_new)
        # Padding on the right moves nothing; only a pattern that is drawn anew for every length notices it.
        alike = not kind.config.seen(kind.config.encoder_mask).depends_on_length
    begun = [torch.tensor(first)] * len(rows)

    def stepper(own: Sequence[Tensor], alone: bool) -> Stepper:
        if use_cache and isinstance(kind, EncoderDecoder) and why_not(kind) is None:
            return Fast(kind, begun[: len(own)], max_new, source=own, alone=alone)
        return _Read(model, own, first, _cache(kind, len(first), max_new) if use_cache else None)

    return _batched(rows, alike, alone, stepper), begun


class _ModelStepper:
    """What all models share: the ids (where there is no cache), the cache, and running quietly."""

    def __init__(self, model: nn.Module, ids: Tensor, cache: _Cache | None) -> None:
        self._model = model
        self._parts = parts_of(model)
        self._ids = ids  # (R, T): all ids so far, or with a cache the newest
        self._cache = cache

    def begin(self) -> Float[Tensor, "B V"]:
        return self._run()

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        newest = ids[:, None]
        self._ids = newest if self._cache is not None else torch.cat((self._ids, newest), dim=1)
        return self._run()

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        rows = rows.to(self._ids.device)
        self._ids = self._ids.index_select(0, rows)
        with torch.inference_mode():
            if self._cache is not None:
                self._cache.reorder(rows)
            self._reorder(rows)

    def _run(self) -> Tensor:
        # Step by step, and not around the whole search: a stream hands control back between steps.
        with evaluating(self._parts), torch.inference_mode():
            return self._forward(self._ids)[:, -1]

    def _forward(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def _reorder(self, rows: Tensor) -> None:
        """Takes along what a model has besides ids and cache."""


class _Continue(_ModelStepper):
    """A decoder (or a recurrent language model) with prompts padded on the left."""

    def __init__(
        self, model: nn.Module, kind: Decoder | Recurrent, rows: Sequence[Tensor], cache: _Cache | None
    ) -> None:
        super().__init__(model, padded(rows, left=True).to(_device(kind)), cache)
        self._adds_positions = isinstance(kind, Decoder) and kind.config.positions.kind == "added"
        T = self._ids.shape[1]
        before = [T - len(row) for row in rows]
        self._before: Tensor | None = None  # (R,) padding in front of each row; None: there is none
        self._mask: Mask | None = None
        if any(before):
            self._hide(torch.tensor(before, device=self._ids.device))

    def _hide(self, before: Tensor) -> None:
        self._before = before
        self._mask = padding(torch.full_like(before, EVERYTHING_AFTER), before=before)

    def _forward(self, ids: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"cache": self._cache}
        if self._before is not None:
            arguments["mask"] = self._mask
            if self._adds_positions:
                first = 0 if self._cache is None else self._cache.length
                place = torch.arange(first, first + ids.shape[1], device=ids.device)
                # (R, T); those of the padding are never seen.
                arguments["positions"] = (place - self._before[:, None]).clamp(min=0)
        logits: Tensor = self._model(ids, **arguments)
        return logits

    def _reorder(self, rows: Tensor) -> None:
        if self._before is not None:
            self._hide(self._before.index_select(0, rows))


class _Read(_ModelStepper):
    """An encoder-decoder: sources padded on the right, encoded once, and one start for every row."""

    def __init__(self, model: nn.Module, rows: Sequence[Tensor], start: Sequence[int], cache: _Cache | None) -> None:
        device = _device(model)
        self._source = sources_of(rows).to(device)  # (B, S), or frames (B, T, F)
        super().__init__(model, torch.tensor(start, device=device).expand(len(rows), -1), cache)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        self._lengths = lengths if len(set(lengths.tolist())) > 1 else None  # None: there is no padding
        self._mask = None if self._lengths is None else padding(self._lengths)
        self._memory: Tensor | None = None  # (R, S, M)

    def _forward(self, ids: Tensor) -> Tensor:
        model: Any = self._model
        if self._memory is None:
            self._memory = model.encode(self._source, mask=self._mask)
        logits: Tensor = model.decode(ids, self._memory, memory_mask=self._mask, cache=self._cache)
        return logits

    def _reorder(self, rows: Tensor) -> None:
        if self._memory is not None:
            self._memory = self._memory.index_select(0, rows)
        if self._lengths is not None:
            self._lengths = self._lengths.index_select(0, rows)
            self._mask = padding(self._lengths)


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


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
