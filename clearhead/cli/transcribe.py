"""`clearhead transcribe`: what is said in recordings, and when."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

from clearhead import pretrained
from clearhead.cli.app import app
from clearhead.cli.options import ByModel, Device, Dtype, Json, argument, option, placed
from clearhead.cli.output import console, show_json, tell


@app.command()
def transcribe(
    sound: Annotated[list[Path], argument("Recordings: WAV, FLAC and whatever else soundfile reads.")],
    model: ByModel,
    language: Annotated[
        str | None, option("The language that is spoken, such as en; by default the model finds out.")
    ] = None,
    times: Annotated[bool, option("Say when each piece is said.")] = True,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Write down what is said in recordings, with a model such as Whisper."""
    trained = pretrained.load(model, **placed(device, dtype))
    pairs = list(zip(sound, trained.transcribe(sound, times=times, language=language), strict=True))
    if json:
        return show_json([{"file": str(file), **dataclasses.asdict(one)} for file, one in pairs])
    for file, one in pairs:
        if len(sound) > 1:
            console.print(f"{file}:", markup=False)
        for note in one.notes:
            sys.stderr.write(f"({file}: {note})\n")
        for part in one.segments:
            when = f"{_clock(part.start)} – {_clock(part.end)}  " if times else ""
            tell(f"{when}{part.text}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}:{rest:05.2f}"
