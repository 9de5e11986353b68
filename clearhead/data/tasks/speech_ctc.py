"""Batches of audio with a CTC loss (connectionist temporal classification), greedy decoding and alignment.

The model returns a score for every symbol and for the blank in each of its output frames. The loss is that of torch:
the negative log probability of all alignments of the symbols, with blanks in between. If the times of the symbols are
known, alignments that emit a symbol before most of it was spoken, or later than `delay` after its end, are excluded.
Otherwise a streaming model could emit symbols late, or learn when someone speaks instead of what.

    B recordings   S symbols at most   T feature frames   F features   N output frames   V symbols"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.shapes import Bool, Float, Int
from clearhead.data.batch import Batch
from clearhead.nn.mel import Mel

_MIN_SPOKEN = 0.75  # share of a symbol that must be spoken before it may be emitted
_EXCLUDED = -1e4  # score of excluded symbols; finite because the sums over alignments need finite scores


@dataclass(frozen=True, kw_only=True)
class SpeechBatch(Batch):
    """Features of recordings and their symbols, with the start and end of each symbol in seconds."""

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

    def output_lengths(self, logits: Float[Tensor, "B N V"]) -> list[int]:
        """Return the number of output frames of each recording, without padding."""
        return [n // (self.frames.shape[1] // logits.shape[1]) for n in self.n_frames]

    def custom_loss(self, logits: Float[Tensor, "B N V"]) -> Float[Tensor, ""]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        lengths = self.output_lengths(logits)
        total = logits.new_zeros(())
        if self.delay is not None:
            # The log probability of the excluded symbols, per frame.
            allowed = logits.masked_fill(~self._allowed(logits), _EXCLUDED)
            excluded = logits.logsumexp(-1) - allowed.logsumexp(-1)  # (B, N)
            frames = torch.arange(logits.shape[1], device=logits.device)
            total = (excluded * (frames < torch.tensor(lengths, device=logits.device)[:, None])).sum()
            logits = allowed
        log_probs = logits.log_softmax(-1).transpose(0, 1)
        sizes = (lengths, self.counts)  # Python integers, so that no device is synchronized
        blank = logits.shape[-1] - 1
        total = total + F.ctc_loss(
            log_probs,
            self.labels,
            *sizes,  # type: ignore[arg-type]
            blank=blank,
            reduction="sum",
            zero_infinity=True,
        )
        return total * (self.weights.amax() > 0)

    def _allowed(self, logits: Tensor) -> Bool[Tensor, "B N V"]:
        """Return which symbols may be emitted in which frame; the blank always may."""
        N, V = logits.shape[1:]
        stacking = self.frames.shape[1] // N
        mel = self.mel
        last_frame = torch.arange(1, N + 1, device=logits.device) * stacking - 1  # the last input of each output
        end_seconds = (last_frame * mel.hop - mel.margin + mel.window) / mel.sample_rate
        begin, end = self.spans.unbind(-1)
        begin = begin + (end - begin) * _MIN_SPOKEN
        # (B, S, N)
        is_in_time = (end_seconds >= begin[..., None]) & (end_seconds <= end[..., None] + (self.delay or 0.0))
        symbols = F.one_hot(self.labels, V) * self.weights[..., None].long()
        is_allowed = torch.einsum("bsn,bsv->bnv", is_in_time.to(logits.dtype), symbols.to(logits.dtype)) > 0
        is_allowed[..., -1] = True
        return is_allowed

    def n_correct(self, logits: Float[Tensor, "B N V"]) -> int:
        """Return the number of symbols minus the number of errors of greedy decoding, at least 0 per recording."""
        hypotheses = [[symbol for symbol, _ in row] for row in greedy_decode(logits, self.output_lengths(logits))]
        references = [row[:n] for row, n in zip(self.labels.tolist(), self.counts, strict=True)]
        pairs = zip(hypotheses, references, strict=True)
        return sum(max(0, len(reference) - align(hypothesis, reference)[0]) for hypothesis, reference in pairs)


def greedy_decode(logits: Float[Tensor, "B N V"], lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Decode greedily: the argmax of every frame, without repeats and blanks.

    Returns:
        The symbols of each recording, each with its first frame.
    """
    best = logits.argmax(-1)
    is_change = best != F.pad(best, (1, 0), value=logits.shape[-1] - 1)[:, :-1]
    is_new = (is_change & (best != logits.shape[-1] - 1)).cpu()
    return [
        [(int(row[n]), n) for n in new[:length].nonzero()[:, 0].tolist()]
        for row, new, length in zip(best.cpu(), is_new, lengths, strict=True)
    ]


def align(hypothesis: Sequence[int], reference: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """Return the edit distance of two sequences, and the pairs of indices whose symbols match in the alignment."""
    table = [list(range(len(reference) + 1))]
    for i, symbol in enumerate(hypothesis, 1):
        row = [i]
        for j, other in enumerate(reference, 1):
            row.append(min(table[-1][j] + 1, row[-1] + 1, table[-1][j - 1] + (symbol != other)))
        table.append(row)
    pairs = []
    i, j = len(hypothesis), len(reference)
    while i and j:
        is_match = hypothesis[i - 1] == reference[j - 1]
        if table[i][j] == table[i - 1][j - 1] + (not is_match):
            i, j = i - 1, j - 1
            if is_match:
                pairs.append((i, j))
        elif table[i][j] == table[i - 1][j] + 1:
            i -= 1
        else:
            j -= 1
    return table[-1][-1], pairs[::-1]
