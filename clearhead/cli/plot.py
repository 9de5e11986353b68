"""`clearhead plot`: draw figures as PNG or SVG, depending on the file name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.options import option

plot = typer.Typer(help="Draw a figure to a PNG or SVG file.", no_args_is_help=True)
app.add_typer(plot, name="plot")

Out = Annotated[Path, option("Output file: .png or .svg.", "--out", "-o")]
