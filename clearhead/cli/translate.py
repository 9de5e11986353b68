"""`clearhead translate`: text in, text out, and if wanted who looked at whom."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from clearhead import pretrained
from clearhead.cli.app import app
from clearhead.cli.options import BeamWidth, ByModel, Device, Dtype, Json, Penalty, argument, option, placed, searching
from clearhead.cli.output import colour, console, show_json, show_picture, tell
from clearhead.errors import DataError


@app.command()
def translate(
    text: Annotated[list[str] | None, argument("Sentences; - reads them from standard input, a line each.")] = None,
    model: ByModel = "en-es",
    file: Annotated[Path | None, option("Translate this file, a sentence a line.")] = None,
    beam: BeamWidth = None,
    length_penalty: Penalty = None,
    look: Annotated[bool, option("Show the cross-attention beside each translation.", "--look")] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Translate sentences with a trained model (English to Spanish comes in the box)."""
    from clearhead.pretrained.translate import DEFAULT

    texts = texts_of(text, file)
    trained = pretrained.load(model, **placed(device, dtype))
    made = pretrained.translations(trained, texts, strategy=searching(beam, length_penalty, DEFAULT))
    if json:
        return show_json([{"source": one.source, "target": one.target} for one in made])
    for one in made:
        tell(one.target)
        if look and one.read:
            show_picture("\n" + cross_attention(trained, one) + "\n")


def cross_attention(trained: pretrained.Pipeline, made: pretrained.Translation) -> str:
    """The cross-attention of the layer that aligns most sharply, its heads together: rows are what was written."""
    from clearhead.cli.look import choose, name_of
    from clearhead.look import heatmap, translation_report

    picture = choose(translation_report(trained, made), None)
    drawn = heatmap(picture.weights(), picture.rows, picture.columns, width=console.width, color=colour())
    return f"{drawn}\n\n{name_of(picture, None)}"


def texts_of(text: list[str] | None, file: Path | None) -> list[str]:
    """The texts that are given, or a file's lines, or with - those of standard input."""
    if file is not None:
        if text:
            raise DataError("give sentences or --file, not both")
        try:
            return _lines(file.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from error
    if not text:
        raise DataError("nothing to translate: give a sentence, - for standard input, or --file PATH")
    if text != ["-"]:
        return text
    if sys.stdin is None:
        raise DataError("standard input is closed: give a sentence, or --file PATH")
    try:
        return _lines(sys.stdin.read())
    except UnicodeDecodeError as error:
        raise DataError(f"standard input cannot be read as {sys.stdin.encoding} text: {error}") from error


def _lines(text: str) -> list[str]:
    """One entry a line. `splitlines` would also cut at signs that may stand inside one, such as U+2028 or a
    form feed."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
