"""Translate texts with a trained encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from clearhead.data.packing import Ragged
from clearhead.data.tasks.translation import encode_sources
from clearhead.errors import DataError
from clearhead.generation import BeamSearch, Strategy, generate
from clearhead.hub.text_generation import accepts_single
from clearhead.nn.positions import LearnedPositions

if TYPE_CHECKING:
    from clearhead.hub.pipeline import Pipeline

LENGTH_PENALTY = 1.0  # the best of 0.8, 1.0 and 1.2 on the shipped translator's validation sentences
DEFAULT = BeamSearch(5, length_penalty=LENGTH_PENALTY)


@dataclass(frozen=True)
class Translation:
    """A text and its translation, with the ids that the model read and those that it wrote.

    Encoding the translation need not give these ids again: a model may spell a rare word in other pieces than the
    tokenizer would cut it into."""

    source: str
    target: str
    read: tuple[int, ...]
    written: tuple[int, ...]  # with the end token, where it came


@accepts_single(str)
def translate(trained: Pipeline, texts: Sequence[str], **strategy: Any) -> list[str]:
    """What an encoder-decoder writes of a text; a list of translations for a list, in their order. `strategy`,
    `max_new_tokens`, `batch` and `on_done` as for `translations`."""
    return [made.target for made in translations(trained, texts, **strategy)]


def translations(
    trained: Pipeline,
    texts: Sequence[str],
    *,
    strategy: Strategy = DEFAULT,
    max_new_tokens: int | None = None,
    batch: int = 256,
    on_done: Callable[[int], None] = lambda done: None,
) -> list[Translation]:
    """A translation for each text, in their order, with its ids: what `look.translation` shows.

    Texts of like length go together, so that little is padding. `max_new_tokens` defaults to twice the longest
    source of a batch and a little more. An empty text stays empty."""
    trained.require("translation")
    tokenizer = trained.tokenizer
    rows = [row for row, text in enumerate(texts) if text.strip()]
    results = [Translation(text, "", (), ()) for text in texts]
    if not rows:
        return results
    given = [texts[row].strip() for row in rows]
    foreign = trained.source is not None
    sources = Ragged.of([tokenizer.prompt(text) for text in given]) if foreign else encode_sources(tokenizer, given)
    lengths, longest = sources.lengths.tolist(), getattr(trained.model.config, "max_len", None)
    for text, length in zip(given, lengths, strict=True):
        if longest is not None and length > longest:
            raise DataError(
                f"a text of {length} tokens is longer than the {longest} that {trained.name} was trained for: "
                f"{text[:40]!r}…; split it into sentences"
            )
    order = sorted(range(len(rows)), key=lambda i: lengths[i])
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        ids, found = sources.padded(torch.tensor(part), fill=0)
        prompt = [row[:n] for row, n in zip(ids, found.tolist(), strict=True)]
        limit = 2 * max(lengths[i] for i in part) + 8 if max_new_tokens is None else max_new_tokens
        config: Any = trained.model.config
        if isinstance(getattr(config, "positions", None), LearnedPositions):
            limit = min(limit, config.max_len - len(trained.start))
        bounds: dict[str, Any] = {
            "decoder_start_ids": trained.start,
            "stop_ids": trained.stops,
            "logits_processors": trained.logits_processors,
        }
        made = generate(trained.model, prompt, strategy=strategy, max_new_tokens=limit, **bounds)
        made = made.to("cpu")  # once, and not number by number
        for row, i in enumerate(part):
            target = tokenizer.decode(made.sequence(row).tolist()).strip()
            written = made.sequence(row, with_stop=True).tolist()
            results[rows[i]] = Translation(texts[rows[i]], target, tuple(prompt[row].tolist()), tuple(written))
        on_done(min(start + batch, len(order)))
    return results
