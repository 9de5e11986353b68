"""Sound in, text out: recordings through an encoder-decoder that hears (`transcribe`), and samples in pieces of any
size through an encoder, with an event for each symbol as soon as it is recognised (`StreamingRecognizer`).

A window of `transcribe` is as long as the model was trained for (30 seconds of Whisper's). It ends with the last moment
that the model has written down, and the next one begins there, so that no word is cut. Of several recordings the
windows go together.

What a `StreamingRecognizer` gives does not depend on the pieces: the mask under which the model was trained says how
far each moment sees, and a cache keeps just that much. Under a window it keeps as much after hours as after seconds. A
mask that looks ahead without end (`full()`) is run once, at the end.

    listener = hub.pipeline("spoken-digits").listen()
    for samples in pieces:
        for event in listener.push(samples):
            print(event.text, event.end)
    print(listener.flush())                               # what the end of the sound decides
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead._core.validation import NonNegativeFloat, PositiveInt, validate
from clearhead.data import audio as samples
from clearhead.errors import ConfigError, DataError
from clearhead.generation import LogitsProcessors, Strategy, WhisperTimestampRules, generate
from clearhead.generation.ctc import CTCGreedyDecoder, CTCPrefixBeamDecoder, CTCSymbol
from clearhead.hub.text_generation import GREEDY, accepts_single
from clearhead.models import CTCEncoder
from clearhead.nn import KVCache
from clearhead.nn.mel import Mel

if TYPE_CHECKING:
    from clearhead.hub.pipeline import Pipeline

_BATCH = 8  # windows that are heard together
_PIECE = 4.0  # seconds that are worked on at once: what is fed whole needs no more memory than what comes bit by bit


@dataclass(frozen=True)
class Segment:
    """The text between two times in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Transcript:
    """The transcript of a recording. `notes` report conversions of the audio and problems with it."""

    text: str
    segments: tuple[Segment, ...]
    seconds: float
    language: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


@accepts_single(str, Path, Tensor)
def transcribe(
    trained: Pipeline,
    sounds: Sequence[str | Path | Tensor],
    *,
    times: bool = True,
    language: str | None = None,
    strategy: Strategy = GREEDY,
) -> list[Transcript]:
    """What is said in a recording, with times: a file, or samples (N,) at 16 kHz; a list of transcripts for a list.

    Without `times` windows are cut blindly, and each is one segment. A model of many languages finds out which is
    spoken, unless `language` ("en") says it."""
    trained.require("transcription")
    speech = _Speech(trained, times, strategy)
    heard = [speech.read(sound) for sound in sounds]
    for start in range(0, len(heard), _BATCH):
        speech.hear(heard[start : start + _BATCH], language)
    return [speech.transcript(one) for one in heard]


@dataclass
class _RecordingState:
    """A recording on its way: its frames, and what has been written of it."""

    frames: Tensor  # (T, F), and a window of silence after them
    n_frames: int
    seconds: float
    notes: tuple[str, ...]
    at: int = 0  # the frame where the next window begins
    language: str | None = None
    parts: list[tuple[int, int, list[int]]] = field(default_factory=list)  # from and to which frame, ids


