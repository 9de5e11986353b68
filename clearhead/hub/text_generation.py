"""Generate text from prompts and conversations with a decoder, in batches or as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from clearhead import generation
from clearhead.errors import DataError
from clearhead.generation import BeamSearch, Greedy, Sample, Strategy
from clearhead.hub.chat_template import render
from clearhead.hub.translate import require_list, translations
from clearhead.nn.positions import LearnedPositionEmbedding

if TYPE_CHECKING:
    from clearhead.hub.pipelines import Pipeline

Messages: TypeAlias = Sequence[Mapping[str, str]]  # each with a role and a content

_EXAMPLE = '{"role": "user", "content": "Hello"}'


def generate(
    pipeline: Pipeline,
    texts: Sequence[str],
    *,
    strategy: Strategy | None = None,
    max_new_tokens: int | None = None,
) -> list[str]:
    """Generate text in one batch: a decoder continues each text, an encoder-decoder translates it.

    Args:
        pipeline: The model.
        texts: The texts.
        strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`; by default the model's own.
        max_new_tokens: Largest number of new tokens per text; by default the model's own, or 128.

    Returns:
        The new text after each text, without the prompt.
    """
    if pipeline.task == "translation":
        return [
            result.target for result in translations(pipeline, texts, strategy=strategy, max_new_tokens=max_new_tokens)
        ]
    pipeline.require("text")
    require_list(texts)
    prompts = [_require_tokens(pipeline.tokenizer.prompt(text)) for text in texts]
    return _generate_texts(pipeline, prompts, strategy, max_new_tokens)


def chat(
    pipeline: Pipeline,
    conversations: Sequence[Messages],
    *,
    strategy: Strategy | None = None,
    max_new_tokens: int | None = None,
) -> list[str]:
    """Generate the next message of each conversation.

    Args:
        pipeline: A decoder with a chat template.
        conversations: Each `[{"role": "user", "content": "…"}, …]`.
        strategy: `Greedy()`, `Sample(…)` or `BeamSearch(…)`; by default the model's own.
        max_new_tokens: Largest number of new tokens per message; by default the model's own, or 128.

    Raises:
        DataError: If the model has no chat template, or a message has no role or content.
    """
    pipeline.require("text")
    prompts = [encode_chat(pipeline, conversation) for conversation in conversations]
    return _generate_texts(pipeline, prompts, strategy, max_new_tokens)


def encode_chat(pipeline: Pipeline, messages: Messages) -> list[int]:
    """Apply the model's chat template, and return the ids of the conversation up to the model's next message.

    Args:
        pipeline: A decoder with a chat template.
        messages: `[{"role": "user", "content": "…"}, …]`.

    Returns:
        Token ids of the conversation, ending where the model's answer begins.

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


def _generate_texts(
    pipeline: Pipeline, prompts: list[list[int]], strategy: Strategy | None, max_new_tokens: int | None
) -> list[str]:
    """Return the text after each prompt."""
    if not prompts:
        return []
    longest = max(map(len, prompts))
    settings = pipeline.generation_settings
    limit, _ = remaining_context(pipeline, longest, settings.new_tokens(longest, max_new_tokens))
    generated = generation.generate(
        pipeline.model,
        prompts,
        strategy=settings.strategy if strategy is None else strategy,
        max_new_tokens=limit,
        stop_ids=settings.stop_ids,
        logits_processors=settings.logits_processors,
    )
    return [decode_suffix(pipeline, ids, generated.sequence(i).tolist()) for i, ids in enumerate(prompts)]


def decode_suffix(pipeline: Pipeline, ids: list[int], new: list[int]) -> str:
    """Return the text of the ids `new` after `ids`, with the leading space that a separate text would lack."""
    prefix = pipeline.tokenizer.decode(ids)
    text = pipeline.tokenizer.decode([*ids, *new])
    return text[len(prefix) :] if text.startswith(prefix) else pipeline.tokenizer.decode(new)


def stream(
    pipeline: Pipeline,
    text: str | Messages,
    *,
    strategy: Greedy | Sample | None = None,
    max_new_tokens: int | None = None,
) -> Iterator[str]:
    """Continue a text or a conversation, and yield the new text piece by piece.

    Args:
        pipeline: A decoder.
        text: A text, or the messages of a conversation.
        strategy: `Greedy()` or `Sample(…)`; by default the model's own, or greedy decoding if that is a beam search,
            whose ids may change until its end.
        max_new_tokens: Largest number of new tokens; by default the model's own, or 128.
    """
    pipeline.require("text")
    ids = _require_tokens(pipeline.tokenizer.prompt(text)) if isinstance(text, str) else encode_chat(pipeline, text)
    limit, _ = remaining_context(pipeline, len(ids), pipeline.generation_settings.new_tokens(len(ids), max_new_tokens))
    return stream_text(pipeline, ids, [], strategy=strategy, max_new_tokens=limit)


def stream_text(
    pipeline: Pipeline,
    ids: list[int],
    new_ids: list[int],
    *,
    standalone: bool = False,
    strategy: Greedy | Sample | None = None,
    max_new_tokens: int | None = None,
    sliding_context: bool = False,
) -> Iterator[str]:
    """Generate after `ids` and yield the text piece by piece.

    Args:
        pipeline: A decoder.
        ids: The prompt.
        new_ids: A list that the new ids are appended to, including a stop id.
        standalone: Decode the new ids without the prompt.
        strategy: As in `stream`.
        max_new_tokens: As in `clearhead.generation.stream`.
        sliding_context: As in `clearhead.generation.stream`.
    """
    settings = pipeline.generation_settings
    if strategy is None:
        strategy = Greedy() if isinstance(settings.strategy, BeamSearch) else settings.strategy
    context = [] if standalone else ids
    yielded = ""
    text = ""
    steps = generation.stream(
        pipeline.model,
        [ids],
        strategy=strategy,
        max_new_tokens=max_new_tokens,
        stop_ids=settings.stop_ids,
        sliding_context=sliding_context,
        logits_processors=settings.logits_processors,
    )
    for step in steps:
        new_ids.append(int(step.ids[0]))
        if new_ids[-1] in settings.stop_ids:
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
