"""Where a command's model runs and how precisely: --device and --dtype, the same for every command that runs one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from clearhead.cli.output import device_here

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]

AUTO, FLOAT32 = "auto", "float32"


def dtype_of(name: str) -> Any:
    """The torch dtype of a name."""
    import torch

    from clearhead.errors import DtypeError

    known = ("float32", "bfloat16", "float16", "float64")
    if name not in known:
        raise DtypeError(f"dtype is {name!r}; expected one of {', '.join(known)}")
    return getattr(torch, name)


def placed(device: str, dtype: str) -> dict[str, Any]:
    """`device` and `dtype` as the arguments by which a model is loaded."""
    return {"dtype": dtype_of(dtype), "device": device_here(None if device == AUTO else device)}
