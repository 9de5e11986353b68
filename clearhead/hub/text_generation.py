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
    from clearhead.hub.pipelines import Pipeline

Messages = Sequence[Mapping[str, str]]  # each with a role and a content

GREEDY = Greedy()
_EXAMPLE = '{"role": "user", "content": "Hello"}'


def accepts_single(*kinds: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: let a batch function also accept a single item, and then return a single result."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(pipeline: Pipeline, inputs: Any, **options: Any) -> Any:
            if isinstance(inputs, kinds):
                return function(pipeline, [inputs], **options)[0]
            return function(pipeline, inputs, **options)

        return wrapper

    return decorate


@accepts_single(str)
def generate(
    pipeline: Pipeline, texts: Sequence[str], *, strategy: Strategy = GREEDY, max_new_tokens: int = 100
) -> list[str]:
    """Generate text in one batch: a decoder continues each text, an encoder-decoder translates it.

    Args:
        pipeline: The model.
        texts: One text, or several.
        strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`.
        max_new_tokens: Largest number of new tokens per text.

    Returns:
        The new text, without the prompt: one for a single text, else a list.
    """
    if pipeline.task == "translation":
        return list(pipeline.translate(list(texts), strategy=strategy, max_new_tokens=max_new_tokens))
    pipeline.require("text")
    prompts = [_require_tokens(pipeline.tokenizer.prompt(text)) for text in texts]
    return _generate_texts(pipeline, prompts, strategy, max_new_tokens)


def chat(
    pipeline: Pipeline,
    messages: Messages | Sequence[Messages],
    *,
    strategy: Strategy = GREEDY,
    max_new_tokens: int = 100,
) -> Any:
    """Generate the next message of a conversation, or of each of several.

    Args:
        pipeline: A decoder with a chat template.
        messages: `[{"role": "user", "content": "…"}, …]`, or a list of conversations.
        strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`.
        max_new_tokens: Largest number of new tokens per message.

    Returns:
        The text of the message: one for a single conversation, else a list.

    Raises:
        DataError: If the model has no chat template, or a message has no role or content.
    """
    pipeline.require("text")
    is_single = bool(messages) and isinstance(messages[0], Mapping)
    conversations: Any = [messages] if is_single else messages
    prompts = [encode_chat(pipeline, conversation) for conversation in conversations]
    replies = _generate_texts(pipeline, prompts, strategy, max_new_tokens)
    return replies[0] if is_single else replies


def encode_chat(pipeline: Pipeline, messages: Messages) -> list[int]:
    """Apply the model's chat template, and return the ids of the conversation up to the model's next message.

    Args:
        pipeline: A decoder with a chat template.
        messages: `[{"role": "user", "content": "…"}, …]`.

    Raises:
        DataError: If the model has no chat template, or a message has no role or content.
    """
    template = None if pipeline.source is None else pipeline.source.template()
    if template is None:
        raise DataError(f"{pipeline.name} has no chat template, so it is not a chat model; use generate")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise DataError(f"a message is {message!r:.60}; expected a role and a content, such as {_EXAMPLE}")
    specials = getattr(pipeline.tokenizer, "specials", {})
    settings = {"add_generation_prompt": True, "tools": None, "documents": None}
    return _require_tokens(pipeline.tokenizer.encode(render(template, messages, {**specials, **settings})))


def _generate_texts(pipeline: Pipeline, prompts: list[list[int]], strategy: Strategy, max_new_tokens: int) -> list[str]:
    """Return the text after each prompt."""
    if not prompts:
        return []
    limit, _ = remaining_context(pipeline, max(map(len, prompts)), max_new_tokens)
    generated = generation.generate(
        pipeline.model,
        prompts,
        strategy=strategy,
        max_new_tokens=limit,
        stop_ids=pipeline.stop_ids,
        logits_processors=pipeline.logits_processors,
    )
    return [decode_suffix(pipeline, ids, generated.sequence(i).tolist()) for i, ids in enumerate(prompts)]


def decode_suffix(pipeline: Pipeline, ids: list[int], new: list[int]) -> str:
    """Return the text of the ids `new` after `ids`, with the leading space that a separate text would lack."""
    prefix = pipeline.tokenizer.decode(ids)
    text = pipeline.tokenizer.decode([*ids, *new])
    return text[len(prefix) :] if text.startswith(prefix) else pipeline.tokenizer.decode(new)


def stream(
    pipeline: Pipeline, text: str | Messages, *, strategy: Greedy | Sample = GREEDY, max_new_tokens: int = 100
) -> Iterator[str]:
    """Continue a text or a conversation, and yield the new text piece by piece.

    Args:
        pipeline: A decoder.
        text: A text, or the messages of a conversation.
        strategy: `Greedy()` or `Sample(…)`.
        max_new_tokens: Largest number of new tokens.
    """
    pipeline.require("text")
    ids = _require_tokens(pipeline.tokenizer.prompt(text)) if isinstance(text, str) else encode_chat(pipeline, text)
    limit, _ = remaining_context(pipeline, len(ids), max_new_tokens)
    return stream_text(pipeline, ids, [], strategy=strategy, max_new_tokens=limit)


def stream_text(
    pipeline: Pipeline, ids: list[int], new_ids: list[int], *, standalone: bool = False, **options: Any
) -> Iterator[str]:
    """Generate after `ids` and yield the text piece by piece.

    Args:
        pipeline: A decoder.
        ids: The prompt.
        new_ids: A list that the new ids are appended to, including a stop id.
        standalone: Decode the new ids without the prompt.
        **options: Of `clearhead.generation.stream`.
    """
    options = {"stop_ids": pipeline.stop_ids, "logits_processors": pipeline.logits_processors, **options}
    context = [] if standalone else ids
    yielded = ""
    text = ""
    for step in generation.stream(pipeline.model, [ids], **options):
        new_ids.append(int(step.ids[0]))
        if new_ids[-1] in pipeline.stop_ids:
            break
        # All new ids are decoded each time, because several tokens may form one character. An incomplete character
        # decodes to U+FFFD, which is held back until the next tokens complete it.
        text = decode_suffix(pipeline, context, new_ids)
        complete = text.rstrip("\N{REPLACEMENT CHARACTER}")
        if len(complete) > len(yielded):
            yield complete[len(yielded) :]
            yielded = complete
    if len(text) > len(yielded):
        yield text[len(yielded) :]


@accepts_single(str)
def embed(pipeline: Pipeline, texts: Sequence[str], *, batch_size: int = 64) -> Float[Tensor, "N M"]:
    """Embed texts with an encoder, using the pooling of the model's folder (by default the mean over tokens).

    Args:
        pipeline: An encoder with a tokenizer.
        texts: One text, or several.
        batch_size: Number of texts per forward pass.

    Returns:
        A vector (M,) for a single text, else (N, M).
    """
    pooling = pipeline.pooling

    def pool(model: Encoder, x: Tensor, lengths: Tensor) -> Tensor:
        x = x.cpu().float()  # (B, T, M)
        lengths = lengths.cpu()
        is_token = torch.arange(x.shape[1]) < lengths[:, None]
        mean = (x * is_token[..., None]).sum(1) / lengths[:, None].clamp(min=1)
        return x[:, 0] if pooling["first"] else mean

    vectors = _encode_texts(pipeline, texts, pool, batch_size, pooling["max_len"])
    return torch.nn.functional.normalize(vectors, dim=1) if pooling["unit"] else vectors


@accepts_single(str)
def classify(pipeline: Pipeline, inputs: Sequence[str] | Tensor, *, batch_size: int = 64) -> list[dict[str, float]]:
    """Return the probability of each class by its name, most likely first.

    Args:
        pipeline: An encoder or a vision model with a classifier.
        inputs: One text, several texts, or images (N, C, height, width).
        batch_size: Number of texts per forward pass.

    Returns:
        One dictionary for a single text, else a list. If a text may belong to several classes, their probabilities are
        independent and do not sum to 1.
    """
    if isinstance(inputs, Tensor):
        pipeline.require("pictures")
        with torch.no_grad():
            logits = pipeline.model(inputs.to(next(pipeline.model.parameters()))).cpu().float()
    else:
        logits = _encode_texts(pipeline, inputs, lambda model, x, lengths: model.classify(x).cpu().float(), batch_size)
    source_config = {} if pipeline.source is None else pipeline.source.config
    is_multi_label = source_config.get("problem_type") == "multi_label_classification"
    names = source_config.get("id2label", {})
    result = []
    for row in (logits.sigmoid() if is_multi_label else logits.softmax(-1)).tolist():
        order = sorted(range(len(row)), key=lambda i: -row[i])
        result.append({str(names.get(str(i), i)): row[i] for i in order})
    return result


@torch.no_grad()
def _encode_texts(
    pipeline: Pipeline,
    texts: Sequence[str],
    reduce: Callable[..., Tensor],
    batch_size: int,
    max_len: int | None = None,
) -> Tensor:
    """Return `reduce(model, x, lengths)` of the encoder's output x (B, T, M) per text, one row each.

    Texts of similar length share a batch, to reduce padding.
    """
    model = pipeline.model
    if not isinstance(model, Encoder):
        kind = type(model).__name__
        raise DataError(f"cannot embed with {pipeline.name}: it is a {kind}; expected an Encoder")
    max_len = min(max_len or model.config.max_len, model.config.max_len)
    rows = [torch.tensor(pipeline.tokenizer.prompt(text, max_len), dtype=torch.int64) for text in texts]
    device = next(model.parameters()).device
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    result = torch.empty(0, model.config.d_model)
    for start in range(0, len(rows), batch_size):
        indices = order[start : start + batch_size]
        lengths = torch.tensor([len(rows[i]) for i in indices])
        ids = torch.nn.utils.rnn.pad_sequence([rows[i] for i in indices], batch_first=True)
        vectors = reduce(model, model(ids.to(device), mask=padding(lengths)), lengths)
        result = result if start else vectors.new_empty(len(rows), vectors.shape[1])
        result[indices] = vectors
    return result


def nearest_pairs(vectors: Float[Tensor, "N M"], n: int) -> list[tuple[float, int, int]]:
    """Return the `n` pairs of rows with the largest cosine, best first: cosine, first row, second row."""
    unit = torch.nn.functional.normalize(vectors, dim=1)
    pairs: list[tuple[float, int, int]] = []
    for i in range(len(unit) - 1):
        best = (unit[i + 1 :] @ unit[i]).topk(min(n, len(unit) - 1 - i))
        pairs += [(value, i, i + 1 + j) for value, j in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        pairs = sorted(pairs, key=lambda pair: -pair[0])[:n]
    return pairs


def _require_tokens(ids: list[int]) -> list[int]:
    """Return the ids of a prompt; raise `DataError` if there are none."""
    if not ids:
        raise DataError("the prompt is empty; give a text to continue")
    return ids


def remaining_context(
    pipeline: Pipeline, prompt_length: int, max_new_tokens: int, *, sliding_context: bool = False
) -> tuple[int, int | None]:
    """Return the number of new tokens that fit, and the context length if positions are learned, else None."""
    table = getattr(pipeline.model, "positions", None)
    if sliding_context or not isinstance(table, LearnedPositionEmbedding):
        return max_new_tokens, None
    context_length = table.length
    if prompt_length >= context_length:
        raise DataError(
            f"the prompt has {prompt_length:,} tokens and the context of {pipeline.name} is {context_length:,}; give a "
            "shorter prompt, or --sliding-context, which drops the oldest tokens"
        )
    return min(max_new_tokens, context_length - prompt_length), context_length
