"""Options shared by several commands, and the conversion of their values."""

from __future__ import annotations

import dataclasses
import itertools
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar

import typer
from typer.core import TyperCommand

from clearhead.errors import ConfigError, DtypeError

if TYPE_CHECKING:
    import torch

    from clearhead.generation import Strategy


_INT64 = range(-(1 << 63), 1 << 63)


V = TypeVar("V")


def _require_int64(value: V) -> V:
    """Reject integers beyond 64 bits, which no library that receives them can represent."""
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, int) and item not in _INT64:
            digits = str(abs(item)) if abs(item) < 10**100 else ""
            size = f"an integer of {len(digits)} digits" if digits else "an integer of more than 100 digits"
            raise typer.BadParameter(f"got {size}; expected an integer of at most 64 bits")
    return value


def option(help: str, *names: str, **kwargs: Any) -> Any:
    """Return an option with this help."""
    kwargs.setdefault("callback", _require_int64)
    return typer.Option(*names, help=help, **kwargs)


def argument(help: str, **kwargs: Any) -> Any:
    """Return an argument with this help."""
    kwargs.setdefault("callback", _require_int64)
    return typer.Argument(help=help, **kwargs)


class ModelCommand(TyperCommand):
    """A command whose first argument is a model. `--model NAME` works too, as in the other commands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "epilog": "The model can also be given as --model NAME."})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_leading_models(args))


def _with_leading_models(args: list[str]) -> list[str]:
    """Return the words of a command line with the values of `--model` in front, where the argument is read."""
    end = args.index("--") if "--" in args else len(args)
    words = iter(args[:end])
    models = []
    remaining = []
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--model":
            remaining.append(word)
        elif equals:
            models.append(value)
        else:
            models.extend(itertools.islice(words, 1))
    return [*models, *remaining, *args[end:]]


MODEL_HELP = "A bundled model, a training run, a Hugging Face folder, org/name on the hub, or a .gguf file."
Model = Annotated[str, argument(MODEL_HELP)]
ModelOption = Annotated[str, option(MODEL_HELP)]
Factory = Annotated[
    str, argument(f"{MODEL_HELP} Or package.module:factory, which is imported and called without arguments.")
]
Json = Annotated[bool, option("Print one JSON document instead of text.", "--json")]

ThemeName = StrEnum("ThemeName", "light dark")
Theme = Annotated[ThemeName, option("Colors of figures: for a light or a dark page.")]
Device = Annotated[str, option("cpu, cuda or auto (a GPU if available).")]
Dtype = Annotated[str, option("float32, bfloat16, float16 or float64.")]


class LoadKwargs(TypedDict):
    """Keyword arguments for loading a model."""

    device: str
    dtype: torch.dtype


def load_kwargs(device: str, dtype: str) -> LoadKwargs:
    """Return `device` and `dtype` as keyword arguments for loading a model."""
    return {"dtype": parse_dtype(dtype), "device": resolve_device(None if device == "auto" else device)}


def parse_dtype(name: str, *allowed: str) -> torch.dtype:
    """Return the torch dtype of a name; raise `DtypeError` unless it is allowed."""
    import torch

    allowed = allowed or ("float32", "bfloat16", "float16", "float64")
    if name not in allowed:
        raise DtypeError(f"dtype is {name!r}; expected one of {', '.join(allowed)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_device(name: str | None) -> str:
    """Return cpu or cuda, by default cuda if a GPU is available; raise `ConfigError` if it is not available."""
    import torch

    best = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; expected cpu or cuda")
    if name == "cuda" and best == "cpu":
        raise ConfigError("device is cuda, but no GPU is available; choose cpu")
    return name or best


_MAX_BEAM = 1000  # a larger one would use up the memory: each hypothesis has a KV cache

BeamWidth = Annotated[int | None, option("Beam width; 1 = greedy. Default 5 (1 for `evaluate`).", "--beam")]
Penalty = Annotated[
    float | None, option("Exponent of the length that scores of beam search are divided by. Default: the translator's.")
]


def decoding_strategy(beam: int | None, length_penalty: float | None, default: Strategy) -> Strategy:
    """Return beam search of this width, or greedy decoding for width 1; the default's width if `beam` is None."""
    from clearhead.generation import BeamSearch, Greedy
    from clearhead.hub.translate import DEFAULT_STRATEGY

    if beam is None:
        beam = default.width if isinstance(default, BeamSearch) else 1
    if not 1 <= beam <= _MAX_BEAM:
        raise ConfigError(f"--beam is {beam}; expected 1 to {_MAX_BEAM} (1 is greedy)")
    if beam == 1:
        return Greedy()
    strategy = default if isinstance(default, BeamSearch) else DEFAULT_STRATEGY
    penalty = strategy.length_penalty if length_penalty is None else length_penalty
    return dataclasses.replace(strategy, width=beam, length_penalty=penalty)
