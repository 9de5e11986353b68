"""`clearhead walk`: what happens to an input in a Transformer, station by station, with the real numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import clearhead as ch
from clearhead.cli.app import app
from clearhead.cli.options import Device, Dtype, Json, Model, argument, option, placed
from clearhead.cli.output import colour, console, show_json, show_picture, tell


@app.command()
def walk(
    model: Model,
    given: Annotated[str, argument("A sentence, a beginning, letters, or the file of a picture.", metavar="INPUT")],
    layer: Annotated[str, option("The block to show in full: its number, or a path such as decoder.blocks.2.")] = "0",
    head: Annotated[int, option("The head whose vectors and matrices are shown.")] = 0,
    html: Annotated[Path | None, option("Write the page with all stations here.")] = None,
    max_new_tokens: Annotated[
        int | None, option("How many tokens are written at most; by default to the end, or 8 of a text.", min=1)
    ] = None,
    data: Annotated[Path | None, option("Pictures by number: where they are.")] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Walk through a run: from characters to tokens, through every block, to the next word.

    Each station has its formula, its shape, the numbers of this very run, and why it is there."""
    from clearhead.look.page import write_file

    walked = ch.look.build_walkthrough(
        ch.pretrained.load(model, **placed(device, dtype)), given, max_new_tokens=max_new_tokens, data=data
    )
    text = walked.text(layer=layer, head=head, width=min(console.width, 120), color=colour())  # refuses a wrong choice
    if html is not None:
        write_file(walked.html(), html)
    if json:
        show_json(walked.to_dict())
    elif html is None:
        show_picture(text)
    else:
        tell(f"{walked.title}\nwritten to {html}")
