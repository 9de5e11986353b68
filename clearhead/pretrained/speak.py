"""Text in, text out: prompts through a decoder, and texts to vectors by an encoder. Batched, and as strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead import generation
from clearhead._shapes import Float
from clearhead.errors import DataError
from clearhead.generation import Greedy, How, Sample
from clearhead.masks import padding
from clearhead.models import Encoder

if TYPE_CHECKING:
    from clearhead.pretrained.store import Trained

__all__ = ["embed", "generate", "stream"]

_GREEDY = Greedy()


def generate(trained: Trained, texts: Sequence[str], *, how: How = _GREEDY, max_new: int = 100) -> list[str]:
    """What the model writes after each text, without the text itself; all of them in one batch."""
    prompts = [_prompt(trained, text) for text in texts]
    if not prompts:
        return []
    room = _room(trained, max(map(len, prompts)), max_new)
    made = generation.generate(trained.model, prompts, how=how, max_new=room, stop=trained.stops)
    return [trained.tokenizer.decode(made.sequence(i)) for i in range(len(prompts))]


def stream(trained: Trained, text: str, *, how: Greedy | Sample = _GREEDY, max_new: int = 100) -> Iterator[str]:
    """What the model writes after a text, piece by piece as it is made."""
    ids = _prompt(trained, text)
    room = _room(trained, len(ids), max_new)
    made: list[int] = []
    shown = ""
    for step in generation.stream(trained.model, torch.stack([ids]), how=how, max_new=room, stop=trained.stops):
        made.append(int(step.ids[0]))
        if made[-1] in trained.stops:
            made.pop()
        # Decoding the whole each time keeps pieces together that are one character only in company; alone they read as
        # �, which is held back until the rest has come.
        whole = trained.tokenizer.decode(made)
        ready = whole.rstrip("\N{REPLACEMENT CHARACTER}")
        if len(ready) > len(shown):
            yield ready[len(shown) :]
            shown = ready
    if len(rest := trained.tokenizer.decode(made)) > len(shown):
        yield rest[len(shown) :]


@torch.no_grad()
def embed(trained: Trained, texts: Sequence[str], *, batch: int = 64) -> Float[Tensor, "N M"]:
    """One vector a text: the mean of its tokens' vectors, or what the model's folder says instead. Texts of like length
    go together, so that little is padding."""
    model = trained.model
    if not isinstance(model, Encoder):
        raise DataError(
            f"{trained.name} gives no vectors of texts: it is a {type(model).__name__}, expected an Encoder"
        )
    pooling = trained.pooling
    longest = model.config.max_len if pooling["max_len"] is None else min(pooling["max_len"], model.config.max_len)
    rows = [torch.tensor(trained.tokenizer.prompt(text, longest), dtype=torch.int64) for text in texts]
    device = next(model.parameters()).device
    vectors = torch.empty(len(rows), model.config.d_model)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(rows), batch):
        chosen = order[start : start + batch]
        lengths = torch.tensor([len(rows[i]) for i in chosen])
        ids = torch.nn.utils.rnn.pad_sequence([rows[i] for i in chosen], batch_first=True)
        x = model(ids.to(device), mask=padding(lengths)).cpu().float()  # (B, T, M)
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        mean = (x * real[..., None]).sum(1) / lengths[:, None].clamp(min=1)
        vectors[chosen] = x[:, 0] if pooling["first"] else mean
    return torch.nn.functional.normalize(vectors, dim=1) if pooling["unit"] else vectors


def _prompt(trained: Trained, text: str) -> Tensor:
    trained.require("text")
    ids = trained.tokenizer.prompt(text)
    if not ids:
        raise DataError("the prompt is empty: give some text to go on from")
    return torch.tensor(ids, device=next(trained.model.parameters()).device)


def _room(trained: Trained, length: int, max_new: int) -> int:
    longest = getattr(trained.model.config, "max_len", length + max_new)
    if length >= longest:
        raise DataError(f"the prompt has {length:,} tokens and {trained.name} reads at most {longest:,}; shorten it")
    return min(max_new, longest - length)
