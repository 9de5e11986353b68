"""`clearhead embed`: a vector for each line of a file, and which lines are nearest to each other."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import A_MODEL, Json, console, show_json, table, writing
from clearhead.cli.translate import texts_of
from clearhead.cli.where import AUTO, FLOAT32, Device, Dtype, placed

_SHOWN = 60  # characters of a text in the table


@app.command()
def embed(
    file: Annotated[Path, typer.Argument(help="A text a line; - reads standard input.")],
    model: Annotated[str, typer.Option(help=A_MODEL)],
    pairs: Annotated[int, typer.Option(help="How many of the nearest pairs to show.", min=0)] = 10,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the vectors: .npz (with the texts) or .safetensors.")
    ] = None,
    device: Device = AUTO,
    dtype: Dtype = FLOAT32,
    json: Json = False,
) -> None:
    """Make a vector of each line with an encoder, pooled as its folder says, and show the lines that are nearest to
    each other, by the cosine of the angle between their vectors."""
    import numpy

    from clearhead import pretrained
    from clearhead.disk import save_tensors

    texts = texts_of(["-"], None) if str(file) == "-" else texts_of(None, file)
    with nullcontext() if out is None else writing(out, (".npz", ".safetensors")):
        vectors = pretrained.load(model, **placed(device, dtype)).embed(texts)
        if out is not None and out.suffix == ".npz":
            numpy.savez(out, vectors=vectors.numpy(), texts=numpy.array(texts))
        elif out is not None:
            save_tensors(out, {"vectors": vectors}, {})
    near = pretrained.nearest(vectors, pairs)
    if json:
        rows = [{"similarity": similarity, "a": texts[i], "b": texts[j]} for similarity, i, j in near]
        show_json({"model": model, "texts": len(texts), "width": vectors.shape[1], "pairs": rows})
        return
    shown = [(f"{similarity:.3f}", texts[i][:_SHOWN], texts[j][:_SHOWN]) for similarity, i, j in near]
    console.print(table(("similarity", "one", "other"), shown))
    console.print(f"{len(texts):,} vectors of {vectors.shape[1]} numbers" + (f" in {out}" if out else ""), markup=False)
