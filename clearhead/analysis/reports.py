"""Attention reports and model inputs for the bundled tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead.analysis.inputs.pipelines import (
    ids_tensor,
    image_input,
    model_inputs,
    no_attention_error,
    patch_labels,
    read_image,
    source_and_target_ids,
)
from clearhead.analysis.tracing.trace import Trace, trace
from clearhead.analysis.views.report import AttentionReport, Labels, Sound, build_report
from clearhead.data import audio
from clearhead.data.tasks.speech import TAIL_SECONDS
from clearhead.errors import DataError, DtypeError
from clearhead.generation import Strategy
from clearhead.generation.ctc import decode
from clearhead.hub import Pipeline
from clearhead.hub.translate import DEFAULT_STRATEGY, Translation, translations
from clearhead.models import CTCEncoder, VisionTransformer
from clearhead.nn import MultiHeadAttention


def attention_report(
    trained: Pipeline, text_or_path: str, *, strategy: Strategy = DEFAULT_STRATEGY, data: Path | None = None
) -> AttentionReport:
    """Build the attention report of one input.

    The input is a sentence to translate, a prompt, letters to sort, an image, or a sound.

        analysis.attention_report(ch.pipeline("en-es"), "How are you?")

    Args:
        trained: A loaded model.
        text_or_path: The text, or the path of an image or audio file. With `data`, the index of an image.
        strategy: Decoding strategy of a translation.
        data: Data set of which `text_or_path` is an image index.

    Returns:
        The report, with the attention maps of all layers.

    Raises:
        DataError: If the input is empty, too long or unreadable, or the model has no attention.
        DtypeError: If `trained` is not a pipeline.
    """
    if not isinstance(trained, Pipeline):
        raise DtypeError(f"got a {type(trained).__name__}; expected a pipeline, as from ch.pipeline(name)")
    if trained.task == "translation":
        return translation_report(trained, translations(trained, [text_or_path], strategy=strategy)[0])
    if trained.task == "digits":
        return report_for_image(trained, read_image(trained, text_or_path, data), name=Path(text_or_path).name)
    if trained.task == "speech":
        rate = trained.model.config.mel.sample_rate if isinstance(trained.model, CTCEncoder) else None
        return report_for_audio(trained, audio.read_audio(text_or_path, rate).samples, name=Path(text_or_path).name)
    inputs: Any = model_inputs(trained, text_or_path)
    return report_for_ids(trained, inputs.args[0][0].tolist(), title=inputs.title)


def translation_report(trained: Pipeline, translation: Translation) -> AttentionReport:
    """Build the report of a sentence and its translation from the ids of the translation, without re-encoding.

    The query of token i predicts token i + 1.

    Args:
        trained: The translation model.
        translation: The translation.

    Returns:
        The report of encoder, decoder and cross-attention.
    """
    input_ids = source_and_target_ids(trained, translation)
    names = trained.tokenizer.tokens
    with torch.no_grad(), _trace(trained) as t:
        trained.model(*(ids_tensor(trained, ids) for ids in input_ids))
    source_tokens = names(input_ids[0])
    target_tokens = names(input_ids[1])
    written_tokens = names(translation.target_ids)
    labels: Labels = {
        "encoder.**": (source_tokens, source_tokens),
        "**.cross_attention": (written_tokens, source_tokens),
        "**": (target_tokens, target_tokens),
    }
    metadata = {"source": f"{len(source_tokens)} tokens", "written": f"{len(written_tokens)} tokens"}
    return build_report(
        t, labels, title=f"{translation.source.strip()} → {translation.target}", metadata=_metadata(trained) | metadata
    )


def report_for_image(trained: Pipeline, pixels: Tensor, *, name: str) -> AttentionReport:
    """Build the report of a gray image (height, width) of bytes."""
    model = trained.model
    if not isinstance(model, VisionTransformer):
        raise no_attention_error(trained)
    rows, columns = model.config.grid
    with torch.no_grad(), _trace(trained) as t:
        logits = model(image_input(trained, pixels))[0]
    metadata = _metadata(trained) | {"seen": _likeliest(logits, str), "patches": f"{rows} × {columns}"}
    title = f"{name} → {int(logits.argmax())}"
    return build_report(t, patch_labels(trained), title=title, metadata=metadata, image=pixels, grid=(rows, columns))


def report_for_audio(trained: Pipeline, samples: Float[Tensor, " N"], *, name: str) -> AttentionReport:
    """Build the report of an audio input, over its spectrogram."""
    model = trained.model
    if not isinstance(model, CTCEncoder):
        raise no_attention_error(trained)
    mel, stacked = model.config.mel, model.config.frame_stacking
    if mel.n_frames(len(samples)) < stacked:
        raise DataError(
            f"{name} is too short: {len(samples)} samples, which is shorter than one encoder frame of {trained.name}"
        )
    # With the tail padding of the streaming recognizer.
    frames = mel(torch.nn.functional.pad(samples, (0, round(TAIL_SECONDS * mel.sample_rate)))[None])
    with torch.no_grad(), _trace(trained) as t:
        logits = model(frames.to(model.head.weight))[0].float().cpu()
    # A symbol is listed at its last frame, and a frame is named by its end, as in the output of the recognizer.
    recognizer = trained.listen()
    ends = [recognizer.seconds(n + 1) for n in range(len(logits))]
    symbols = {symbol.end - 1: str(symbol.id) for symbol in decode(logits.log_softmax(-1), blank=model.config.blank)}
    names = [f"{symbols.get(n, '')} {end:.2f} s".lstrip() for n, end in enumerate(ends)]
    shape = frames[0, : len(logits) * stacked].T.flip(0).cpu()  # low frequencies at the bottom
    image = (255 * (shape - shape.min()) / (shape.max() - shape.min()).clamp(min=1e-6)).to(torch.uint8)
    image = image.repeat_interleave(max(1, image.shape[1] // (3 * len(image))), 0)
    title = f"{name} → {' '.join(symbols.values()) or 'nothing'}"
    heard = ", ".join(f"{text} ({ends[n]:.2f} s)" for n, text in symbols.items())
    metadata = {"mask": str(model.config.mask), "heard": heard or "nothing"}
    sound = Sound(samples, mel.sample_rate, ends, symbols)
    report = build_report(
        t, names, title=title, metadata=_metadata(trained) | metadata, image=image, grid=(1, len(logits))
    )
    return replace(report, query=next(iter(symbols), None), sound=sound)


def report_for_ids(trained: Pipeline, ids: list[int], *, title: str, layer: str | None = None) -> AttentionReport:
    """Build the report of the ids of a text, with the top predictions; optionally of one layer."""
    with torch.no_grad(), _trace(trained, layer) as t:
        logits = trained.model(ids_tensor(trained, ids))[0, -1]
    tokens = trained.tokenizer.tokens
    metadata = {"tokens": str(len(ids)), "next_token": _likeliest(logits, lambda token: tokens([token])[0])}
    return build_report(t, tokens(ids), title=title, metadata=_metadata(trained) | metadata)


def _likeliest(logits: Float[Tensor, " V"], name: Callable[[int], str]) -> str:
    """Return the top three predictions as text."""
    probabilities, ids = logits.softmax(-1).topk(min(3, len(logits)))
    return ", ".join(f"{name(i)} ({100 * p:.0f} %)" for i, p in zip(ids.tolist(), probabilities.tolist(), strict=True))


def attention_layers(model: nn.Module) -> dict[str, MultiHeadAttention]:
    """Return the attention layers of a clearhead model by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, MultiHeadAttention)}


def _trace(trained: Pipeline, layer: str | None = None) -> Trace:
    layers = attention_layers(trained.model)
    if not layers:
        raise no_attention_error(trained)
    patterns = (f"{path}.weights" for path in (layers if layer is None else [layer]))
    return trace(trained.model, *patterns, "**.blocks.*.output")


def _metadata(trained: Pipeline) -> dict[str, str]:
    return {"model": trained.name, "parameters": f"{sum(p.numel() for p in trained.model.parameters()):,}"}
