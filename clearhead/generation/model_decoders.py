"""`IncrementalDecoder`s for the models of this package.

A decoder continues its prompts, and an encoder-decoder encodes its prompts once and continues the same start ids in
every row. Models that the engine supports use its `SlotDecoder`. For others, the model's own forward is called: prompts
of different lengths are then padded on the left, a mask hides the padding and explicit positions do not count it.

    B prompts   R active rows   T ids   S source ids   M model width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.validation import short_repr
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.generation.decoder import IncrementalDecoder, LengthBucketedDecoder, SlidingContextDecoder
from clearhead.generation.engine.program import unsupported_reason
from clearhead.generation.engine.slot_decoder import SlotDecoder
from clearhead.generation.logits_processors import LogitsProcessingDecoder
from clearhead.generation.prompts import Prompt, frame_rows, left_padding_kwargs, pad_rows, prompt_rows
from clearhead.generation.request import Engine, SearchRequest, id_tuple
from clearhead.masks import padding
from clearhead.masks.operators import is_causal, is_translation_invariant
from clearhead.models.baselines.recurrent import NextToken, Recurrent, RecurrentCache
from clearhead.models.baselines.recurrent_seq2seq import RecurrentSeq2Seq
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.nn import KVCache
from clearhead.nn.modes import eval_mode, iter_modules
from clearhead.nn.positions import LearnedPositionEmbedding

_Cache = KVCache | RecurrentCache
_INITIAL_CAPACITY = 512  # new tokens that a cache is allocated for at the start; it grows beyond


def incremental_decoder(model: nn.Module, prompt: Prompt, request: SearchRequest) -> IncrementalDecoder:
    """Return a decoder of `model` for these prompts, and raise for arguments that do not fit the model."""
    unwrapped = getattr(model, "_orig_mod", model)  # inside of torch.compile
    if isinstance(unwrapped, (EncoderDecoder, RecurrentSeq2Seq)):
        decoder, rows = _encoder_decoder(model, unwrapped, prompt, request)
    elif not isinstance(unwrapped, (Decoder, Recurrent)):
        raise DtypeError(
            f"got a {type(model).__name__}; expected a Decoder, EncoderDecoder, Recurrent or RecurrentSeq2Seq (for "
            "other sources of logits, pass an IncrementalDecoder to `search`)"
        )
    elif request.decoder_start_ids is not None:
        raise ConfigError(
            f"decoder_start_ids is {short_repr(request.decoder_start_ids)}, but a {type(unwrapped).__name__} continues "
            "its prompt; leave decoder_start_ids out"
        )
    else:
        decoder, rows = _decoder_only(model, unwrapped, prompt, request)
    if request.logits_processors is None:
        return decoder
    return LogitsProcessingDecoder(
        decoder,
        request.logits_processors,
        rows,
        max_new_tokens=request.max_new_tokens,
        stop_ids=request.stop_ids,
        returns_log_probs=request.is_beam_search,
    )


def _bucket_by_length(
    rows: Sequence[Tensor], can_pad: bool, make_decoder: Callable[[Sequence[Tensor]], IncrementalDecoder]
) -> IncrementalDecoder:
    """Return `make_decoder(rows)`, or one decoder per prompt length if the mask does not allow padding."""
    buckets: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        buckets.setdefault(0 if can_pad else len(row), []).append(index)
    members = list(buckets.values())
    if len(members) == 1:
        return make_decoder(rows)
    decoders = [make_decoder([rows[index] for index in bucket]) for bucket in members]
    return LengthBucketedDecoder(decoders, members)


def _decoder_only(
    model: nn.Module,
    unwrapped: Decoder | Recurrent,
    prompt: Prompt,
    request: SearchRequest,
) -> tuple[IncrementalDecoder, Sequence[Tensor]]:
    """Return a decoder that continues prompts, and the prompts."""
    max_new_tokens = request.max_new_tokens
    mask = None
    if isinstance(unwrapped, Decoder):
        mask = unwrapped.config.union_mask(unwrapped.config.mask)
        if unwrapped.config.cross_attention:
            raise ConfigError(
                "this Decoder attends to a memory (cross_attention=True); pass the EncoderDecoder that it belongs to"
            )
        if not unwrapped.config.lm_head:
            raise ConfigError("this Decoder has no language-model head (lm_head=False), so it predicts no tokens")
    elif not isinstance(unwrapped.config.task, NextToken):
        raise ConfigError("this Recurrent classifies; expected one built with task=NextToken(), which predicts ids")
    rows = prompt_rows(prompt, unwrapped.config.vocab_size)

    def make_for_length(rows: Sequence[Tensor], max_new_tokens: int) -> IncrementalDecoder:
        def is_cached(rows: Sequence[Tensor]) -> bool:
            lengths = {len(row) for row in rows}
            is_constant = mask is None or all(is_causal(mask, n, n + max_new_tokens) for n in lengths)
            return request.use_cache and is_constant and _rotates_equally(unwrapped, rows, max_new_tokens)

        if isinstance(unwrapped, Decoder) and _uses_engine(unwrapped, is_cached(rows), request.engine):
            return SlotDecoder(unwrapped, rows, max_new_tokens, slots=request.slots)

        def make_decoder(rows: Sequence[Tensor]) -> IncrementalDecoder:
            longest = max(len(row) for row in rows)
            cached = is_cached(rows)
            cache = _new_cache(unwrapped, longest, max_new_tokens) if cached else None
            return _module_decoder_only(model, unwrapped, rows, cache)

        can_pad = (mask is None or is_translation_invariant(mask)) and _rotates_equally(unwrapped, rows, max_new_tokens)
        return _bucket_by_length(rows, can_pad, make_decoder)

    table = getattr(unwrapped, "positions", None)
    if request.sliding_context and isinstance(table, LearnedPositionEmbedding):
        longest = max(len(row) for row in rows)
        if longest + max_new_tokens - 1 > table.length:
            return SlidingContextDecoder(rows, table.length, make_for_length), rows
    for index, row in enumerate(rows):
        _check_max_positions(unwrapped, len(row), max_new_tokens, f"prompt {index}")
    return make_for_length(rows, max_new_tokens), rows


def _rotates_equally(model: Decoder | Recurrent, rows: Sequence[Tensor], max_new_tokens: int) -> bool:
    """Return whether rotary positions do not depend on the length, from the shortest prompt to the longest result."""
    lengths = [len(row) for row in rows]
    return not isinstance(model, Decoder) or model.config.rotates_equally(min(lengths), max(lengths) + max_new_tokens)


def _encoder_decoder(
    model: nn.Module,
    unwrapped: EncoderDecoder | RecurrentSeq2Seq,
    prompt: Prompt,
    request: SearchRequest,
) -> tuple[IncrementalDecoder, Sequence[Tensor]]:
    """Return a decoder that generates after the start ids given encoded prompts, and the start of each row."""
    config = unwrapped.config
    n_features = getattr(config, "n_features", None)
    if n_features is None:
        rows = prompt_rows(prompt, config.source_vocab_size or config.vocab_size)
    else:
        rows = frame_rows(prompt, n_features)
    start_ids = _check_start_ids(request.decoder_start_ids, config.vocab_size)
    max_new_tokens = request.max_new_tokens
    use_cache = request.use_cache
    can_pad = True
    if isinstance(unwrapped, EncoderDecoder):
        for index, row in enumerate(rows):
            _check_max_positions(unwrapped.encoder, len(row), 1, f"prompt {index}")
        _check_max_positions(unwrapped.decoder, len(start_ids), max_new_tokens, "decoder_start_ids")
        decoder_mask = unwrapped.config.union_mask(unwrapped.config.decoder_mask)
        use_cache = use_cache and is_causal(decoder_mask, len(start_ids), len(start_ids) + max_new_tokens)
        # Right padding changes a mask only if the mask depends on the length.
        can_pad = not unwrapped.config.union_mask(unwrapped.config.encoder_mask).depends_on_length
    start_rows = [torch.tensor(start_ids)] * len(rows)

    if isinstance(unwrapped, EncoderDecoder) and _uses_engine(unwrapped, use_cache, request.engine):
        return SlotDecoder(unwrapped, start_rows, max_new_tokens, rows, slots=request.slots), start_rows

    def make_decoder(rows: Sequence[Tensor]) -> IncrementalDecoder:
        cache = _new_cache(unwrapped, len(start_ids), max_new_tokens) if use_cache else None
        return _module_encoder_decoder(model, rows, start_ids, cache)

    return _bucket_by_length(rows, can_pad, make_decoder), start_rows


def _uses_engine(model: Decoder | EncoderDecoder, cached: bool, engine: Engine) -> bool:
    """Return whether to use the engine; raise `ConfigError` if it is required and cannot be used."""
    if engine == "module":
        return False
    reason = unsupported_reason(model) if cached else "the keys and values are not cached"
    if engine == "fused" and reason is not None:
        raise ConfigError(f'engine="fused" is not possible because {reason}; use engine="auto"')
    return reason is None


class _ModuleDecoder:
    """Calls a model's own forward in evaluation mode: with the newest ids if there is a cache, else with all ids.

    `row_inputs` are tensors (R, …) that are reordered with the rows; `call(ids, cache, row_inputs)` returns the logits
    of all ids.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Tensor,
        cache: _Cache | None,
        row_inputs: dict[str, Tensor],
        call: Callable[..., Tensor],
    ) -> None:
        self._modules = iter_modules(model)
        self._ids = ids
        self._cache = cache
        self._row_inputs = row_inputs
        self._call = call

    def prefill(self) -> Float[Tensor, "B V"]:
        # Per step, not around the search: a stream returns control between steps.
        with eval_mode(self._modules), torch.inference_mode():
            return self._call(self._ids, self._cache, self._row_inputs)[:, -1]

    def decode_step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        newest = ids[:, None]
        self._ids = newest if self._cache is not None else torch.cat((self._ids, newest), dim=1)
        return self.prefill()

    def reorder_cache(self, rows: Int[Tensor, " rows"]) -> None:
        rows = rows.to(self._ids.device)
        self._ids = self._ids.index_select(0, rows)
        with torch.inference_mode():
            if self._cache is not None:
                self._cache.reorder(rows)
            self._row_inputs |= {name: x.index_select(0, rows) for name, x in self._row_inputs.items()}


