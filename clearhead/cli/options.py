"""Options that several commands take, each declared once, and what is made of them: where a model runs and how
precisely, how it searches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.errors import ConfigError, DtypeError

if TYPE_CHECKING:
    from clearhead.generation import Strategy


_INT64 = range(-(1 << 63), 1 << 63)


def _require_int64(value: Any) -> Any:
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


# The names that every command takes for a model.
A_MODEL = "A model in the box, a run, a Hugging Face folder, hf:org/name, or a .gguf file."
Model = Annotated[str, argument(A_MODEL)]
ByModel = Annotated[str, option(A_MODEL)]
Factory = Annotated[str, argument(f"{A_MODEL} Or package.module:factory, which is imported and called.")]
Json = Annotated[bool, option("Print one JSON document instead of text.", "--json")]

Device = Annotated[str, option("cpu, cuda, or auto: a GPU where there is one.")]
Dtype = Annotated[str, option("float32, bfloat16, float16 or float64.")]


def placed(device: str, dtype: str) -> dict[str, Any]:
    """`device` and `dtype` as the arguments by which a model is loaded."""
    return {"dtype": dtype_of(dtype), "device": device_here(None if device == "auto" else device)}


def dtype_of(name: str, *known: str) -> Any:
    """The torch dtype of a name, one of those that are known."""
    import torch

    known = known or ("float32", "bfloat16", "float16", "float64")
    if name not in known:
        raise DtypeError(f"dtype is {name!r}; expected one of {', '.join(known)}")
    return getattr(torch, name)


def device_here(name: str | None) -> str:
    """The device to measure on: cpu or cuda, by default a GPU where there is one; refused where it is not here."""
    import torch

    best = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; expected cpu or cuda")
    if name == "cuda" and best == "cpu":
        raise ConfigError("device is cuda, and there is no GPU here; choose cpu")
    return name or best


BeamWidth = Annotated[
    int | None, option("Beam search of this width; 1 is greedy. By default 5, to evaluate 1.", "--beam")
]
Penalty = Annotated[
    float | None, option("In beam search: scores are divided by length to this power, by default the translator's own.")
]


def searching(beam: int | None, length_penalty: float | None, default: Strategy) -> Strategy:
    """Beam search of a width, greedy for width 1; where none is given, of the default's width."""
    from clearhead.generation import BeamSearch, Greedy
    from clearhead.pretrained.translate import LENGTH_PENALTY

    if beam is None:
        beam = default.width if isinstance(default, BeamSearch) else 1
    if beam < 1:
        raise ConfigError(f"--beam is {beam}; a beam is at least 1 wide (1 is greedy)")
    penalty = LENGTH_PENALTY if length_penalty is None else length_penalty
    return Greedy() if beam == 1 else BeamSearch(beam, length_penalty=penalty)
