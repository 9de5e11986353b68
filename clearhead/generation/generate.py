"""`generate` and `stream` for models, and `search` for any source of next-token logits.

These functions work on token ids; tokenizers convert from and to text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Union

from torch import nn

from clearhead._core.validation import short_repr, validate
from clearhead.errors import ConfigError, DtypeError
from clearhead.generation.beam import beam_search
from clearhead.generation.decoder import IncrementalDecoder
from clearhead.generation.logits_processors import LogitsProcessors
from clearhead.generation.model_decoders import incremental_decoder
from clearhead.generation.options import BeamSearch, Greedy, Sample, Strategy
from clearhead.generation.prompts import Prompt
from clearhead.generation.results import Generated, GenerationStep
from clearhead.generation.token_loop import run, stream_tokens

_GREEDY = Greedy()
MAX_NEW_TOKENS = 1 << 24  # ids and log-probabilities of a search are allocated at its start


def generate(
    model: nn.Module,
    prompt: Prompt,
    *,
    strategy: Strategy = _GREEDY,
    max_new_tokens: int = 128,
    stop_ids: int | Sequence[int] | None = None,
    decoder_start_ids: int | Sequence[int] | None = None,
    use_cache: bool = True,
    sliding_context: bool = False,
    logits_processors: LogitsProcessors | None = None,
) -> Generated:
    """Generate new ids for each prompt.

    A decoder continues its prompts; an encoder-decoder encodes them and generates after `decoder_start_ids`. Prompts of
    different lengths are padded and masked internally, so each row gets the ids that it would get alone. The model is
    in evaluation mode while it runs and in its previous mode afterwards. The fused decoder is used when it is
    equivalent; models with hooks or replaced modules run their own forward.

    Args:
        model: A decoder, an encoder-decoder, or a recurrent language model.
        prompt: A (B, T) tensor, a list of rows of any lengths, or one row.
        strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`.
        max_new_tokens: Largest number of new ids per prompt.
        stop_ids: An id, or several, that end a sequence.
        decoder_start_ids: The id, or ids, that an encoder-decoder generates after.
        use_cache: If False, recompute all ids at every step: the same result, slower.
        sliding_context: Let a decoder with learned positions continue past the last of them, over the most recent ids
            that fit. Other positions need no such option.
        logits_processors: Ids that are forced, forbidden or penalized.

    Returns:
        The new ids with their log-probabilities and scores.

    Raises:
        ConfigError: If an option is invalid or does not apply to this model.
        ShapeError: If a prompt is empty, contains an invalid id, or exceeds the position table.
        LogitsError: If the model returns logits that no id can be chosen from.

    Example:
        generate(decoder, [[5, 3], [7, 2, 9]], strategy=Sample(temperature=0.8, seed=1), stop_ids=0).best
        generate(translator, sources, decoder_start_ids=1, stop_ids=2, strategy=BeamSearch(5)).best
    """
    stops = _validate(strategy, max_new_tokens, stop_ids)
    decoder = incremental_decoder(
        model,
        prompt,
        decoder_start_ids=decoder_start_ids,
        max_new_tokens=max_new_tokens,
        use_cache=use_cache,
        sliding_context=sliding_context,
        logits_processors=logits_processors,
        stop_ids=stops,
        # A beam of width 1 is greedy decoding, in transformers too.
        returns_log_probs=isinstance(strategy, BeamSearch) and strategy.width > 1,
    )
    return search(decoder, strategy=strategy, max_new_tokens=max_new_tokens, stop_ids=stop_ids)


def stream(
    model: nn.Module,
    prompt: Prompt,
    *,
    strategy: Greedy | Sample = _GREEDY,
    max_new_tokens: int = 128,
    stop_ids: int | Sequence[int] | None = None,
    decoder_start_ids: int | Sequence[int] | None = None,
    use_cache: bool = True,
    sliding_context: bool = False,
    logits_processors: LogitsProcessors | None = None,
) -> Iterator[GenerationStep]:
    """Generate like `generate`, and yield each step.

    Arguments are validated at once, and the model runs as steps are requested. Between steps, and after the loop ends
    or is left, the model is in its previous mode. The arguments are those of `generate`.

    Yields:
        The newest id of every row, its log-probability, and which rows are active.

    Raises:
        ConfigError: If the strategy is `BeamSearch`, whose ids may change until its end.

    Example:
        for step in stream(decoder, prompt, stop_ids=0):
            print(step.ids.tolist())
    """
    if isinstance(strategy, BeamSearch):
        raise ConfigError(
            f"{strategy} cannot be streamed because any id may change until its end; use generate, or Greedy() or "
            "Sample(…)"
        )
    stops = _validate(strategy, max_new_tokens, stop_ids, (Greedy, Sample))
    decoder = incremental_decoder(
        model,
        prompt,
        decoder_start_ids=decoder_start_ids,
        max_new_tokens=max_new_tokens,
        use_cache=use_cache,
        sliding_context=sliding_context,
        logits_processors=logits_processors,
        stop_ids=stops,
    )
    return stream_tokens(decoder, strategy, max_new_tokens, stops)


def search(
    decoder: IncrementalDecoder,
    *,
    strategy: Strategy = _GREEDY,
    max_new_tokens: int = 128,
    stop_ids: int | Sequence[int] | None = None,
) -> Generated:
    """Generate new ids from any `IncrementalDecoder`.

    Args:
        decoder: Produces next-token logits, for example an `UncachedDecoder` around a function of ids.
        strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`.
        max_new_tokens: Largest number of new ids per prompt.
        stop_ids: An id, or several, that end a sequence.

    Returns:
        The new ids with their log-probabilities and scores.
    """
    stops = _validate(strategy, max_new_tokens, stop_ids)
    if not isinstance(decoder, IncrementalDecoder):
        raise DtypeError(
            f"got a {type(decoder).__name__}; expected an IncrementalDecoder with prefill(), decode_step(ids) and "
            "reorder_cache(rows) (wrap a function of ids in UncachedDecoder; pass a model to generate)"
        )
    if isinstance(strategy, BeamSearch):
        return beam_search(decoder, strategy, max_new_tokens, stops)
    return run(decoder, strategy, max_new_tokens, stops)


def _validate(
    strategy: Any, max_new_tokens: Any, stop_ids: Any, strategies: tuple[type, ...] = (Greedy, Sample, BeamSearch)
) -> tuple[int, ...]:
    """Validate the strategy and `max_new_tokens`; return sorted unique stop ids."""
    validate(strategy, "strategy", Union[strategies])  # noqa: UP007  (a union of a tuple can only be written so)
    is_int = isinstance(max_new_tokens, int) and not isinstance(max_new_tokens, bool)
    if not is_int or not 1 <= max_new_tokens <= MAX_NEW_TOKENS:
        raise ConfigError(
            f"max_new_tokens is {short_repr(max_new_tokens)}; expected a whole number of at least 1 and at most "
            f"{MAX_NEW_TOKENS:,}"
        )
    ids = () if stop_ids is None else (stop_ids,) if isinstance(stop_ids, int) else tuple(stop_ids)
    if any(isinstance(id_, bool) or not isinstance(id_, int) or id_ < 0 for id_ in ids):
        raise ConfigError(f"stop_ids is {short_repr(stop_ids)}; expected an id, several ids, or None")
    return tuple(sorted(set(ids)))
