"""Generate text from prompts with a decoder, and embed and classify texts with an encoder, in batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead import generation
from clearhead._core.shapes import Float
from clearhead.errors import DataError
from clearhead.generation import Greedy, Sample, Strategy
from clearhead.hub.chat_template import render
from clearhead.masks import padding
from clearhead.models import Encoder
from clearhead.nn.positions import LearnedPositionEmbedding

if TYPE_CHECKING:
    from clearhead.hub.pipeline import Pipeline

Messages = Sequence[Mapping[str, str]]  # messages, each with a role and a content

GREEDY = Greedy()
_EXAMPLE = '{"role": "user", "content": "Hello"}'


def accepts_single(*kinds: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: let a batch function also accept a single item, and then return a single result."""

    def of_both(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def one_or_several(trained: Pipeline, given: Any, **strategy: Any) -> Any:
            return run(trained, [given], **strategy)[0] if isinstance(given, kinds) else run(trained, given, **strategy)

        return one_or_several

    return of_both


@accepts_single(str)
def generate(
    trained: Pipeline, texts: Sequence[str], *, strategy: Strategy = GREEDY, max_new_tokens: int = 100
) -> list[str]:
    """What a decoder writes after a text, without the text itself, or an encoder-decoder of a text; a list of them for
    a list, made in one batch."""
    if trained.task == "translation":
        return list(trained.translate(list(texts), strategy=strategy, max_new_tokens=max_new_tokens))
    trained.require("text")
    return _written(trained, [_checked(trained.tokenizer.prompt(text)) for text in texts], strategy, max_new_tokens)


def chat(
    trained: Pipeline,
    messages: Messages | Sequence[Messages],
    *,
    strategy: Strategy = GREEDY,
    max_new_tokens: int = 100,
) -> Any:
    """What a decoder answers to `[{"role": "user", "content": "…"}]`, which its own template makes one text of; a list
    of answers for a list of conversations."""
    trained.require("text")
    one = bool(messages) and isinstance(messages[0], Mapping)
    talks: Any = [messages] if one else messages
    written = _written(trained, [conversation(trained, talk) for talk in talks], strategy, max_new_tokens)
    return written[0] if one else written


def conversation(trained: Pipeline, messages: Messages) -> list[int]:
    """The ids of a conversation up to where the model answers, with the special tokens of its template."""
    template = None if trained.source is None else trained.source.template()
    if template is None:
        raise DataError(f"{trained.name} has no chat template, so it was not made for conversations; use generate")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise DataError(f"a message is {message!r:.60}; expected a role and a content, such as {_EXAMPLE}")
    specials = getattr(trained.tokenizer, "specials", {})
    settings = {"add_generation_prompt": True, "tools": None, "documents": None}
    return _checked(trained.tokenizer.encode(render(template, messages, {**specials, **settings})))


def _written(trained: Pipeline, prompts: list[list[int]], strategy: Strategy, max_new_tokens: int) -> list[str]:
    if not prompts:
        return []
    bounds: dict[str, Any] = {"stop_ids": trained.stops, "logits_processors": trained.logits_processors}
    room, _ = remaining_context(trained, max(map(len, prompts)), max_new_tokens)
    made = generation.generate(trained.model, prompts, strategy=strategy, max_new_tokens=room, **bounds)
    return [decode_suffix(trained, ids, made.sequence(i).tolist()) for i, ids in enumerate(prompts)]


def decode_suffix(trained: Pipeline, ids: list[int], new: list[int]) -> str:
    """Return the text of new ids after others, with the leading space that a separate text would lack."""
    before, whole = trained.tokenizer.decode(ids), trained.tokenizer.decode([*ids, *new])
    return whole[len(before) :] if whole.startswith(before) else trained.tokenizer.decode(new)


def stream(
    trained: Pipeline, text: str | Messages, *, strategy: Greedy | Sample = GREEDY, max_new_tokens: int = 100
) -> Iterator[str]:
    """What a decoder writes after a text, or answers in a conversation, piece by piece as it is made."""
    trained.require("text")
    ids = _checked(trained.tokenizer.prompt(text)) if isinstance(text, str) else conversation(trained, text)
    return stream_text(
        trained, ids, [], strategy=strategy, max_new_tokens=remaining_context(trained, len(ids), max_new_tokens)[0]
    )


def stream_text(
    trained: Pipeline, ids: list[int], made: list[int], *, alone: bool = False, **strategy: Any
) -> Iterator[str]:
    """The text after ids as it is made; its ids go into `made`, a stop as well. `alone`: as a text of its own."""
    bounds: dict[str, Any] = {"stop_ids": trained.stops, "logits_processors": trained.logits_processors, **strategy}
    context, shown, rest = [] if alone else ids, "", ""
    for step in generation.stream(trained.model, [ids], **bounds):
        made.append(int(step.ids[0]))
        if made[-1] in trained.stops:
            break
        # Decoding the whole each time keeps pieces together that are one character only in company; alone they read as
        # �, which is held back until the rest has come.
        rest = decode_suffix(trained, context, made)
        ready = rest.rstrip("\N{REPLACEMENT CHARACTER}")
        if len(ready) > len(shown):
            yield ready[len(shown) :]
            shown = ready
    if len(rest) > len(shown):
        yield rest[len(shown) :]


@accepts_single(str)
def embed(trained: Pipeline, texts: Sequence[str], *, batch: int = 64) -> Float[Tensor, "N M"]:
    """An encoder's vector of a text (M,), or those of a list of texts (N, M): the mean of the tokens' vectors, or what
    the model's folder says instead."""
    pooling = trained.pooling

    def pooled(model: Encoder, x: Tensor, lengths: Tensor) -> Tensor:
        x, lengths = x.cpu().float(), lengths.cpu()  # (B, T, M)
        real = torch.arange(x.shape[1]) < lengths[:, None]
        mean = (x * real[..., None]).sum(1) / lengths[:, None].clamp(min=1)
        return x[:, 0] if pooling["first"] else mean

    vectors = _read(trained, texts, pooled, batch, pooling["max_len"])
    return torch.nn.functional.normalize(vectors, dim=1) if pooling["unit"] else vectors


@accepts_single(str)
def classify(trained: Pipeline, given: Sequence[str] | Tensor, *, batch: int = 64) -> list[dict[str, float]]:
    """How likely each class is, by its name, likeliest first: of a text, or a list of these for a list of texts or for
    pictures (N, C, height, width) as the model takes them. Where a text may be of several classes at once, each has a
    probability of its own."""
    if isinstance(given, Tensor):
        trained.require("pictures")
        with torch.no_grad():
            logits = trained.model(given.to(next(trained.model.parameters()))).cpu().float()
    else:
        logits = _read(trained, given, lambda model, x, lengths: model.classified(x).cpu().float(), batch)
    said = {} if trained.source is None else trained.source.config
    several = said.get("problem_type") == "multi_label_classification"
    names = said.get("id2label", {})
    result = []
    for row in (logits.sigmoid() if several else logits.softmax(-1)).tolist():
        order = sorted(range(len(row)), key=lambda i: -row[i])
        result.append({str(names.get(str(i), i)): row[i] for i in order})
    return result


@torch.no_grad()
def _read(
    trained: Pipeline, texts: Sequence[str], use: Callable[..., Tensor], batch: int, longest: int | None = None
) -> Tensor:
    """A row for each text of what `use(model, x, lengths)` makes of an encoder's vectors (B, T, M) and their
    numbers (B,). Texts of like length go together, so that little is padding."""
    model = trained.model
    if not isinstance(model, Encoder):
        kind = type(model).__name__
        raise DataError(f"{trained.name} cannot embed texts: it is a {kind}; expected an Encoder")
    longest = min(longest or model.config.max_len, model.config.max_len)
    rows = [torch.tensor(trained.tokenizer.prompt(text, longest), dtype=torch.int64) for text in texts]
    device, order = next(model.parameters()).device, sorted(range(len(rows)), key=lambda i: len(rows[i]))
    made = torch.empty(0, model.config.d_model)
    for start in range(0, len(rows), batch):
        chosen = order[start : start + batch]
        lengths = torch.tensor([len(rows[i]) for i in chosen])
        ids = torch.nn.utils.rnn.pad_sequence([rows[i] for i in chosen], batch_first=True)
        found = use(model, model(ids.to(device), mask=padding(lengths)), lengths)
        made = made if start else found.new_empty(len(rows), found.shape[1])
        made[chosen] = found
    return made


def nearest(vectors: Float[Tensor, "N M"], most: int) -> list[tuple[float, int, int]]:
    """Return the pairs of rows with the largest cosine, best first: cosine, first row, second row."""
    unit, found = torch.nn.functional.normalize(vectors, dim=1), []
    for i in range(len(unit) - 1):
        best = (unit[i + 1 :] @ unit[i]).topk(min(most, len(unit) - 1 - i))
        found += [(value, i, i + 1 + j) for value, j in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        found = sorted(found, key=lambda pair: -pair[0])[:most]
    return found


def _checked(ids: list[int]) -> list[int]:
    if not ids:
        raise DataError("the prompt is empty: give some text to go on from")
    return ids


def remaining_context(
    trained: Pipeline, length: int, max_new_tokens: int, *, sliding_context: bool = False
) -> tuple[int, int | None]:
    """Return the number of new tokens that fit, and the context length if positions are learned, else None."""
    table = getattr(trained.model, "positions", None)
    if sliding_context or not isinstance(table, LearnedPositionEmbedding):
        return max_new_tokens, None
    longest = table.length
    if length >= longest:
        raise DataError(
            f"the prompt has {length:,} tokens and {trained.name} reads at most {longest:,}; give a shorter one, or "
            "--sliding-context, which goes on from the last of them"
        )
    return min(max_new_tokens, longest - length), longest
