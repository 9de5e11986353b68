"""`clearhead listen`: recognize spoken digits in a stream of audio."""

from __future__ import annotations

import contextlib
import dataclasses
import json as jsonlib
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import Device, Dtype, ModelOption, argument, check_beam, load_kwargs, option
from clearhead.cli.output import console, print_line, show_picture, use_color
from clearhead.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_MAX_ATTENTION_SECONDS = 60.0  # of audio whose attention is shown


@app.command()
def listen(
    sound: Annotated[str, argument("A WAV or FLAC file, or - for standard input (WAV or raw samples).")],
    model: ModelOption = "spoken-digits",
    sample_rate: Annotated[int | None, option("Sample rate of raw samples, in Hz. Default: the model's.")] = None,
    sample_format: Annotated[str, option("Format of raw samples: u8, s16, s32, f32 or f64, little-endian.")] = "s16",
    channels: Annotated[int, option("Number of channels of raw samples.")] = 1,
    beam: Annotated[int, option("Width of prefix beam search; 1 = greedy.")] = 1,
    attention: Annotated[
        bool, option("Show the attention of each digit below the spectrogram.", "--attention")
    ] = False,
    html: Annotated[Path | None, option("Write a page with all layers and heads to this file.")] = None,
    json: Annotated[bool, option("Print JSON: one line per digit and one at the end.", "--json")] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Print spoken digits as they are recognized, with end time, latency and confidence.

    Any recorder can be piped in: arecord -f S16_LE -r 8000 | clearhead listen -

    Latency is measured from the last frame of the digit: the audio since then, and the time to compute."""
    import torch

    from clearhead.data.audio import AudioStream

    check_beam(beam)
    torch.set_num_threads(1)  # chunks are small, and the real-time factor is that of one core
    trained = hub.pipeline(model, **load_kwargs(device, dtype))
    source: Any = getattr(sys.stdin, "buffer", None) if sound == "-" else sound
    if source is None or (sound == "-" and sys.stdin.isatty()):
        raise DataError(
            "standard input is a terminal; give a file, or pipe a recorder such as arecord -f S16_LE -r 8000"
        )
    trained.listen().push(torch.zeros(8_000))  # warm up: the first computation takes longest
    printer = _StreamPrinter(trained.listen(beam=beam), json=json, keeps_audio=attention or html is not None)
    stream = AudioStream(
        source,
        sample_rate=printer.listener.sample_rate,
        source_rate=sample_rate,
        sample_format=sample_format,
        channels=channels,
    )
    with contextlib.suppress(KeyboardInterrupt):  # report what was recognized so far
        for chunk in stream:
            printer.process(chunk)
    printer.process(None)
    printer.finish(stream.notes)
    if printer.chunks:
        name = ("standard input" if sound == "-" else Path(sound).name) + ", its first minute" * (
            printer.seconds > _MAX_ATTENTION_SECONDS
        )
        _show_attention(trained, torch.cat(printer.chunks), name, html, drawn=attention, json=json)


@dataclasses.dataclass
class _StreamPrinter:
    """Recognizes audio chunk by chunk and prints the results."""

    listener: hub.StreamingRecognizer
    json: bool
    keeps_audio: bool
    chunks: list[Tensor] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    computing: float = 0.0

    def process(self, chunk: Tensor | None) -> None:
        """Process the next chunk; None ends the stream."""
        if chunk is not None:
            if self.keeps_audio and self.seconds < _MAX_ATTENTION_SECONDS:
                self.chunks.append(chunk)
            self.seconds += len(chunk) / self.listener.sample_rate
        began, worked = time.perf_counter(), time.process_time()
        symbols = self.listener.flush() if chunk is None else self.listener.push(chunk)
        took = time.perf_counter() - began
        self.computing += time.process_time() - worked  # other processes affect the latency only
        for symbol in symbols:
            self._print(symbol, self.seconds - symbol.end + took)

    def _print(self, symbol: hub.RecognizedSymbol, latency: float) -> None:
        if self.json:
            line = jsonlib.dumps(dataclasses.asdict(symbol) | {"latency": latency})
        else:
            confidence = 100 * math.exp(symbol.log_prob)
            line = (
                f"{symbol.text}   ended at {symbol.end:6.2f} s   latency {1000 * latency:4.0f} ms   {confidence:3.0f} %"
            )
        print(line, flush=True)

    def finish(self, notes: list[str]) -> None:
        """Print the last line: the duration of the audio and of the computation."""
        factor = self.computing / self.seconds if self.seconds else 0.0
        shortest = self.listener.seconds(1)
        if self.seconds < shortest:
            notes = [*notes, f"too short to recognize anything: one frame takes {shortest:.3f} s"]
        if self.json:
            figures = {"seconds": self.seconds, "computing": self.computing, "real_time_factor": factor}
            print(jsonlib.dumps(figures | {"notes": notes}), flush=True)
            return
        took = f"{self.seconds:.2f} s of audio took {self.computing:.2f} s on one core: real-time factor {factor:.3f}"
        for line in (took, *(f"note: {note}" for note in notes)):
            print_line(line, style="dim")


def _show_attention(
    trained: hub.Pipeline, samples: Tensor, name: str, html: Path | None, *, drawn: bool, json: bool
) -> None:
    from clearhead.analysis import save_page
    from clearhead.analysis.reports import report_for_audio
    from clearhead.analysis.views import terminal
    from clearhead.cli.inspect import name_of

    album = report_for_audio(trained, samples, name=name)
    if html is not None:
        save_page(album, html)
        if not json:
            print_line(f"written to {html}")
    if drawn and not json and album.image is not None:
        picture = album.default_map
        rows = [n for n, label in enumerate(picture.rows) if label.count(" ") > 1]
        weights = picture.weights()[rows]
        names = [picture.rows[n] for n in rows]
        show_picture("\n" + terminal.sound_map(album.image, weights, names, width=console.width, color=use_color()))
        show_picture(
            f"\n{name_of(picture, None)}: the spectrogram and the attention of each digit when it was recognized"
        )
