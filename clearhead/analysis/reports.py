"""Attention reports and model inputs for the bundled tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead.analysis.interp.metric import ModelInputs
from clearhead.analysis.tracing.trace import Trace, trace
from clearhead.analysis.views.report import AttentionReport, Labels, build_report
from clearhead.data import audio
from clearhead.data.tasks.digits import prepare, to_grayscale
from clearhead.data.tasks.speech import TAIL_SECONDS
from clearhead.errors import DataError, optional_dependency
from clearhead.generation import Greedy, Strategy, generate
from clearhead.generation.ctc import decode
from clearhead.hub import Pipeline
from clearhead.hub.translate import DEFAULT_STRATEGY, Translation, translations
from clearhead.models import CTCEncoder, VisionTransformer
from clearhead.nn import MultiHeadAttention


def attention_report(
    trained: Pipeline, text_or_path: str, *, strategy: Strategy = DEFAULT_STRATEGY, data: Path | None = None
) -> AttentionReport:
    """Build the attention report of one input: a sentence to translate, a prompt, letters to sort, an image, or a
    sound.

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
    """
    if trained.task == "translation":
        return translation_report(trained, translations(trained, [text_or_path], strategy=strategy)[0])
    if trained.task == "digits":
        return report_for_image(trained, read_image(trained, text_or_path, data), name=Path(text_or_path).name)
    if trained.task == "speech":
        rate = trained.model.config.mel.sample_rate if isinstance(trained.model, CTCEncoder) else None
        return report_for_audio(trained, audio.read_audio(text_or_path, rate).samples, name=Path(text_or_path).name)
    inputs: Any = model_inputs(trained, text_or_path)
    return report_for_ids(trained, inputs.args[0][0].tolist(), title=inputs.title)


def model_inputs(
    trained: Pipeline, text_or_path: str, *, strategy: Strategy = DEFAULT_STRATEGY, data: Path | None = None
) -> ModelInputs:
    """Return an input in the form in which its model is called, for `logit_lens`, `attribute`, `patch` and `ablate`.

        inputs = analysis.model_inputs(trained, "To be, or not")
        analysis.logit_lens(trained.model, inputs.args).charts(inputs.tokens, inputs.name)

    Args:
        trained: A loaded model.
        text_or_path: The text, or the path of an image file. With `data`, the index of an image. A sentence to
            translate is completed by the model's translation.
        strategy: Decoding strategy of a translation.
        data: Data set of which `text_or_path` is an image index.

    Returns:
        The input tensors, their tokens and a title.

    Raises:
        DataError: If the input is empty, too long or unreadable.
    """
    title = shorten_text(text_or_path)
    if trained.task == "digits":
        pixels = image_input(trained, read_image(trained, text_or_path, data))
        return ModelInputs(pixels, tuple(patch_labels(trained)), str, Path(text_or_path).name)
    tokenizer = trained.tokenizer
    source_ids: list[int] = []
    if trained.task == "translation":
        translation = translations(trained, [text_or_path], strategy=strategy)[0]
        (source_ids, ids), title = source_and_target_ids(trained, translation), f"{title} → {translation.target}"
    elif trained.task == "sort-dedup":
        ids, answer = sorting_ids(trained, text_or_path)
        ids, title = [*ids, *answer], f"{title} → {tokenizer.decode(answer)}"
    else:
        ids = list(encode_prompt(trained, text_or_path))
    calls = tuple(ids_tensor(trained, ids_) for ids_ in (source_ids, ids) if ids_)
    source_tokens, tokens = (tuple(tokenizer.tokens(ids_)) for ids_ in (source_ids, ids))
    return ModelInputs(calls, tokens, lambda token: tokenizer.tokens([token])[0], title, source_tokens)


def translation_report(trained: Pipeline, translation: Translation) -> AttentionReport:
    """Build the report of a sentence and its translation from the ids of the translation, without re-encoding.

    The query of token i predicts token i + 1.

    Args:
        trained: The translation model.
        translation: The translation.
    """
    input_ids, names = source_and_target_ids(trained, translation), trained.tokenizer.tokens
    with torch.no_grad(), _trace(trained) as t:
        trained.model(*(ids_tensor(trained, ids) for ids in input_ids))
    source_tokens, target_tokens, written_tokens = (
        names(input_ids[0]),
        names(input_ids[1]),
        names(translation.target_ids),
    )
    labels: Labels = {
        "encoder.**": (source_tokens, source_tokens),
        "**.cross_attention": (written_tokens, source_tokens),
        "**": (target_tokens, target_tokens),
    }
    metadata = {"source": f"{len(source_tokens)} tokens", "written": f"{len(written_tokens)} tokens"}
    return build_report(
        t, labels, title=f"{translation.source.strip()} → {translation.target}", metadata=_metadata(trained) | metadata
    )


def source_and_target_ids(trained: Pipeline, translation: Translation) -> tuple[list[int], list[int]]:
    """Return the inputs of encoder and decoder of a translation."""
    if not translation.source_ids:
        raise DataError("the input is empty; pass a sentence to translate")
    return list(translation.source_ids), [trained.tokenizer.bos_id, *translation.target_ids[:-1]]


def sorting_ids(trained: Pipeline, letters: str, *, with_stop: bool = False) -> tuple[list[int], list[int]]:
    """Return the ids of the letters and <START>, and those of the answer."""
    tokenizer = trained.tokenizer
    ids = [*tokenizer.encode(letters), tokenizer.bos_id]
    if len(ids) == 1:
        raise DataError("the input is empty; pass letters separated by blanks, such as 'D A A'")
    longest = getattr(trained.model.config, "max_len", len(ids) + tokenizer.vocab_size)
    max_new_tokens = min(tokenizer.vocab_size, int(longest) - len(ids))
    if max_new_tokens < 1:
        raise DataError(
            f"{len(ids) - 1} letters leave no positions for an answer; {trained.name} takes {longest} tokens"
        )
    generated = generate(
        trained.model,
        ids_tensor(trained, ids),
        strategy=Greedy(),
        max_new_tokens=max_new_tokens,
        stop_ids=tokenizer.eos_id,
    )
    return ids, generated.sequence(0, with_stop=with_stop).tolist()


def encode_prompt(trained: Pipeline, prompt: str) -> list[int]:
    """Return the ids of a text; raise DataError if it is empty or too long."""
    ids = trained.tokenizer.prompt(prompt)
    if not ids:
        raise DataError("the text has no tokens; pass at least one letter")
    longest = getattr(trained.model.config, "max_len", None)
    if longest is not None and len(ids) > longest:
        raise DataError(f"the text has {len(ids)} tokens but {trained.name} takes at most {longest}; shorten it")
    return ids


def shorten_text(text: str) -> str:
    """Return a text in one line of at most 90 characters."""
    return " ".join((text if len(text) <= 90 else text[:89] + "…").split())


def report_for_image(trained: Pipeline, pixels: Tensor, *, name: str) -> AttentionReport:
    """Build the report of a gray image (height, width) of bytes."""
    model: Any = trained.model
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
    symbols = {symbol.start: str(symbol.id) for symbol in decode(logits.log_softmax(-1), blank=model.config.blank)}
    names = [f"{symbols.get(n, '')} {n * model.config.frame_seconds:.2f} s".lstrip() for n in range(len(logits))]
    shape = frames[0, : len(logits) * stacked].T.flip(0).cpu()  # low frequencies at the bottom
    image = (255 * (shape - shape.min()) / (shape.max() - shape.min()).clamp(min=1e-6)).to(torch.uint8)
    image = image.repeat_interleave(max(1, image.shape[1] // (3 * len(image))), 0)
    title = f"{name} → {' '.join(symbols.values()) or 'nothing'}"
    metadata = {"mask": str(model.config.mask), "heard": ", ".join(names[n] for n in symbols) or "nothing"}
    report = build_report(
        t, names, title=title, metadata=_metadata(trained) | metadata, image=image, grid=(1, len(logits))
    )
    return replace(report, query=next(iter(symbols), None))


def image_input(trained: Pipeline, pixels: Tensor) -> Tensor:
    """Return a gray image (height, width) of bytes as model input."""
    choice: Any = getattr(trained.recipe.data, "normalize", None)
    if choice is None:
        name = trained.name
        raise DataError(f"the recipe of {name} has no image normalization (`data.normalize`); train the model again")
    return prepare(pixels[None], choice).to(next(trained.model.parameters()).device)


def patch_labels(trained: Pipeline) -> list[str]:
    """Return the tokens of an image: patch coordinates, after the special tokens."""
    config: Any = trained.model.config
    coordinates = [f"({i}, {j})" for i in range(config.grid[0]) for j in range(config.grid[1])]
    return [*["[CLS]"] * config.pooling.n_extra, *coordinates]


_MAX_PIXELS = 1 << 25  # decoded, an image takes several times 4 bytes per pixel


def read_image(trained: Pipeline, path_or_index: str, data: Path | None) -> Tensor:
    """Return the gray bytes of an image in the model's size: from a file, or by index from the validation data."""
    if not isinstance(trained.model, VisionTransformer):
        raise no_attention_error(trained)
    if data is not None:
        task: Any = trained.recipe.data.with_path(data).load(seed=trained.recipe.train.seed)
        images: Tensor = task.validation.pixels
        if not path_or_index.isdigit() or int(path_or_index) >= len(images):
            raise DataError(
                f"there is no image {path_or_index} in {data}; expected an index from 0 to {len(images) - 1}"
            )
        return images[int(path_or_index)]
    path, (height, width) = Path(path_or_index), trained.model.config.image_size
    if not path.is_file():
        raise DataError(
            f"there is no image file {path_or_index}; pass a PNG or JPEG file, or an image index together with --data"
        )
    with optional_dependency("reading images needs pillow: pip install pillow"):
        from PIL import Image, UnidentifiedImageError
    try:
        with Image.open(path) as file:
            if file.width * file.height > _MAX_PIXELS:
                raise DataError(
                    f"{path_or_index} has {file.width:,} × {file.height:,} pixels; expected at most {_MAX_PIXELS:,}; "
                    "shrink it first"
                )
            # Composite transparent images on white.
            rgba = file.convert("RGBA")
            opaque = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
            small = opaque.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise DataError(f"{path_or_index} cannot be read as an image: {str(error).splitlines()[0]}") from error
    return to_grayscale(torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(height, width, 3))


