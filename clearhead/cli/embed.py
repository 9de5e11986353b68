"""`clearhead embed`: embed each line of a file and list the most similar pairs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import Device, Dtype, Json, ModelOption, argument, load_kwargs, option
from clearhead.cli.output import emit, table, writing
from clearhead.cli.translate import texts_of

_MAX_CHARS = 60  # of a text in the table


@app.command()
def embed(
    file: Annotated[Path, argument("File with one text per line; - for standard input.")],
    model: ModelOption,
    pairs: Annotated[int, option("Number of pairs to list.", min=0)] = 10,
    out: Annotated[
        Path | None, option("Save the vectors as .npz (with the texts) or .safetensors.", "--out", "-o")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Embed each line with an encoder, using the model's own pooling, and list the most similar pairs (cosine)."""
    import numpy

    from clearhead._core.atomic_io import save_tensors

    texts = texts_of(["-"], None) if str(file) == "-" else texts_of(None, file)
    with nullcontext() if out is None else writing(out, (".npz", ".safetensors")):
        vectors = hub.pipeline(model, **load_kwargs(device, dtype)).embed(texts)
        if out is not None and out.suffix.lower() == ".npz":
            with out.open("wb") as stream:  # given a path, savez would add .npz to one that ends in .NPZ
                numpy.savez(stream, vectors=vectors.numpy(), texts=numpy.array(texts))
        elif out is not None:
            save_tensors(out, {"vectors": vectors}, {})
    near = hub.nearest_pairs(vectors, pairs)
    rows = [{"similarity": similarity, "a": texts[i], "b": texts[j]} for similarity, i, j in near]
    cells = [(f"{similarity:.3f}", texts[i][:_MAX_CHARS], texts[j][:_MAX_CHARS]) for similarity, i, j in near]
    last = f"{len(texts):,} vectors of dimension {vectors.shape[1]}" + (f" in {out}" if out else "")
    document = {"model": model, "texts": len(texts), "width": vectors.shape[1], "pairs": rows}
    emit(json, document, table(("similarity", "text", "text"), cells), last)
