"""`clearhead translate`: translate sentences, optionally with their cross-attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import (
    BeamWidth,
    Device,
    Dtype,
    Json,
    ModelOption,
    Penalty,
    argument,
    decoding_strategy,
    load_kwargs,
    option,
)
from clearhead.cli.output import console, print_line, show_json, show_picture, use_color
from clearhead.errors import DataError


@app.command()
def translate(
    text: Annotated[list[str] | None, argument("Sentences; - reads one sentence per line from standard input.")] = None,
    model: ModelOption = "en-es",
    file: Annotated[Path | None, option("File with one sentence per line.")] = None,
    beam: BeamWidth = None,
    length_penalty: Penalty = None,
    attention: Annotated[bool, option("Show the cross-attention of each translation.", "--attention")] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Translate sentences (a bundled model translates English to Spanish)."""
    texts = texts_of(text, file)
    trained = hub.pipeline(model, **load_kwargs(device, dtype))
    strategy = trained.generation_settings.strategy
    if beam is not None or length_penalty is not None:
        strategy = decoding_strategy(beam, length_penalty, strategy)
    translations = hub.translations(trained, texts, strategy=strategy)
    if json:
        return show_json([{"source": translation.source, "target": translation.target} for translation in translations])
    for translation in translations:
        print_line(translation.target)
        if attention and translation.source_ids:
            show_picture("\n" + cross_attention(trained, translation) + "\n")


def cross_attention(trained: hub.Pipeline, translation: hub.Translation) -> str:
    """Return a heatmap of the layer with the sharpest alignment, averaged over heads; rows are target tokens."""
    from clearhead.analysis import heatmap, translation_report
    from clearhead.cli.inspect import choose_map, name_of

    attention_map = choose_map(translation_report(trained, translation), None)
    drawing = heatmap(
        attention_map.weights(), attention_map.rows, attention_map.columns, width=console.width, color=use_color()
    )
    return f"{drawing}\n\n{name_of(attention_map, None)}"


def texts_of(text: list[str] | None, file: Path | None) -> list[str]:
    """Return the texts, the lines of a file, or for - those of standard input."""
    if file is not None:
        if text:
            raise DataError("give sentences or --file, not both")
        try:
            return _lines(file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}; give a text file in UTF-8") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from error
    if not text:
        raise DataError("there is nothing to translate; give a sentence, - for standard input, or --file PATH")
    if text != ["-"]:
        return text
    if sys.stdin is None:
        raise DataError("standard input is closed: give a sentence, or --file PATH")
    try:
        return _lines(sys.stdin.read())
    except UnicodeDecodeError as error:
        raise DataError(f"standard input cannot be read as {sys.stdin.encoding} text: {error}") from error


def _lines(text: str) -> list[str]:
    """Split a text at line feeds only. `splitlines` would also split at U+2028 or a form feed."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
