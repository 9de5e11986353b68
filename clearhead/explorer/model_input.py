"""The input of a model as ids: encoded once, in the action `run`; every other action receives the ids of that run."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeInt, require
from clearhead.analysis.inputs.pipelines import encode_prompt, ids_tensor
from clearhead.config import Validated
from clearhead.data import WordLevelTokenizer
from clearhead.data.tasks.translation import encode_sources
from clearhead.errors import DataError
from clearhead.explorer.request import FieldError, RequestContext, field_errors
from clearhead.generation import generate
from clearhead.hub import Pipeline
from clearhead.hub.text_generation import decode_suffix, encode_chat
from clearhead.models import EncoderDecoder

_ANSWERED_TASKS = ("translation", "sort-dedup")


@dataclass(frozen=True, kw_only=True)
class ModelRequest(Validated):
    """A model and its input: a text, the ids of an earlier run, an image or a sound.

    Attributes:
        model: Name of the model.
        text: The text; not read if `ids` is given.
        chat: Whether the text is a message, to which the model's chat template is applied.
        source_ids: Input of the encoder, of an earlier run.
        ids: Input of the decoder, or of the only stack, of an earlier run.
        n_prompt: Number of `ids` that were not generated.
        generated_ids: Ids that follow the text.
        pixels: Gray bytes of an image, in base64.
        samples: 16-bit samples of a sound at the model's rate, in base64.
        layer: The attention layer to report; by default all.
    """

    model: str
    text: str = ""
    chat: bool = False
    source_ids: tuple[NonNegativeInt, ...] = ()
    ids: tuple[NonNegativeInt, ...] = ()
    n_prompt: NonNegativeInt = 0
    generated_ids: tuple[NonNegativeInt, ...] = ()
    pixels: str = ""
    samples: str = ""
    layer: str = ""


@dataclass(frozen=True)
class EncodedInput:
    """One text as ids.

    Attributes:
        pipeline: The model.
        source_ids: Input of the encoder; empty for decoder-only models and encoders.
        ids: Input of the decoder, or of the only stack, and the generated ids.
        n_prompt: Number of `ids` that were not generated.
    """

    pipeline: Pipeline
    source_ids: list[int]
    ids: list[int]
    n_prompt: int

    @property
    def generated_ids(self) -> list[int]:
        """The generated ids, including a stop id."""
        return self.ids[self.n_prompt :]

    @property
    def is_finished(self) -> bool:
        """Whether the last generated id is a stop id."""
        return bool(self.generated_ids) and self.ids[-1] in self.pipeline.stop_ids

    @property
    def input_ids(self) -> list[int]:
        """The ids that the model reads: all but a final stop id, after which it predicts nothing."""
        return self.ids[:-1] if self.is_finished else self.ids

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments of the model."""
        return tuple(ids_tensor(self.pipeline, row) for row in (self.source_ids, self.input_ids) if row)

    def logits(self, start: int) -> Tensor:
        """Return the logits (T, V) from position `start` on; those of the other positions are not computed."""
        model: Any = self.pipeline.model
        hidden = model.hidden_states(*self.inputs)[0, start:]
        stack = model.decoder if isinstance(model, EncoderDecoder) else model
        logits: Tensor = stack.postprocess_logits(hidden @ model.lm_head_weight().T)
        return logits.float().cpu()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids without stop tokens."""
        return self.pipeline.tokenizer.decode([i for i in ids if i not in self.pipeline.stop_ids])

    @property
    def output_text(self) -> str:
        """The text of the generated ids, with the leading space that a continuation has."""
        new = [i for i in self.generated_ids if i not in self.pipeline.stop_ids]
        if self.source_ids or self.pipeline.task in _ANSWERED_TASKS:
            return self.pipeline.tokenizer.decode(new)
        return decode_suffix(self.pipeline, self.ids[: self.n_prompt], new)

    def to_dict(self) -> JSONObject:
        """Return the tokens as plain data for JSON."""
        names = self.pipeline.tokenizer.tokens
        return {
            "tokens": names(self.ids),
            "ids": self.ids,
            "n_prompt": self.n_prompt,
            "separator": " " if isinstance(self.pipeline.tokenizer, WordLevelTokenizer) else "",
            "source": names(self.source_ids) if self.source_ids else [],
            "source_ids": self.source_ids,
        }


def encode_input(request: ModelRequest, context: RequestContext) -> EncodedInput:
    """Return the ids of a request; raise DataError if it is empty or too long."""
    pipeline = context.registry.model(request.model)
    if request.ids:
        require(1 <= request.n_prompt <= len(request.ids), f"n_prompt is {request.n_prompt}; expected 1 to the length")
        source_ids, ids, n_prompt = list(request.source_ids), list(request.ids), request.n_prompt
        is_pair = isinstance(pipeline.model, EncoderDecoder)
        require(is_pair == bool(source_ids), "source_ids are needed for an encoder-decoder, and for no other model")
    else:
        with field_errors("text"):
            source_ids, ids = _encode_text(pipeline, request)
        n_prompt = len(ids)
    ids += request.generated_ids
    config: Any = pipeline.model.config
    for name, row, size in (
        ("ids", ids, config.vocab_size),
        ("source_ids", source_ids, getattr(config, "source_vocab_size", None) or config.vocab_size),
    ):
        require(all(i < size for i in row), f"{name} contains an id outside the vocabulary (0 … {size - 1:,})")
    length = max(len(source_ids), len(ids))
    limit = max_tokens(pipeline.model, context.registry.limits.max_tokens)
    if length > limit + 1:  # the last id may be a stop id, which the model does not read
        message = f"the input has {length:,} tokens but {pipeline.name} takes at most {limit:,} here; shorten it"
        raise FieldError("text", message)
    return EncodedInput(pipeline, source_ids, ids, n_prompt)


def _encode_text(pipeline: Pipeline, request: ModelRequest) -> tuple[list[int], list[int]]:
    """Return the ids of the encoder and of the decoder for a text."""
    text, tokenizer = request.text.strip(), pipeline.tokenizer
    if not text:
        raise DataError("the input is empty; enter a text")
    if isinstance(pipeline.model, EncoderDecoder):
        if pipeline.source is not None:
            return tokenizer.prompt(text), list(pipeline.decoder_start_ids)
        sources = encode_sources(tokenizer, [text])
        return sources.padded(torch.tensor([0]), fill=tokenizer.pad_id)[0][0].tolist(), list(pipeline.decoder_start_ids)
    if pipeline.task == "sort-dedup":
        return [], [*tokenizer.encode(request.text), tokenizer.bos_id]
    if request.chat:
        return [], list(encode_chat(pipeline, [{"role": "user", "content": text}]))
    return [], list(encode_prompt(pipeline, request.text))


def max_tokens(model: Any, limit: int) -> int:
    """Return the number of tokens that the page passes to a model at most."""
    return min(limit, getattr(model.config, "max_len", None) or limit)


def with_answer(encoded: EncodedInput) -> EncodedInput:
    """Append the greedy answer if the task has one and nothing was generated yet."""
    if encoded.pipeline.task not in _ANSWERED_TASKS or encoded.generated_ids:
        return encoded
    model: Any = encoded.pipeline.model
    output = generate(
        model,
        encoded.inputs[0],
        decoder_start_ids=encoded.ids if encoded.source_ids else None,
        stop_ids=encoded.pipeline.stop_ids,
        max_new_tokens=answer_length(encoded),
    )
    return replace(encoded, ids=[*encoded.ids, *output.sequence(0, with_stop=True).tolist()])


def answer_length(encoded: EncodedInput) -> int:
    """Return the largest number of new tokens of an answer."""
    length = 2 * max(len(encoded.source_ids), encoded.n_prompt) + 8
    return max(1, min(length, max_tokens(encoded.pipeline.model, length + encoded.n_prompt) - len(encoded.ids)))


def has_answer(pipeline: Pipeline) -> bool:
    """Return whether the task has one answer, which ends with a stop token."""
    return pipeline.task in _ANSWERED_TASKS


def decode_pixels(text: str, model: Any) -> Tensor:
    """Return an image (height, width) of bytes, in the size that a model takes."""
    height, width = model.config.image_size
    data = _decode_base64(text)
    require(len(data) == height * width, f"the image has {len(data)} bytes; expected {height} × {width}, in base64")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(height, width)


def decode_samples(text: str) -> Tensor:
    """Return the samples (N,) of a sound, from −1 to 1."""
    data = _decode_base64(text)
    require(len(data) >= 2 and len(data) % 2 == 0, "the sound is empty; record one, or choose a file")
    return torch.frombuffer(bytearray(data), dtype=torch.int16).float() / 32768


def _decode_base64(text: str) -> bytes:
    """Return decoded bytes; none if the text is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
