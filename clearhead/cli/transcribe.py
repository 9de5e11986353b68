"""`clearhead transcribe`: what is said in recordings, and when."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import A_MODEL, Json, console, show_json
from clearhead.cli.where import AUTO, FLOAT32, Device, Dtype, placed


@app.command()
def transcribe(
    sound: Annotated[list[Path], typer.Argument(help="Recordings: WAV, FLAC and whatever else soundfile reads.")],
    model: Annotated[str, typer.Option(help=A_MODEL)],
    language: Annotated[
        str | None, typer.Option(help="The language that is spoken, such as en; by default the model finds out.")
    ] = None,
    times: Annotated[bool, typer.Option(help="Say when each piece is said.")] = True,
    device: Device = AUTO,
    dtype: Dtype = FLOAT32,
    json: Json = False,
) -> None:
    """Write down what is said in recordings, with a model such as Whisper."""
    from clearhead import pretrained

    trained = pretrained.load(model, **placed(device, dtype))
    made = trained.transcribe(sound, times=times, language=language)
    if json:
        show_json([{"file": str(file), **dataclasses.asdict(one)} for file, one in zip(sound, made, strict=True)])
        return
    for file, one in zip(sound, made, strict=True):
        if len(sound) > 1:
            console.print(f"{file}:", markup=False)
        for note in one.notes:
            sys.stderr.write(f"({file}: {note})\n")
        for part in one.segments:
            when = f"{_clock(part.start)} – {_clock(part.end)}  " if times else ""
            console.print(f"{when}{part.text}", markup=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}:{rest:05.2f}"