def _module_decoder_only(
    model: nn.Module, unwrapped: Decoder | Recurrent, rows: Sequence[Tensor], cache: _Cache | None
) -> _ModuleDecoder:
    """Return a decoder that calls a decoder or recurrent language model, with prompts padded on the left."""
    prompts = pad_rows(rows, left=True).to(next(model.parameters()).device)
    left_pad = torch.tensor([prompts.shape[1] - len(row) for row in rows], device=prompts.device)
    adds_positions = isinstance(unwrapped, Decoder) and unwrapped.adds_positions

    def call(ids: Tensor, cache: _Cache | None, row_inputs: dict[str, Tensor]) -> Tensor:
        left_pad = row_inputs.get("left_pad")
        first = 0 if cache is None else cache.length
        kwargs = {}
        if left_pad is not None:
            kwargs = left_padding_kwargs(left_pad, first, ids.shape[1], adds_positions=adds_positions)
        logits: Tensor = model(ids, cache=cache, **kwargs)
        return logits

    return _ModuleDecoder(model, prompts, cache, {"left_pad": left_pad} if bool(left_pad.any()) else {}, call)


def _module_encoder_decoder(
    model: Any, rows: Sequence[Tensor], start_ids: Sequence[int], cache: _Cache | None
) -> _ModuleDecoder:
    """Return a decoder that calls an encoder-decoder, with sources padded on the right and encoded once."""
    device = next(model.parameters()).device
    lengths = [len(row) for row in rows]
    row_inputs = {"source": pad_rows(rows).to(device)}  # (B, S), or frames (B, T, F)
    if len(set(lengths)) > 1:
        row_inputs["lengths"] = torch.tensor(lengths, device=device)

    def call(ids: Tensor, cache: _Cache | None, row_inputs: dict[str, Tensor]) -> Tensor:
        mask = padding(row_inputs["lengths"]) if "lengths" in row_inputs else None
        if "source" in row_inputs:
            row_inputs["memory"] = model.encode(row_inputs.pop("source"), mask=mask)  # (R, S, M)
        logits: Tensor = model.decode(ids, row_inputs["memory"], memory_mask=mask, cache=cache)
        return logits

    ids = torch.tensor(start_ids, device=device).expand(len(rows), -1)
    return _ModuleDecoder(model, ids, cache, row_inputs, call)


