"""`load`: a model without its tokenizer, by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal, overload

import torch
from torch import nn

from clearhead._core.keywords import explain_keywords
from clearhead.hub import checkpoint, convert
from clearhead.hub.bundled import is_clearhead_model, model_folder, unfinished_run
from clearhead.models import ConvNet, CTCEncoder, Decoder, EncoderDecoder, VisionTransformer, storage
from clearhead.training.recipe import load_newest_checkpoint


@overload
def load(
    name: Literal["en-es"], device: str | torch.device = ..., dtype: torch.dtype | None = ...
) -> EncoderDecoder: ...
@overload
def load(
    name: Literal["shakespeare", "sort-dedup"], device: str | torch.device = ..., dtype: torch.dtype | None = ...
) -> Decoder: ...
@overload
def load(
    name: Literal["digits-vit"], device: str | torch.device = ..., dtype: torch.dtype | None = ...
) -> VisionTransformer: ...
@overload
def load(
    name: Literal["digits-conv"], device: str | torch.device = ..., dtype: torch.dtype | None = ...
) -> ConvNet: ...
@overload
def load(
    name: Literal["spoken-digits"], device: str | torch.device = ..., dtype: torch.dtype | None = ...
) -> CTCEncoder: ...
@overload
def load(name: str | Path, device: str | torch.device = ..., dtype: torch.dtype | None = ...) -> nn.Module: ...
@explain_keywords
def load(name: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = torch.float32) -> nn.Module:
    """Load a model without its tokenizer, in evaluation mode.

    Args:
        name: A bundled model (`"en-es"`), the folder of a run (if it is not finished, its newest checkpoint is used) or
            of a model, a Hugging Face folder, a name on the Hugging Face hub (`"org/name"` or
            `"hf:org/name@revision"`) or a .gguf file.
        device: Device of the parameters.
        dtype: Dtype of the parameters; None for the stored one.

    Returns:
        The model. Type checkers know the class of bundled models.

    Raises:
        StorageError: If the model does not exist or it cannot be read.
    """
    if not is_clearhead_model(name) and checkpoint.is_third_party(name):
        return convert.load_from_reader(checkpoint.open_checkpoint(name), device=device, dtype=dtype)
    return load_from_folder(name, device, dtype)


def load_from_folder(name: str | Path, device: str | torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Load a clearhead model; of an unfinished run its newest checkpoint, with a warning."""
    run = unfinished_run(name)
    if run is None:
        model: nn.Module = storage.load_checkpoint(model_folder(name), device=device, dtype=dtype)
        return model
    model, step = load_newest_checkpoint(run)
    message = f"{run} is not finished; its checkpoint of step {step:,} is used"
    warnings.warn(message, RuntimeWarning, stacklevel=4)
    return model.to(device=device, dtype=dtype)
