"""`clearhead embed`: a vector for each line of a file, and which lines are nearest to each other."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from clearhead import pretrained
from clearhead.cli.app import app
from clearhead.cli.options import ByModel, Device, Dtype, Json, argument, option, placed
from clearhead.cli.output import answer, table, writing
from clearhead.cli.translate import texts_of

_SHOWN = 60  # characters of a text in the table


@app.command()
def embed(
    file: Annotated[Path, argument("A text a line; - reads standard input.")],
    model: ByModel,
    pairs: Annotated[int, option("How many of the nearest pairs to show.", min=0)] = 10,
    out: Annotated[
        Path | None, option("Write the vectors: .npz (with the texts) or .safetensors.", "--out", "-o")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Make a vector of each line with an encoder, pooled as its folder says, and show the lines that are nearest to
    each other, by the cosine of the angle between their vectors."""
    import numpy

    from clearhead.disk import save_tensors

    texts = texts_of(["-"], None) if str(file) == "-" else texts_of(None, file)
    with nullcontext() if out is None else writing(out, (".npz", ".safetensors")):
        vectors = pretrained.load(model, **placed(device, dtype)).embed(texts)
        if out is not None and out.suffix == ".npz":
            numpy.savez(out, vectors=vectors.numpy(), texts=numpy.array(texts))
        elif out is not None:
            save_tensors(out, {"vectors": vectors}, {})
    near = pretrained.nearest(vectors, pairs)
    rows = [{"similarity": similarity, "a": texts[i], "b": texts[j]} for similarity, i, j in near]
    shown = [(f"{similarity:.3f}", texts[i][:_SHOWN], texts[j][:_SHOWN]) for similarity, i, j in near]
    last = f"{len(texts):,} vectors of {vectors.shape[1]} numbers" + (f" in {out}" if out else "")
    document = {"model": model, "texts": len(texts), "width": vectors.shape[1], "pairs": rows}
    answer(json, document, table(("similarity", "one", "other"), shown), last)
