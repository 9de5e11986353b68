"""`clearhead walk`: what happens to an input in a Transformer, station by station, with the real numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import A_MODEL, Json, console, show_json, show_picture
from clearhead.cli.where import AUTO, FLOAT32, Device, Dtype, placed


@app.command()
def walk(
    model: Annotated[str, typer.Argument(help=A_MODEL)],
    given: Annotated[
        str,
        typer.Argument(metavar="INPUT", help="A sentence, a beginning, letters, or the file of a picture."),
    ],
    layer: Annotated[
        str, typer.Option(help="The block to show in full: its number, or a path such as decoder.blocks.2.")
    ] = "0",
    head: Annotated[int, typer.Option(help="The head whose vectors and matrices are shown.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write the page with all stations here.")] = None,
    max_new: Annotated[
        int | None,
        typer.Option(help="How many tokens are written at most; by default to the end, or 8 of a text.", min=1),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Pictures by number: where they are.")] = None,
    device: Device = AUTO,
    dtype: Dtype = FLOAT32,
    json: Json = False,
) -> None:
    """Walk through a run: from characters to tokens, through every block, to the next word.

    Each station has its formula, its shape, the numbers of this very run, and why it is there.
    """
    from clearhead import look, pretrained
    from clearhead.look.page import written

    walked = look.walk(pretrained.load(model, **placed(device, dtype)), given, max_new=max_new, data=data)
    colour = console.is_terminal and not console.no_color
    text = walked.text(layer=layer, head=head, width=min(console.width, 120), colour=colour)  # refuses a wrong choice
    if html is not None:
        written(walked.html(), html)
    if json:
        show_json(walked.to_dict())
    elif html is None:
        show_picture(text)
    else:
        console.print(f"{walked.title}\nwritten to {html}", markup=False, soft_wrap=True)
