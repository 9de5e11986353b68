"""Speech recognition: `transcribe` for recordings (encoder-decoders), `StreamingRecognizer` for streams (CTC encoders).

`transcribe` processes a recording in windows of the length that the model was trained for (30 seconds for Whisper). A
window ends at the last timestamp that the model generates, and the next one starts there, so that no word is cut.
Windows of several recordings share a batch.

A `StreamingRecognizer` takes samples in chunks of any size and returns each symbol as soon as it is final. Its results
do not depend on the chunks: the mask that the model was trained with defines the context of each frame, and a cache
keeps exactly that context, so under a window memory stays constant. A mask with unbounded look-ahead (`full()`) is
evaluated once, at the end.

    recognizer = ch.pipeline("spoken-digits").listen()
    for samples in chunks:
        for symbol in recognizer.push(samples):
            print(symbol.text, symbol.end)
    print(recognizer.flush())
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead._core.validation import NonNegativeFloat, PositiveFloat, PositiveInt, validate
from clearhead.data import audio
from clearhead.errors import ConfigError, DataError
from clearhead.generation import LogitsProcessors, Strategy, WhisperTimestampRules, generate
from clearhead.generation.ctc import CTCGreedyDecoder, CTCPrefixBeamDecoder, CTCSymbol
from clearhead.models import CTCEncoder
from clearhead.nn import KVCache
from clearhead.nn.mel import Mel

if TYPE_CHECKING:
    from clearhead.hub.pipelines import Pipeline

_BATCH_SIZE = 8  # windows per batch


@dataclass(frozen=True)
class Segment:
    """A part of a transcription.

    Args:
        start: Start in seconds.
        end: End in seconds.
        text: The transcribed text.
    """

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Transcript:
    """The transcript of a recording.

    Attributes:
        text: The whole text.
        segments: Its parts with their times.
        seconds: Duration of the recording.
        language: Language code; None for a model of one language.
        notes: Conversions of the audio and problems with it.
    """

    text: str
    segments: tuple[Segment, ...]
    seconds: float
    language: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


def transcribe(
    pipeline: Pipeline,
    recordings: Sequence[str | Path | Tensor],
    *,
    timestamps: bool = True,
    language: str | None = None,
    strategy: Strategy | None = None,
) -> list[Transcript]:
    """Transcribe recordings.

    Args:
        pipeline: A Whisper model.
        recordings: Files, or samples (N,) at 16 kHz.
        timestamps: Generate timestamps. Without them windows are cut at fixed times, and each is one segment.
        language: Language code such as "en"; by default a multilingual model detects it.
        strategy: Decoding strategy; by default the model's own.

    Returns:
        One transcript per recording.

    Raises:
        DataError: If the model does not transcribe, or does not support the language.
    """
    pipeline.require("transcription")
    transcriber = _WindowedTranscriber(pipeline, timestamps, strategy)
    states = [transcriber.read(recording) for recording in recordings]
    for start in range(0, len(states), _BATCH_SIZE):
        transcriber.run(states[start : start + _BATCH_SIZE], language)
    return [transcriber.transcript(state) for state in states]


@dataclass
class _RecordingState:
    """A recording in progress: its frames, and the segments so far."""

    frames: Tensor  # (T, F), followed by a window of silence
    n_frames: int  # without the silence
    seconds: float
    notes: tuple[str, ...]
    position: int = 0  # first frame of the next window
    language: str | None = None
    segments: list[tuple[int, int, list[int]]] = field(default_factory=list)  # first frame, end frame, ids


class _WindowedTranscriber:
    """Transcribes recordings window by window."""

    def __init__(self, pipeline: Pipeline, timestamps: bool, strategy: Strategy | None) -> None:
        assert pipeline.source is not None  # clearhead trains no such model
        defaults = pipeline.generation_settings
        self.pipeline = pipeline
        self.timestamps = timestamps
        self.strategy = defaults.strategy if strategy is None else strategy
        model: Any = pipeline.model
        self.config = model.config
        self.mel = Mel.whisper(self.config.n_features)
        self.window: int = 2 * self.config.encoder.max_len  # frames
        self.settings = pipeline.source.generation()
        _ = pipeline.tokenizer  # a folder without tokenizer has no generation settings either; report the tokenizer
        no_timestamps = self.settings.get("no_timestamps_token_id")
        if not isinstance(no_timestamps, int):
            raise DataError(
                f"the generation_config.json of {pipeline.name} has no no_timestamps_token_id, so its timestamp ids "
                "are unknown; download that file again"
            )
        self.first_timestamp = no_timestamps + 1
        self.end_id = pipeline.stop_ids[0]
        latest = self.settings.get("max_initial_timestamp_index")
        rules = WhisperTimestampRules(self.first_timestamp, self.end_id, latest if isinstance(latest, int) else None)
        self.logits_processors = replace(
            defaults.logits_processors or LogitsProcessors(), timestamp_rules=rules if timestamps else None
        )

    def read(self, recording: str | Path | Tensor) -> _RecordingState:
        """Return the frames of a recording, followed by a window of silence."""
        rate = self.mel.sample_rate
        sound = audio.Waveform(recording, rate) if isinstance(recording, Tensor) else audio.read_audio(recording, rate)
        samples = sound.samples
        if samples.dim() != 1 or not len(samples):
            raise DataError(
                f"samples have shape {tuple(samples.shape)}; expected (N,), one channel at 16 kHz, not empty"
            )
        # Whisper models were trained on recordings that are followed by silence.
        padded = torch.nn.functional.pad(samples.float(), (0, self.window * self.mel.hop))
        frames = self.mel(padded[None])[0]
        return _RecordingState(frames, -(-len(samples) // self.mel.hop), sound.seconds, sound.notes)

    def run(self, states: Sequence[_RecordingState], language: str | None) -> None:
        """Transcribe recordings to their ends, one window of each at a time."""
        while unfinished := [state for state in states if state.position < state.n_frames]:
            windows = torch.stack([state.frames[state.position : state.position + self.window] for state in unfinished])
            windows = windows.to(next(self.pipeline.model.parameters()))
            self._set_languages(unfinished, windows, language)
            for spoken in dict.fromkeys(state.language for state in unfinished):  # start ids depend on the language
                rows = [i for i, state in enumerate(unfinished) if state.language == spoken]
                for row, ids in zip(rows, self._generate(windows[rows], spoken), strict=True):
                    self._add_segments(unfinished[row], ids)

    def _generate(self, windows: Tensor, language: str | None) -> Iterable[list[int]]:
        """Return the ids of each window."""
        start_ids = list(self.pipeline.decoder_start_ids)
        if language is not None:
            start_ids += [self.settings["lang_to_id"][language], self.settings["task_to_id"]["transcribe"]]
        if not self.timestamps:
            start_ids.append(self.first_timestamp - 1)
        generated = generate(
            self.pipeline.model,
            windows,
            strategy=self.strategy,
            decoder_start_ids=start_ids,
            stop_ids=self.pipeline.stop_ids,
            max_new_tokens=self.config.max_len - len(start_ids),
            logits_processors=self.logits_processors,
        ).to("cpu")
        return [generated.sequence(row).tolist() for row in range(len(windows))]

    @torch.no_grad()
    def _set_languages(self, states: Sequence[_RecordingState], windows: Tensor, language: str | None) -> None:
        """Set the language of recordings that have none: the given one, or the most likely."""
        language_ids = self.settings.get("lang_to_id")
        if not isinstance(language_ids, dict):
            if language not in (None, "en"):
                raise DataError(f"{self.pipeline.name} supports English only; leave the language out")
            return
        tokens = {token.strip("<|>"): token for token in language_ids}
        if language is not None and language not in tokens:
            raise DataError(f"the language {language!r} is not known; expected one of: {', '.join(sorted(tokens))}")
        new = [i for i, state in enumerate(states) if state.language is None]
        languages = [] if language is None else [tokens[language]] * len(new)
        if language is None and new:
            model: Any = self.pipeline.model
            start_ids = torch.tensor([self.pipeline.decoder_start_ids] * len(new), device=windows.device)
            logits = model(windows[new], start_ids)[:, -1, list(language_ids.values())]
            languages = [list(language_ids)[i] for i in logits.argmax(-1).tolist()]
        for i, name in zip(new, languages, strict=True):
            states[i].language = name

    def _add_segments(self, state: _RecordingState, ids: list[int]) -> None:
        """Split the ids of a window into segments at its timestamps, and move to the end of the last segment."""
        length = min(self.window, state.n_frames - state.position)
        is_time = [id_ >= self.first_timestamp for id_ in ids]
        cuts = [i for i in range(1, len(ids)) if is_time[i] and is_time[i - 1]]
        ends_with_silence = is_time[-2:] == [False, True]  # no text follows the last timestamp
        advance = length
        if not cuts:
            times = [
                id_ - self.first_timestamp
                for id_, time in zip(ids, is_time, strict=True)
                if time and id_ > self.first_timestamp
            ]
            end = state.position + min(2 * times[-1] if times else length, self.window)
            state.segments.append((state.position, end, ids))
        else:
            ends = [*cuts, *([len(ids)] if ends_with_silence else [])]
            for start, stop in zip([0, *cuts], ends, strict=False):
                part = ids[start:stop]
                first, last = (2 * (id_ - self.first_timestamp) for id_ in (part[0], part[-1]))
                state.segments.append((state.position + first, state.position + last, part))
            if not ends_with_silence:
                advance = 2 * (ids[cuts[-1] - 1] - self.first_timestamp)
        state.position += advance or length  # skip a window in which no segment ends

    def transcript(self, state: _RecordingState) -> Transcript:
        """Return the transcript of a finished recording."""
        frame_seconds = self.mel.hop / self.mel.sample_rate
        segments = []
        for start, end, ids in state.segments:
            text = self.pipeline.tokenizer.decode([id_ for id_ in ids if id_ < self.end_id])
            if text.strip():
                times = round(start * frame_seconds, 2), round(end * frame_seconds, 2)
                segments.append(Segment(*times, text.strip()))
        text = " ".join(segment.text for segment in segments)
        language = None if state.language is None else state.language.strip("<|>")
        return Transcript(text, tuple(segments), state.seconds, language, state.notes)


@dataclass(frozen=True)
class RecognizedSymbol:
    """A recognized symbol, with times in seconds from the start of the recording.

    Attributes:
        text: The symbol.
        start: Start of its first frame in the most likely alignment.
        end: End of its last frame.
        emitted_at: Duration of the audio that was needed to recognize it.
        log_prob: Log-probability of its most certain frame.
    """

    text: str
    start: float
    end: float
    emitted_at: float
    log_prob: float


class StreamingRecognizer:
    """Recognizes symbols in a stream of samples, and returns each as soon as it is final.

    Call `push` with chunks of samples at `sample_rate` Hz, and `flush` at the end of a recording; after that the next
    recording may follow.

    Args:
        model: A CTC encoder.
        beam: Width of the beam search; 1 for greedy decoding.
        tail_seconds: Silence added after the end, because a model recognizes a symbol some time after it ended.
        chunk_seconds: Longer input is processed in chunks of this duration, so that memory does not depend on it.

    Example:
        recognizer = StreamingRecognizer(model)
        symbols = [*recognizer.push(samples), *recognizer.flush()]
    """

    def __init__(
        self, model: CTCEncoder, *, beam: int = 1, tail_seconds: float = 0.0, chunk_seconds: float = 4.0
    ) -> None:
        self.model = model
        self._beam = validate(beam, "beam", PositiveInt)
        self._tail_seconds = validate(tail_seconds, "tail_seconds", NonNegativeFloat)
        self._chunk_seconds = validate(chunk_seconds, "chunk_seconds", PositiveFloat)
        self.sample_rate = model.config.mel.sample_rate
        try:
            self._chunk = model.streaming.chunk  # encoder frames that become final together
            self._is_streaming = True
        except ConfigError:
            self._chunk = 1 << 40  # no frame is final before the end
            self._is_streaming = False
        self._frames: Tensor
        self._reset()

    def push(self, samples: Float[Tensor, " N"]) -> list[RecognizedSymbol]:
        """Process samples (N,), from −1 to 1, and return the symbols that become final."""
        symbols: list[RecognizedSymbol] = []
        step = self._chunk * self.model.config.frame_stacking
        for part in samples.split(max(1, round(self._chunk_seconds * self.sample_rate))):
            self._frames = torch.cat((self._frames, self._mel.push(part)))
            n_ready = len(self._frames) // step * step
            symbols += self._with_times(self._decode(self._frames[:n_ready]))
            self._frames = self._frames[n_ready:].clone()
        return symbols

    def flush(self) -> list[RecognizedSymbol]:
        """End the recording, and return its remaining symbols."""
        duration = self._mel.n_samples / self.sample_rate
        has_frame = duration >= self.seconds(1)
        symbols = self.push(torch.zeros(round(self._tail_seconds * self.sample_rate))) if has_frame else []
        remaining = torch.cat((self._frames, self._mel.flush()))
        symbols += self._with_times([*self._decode(remaining), *self._search.flush()])
        self._reset()
        return [
            replace(symbol, start=min(symbol.start, duration), end=min(symbol.end, duration), emitted_at=duration)
            for symbol in symbols
        ]

    def _reset(self) -> None:
        """Prepare for the next recording."""
        config = self.model.config
        self._mel = config.mel.stream()
        self._frames = torch.zeros(0, config.mel.n_mels)
        self._cache = KVCache() if self._is_streaming else None
        self._search = (
            CTCGreedyDecoder(config.blank) if self._beam == 1 else CTCPrefixBeamDecoder(self._beam, blank=config.blank)
        )

    @torch.no_grad()
    def _decode(self, frames: Tensor) -> list[CTCSymbol]:
        """Return the symbols that become final with these feature frames."""
        if len(frames) < self.model.config.frame_stacking:
            return []
        logits = self.model(frames[None].to(self.model.head.weight), cache=self._cache)[0]
        return self._search.push(logits.float().log_softmax(-1))

    def _with_times(self, symbols: list[CTCSymbol]) -> list[RecognizedSymbol]:
        """Convert frames to seconds."""
        return [
            RecognizedSymbol(
                text=str(symbol.id),
                start=symbol.start * self.model.config.frame_seconds,
                end=self.seconds(symbol.end),
                emitted_at=self.seconds(-(-symbol.emitted_at // self._chunk) * self._chunk),
                log_prob=symbol.log_prob,
            )
            for symbol in symbols
        ]

    def seconds(self, n_frames: int) -> float:
        """Return the duration of the audio that `n_frames` encoder frames need."""
        return self.model.config.mel.end(n_frames * self.model.config.frame_stacking - 1) / self.sample_rate