class _Speech:
    def __init__(self, trained: Pipeline, times: bool, strategy: Strategy) -> None:
        assert trained.source is not None  # who hears came from elsewhere
        self.trained, self.times, self.strategy = trained, times, strategy
        model: Any = trained.model
        self.config = model.config
        self.mel = Mel.whisper(self.config.n_features)
        self.window: int = 2 * self.config.encoder.max_len  # frames
        self.said = trained.source.generation()
        last_control = self.said.get("no_timestamps_token_id")
        if not isinstance(last_control, int):
            raise DataError(
                f"{trained.name} does not say which ids are times: its generation_config.json has no "
                "no_timestamps_token_id; get that file of its maker"
            )
        self.first, self.end = last_control + 1, trained.stops[0]
        latest = self.said.get("max_initial_timestamp_index")
        moments = WhisperTimestampRules(self.first, self.end, latest if isinstance(latest, int) else None)
        self.logits_processors = replace(
            trained.logits_processors or LogitsProcessors(), timestamp_rules=moments if times else None
        )

    def read(self, sound: str | Path | Tensor) -> _RecordingState:
        rate = self.mel.sample_rate
        found = samples.Sound(sound, rate) if isinstance(sound, Tensor) else samples.read(sound, rate)
        data = found.samples
        if data.dim() != 1 or not len(data):
            raise DataError(f"samples have shape {tuple(data.shape)}; expected (N,), one channel at 16 kHz, not empty")
        # With a window of silence after it, as its maker's models are used to.
        silent = torch.nn.functional.pad(data.float(), (0, self.window * self.mel.hop))
        frames = self.mel(silent[None])[0]
        return _RecordingState(frames, -(-len(data) // self.mel.hop), found.seconds, found.notes)

    def hear(self, recordings: Sequence[_RecordingState], language: str | None) -> None:
        """Writes down what is said, a window of every recording at a time."""
        while going := [one for one in recordings if one.at < one.n_frames]:
            windows = torch.stack([one.frames[one.at : one.at + self.window] for one in going])
            windows = windows.to(next(self.trained.model.parameters()))
            self._find_languages(going, windows, language)
            for spoken in dict.fromkeys(one.language for one in going):  # ids that it writes after depend on it
                rows = [i for i, one in enumerate(going) if one.language == spoken]
                for row, ids in zip(rows, self._written(windows[rows], spoken), strict=True):
                    self._note(going[row], ids)

    def _written(self, windows: Tensor, language: str | None) -> Iterable[list[int]]:
        # What the model is told: the language, to transcribe, and where no times are wanted, that.
        said = self.said
        told = [] if language is None else [said["lang_to_id"][language], said["task_to_id"]["transcribe"]]
        start = [*self.trained.start, *told, *([] if self.times else [self.first - 1])]
        room = self.config.max_len - len(start)
        bounds: dict[str, Any] = {
            "decoder_start_ids": start,
            "stop_ids": self.trained.stops,
            "max_new_tokens": room,
            "logits_processors": self.logits_processors,
        }
        made = generate(self.trained.model, windows, strategy=self.strategy, **bounds).to("cpu")
        return [made.sequence(row).tolist() for row in range(len(windows))]

    @torch.no_grad()
    def _find_languages(self, going: Sequence[_RecordingState], windows: Tensor, language: str | None) -> None:
        emitted_at = self.said.get("lang_to_id")
        if not isinstance(emitted_at, dict):
            if language not in (None, "en"):
                raise DataError(f"{self.trained.name} knows English alone; leave the language out")
            return
        names = {name.strip("<|>"): name for name in emitted_at}
        if language is not None and language not in names:
            raise DataError(f"the language {language!r} is not known; expected one of: {', '.join(sorted(names))}")
        new = [i for i, one in enumerate(going) if one.language is None]
        found = [] if language is None else [names[language]] * len(new)
        if language is None and new:
            model: Any = self.trained.model
            start = torch.tensor([self.trained.start] * len(new), device=windows.device)
            logits = model(windows[new], start)[:, -1, list(emitted_at.values())]
            found = [list(emitted_at)[i] for i in logits.argmax(-1).tolist()]
        for i, name in zip(new, found, strict=True):
            going[i].language = name

    def _note(self, one: _RecordingState, ids: list[int]) -> None:
        """Cuts a window's ids into segments at its times, and moves on to where the last one ended."""
        length = min(self.window, one.n_frames - one.at)
        is_time = [id_ >= self.first for id_ in ids]
        cuts = [i for i in range(1, len(ids)) if is_time[i] and is_time[i - 1]]
        whole = is_time[-2:] == [False, True]  # nothing is said after the last moment
        moved = length
        if not cuts:
            moments = [id_ - self.first for id_, time in zip(ids, is_time, strict=True) if time and id_ > self.first]
            one.parts.append((one.at, one.at + min(2 * moments[-1] if moments else length, self.window), ids))
        else:
            for begin, end in zip([0, *cuts], [*cuts, *([len(ids)] if whole else [])], strict=False):
                part = ids[begin:end]
                first, last = (2 * (id_ - self.first) for id_ in (part[0], part[-1]))
                one.parts.append((one.at + first, one.at + last, part))
            if not whole:
                moved = 2 * (ids[cuts[-1] - 1] - self.first)
        one.at += moved or length  # a window in which nothing ended goes by whole

    def transcript(self, one: _RecordingState) -> Transcript:
        a_frame = self.mel.hop / self.mel.sample_rate
        segments = []
        for start, end, ids in one.parts:
            text = self.trained.tokenizer.decode([id_ for id_ in ids if id_ < self.end])
            if text.strip():
                segments.append(Segment(round(start * a_frame, 2), round(end * a_frame, 2), text.strip()))
        text = " ".join(segment.text for segment in segments)
        language = None if one.language is None else one.language.strip("<|>")
        return Transcript(text, tuple(segments), one.seconds, language, one.notes)


@dataclass(frozen=True)
class RecognizedSymbol:
    """A symbol that was recognised. Seconds from the beginning of the sound: the moments from `start` to `end` say it,
    and it could be told when the sound up to `known` had come. `log_prob` is that of the clearest moment."""

    text: str
    start: float
    end: float
    emitted_at: float
    log_prob: float


class StreamingRecognizer:
    """Hears one sound after another: `feed` it samples at `rate` Hz, (N,) from −1 to 1, and call `end` after the last.

    `beam` is the width of the search for symbols; 1 takes the likeliest one at every moment. `silence` is how many
    seconds of it are heard after the end: a model that writes down what has been said needs a moment to do so."""

    def __init__(self, model: CTCEncoder, *, beam: int = 1, tail_seconds: float = 0.0) -> None:
        self.model, self._beam = model, validate(beam, "beam", PositiveInt)
        self._tail_seconds = validate(tail_seconds, "tail_seconds", NonNegativeFloat)
        self.rate = model.config.mel.sample_rate
        try:
            self._step, self._streams = model.streaming.chunk, True  # moments that are known together
        except ConfigError:
            self._step, self._streams = 1 << 40, False  # none is known before the end
        self._frames: Tensor
        self._begin()

    def push(self, samples: Float[Tensor, " N"]) -> list[RecognizedSymbol]:
        """What can be told now and could not before."""
        found: list[RecognizedSymbol] = []
        step = self._step * self.model.config.frame_stacking
        for part in samples.split(round(_PIECE * self.rate)):
            self._frames = torch.cat((self._frames, self._mel.push(part)))
            ready = len(self._frames) // step * step
            found += self._told(self._run(self._frames[:ready]))
            self._frames = self._frames[ready:].clone()
        return found

    def flush(self) -> list[RecognizedSymbol]:
        """What the end of the sound decides. After it, another sound may be fed."""
        over = self._mel.n_samples / self.rate
        enough = over >= self.seconds(1)  # what is too short for a moment has said nothing
        found = self.push(torch.zeros(round(self._tail_seconds * self.rate))) if enough else []
        rest = torch.cat((self._frames, self._mel.flush()))
        found += self._told([*self._run(rest), *self._search.flush()])
        self._begin()
        return [replace(one, start=min(one.start, over), end=min(one.end, over), emitted_at=over) for one in found]

    def _begin(self) -> None:
        config = self.model.config
        self._mel, self._frames = config.mel.stream(), torch.zeros(0, config.mel.n_mels)
        self._cache = KVCache() if self._streams else None
        self._search = (
            CTCGreedyDecoder(config.blank) if self._beam == 1 else CTCPrefixBeamDecoder(self._beam, blank=config.blank)
        )

    @torch.no_grad()
    def _run(self, frames: Tensor) -> list[CTCSymbol]:
        if len(frames) < self.model.config.frame_stacking:
            return []
        logits = self.model(frames[None].to(self.model.head.weight), cache=self._cache)[0]
        return self._search.push(logits.float().log_softmax(-1))

    def _told(self, symbols: list[CTCSymbol]) -> list[RecognizedSymbol]:
        moment, step, told = self.model.config.frame_seconds, self._step, self.seconds
        return [
            RecognizedSymbol(
                str(one.id), one.start * moment, told(one.end), told(-(-one.emitted_at // step) * step), one.log_prob
            )
            for one in symbols
        ]

    def seconds(self, moments: int) -> float:
        """How long a sound has so many moments: the last frame of the last of them has come."""
        return self.model.config.mel.end(moments * self.model.config.frame_stacking - 1) / self.rate
