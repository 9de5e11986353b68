"""Sound in, symbols out while it comes: samples in pieces of any size, an event for each symbol that is recognised.

    listener = pretrained.load("spoken-digits").listen()
    for samples in pieces:
        for event in listener.feed(samples):
            print(event.text, event.end)
    print(listener.end())                               # what the end of the sound decides

What it gives does not depend on the pieces: the mask under which the model was trained says how far each moment sees,
and a cache keeps just that much. Under a window it keeps as much after hours as after seconds. A mask that looks ahead
without end (`full()`) is run once, at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead._shapes import Float
from clearhead.attention import KVCache
from clearhead.errors import ConfigError
from clearhead.generation.ctc import GreedyCTC, PrefixBeam, Symbol
from clearhead.models import SpeechEncoder
from clearhead.values import Count, NotNegative, checked

_PIECE = 4.0  # seconds that are worked on at once: what is fed whole needs no more memory than what comes bit by bit


@dataclass(frozen=True)
class Event:
    """A symbol that was recognised. Seconds from the beginning of the sound: the moments from `start` to `end` say it,
    and it could be told when the sound up to `known` had come. `log_prob` is that of the clearest moment."""

    text: str
    start: float
    end: float
    known: float
    log_prob: float


class Listener:
    """Hears one sound after another: `feed` it samples at `rate` Hz, (N,) from −1 to 1, and call `end` after the last.

    `beam` is the width of the search for symbols; 1 takes the likeliest one at every moment. `silence` is how many
    seconds of it are heard after the end: a model that writes down what has been said needs a moment to do so."""

    def __init__(self, model: SpeechEncoder, *, beam: int = 1, silence: float = 0.0) -> None:
        self.model, self._beam = model, checked(beam, "beam", Count)
        self._silence = checked(silence, "silence", NotNegative)
        self.rate = model.config.mel.sample_rate
        try:
            self._step, self._streams = model.pace.step, True  # moments that are known together
        except ConfigError:
            self._step, self._streams = 1 << 40, False  # none is known before the end
        self._frames: Tensor
        self._begin()

    def feed(self, samples: Float[Tensor, " N"]) -> list[Event]:
        """What can be told now and could not before."""
        found: list[Event] = []
        step = self._step * self.model.config.n_stacked
        for part in samples.split(round(_PIECE * self.rate)):
            self._frames = torch.cat((self._frames, self._mel.feed(part)))
            ready = len(self._frames) // step * step
            found += self._told(self._run(self._frames[:ready]))
            self._frames = self._frames[ready:].clone()
        return found

    def end(self) -> list[Event]:
        """What the end of the sound decides. After it, another sound may be fed."""
        over = self._mel.n_samples / self.rate
        enough = over >= self.seconds(1)  # what is too short for a moment has said nothing
        found = self.feed(torch.zeros(round(self._silence * self.rate))) if enough else []
        rest = torch.cat((self._frames, self._mel.finish()))
        found += self._told([*self._run(rest), *self._search.end()])
        self._begin()
        return [replace(one, start=min(one.start, over), end=min(one.end, over), known=over) for one in found]

    def _begin(self) -> None:
        config = self.model.config
        self._mel, self._frames = config.mel.stream(), torch.zeros(0, config.mel.n_mels)
        self._cache = KVCache() if self._streams else None
        self._search = GreedyCTC(config.blank) if self._beam == 1 else PrefixBeam(self._beam, blank=config.blank)

    @torch.no_grad()
    def _run(self, frames: Tensor) -> list[Symbol]:
        if len(frames) < self.model.config.n_stacked:
            return []
        logits = self.model(frames[None].to(self.model.head.weight), cache=self._cache)[0]
        return self._search.feed(logits.float().log_softmax(-1))

    def _told(self, symbols: list[Symbol]) -> list[Event]:
        moment, step, told = self.model.config.moment, self._step, self.seconds
        return [
            Event(str(one.id), one.start * moment, told(one.end), told(-(-one.known // step) * step), one.log_prob)
            for one in symbols
        ]

    def seconds(self, moments: int) -> float:
        """How long a sound has so many moments: the last frame of the last of them has come."""
        return self.model.config.mel.end(moments * self.model.config.n_stacked - 1) / self.rate
