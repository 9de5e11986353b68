"""Translate texts with a trained encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clearhead.data.packing import Ragged
from clearhead.data.tasks.translation import encode_sources
from clearhead.errors import DataError
from clearhead.generation import BeamSearch, Strategy, generate
from clearhead.hub.generation_settings import GenerationSettings
from clearhead.models import EncoderDecoderConfig
from clearhead.nn.positions import LearnedPositions

if TYPE_CHECKING:
    from clearhead.hub.pipelines import Pipeline

LENGTH_PENALTY = 1.0  # the best of 0.8, 1.0 and 1.2 on the validation sentences of en-es
DEFAULT_STRATEGY = BeamSearch(5, length_penalty=LENGTH_PENALTY, early_stopping=True)


def require_list(texts: Sequence[str]) -> None:
    """Raise `DataError` for a single text, which would be taken for a list of letters."""
    if isinstance(texts, str):
        raise DataError(f"got the text {texts[:40]!r}; expected a list of texts, or use the method of the pipeline")


@dataclass(frozen=True)
class Translation:
    """A text and its translation, with the ids of both.

    Encoding the translation may give other ids: the model can spell a rare word in other tokens than the tokenizer.

    Attributes:
        source: The text.
        target: The translation.
        source_ids: Ids that the model encoded.
        target_ids: Ids that the model generated, including the stop id, if any.
    """

    source: str
    target: str
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


def translate(
    pipeline: Pipeline,
    texts: Sequence[str],
    *,
    strategy: Strategy | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 64,
    on_done: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Return the translations of texts.

    Args:
        pipeline: An encoder-decoder with a tokenizer.
        texts: The texts.
        strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`; by default the model's own.
        max_new_tokens: Largest number of new tokens per text; by default as in `translations`.
        batch_size: Number of texts per batch.
        on_done: Called after each batch with the number of texts translated so far.

    Raises:
        DataError: If the model does not translate, or a text is longer than the model's maximum.
    """
    results = translations(
        pipeline,
        texts,
        strategy=strategy,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        on_done=on_done,
    )
    return [result.target for result in results]


def summarize(
    pipeline: Pipeline, texts: Sequence[str], *, strategy: Strategy | None = None, max_new_tokens: int | None = None
) -> list[str]:
    """Return summaries of texts by an encoder-decoder that was trained for it, such as BART, Pegasus or T5.

    Args:
        pipeline: The model.
        texts: The texts.
        strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`; by default the model's own for summaries.
        max_new_tokens: Largest number of new tokens per text; by default the model's own.
    """
    pipeline.require("translation")
    settings, prefix = pipeline.task_settings("summarization")
    results = translations(
        pipeline,
        [prefix + text for text in texts],
        strategy=settings.strategy if strategy is None else strategy,
        max_new_tokens=max_new_tokens,
        settings=settings,
    )
    return [result.target for result in results]


def translations(
    pipeline: Pipeline,
    texts: Sequence[str],
    *,
    strategy: Strategy | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 64,
    on_done: Callable[[int], None] = lambda done: None,
    settings: GenerationSettings | None = None,
) -> list[Translation]:
    """Translate texts, and return each translation together with its ids.

    Texts of similar length share a batch, to reduce padding. The translation of an empty text is empty.

    Args:
        pipeline: An encoder-decoder with a tokenizer.
        texts: The texts.
        strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`; by default the model's own.
        max_new_tokens: Largest number of new tokens per text; by default the model's own, or twice the longest text of
            a batch, plus 8.
        batch_size: Number of texts per batch.
        on_done: Called after each batch with the number of texts translated so far.
        settings: Used instead of the model's generation settings.

    Returns:
        One translation per text, in the order of `texts`.

    Raises:
        DataError: If the model does not translate, or a text is longer than the model's maximum.
    """
    pipeline.require("translation")
    require_list(texts)
    settings = pipeline.generation_settings if settings is None else settings
    strategy = settings.strategy if strategy is None else strategy
    rows = [row for row, text in enumerate(texts) if text.strip()]
    results = [Translation(text, "", (), ()) for text in texts]
    if not rows:
        return results
    sources = _encode(pipeline, [texts[row].strip() for row in rows])
    order = sources.lengths.sort(stable=True).indices
    n_done = 0
    for indices in order.split(batch_size):
        ids, lengths = sources.padded(indices, fill=0)
        prompts = [row[:n] for row, n in zip(ids, lengths.tolist(), strict=True)]
        generated = generate(
            pipeline.model,
            prompts,
            strategy=strategy,
            max_new_tokens=_max_new_tokens(pipeline, settings, max_new_tokens, int(lengths.max())),
            decoder_start_ids=settings.decoder_start_ids,
            stop_ids=settings.stop_ids,
            logits_processors=settings.logits_processors,
        ).to("cpu")  # one copy, instead of one per sequence
        for row, i in enumerate(indices.tolist()):
            target = pipeline.tokenizer.decode(generated.sequence(row).tolist()).strip()
            target_ids = generated.sequence(row, with_stop=True).tolist()
            results[rows[i]] = Translation(texts[rows[i]], target, tuple(prompts[row].tolist()), tuple(target_ids))
        n_done += len(indices)
        on_done(n_done)
    return results


def _encode(pipeline: Pipeline, texts: Sequence[str]) -> Ragged:
    """Return the ids of texts; raise `DataError` if one is longer than the model's maximum."""
    if pipeline.source is None:
        sources = encode_sources(pipeline.tokenizer, texts)
    else:
        sources = Ragged.of([pipeline.tokenizer.prompt(text) for text in texts])
    max_len = getattr(pipeline.model.config, "max_len", None)
    for text, length in zip(texts, sources.lengths.tolist(), strict=True):
        if max_len is not None and length > max_len:
            raise DataError(
                f"a text has {length} tokens, longer than the {max_len} that {pipeline.name} was trained for: "
                f"{text[:40]!r}…; split it into sentences"
            )
    return sources


def _max_new_tokens(pipeline: Pipeline, settings: GenerationSettings, requested: int | None, longest: int) -> int:
    """Return the largest number of new tokens for a batch whose longest text has `longest` tokens."""
    n_start_ids = len(settings.decoder_start_ids)
    limit = settings.new_tokens(n_start_ids, requested, default=2 * longest + 8)
    config = pipeline.model.config
    if isinstance(config, EncoderDecoderConfig) and isinstance(config.positions, LearnedPositions):
        limit = min(limit, config.max_len - n_start_ids)
    return limit
