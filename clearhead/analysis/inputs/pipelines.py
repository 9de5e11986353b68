"""Inputs of bundled models: a text, letters to sort, a sentence to translate or an image, as the model gets them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.analysis.inputs.model_inputs import ModelArgs, ModelInputs
from clearhead.data.image_files import to_grayscale
from clearhead.data.image_transforms import prepare
from clearhead.errors import DataError, DtypeError, optional_dependency
from clearhead.generation import Greedy, Strategy, generate
from clearhead.hub import Pipeline
from clearhead.hub.translate import DEFAULT_STRATEGY, Translation, translations
from clearhead.models import VisionTransformer

_MAX_PIXELS = 1 << 25  # decoded, an image takes several times 4 bytes per pixel


def resolve_inputs(model: nn.Module | Pipeline, args: ModelArgs | str) -> tuple[nn.Module, ModelInputs]:
    """Return the model and its inputs.

    Args:
        model: A module, or a pipeline, whose inputs may be a text.
        args: Arguments of the module, or a text.

    Raises:
        DtypeError: If a text is given for a module, which has no tokenizer.
    """
    if isinstance(model, Pipeline):
        inputs = model_inputs(model, args) if isinstance(args, str) else ModelInputs(args, (), str, "")
        return model.model, inputs
    if isinstance(args, str):
        raise DtypeError(
            f"got the text {shorten_text(args)!r} for a {type(model).__name__}, which has no tokenizer; pass a "
            "pipeline, as from ch.pipeline(name), or token ids"
        )
    return model, ModelInputs(args, (), str, "")


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
        ids = [*ids, *answer]
        title = f"{title} → {tokenizer.decode(answer)}"
    else:
        ids = list(encode_prompt(trained, text_or_path))
    calls = tuple(ids_tensor(trained, ids_) for ids_ in (source_ids, ids) if ids_)
    source_tokens, tokens = (tuple(tokenizer.tokens(ids_)) for ids_ in (source_ids, ids))
    return ModelInputs(calls, tokens, lambda token: tokenizer.tokens([token])[0], title, source_tokens)


def source_and_target_ids(trained: Pipeline, translation: Translation) -> tuple[list[int], list[int]]:
    """Return the inputs of encoder and decoder of a translation."""
    if not translation.source_ids:
        raise DataError("the input is empty; pass a sentence to translate")
    return list(translation.source_ids), [*trained.decoder_start_ids, *translation.target_ids[:-1]]


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


def image_input(trained: Pipeline, pixels: Tensor) -> Tensor:
    """Return a gray image (height, width) of bytes as model input."""
    choice: Any = getattr(trained.recipe.data, "normalize", None)
    if choice is None:
        name = trained.name
        raise DataError(f"the recipe of {name} has no image normalization (`data.normalize`); train the model again")
    return prepare(pixels[None], choice).to(next(trained.model.parameters()).device)


def patch_labels(trained: Pipeline) -> list[str]:
    """Return the tokens of an image: patch coordinates, after the special tokens."""
    if not isinstance(trained.model, VisionTransformer):
        raise no_attention_error(trained)
    config = trained.model.config
    coordinates = [f"({i}, {j})" for i in range(config.grid[0]) for j in range(config.grid[1])]
    return [*["[CLS]"] * config.pooling.n_extra, *coordinates]


def read_image(trained: Pipeline, path_or_index: str, data: Path | None) -> Tensor:
    """Return the gray bytes of an image in the model's size: from a file, or by index from the validation data."""
    if not isinstance(trained.model, VisionTransformer):
        raise no_attention_error(trained)
    if data is not None:
        task: Any = trained.recipe.data.with_path(data).load(seed=trained.recipe.train.seed)
        images: Tensor = task.validation.pixels
        if not path_or_index.isdigit() or int(path_or_index) >= len(images):
            raise DataError(f"image {path_or_index} is not in {data}; expected an index from 0 to {len(images) - 1}")
        return images[int(path_or_index)]
    path, (height, width) = Path(path_or_index), trained.model.config.image_size
    if not path.is_file():
        raise DataError(
            f"image file {path_or_index} does not exist; pass a PNG or JPEG file, or an index together with --data"
        )
    with optional_dependency("reading images needs pillow: pip install 'clearhead[data]'"):
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


def no_attention_error(trained: Pipeline) -> DataError:
    """Return the error for a model without attention."""
    kind = type(trained.model).__name__
    return DataError(f"{trained.name} has the type {kind} and no attention; choose a Transformer")


def ids_tensor(trained: Pipeline, ids: Sequence[int]) -> Tensor:
    """Return ids as a tensor (1, T) on the model's device."""
    return torch.tensor([list(ids)], device=next(trained.model.parameters()).device)
