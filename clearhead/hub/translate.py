"""Translate texts with a trained encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

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
    tokenizer = pipeline.tokenizer
    rows = [row for row, text in enumerate(texts) if text.strip()]
    results = [Translation(text, "", (), ()) for text in texts]
    if not rows:
        return results
    stripped = [texts[row].strip() for row in rows]
    if pipeline.source is not None:
        sources = Ragged.of([tokenizer.prompt(text) for text in stripped])
    else:
        sources = encode_sources(tokenizer, stripped)
    lengths = sources.lengths.tolist()
    max_len = getattr(pipeline.model.config, "max_len", None)
    for text, length in zip(stripped, lengths, strict=True):
        if max_len is not None and length > max_len:
            raise DataError(
                f"a text has {length} tokens, longer than the {max_len} that {pipeline.name} was trained for: "
                f"{text[:40]!r}…; split it into sentences"
            )
    order = sorted(range(len(rows)), key=lambda i: lengths[i])
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        ids, batch_lengths = sources.padded(torch.tensor(indices), fill=0)
        prompts = [row[:n] for row, n in zip(ids, batch_lengths.tolist(), strict=True)]
        default = 2 * max(lengths[i] for i in indices) + 8
        limit = settings.new_tokens(len(settings.decoder_start_ids), max_new_tokens, default)
        config = pipeline.model.config
        if isinstance(config, EncoderDecoderConfig) and isinstance(config.positions, LearnedPositions):
            limit = min(limit, config.max_len - len(settings.decoder_start_ids))
        generated = generate(
            pipeline.model,
            prompts,
            strategy=settings.strategy if strategy is None else strategy,
            max_new_tokens=limit,
            decoder_start_ids=settings.decoder_start_ids,
            stop_ids=settings.stop_ids,
            logits_processors=settings.logits_processors,
        ).to("cpu")  # one copy, instead of one per sequence
        for row, i in enumerate(indices):
            target = tokenizer.decode(generated.sequence(row).tolist()).strip()
            target_ids = generated.sequence(row, with_stop=True).tolist()
            results[rows[i]] = Translation(texts[rows[i]], target, tuple(prompts[row].tolist()), tuple(target_ids))
        on_done(min(start + batch_size, len(order)))
    return results
