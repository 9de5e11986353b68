"""Text in, text out: sentences through a trained encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from clearhead.data.translation import encode_sources
from clearhead.errors import DataError
from clearhead.generation import Beam, How, generate
from clearhead.pretrained.store import Trained

LENGTH_PENALTY = 1.0  # the best of 0.8, 1.0 and 1.2 on the shipped translator's validation sentences
DEFAULT = Beam(5, length_penalty=LENGTH_PENALTY)


def translate(
    trained: Trained,
    texts: Sequence[str],
    *,
    how: How = DEFAULT,
    max_new: int | None = None,
    batch: int = 256,
    on_done: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """A translation for each text, in their order. Texts of like length go together, so that little is padding.

    `max_new` defaults to twice the longest source of a batch and a little more. An empty text stays empty.
    """
    trained.require("translation")
    tokenizer = trained.tokenizer
    device = next(trained.model.parameters()).device
    rows = [row for row, text in enumerate(texts) if text.strip()]
    if not rows:
        return [""] * len(texts)
    sources = encode_sources(tokenizer, [texts[row].strip() for row in rows])
    lengths = sources.lengths.tolist()
    _check_lengths(trained, [texts[row] for row in rows], lengths)
    order = sorted(range(len(rows)), key=lambda i: lengths[i])
    results = [""] * len(texts)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        ids, found = sources.padded(torch.tensor(part), fill=tokenizer.pad_id)
        prompt = [ids[i, : int(found[i])].to(device) for i in range(len(part))]
        limit = 2 * max(lengths[i] for i in part) + 8 if max_new is None else max_new
        made = generate(trained.model, prompt, how=how, max_new=limit, start=tokenizer.bos_id, stop=tokenizer.eos_id)
        for i, new in zip(part, made.best, strict=True):
            results[rows[i]] = tokenizer.decode(new.tolist()).strip()
        on_done(min(start + batch, len(order)))
    return results


def _check_lengths(trained: Trained, texts: Sequence[str], lengths: Sequence[int]) -> None:
    longest = getattr(trained.model.config, "max_len", None)
    for text, length in zip(texts, lengths, strict=True):
        if longest is not None and length > longest:
            raise DataError(
                f"a text of {length} tokens is longer than the {longest} that {trained.name} was trained for: "
                f"{text[:40]!r}…; split it into sentences"
            )