def report_for_ids(trained: Pipeline, ids: list[int], *, title: str, layer: str | None = None) -> AttentionReport:
    """Build the report of the ids of a text, with the top predictions; optionally of one layer."""
    with torch.no_grad(), _trace(trained, layer) as t:
        logits = trained.model(ids_tensor(trained, ids))[0, -1]
    tokens = trained.tokenizer.tokens
    metadata = {"tokens": str(len(ids)), "next_token": _likeliest(logits, lambda token: tokens([token])[0])}
    return build_report(t, tokens(ids), title=title, metadata=_metadata(trained) | metadata)


def _likeliest(logits: Float[Tensor, " V"], name: Callable[[int], str]) -> str:
    """Return the top three predictions as text."""
    probabilities, ids = logits.softmax(-1).topk(3)
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


def no_attention_error(trained: Pipeline) -> DataError:
    """Return the error for a model without attention."""
    kind = type(trained.model).__name__
    return DataError(f"{trained.name} is a {kind} and has no attention; choose a Transformer")


def _metadata(trained: Pipeline) -> dict[str, str]:
    return {"model": trained.name, "parameters": f"{sum(p.numel() for p in trained.model.parameters()):,}"}


def ids_tensor(trained: Pipeline, ids: Sequence[int]) -> Tensor:
    """Return ids as a tensor (1, T) on the model's device."""
    return torch.tensor([list(ids)], device=next(trained.model.parameters()).device)
