"""`clearhead listen`: what is said in a sound, printed while it comes."""

from __future__ import annotations

import contextlib
import dataclasses
import json as jsonlib
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from clearhead import pretrained
from clearhead.cli.app import app
from clearhead.cli.options import ByModel, Device, Dtype, argument, option, placed
from clearhead.cli.output import colour, console, show_picture, tell
from clearhead.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 60.0  # seconds that are looked into at most


@app.command()
def listen(
    sound: Annotated[str, argument("A WAV or FLAC file, or - for standard input: WAV, or bare samples.")],
    model: ByModel = "spoken-digits",
    rate: Annotated[int | None, option("Hz of bare samples; the model's own unless given.")] = None,
    kind: Annotated[str, option("Of bare samples: u8, s16, s32, f32 or f64, little-endian.")] = "s16",
    channels: Annotated[int, option("Of bare samples.")] = 1,
    beam: Annotated[int, option("Prefix beam search of this width; 1 is greedy.")] = 1,
    look: Annotated[bool, option("Show what each digit attended to, below the sound.", "--look")] = False,
    html: Annotated[Path | None, option("Write the page with all layers and heads here.")] = None,
    json: Annotated[bool, option("Print JSON: a line a digit, and one at the end.", "--json")] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Print spoken digits as they are recognised: when each ended, how late it was told, and how sure that is.

    Any recorder can be piped in: arecord -f S16_LE -r 8000 | clearhead listen -

    Latency counts from the last moment that says the digit: the sound that came meanwhile, and the time to compute."""
    import torch

    from clearhead.audio import Stream

    torch.set_num_threads(1)  # pieces are small, and the real-time factor is one core's
    trained = pretrained.load(model, **placed(device, dtype))
    source: Any = getattr(sys.stdin, "buffer", None) if sound == "-" else sound
    if source is None or (sound == "-" and sys.stdin.isatty()):
        raise DataError("nothing is piped in: give a file, or pipe a recorder, such as arecord -f S16_LE -r 8000")
    trained.listen().push(torch.zeros(8_000))  # what is computed first takes longest
    ear = _Ear(trained.listen(beam=beam), json=json, keep=look or html is not None)
    stream = Stream(source, rate=ear.listener.rate, raw_rate=rate, kind=kind, channels=channels)
    with contextlib.suppress(KeyboardInterrupt):  # what was heard by then counts
        for piece in stream:
            ear.hear(piece)
    ear.hear(None)
    ear.finish(stream.notes)
    if ear.kept:
        name = ("standard input" if sound == "-" else Path(sound).name) + ", its first minute" * (ear.seconds > _SHOWN)
        _look(trained, torch.cat(ear.kept), name, html, drawn=look and not json)


@dataclasses.dataclass
class _Ear:
    """Hears a sound piece by piece, and says what there is to say."""

    listener: pretrained.StreamingRecognizer
    json: bool
    keep: bool
    kept: list[Tensor] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    computing: float = 0.0

    def hear(self, piece: Tensor | None) -> None:
        """The next piece of the sound; None is its end."""
        if piece is not None:
            if self.keep and self.seconds < _SHOWN:
                self.kept.append(piece)
            self.seconds += len(piece) / self.listener.rate
        began, worked = time.perf_counter(), time.process_time()
        found = self.listener.flush() if piece is None else self.listener.push(piece)
        took = time.perf_counter() - began
        self.computing += time.process_time() - worked  # what else the machine does counts for the latency alone
        for one in found:
            self._say(one, self.seconds - one.end + took)

    def _say(self, one: pretrained.RecognizedSymbol, latency: float) -> None:
        if self.json:
            line = jsonlib.dumps(dataclasses.asdict(one) | {"latency": latency})
        else:
            sure = 100 * math.exp(one.log_prob)
            line = f"{one.text}   ended at {one.end:6.2f} s   latency {1000 * latency:4.0f} ms   {sure:3.0f} %"
        print(line, flush=True)

    def finish(self, notes: list[str]) -> None:
        """The last line: how long all of it took."""
        factor, shortest = self.computing / self.seconds if self.seconds else 0.0, self.listener.seconds(1)
        if self.seconds < shortest:
            notes = [*notes, f"too short to hear anything in it: a moment takes {shortest:.3f} s"]
        if self.json:
            figures = {"seconds": self.seconds, "computing": self.computing, "real_time_factor": factor}
            print(jsonlib.dumps(figures | {"notes": notes}), flush=True)
            return
        took = f"{self.seconds:.2f} s of sound took {self.computing:.2f} s of one core: real-time factor {factor:.3f}"
        for line in (took, *(f"note: {note}" for note in notes)):
            tell(line, style="dim")


def _look(trained: pretrained.Pipeline, samples: Tensor, name: str, html: Path | None, *, drawn: bool) -> None:
    from clearhead.cli.look import name_of
    from clearhead.look import save_page, terminal
    from clearhead.look.trained import report_for_audio

    album = report_for_audio(trained, samples, name=name)
    if html is not None:
        save_page(album, html)
    if drawn and album.image is not None:
        picture = album.default_map
        said = [n for n, label in enumerate(picture.rows) if label.count(" ") > 1]
        weights, names = picture.weights()[said], [picture.rows[n] for n in said]
        show_picture("\n" + terminal.sound_map(album.image, weights, names, width=console.width, color=colour()))
        show_picture(f"\n{name_of(picture, None)}: the sound, and where each digit looked when it was recognised")
