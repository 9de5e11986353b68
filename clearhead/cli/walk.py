"""`clearhead walk`: a forward pass step by step, with its values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import clearhead as ch
from clearhead.cli.app import app
from clearhead.cli.options import (
    Device,
    Dtype,
    Json,
    Model,
    ModelCommand,
    Theme,
    ThemeName,
    argument,
    load_kwargs,
    option,
)
from clearhead.cli.output import console, print_line, show_json, show_picture, use_color


@app.command(cls=ModelCommand)
def walk(
    model: Model,
    input_: Annotated[str, argument("A sentence, a prompt, letters, or an image file.", metavar="INPUT")],
    layer: Annotated[str, option("The block to show in full: its index, or a path such as decoder.blocks.2.")] = "0",
    head: Annotated[int, option("Index of the head to show.")] = 0,
    html: Annotated[Path | None, option("Write a page with all steps to this file.")] = None,
    out: Annotated[
        Path | None, option("Write a drawing of the architecture: .svg, .pdf or .png.", "--out", "-o")
    ] = None,
    theme: Theme = ThemeName.light,
    max_new_tokens: Annotated[
        int | None, option("Maximum number of new tokens. Default: up to the end, or 8 for a text.", min=1)
    ] = None,
    data: Annotated[Path | None, option("Data set to take image N from.")] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Walk through a forward pass: from text to tokens, through every block, to the next token.

    Each step has its formula, its shape, its values for this input, and an explanation."""
    from clearhead._core.plotting import plot_style
    from clearhead.analysis.views import figures
    from clearhead.analysis.views.page import write_file
    from clearhead.analysis.walkthrough.diagram import draw_architecture

    walked = ch.analysis.build_walkthrough(
        ch.pipeline(model, **load_kwargs(device, dtype)), input_, max_new_tokens=max_new_tokens, data=data
    )
    # This raises if --layer or --head does not exist, before anything is written.
    text = walked.text(layer=layer, head=head, width=min(console.width, 120), color=use_color())
    if html is not None:
        write_file(walked.html(), html)
    if out is not None:
        with plot_style(theme.value):
            figures.save(draw_architecture(walked), out)
    if json:
        show_json(walked.to_dict())
    elif html is None and out is None:
        show_picture(text)
    else:
        print_line(f"{walked.title}\nwritten to {', '.join(str(path) for path in (html, out) if path)}")
