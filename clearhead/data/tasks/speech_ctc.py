"""A batch of sounds with what is said in them, and how an answer is judged: connectionist temporal classification.

The model gives a score for every symbol, and for none, at every moment. The loss is torch's: the probability of all
ways of writing the symbols down in their order, blanks in between. Where it is known when each was said, ways that
write it down before most of it has been said, or later than `delay` after its end, do not count: a stream must not be
kept waiting, and a model that may answer at the first sound learns when somebody speaks, and never what.

    B sounds   S symbols of one at most   T frames   F features   N moments   V symbols"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.shapes import Bool, Float, Int
from clearhead.data.batch import Batch
from clearhead.nn.mel import Mel

_HEARD = 0.75  # how much of a symbol must have been said
_NEVER = -1e4  # a score that no way goes through, and finite, as sums over ways need it


@dataclass(frozen=True, kw_only=True)
class SpeechBatch(Batch):
    """Features of sounds and the symbols in them, each with the seconds from which to which it is said."""

    frames: Float[Tensor, "B T F"]
    labels: Int[Tensor, "B S"]
    weights: Float[Tensor, "B S"]
    spans: Float[Tensor, "B S 2"]
    delay: float | None
    mel: Mel
    counts: tuple[int, ...]  # of symbols
    n_frames: tuple[int, ...]

    def logits(self, model: Callable[..., Tensor]) -> Float[Tensor, "B N V"]:
        if min(self.n_frames) == self.frames.shape[1]:
            return model(self.frames)
        return model(self.frames, torch.tensor(self.n_frames, device=self.frames.device))

    def n_moments(self, logits: Float[Tensor, "B N V"]) -> list[int]:
        """How many of the moments are each sound's own."""
        return [n // (self.frames.shape[1] // logits.shape[1]) for n in self.n_frames]

    def custom_loss(self, logits: Float[Tensor, "B N V"]) -> Float[Tensor, ""]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        lengths, total = self.n_moments(logits), logits.new_zeros(())
        if self.delay is not None:
            # What lies on the other ways is lost to the right ones, moment by moment.
            narrowed = logits.masked_fill(~self._in_time(logits), _NEVER)
            lost = logits.logsumexp(-1) - narrowed.logsumexp(-1)  # (B, N)
            moments = torch.arange(logits.shape[1], device=logits.device)
            total = (lost * (moments < torch.tensor(lengths, device=logits.device)[:, None])).sum()
            logits = narrowed
        scores, sizes = logits.log_softmax(-1).transpose(0, 1), (lengths, self.counts)  # plain: no device is waited for
        how: dict[str, Any] = {"blank": logits.shape[-1] - 1, "reduction": "sum", "zero_infinity": True}
        total = total + F.ctc_loss(scores, self.labels, *sizes, **how)  # type: ignore[arg-type]
        return total * (self.weights.amax() > 0)

    def _in_time(self, logits: Tensor) -> Bool[Tensor, "B N V"]:
        """Which symbols may be written down when; the blank always."""
        N, V = logits.shape[1:]
        stacked, mel = self.frames.shape[1] // N, self.mel
        frame = torch.arange(1, N + 1, device=logits.device) * stacked - 1  # the last of each moment
        known = (frame * mel.hop - mel.margin + mel.window) / mel.sample_rate  # seconds
        begin, end = self.spans.unbind(-1)
        begin = begin + (end - begin) * _HEARD
        inside = (known >= begin[..., None]) & (known <= end[..., None] + (self.delay or 0.0))  # (B, S, N)
        symbols = F.one_hot(self.labels, V) * self.weights[..., None].long()
        may = torch.einsum("bsn,bsv->bnv", inside.to(logits.dtype), symbols.to(logits.dtype)) > 0
        may[..., -1] = True
        return may

    def right(self, logits: Float[Tensor, "B N V"]) -> int:
        """How many symbols are left of those that should be there, after one is taken off for each mistake."""
        found = [[symbol for symbol, _ in row] for row in written(logits, self.n_moments(logits))]
        wanted = [row[:n] for row, n in zip(self.labels.tolist(), self.counts, strict=True)]
        return sum(max(0, len(w) - compared(f, w)[0]) for f, w in zip(found, wanted, strict=True))


def written(logits: Float[Tensor, "B N V"], lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The likeliest class of every moment, without repeats and blanks: symbols, each with its first moment."""
    best = logits.argmax(-1)
    fresh = best != F.pad(best, (1, 0), value=logits.shape[-1] - 1)[:, :-1]
    new = (fresh & (best != logits.shape[-1] - 1)).cpu()
    return [
        [(int(row[n]), n) for n in is_new[:length].nonzero()[:, 0].tolist()]
        for row, is_new, length in zip(best.cpu(), new, lengths, strict=True)
    ]


def compared(found: Sequence[int], wanted: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """How many digits have to be changed, added or left out to get from one to the other at least, and which of them
    then stand for each other and are the same: pairs of places."""
    table = [list(range(len(wanted) + 1))]
    for i, digit in enumerate(found, 1):
        row = [i]
        for j, other in enumerate(wanted, 1):
            row.append(min(table[-1][j] + 1, row[-1] + 1, table[-1][j - 1] + (digit != other)))
        table.append(row)
    pairs, i, j = [], len(found), len(wanted)
    while i and j:
        same = found[i - 1] == wanted[j - 1]
        if table[i][j] == table[i - 1][j - 1] + (not same):
            i, j = i - 1, j - 1
            if same:
                pairs.append((i, j))
        elif table[i][j] == table[i - 1][j] + 1:
            i -= 1
        else:
            j -= 1
    return table[-1][-1], pairs[::-1]
