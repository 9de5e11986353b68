"""`clearhead transcribe`: transcribe recordings."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import Device, Dtype, Json, ModelOption, argument, load_kwargs, option
from clearhead.cli.output import console, print_line, show_json


@app.command()
def transcribe(
    sound: Annotated[list[Path], argument("Recordings: WAV, FLAC and other formats that soundfile reads.")],
    model: ModelOption,
    language: Annotated[str | None, option("Language code such as en. Default: detected by the model.")] = None,
    timestamps: Annotated[bool, option("Print the time of each segment.")] = True,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Transcribe recordings with a model such as Whisper."""
    trained = hub.pipeline(model, **load_kwargs(device, dtype))
    pairs = list(zip(sound, trained.transcribe(sound, timestamps=timestamps, language=language), strict=True))
    if json:
        return show_json([{"file": str(file), **dataclasses.asdict(transcript)} for file, transcript in pairs])
    for file, transcript in pairs:
        if len(sound) > 1:
            console.print(f"{file}:", markup=False)
        for note in transcript.notes:
            sys.stderr.write(f"({file}: {note})\n")
        for part in transcript.segments:
            when = f"{_clock(part.start)} – {_clock(part.end)}  " if timestamps else ""
            print_line(f"{when}{part.text}")


def _clock(seconds: float) -> str:
    minutes, remainder = divmod(seconds, 60)
    return f"{int(minutes)}:{remainder:05.2f}"