def _new_cache(unwrapped: nn.Module, prompt_length: int, max_new_tokens: int) -> _Cache:
    """Return an empty cache for the model."""
    if isinstance(unwrapped, (Recurrent, RecurrentSeq2Seq)):
        return RecurrentCache()
    return KVCache(capacity=prompt_length + min(max_new_tokens, _INITIAL_CAPACITY))


def _check_start_ids(decoder_start_ids: int | Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """Return the start ids; raise `ConfigError` if they are missing or outside the vocabulary."""
    if decoder_start_ids is None:
        raise ConfigError(
            "an encoder-decoder needs decoder_start_ids: the id that every target began with during training"
        )
    ids = id_tuple(decoder_start_ids)
    if not ids or max(ids) >= vocab_size:
        raise ConfigError(
            f"decoder_start_ids is {short_repr(decoder_start_ids)}; expected one id, or several, from the target's "
            f"vocabulary, 0 … {vocab_size - 1}"
        )
    return ids


def _check_max_positions(stack: nn.Module, length: int, max_new_tokens: int, label: str) -> None:
    """Raise `ShapeError` if the ids exceed a table of learned positions. The last new id is not encoded again."""
    table = getattr(stack, "positions", None)
    if not isinstance(table, LearnedPositionEmbedding):
        return
    max_positions = table.length
    if length > max_positions:
        raise ShapeError(
            f"{label} has {length} ids, but the model's table of learned positions has {max_positions} rows; "
            "shorten it, or extend the table with `.resized(new_length)`"
        )
    n_positions = length + max_new_tokens - 1
    if n_positions > max_positions:
        raise ShapeError(
            f"{label} has {length} ids and max_new_tokens is {max_new_tokens}, which needs {n_positions} positions, "
            f"but the model's table of learned positions has {max_positions} rows; give "
            f"max_new_tokens={max_positions - length + 1} or less, a shorter prompt, or sliding_context=True "
            f"(--sliding-context), which keeps the last {max_positions} ids"
        )
