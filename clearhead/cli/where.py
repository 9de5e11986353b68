"""Where a command's model runs and how precisely: --device and --dtype, the same for every command that runs one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from clearhead.cli.output import device_here

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]

AUTO, FLOAT32 = "auto", "float32"


def placed(device: str, dtype: str) -> dict[str, Any]:
    """`device` and `dtype` as the arguments by which a model is loaded."""
    import torch

    from clearhead.errors import DtypeError

    known = ("float32", "bfloat16", "float16", "float64")
    if dtype not in known:
        raise DtypeError(f"dtype is {dtype!r}; expected one of {', '.join(known)}")
    return {"device": device_here(None if device == AUTO else device), "dtype": getattr(torch, dtype)}
