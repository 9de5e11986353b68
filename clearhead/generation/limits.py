"""What may be written besides what is likely: ids that are forced, forbidden or made less likely, as a model's
generation_config.json asks for it.

`Limited` stands between a search and any stepper and changes the logits of every step, so greedy decoding, sampling and
beam search all obey. It looks at the ids so far, which a recording cannot: the fast way runs under it step by step.

    R rows   T ids so far   V vocabulary"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.config import Value
from clearhead.errors import ConfigError
from clearhead.generation.prompts import padded
from clearhead.generation.stepper import Stepper
from clearhead.values import Natural, Positive

Ids = tuple[Natural, ...]


@dataclass(frozen=True)
class Times(Value):
    """Whisper's ids for moments: `first` is 0.00 s and the id before it "no times"; `end` follows the last id of text.

    They come in pairs (an end and the next beginning), never go back, and the text begins with one, of which the
    `latest` may be asked for. Where all of them together are likelier than any id of text, one of them is written."""

    first: Natural
    end: Natural
    latest: Natural | None = None


@dataclass(frozen=True)
class Limits(Value):
    """Applied in this order to the logits of a step, as transformers does it for greedy decoding."""

    repetition_penalty: Positive = 1.0  # divides the logits of ids that stand there already; a negative one grows by it
    no_repeat: Natural = 0  # no run of so many ids occurs twice; 0 is no such limit
    forbidden: tuple[Ids, ...] = ()  # runs of ids that are never completed
    min_length: Natural = 0  # ids, with those of the prompt, before a stop may come
    min_new: Natural = 0  # the same without those of the prompt
    forced_first: Natural | None = None  # the id after a beginning of one id
    forced_last: Ids = ()  # one of these is the last that there is room for
    suppressed: Ids = ()  # never written
    suppressed_first: Ids = ()  # not as the first id
    times: Times | None = None


class Limited:
    """A `Stepper` under limits. `begun` are the ids that each row goes on from."""

    def __init__(
        self, stepper: Stepper, limits: Limits, begun: Sequence[Tensor], *, max_new: int, stops: tuple[int, ...]
    ) -> None:
        self._stepper, self._limits, self._max_new, self._stops = stepper, limits, max_new, list(stops)
        self._lengths = torch.tensor([len(row) for row in begun])  # (R,) of what was begun
        self._ids = padded([row.cpu() for row in begun], left=True, fill=-1)  # -1 is no id and equals none
        self._made = 0

    def begin(self) -> Float[Tensor, "B V"]:
        logits = self._stepper.begin()
        limits, V = self._limits, logits.shape[-1]
        runs = (*limits.forbidden, limits.forced_last, limits.suppressed, limits.suppressed_first)
        if strange := [id_ for id_ in (*itertools.chain(*runs), limits.forced_first or 0) if id_ >= V]:
            raise ConfigError(f"the limits speak of id {strange[0]}, and the vocabulary ends at {V - 1}; correct them")
        self._ids, self._lengths = self._ids.to(logits.device), self._lengths.to(logits.device)
        return self._changed(logits)

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        self._ids = torch.cat((self._ids, ids[:, None]), dim=1)
        self._made += 1
        return self._changed(self._stepper.step(ids))

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        self._stepper.reorder(rows)
        self._ids, self._lengths = (x.index_select(0, rows.to(x.device)) for x in (self._ids, self._lengths))

    def _changed(self, logits: Tensor) -> Tensor:
        limits, (R, V) = self._limits, logits.shape
        x, banned = logits, torch.zeros(R, V + 1, dtype=torch.bool, device=logits.device)
        if limits.repetition_penalty != 1:
            seen = banned.scatter(1, self._ids.remainder(V + 1), True)[:, :V]  # -1 falls into the last column
            x = torch.where(seen, torch.where(x < 0, x * limits.repetition_penalty, x / limits.repetition_penalty), x)
        self._repeated(banned)
        for *before, last in limits.forbidden:
            banned[:, last] |= self._ends_in(before) if before else True
        lengths = self._lengths + self._made
        short = lengths < (limits.min_length if self._made >= limits.min_new else math.inf)
        banned[:, self._stops] |= short[:, None]
        x = x.masked_fill(banned[:, :V], -math.inf)
        if limits.forced_first is not None:
            x = torch.where((lengths == 1)[:, None], _only(x, [limits.forced_first]), x)
        if limits.forced_last and self._made == self._max_new - 1:
            x = _only(x, list(limits.forced_last))
        after_all = torch.zeros(R, V, dtype=torch.bool, device=x.device)
        after_all[:, list(limits.suppressed)] = True
        # What was forced as the first id does not count as one.
        first = (self._lengths == 1).long() * (limits.forced_first is not None)
        after_all[:, list(limits.suppressed_first)] |= first.eq(self._made)[:, None]
        x = x.masked_fill(after_all, -math.inf)
        return x if limits.times is None else self._timed(x, limits.times)

    def _repeated(self, banned: Tensor) -> None:
        """Bans the ids that would make a run of `no_repeat` ids a second time."""
        n, T = self._limits.no_repeat, self._ids.shape[1]
        if not n or T < n:
            return
        runs = self._ids.unfold(1, n, 1)  # (R, T - n + 1, n)
        again = (runs[..., :-1] == self._ids[:, None, T - n + 1 :]).all(-1) & (runs >= 0).all(-1)
        banned.scatter_(1, torch.where(again, runs[..., -1], banned.shape[1] - 1), True)

    def _ends_in(self, run: list[int]) -> Tensor:
        """(R,): which rows end in a run of ids and have one more before it, which is what transformers asks for."""
        n = len(run)
        if self._ids.shape[1] <= n:
            return torch.zeros(len(self._ids), dtype=torch.bool, device=self._ids.device)
        return (self._ids[:, -n:] == torch.tensor(run, device=self._ids.device)).all(1) & (self._ids[:, -n - 1] >= 0)

    def _timed(self, x: Tensor, times: Times) -> Tensor:
        new, ids = self._ids[:, self._ids.shape[1] - self._made :], torch.arange(x.shape[1], device=x.device)
        is_time, is_text = ids >= times.first, ids < times.end
        banned = (ids == times.first - 1).expand_as(x)
        if self._made:
            was_time = new >= times.first
            last = was_time[:, -1:]
            before = was_time[:, -2:-1] if self._made > 1 else torch.ones_like(last)
            banned = banned | (last & before & is_time) | (last & ~before & is_text)
            latest = torch.where(was_time, new, times.first - 1).amax(1, keepdim=True)
            # The same moment only as the beginning of what follows.
            banned = banned | (is_time & (ids < torch.where(last & ~before, latest, latest + 1)))
        else:
            banned = banned | ~is_time
            banned = banned | (ids > times.first + times.latest) if times.latest is not None else banned
        x = x.masked_fill(banned, -math.inf)
        likely = x.float().log_softmax(-1)
        rather = likely[:, times.first :].logsumexp(-1) > likely[:, : times.first].amax(-1)
        return x.masked_fill(rather[:, None] & ~is_time, -math.inf)


def _only(x: Tensor, ids: list[int]) -> Tensor:
    """Logits that leave these ids alone, all alike."""
    alone = torch.full_like(x, -math.inf)
    alone[:, ids] = 0.0
    return alone
