"""Logits processors: forced, forbidden and penalized ids, as in a model's generation_config.json.

`LogitsProcessingDecoder` wraps any decoder and changes the logits of every step, so processors apply to greedy
decoding, sampling and beam search. They depend on the ids so far, which a captured CUDA graph cannot, so the fused
decoder runs without CUDA graphs under them.

    R rows   T ids so far   V vocabulary
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Bool, Float, Int
from clearhead._core.validation import NonNegativeInt, PositiveFloat
from clearhead.config import Validated
from clearhead.errors import ConfigError
from clearhead.generation.decoder import IncrementalDecoder
from clearhead.generation.prompts import pad_rows
from clearhead.generation.sampling import to_float32

Ids = tuple[NonNegativeInt, ...]


@dataclass(frozen=True)
class WhisperTimestampRules(Validated):
    """Whisper's rules for timestamp ids.

    Timestamps form pairs (an end and the next start) and never decrease, and the text begins with one. If all of them
    together are more likely than any text id, a timestamp is chosen.

    Args:
        first: Id of 0.00 s; the id before it means "no timestamps".
        end: The id after the last text id.
        latest: Largest index of the first timestamp; None for no bound.
    """

    first: NonNegativeInt
    end: NonNegativeInt
    latest: NonNegativeInt | None = None


@explain_keywords
@dataclass(frozen=True)
class LogitsProcessors(Validated):
    """Changes applied to the logits of each step, in this order, as transformers does for greedy decoding.

    Args:
        repetition_penalty: Divides positive logits of ids that occurred before, and multiplies negative ones.
        no_repeat_ngram_size: Length of the runs of ids that must not occur twice; 0 for no such rule.
        bad_words_ids: Runs of ids that are never completed.
        min_length: Number of ids, including the prompt, before a stop id is allowed.
        min_new_tokens: Number of new ids before a stop id is allowed.
        forced_bos_token_id: The id after a start of one id.
        forced_eos_token_ids: Ids allowed as the last of `max_new_tokens`.
        suppress_tokens: Ids that are never generated.
        begin_suppress_tokens: Ids that are not generated first.
        renormalize_logits: Normalize the log-probabilities of beam search again after the other changes. The ids of
            greedy decoding and sampling do not depend on it.
        timestamp_rules: Rules for Whisper's timestamps.
    """

    repetition_penalty: PositiveFloat = 1.0
    no_repeat_ngram_size: NonNegativeInt = 0
    bad_words_ids: tuple[Ids, ...] = ()
    min_length: NonNegativeInt = 0
    min_new_tokens: NonNegativeInt = 0
    forced_bos_token_id: NonNegativeInt | None = None
    forced_eos_token_ids: Ids = ()
    suppress_tokens: Ids = ()
    begin_suppress_tokens: Ids = ()
    renormalize_logits: bool = False
    timestamp_rules: WhisperTimestampRules | None = None


class LogitsProcessingDecoder:
    """Applies logits processors to a decoder.

    Args:
        decoder: The decoder.
        processors: The logits processors.
        prompts: Ids that each row continues.
        max_new_tokens: Largest number of new ids.
        stop_ids: Ids that end a sequence.
        returns_log_probs: Apply the processors to log-probabilities and return these, as transformers does for beam
            search. They are not normalized again, so their sum over a sequence counts what the processors took away.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        processors: LogitsProcessors,
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        returns_log_probs: bool = False,
    ) -> None:
        self.returns_log_probs = returns_log_probs
        self._decoder = decoder
        self._processors = processors
        self._max_new_tokens = max_new_tokens
        self._stop_ids = list(stop_ids)
        self._prompt_lengths = torch.tensor([len(row) for row in prompts])  # (R,)
        self._ids = pad_rows([row.cpu() for row in prompts], left=True, fill=-1)  # -1 differs from every id
        self._n_new = 0

    def prefill(self) -> Float[Tensor, "B V"]:
        logits = self._decoder.prefill()
        V = logits.shape[-1]
        p = self._processors
        runs = (*p.bad_words_ids, p.forced_eos_token_ids, p.suppress_tokens, p.begin_suppress_tokens)
        invalid = [id_ for id_ in (*itertools.chain(*runs), p.forced_bos_token_id or 0) if id_ >= V]
        if invalid:
            raise ConfigError(
                f"token id {invalid[0]} in the logits processors is outside the vocabulary (0 … {V - 1}); remove it"
            )
        self._ids = self._ids.to(logits.device)
        self._prompt_lengths = self._prompt_lengths.to(logits.device)
        return self._process(logits)

    def decode_step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        self._ids = torch.cat((self._ids, ids[:, None]), dim=1)
        self._n_new += 1
        return self._process(self._decoder.decode_step(ids))

    def reorder_cache(self, rows: Int[Tensor, " rows"]) -> None:
        self._decoder.reorder_cache(rows)
        self._ids = self._ids.index_select(0, rows.to(self._ids.device))
        self._prompt_lengths = self._prompt_lengths.index_select(0, rows.to(self._prompt_lengths.device))

    def _process(self, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        """Return the processed logits or log-probabilities."""
        p = self._processors
        R, V = logits.shape
        x = to_float32(logits).log_softmax(-1) if self.returns_log_probs else logits
        banned = torch.zeros(R, V + 1, dtype=torch.bool, device=logits.device)
        if p.repetition_penalty != 1:
            occurred = banned.scatter(1, self._ids.remainder(V + 1), True)[:, :V]  # -1 maps to the last column
            penalized = torch.where(x < 0, x * p.repetition_penalty, x / p.repetition_penalty)
            x = torch.where(occurred, penalized, x)
        self._ban_repeated_ngrams(banned)
        for *prefix, last in p.bad_words_ids:
            banned[:, last] |= self._ends_with(prefix) if prefix else True
        lengths = self._prompt_lengths + self._n_new
        too_short = lengths < (p.min_length if self._n_new >= p.min_new_tokens else math.inf)
        banned[:, self._stop_ids] |= too_short[:, None]
        x = x.masked_fill(banned[:, :V], -math.inf)
        if p.forced_bos_token_id is not None:
            x = torch.where((lengths == 1)[:, None], _force(x, [p.forced_bos_token_id]), x)
        if p.forced_eos_token_ids and self._n_new == self._max_new_tokens - 1:
            x = _force(x, list(p.forced_eos_token_ids))
        suppressed = torch.zeros(R, V, dtype=torch.bool, device=x.device)
        suppressed[:, list(p.suppress_tokens)] = True
        # A forced first id does not count as the first.
        first_step = (self._prompt_lengths == 1).long() * (p.forced_bos_token_id is not None)
        suppressed[:, list(p.begin_suppress_tokens)] |= first_step.eq(self._n_new)[:, None]
        x = x.masked_fill(suppressed, -math.inf)
        if p.timestamp_rules is not None:
            x = self._apply_timestamp_rules(x, p.timestamp_rules)
        if p.renormalize_logits and self.returns_log_probs:
            has_ids = (x > -math.inf).any(-1, keepdim=True)
            x = torch.where(has_ids, x.log_softmax(-1), x)
        return x

    def _ban_repeated_ngrams(self, banned: Bool[Tensor, "R V1"]) -> None:
        """Ban the ids that would complete an n-gram that occurred before."""
        n = self._processors.no_repeat_ngram_size
        T = self._ids.shape[1]
        if not n or T < n:
            return
        ngrams = self._ids.unfold(1, n, 1)  # (R, T - n + 1, n)
        matches = (ngrams[..., :-1] == self._ids[:, None, T - n + 1 :]).all(-1) & (ngrams >= 0).all(-1)
        banned.scatter_(1, torch.where(matches, ngrams[..., -1], banned.shape[1] - 1), True)

    def _ends_with(self, run: list[int]) -> Bool[Tensor, " R"]:
        """Return which rows end with a run of ids that has at least one id before it, as transformers requires."""
        n = len(run)
        if self._ids.shape[1] <= n:
            return torch.zeros(len(self._ids), dtype=torch.bool, device=self._ids.device)
        return (self._ids[:, -n:] == torch.tensor(run, device=self._ids.device)).all(1) & (self._ids[:, -n - 1] >= 0)

    def _apply_timestamp_rules(self, x: Float[Tensor, "R V"], rules: WhisperTimestampRules) -> Float[Tensor, "R V"]:
        """Return logits that follow the rules for timestamps."""
        new = self._ids[:, self._ids.shape[1] - self._n_new :]
        ids = torch.arange(x.shape[1], device=x.device)
        is_time = ids >= rules.first
        is_text = ids < rules.end
        banned = (ids == rules.first - 1).expand_as(x)
        if self._n_new:
            was_time = new >= rules.first
            last = was_time[:, -1:]
            second_last = was_time[:, -2:-1] if self._n_new > 1 else torch.ones_like(last)
            banned = banned | (last & second_last & is_time) | (last & ~second_last & is_text)
            latest = torch.where(was_time, new, rules.first - 1).amax(1, keepdim=True)
            # A timestamp may be repeated only as the start of the next segment.
            banned = banned | (is_time & (ids < torch.where(last & ~second_last, latest, latest + 1)))
        else:
            banned = banned | ~is_time
            banned = banned | (ids > rules.first + rules.latest) if rules.latest is not None else banned
        x = x.masked_fill(banned, -math.inf)
        log_probs = x.float().log_softmax(-1)
        prefers_time = log_probs[:, rules.first :].logsumexp(-1) > log_probs[:, : rules.first].amax(-1)
        return x.masked_fill(prefers_time[:, None] & ~is_time, -math.inf)


def _force(x: Tensor, ids: list[int]) -> Tensor:
    """Return logits that allow only these ids, with equal probability."""
    forced = torch.full_like(x, -math.inf)
    forced[:, ids] = 0.0
    return forced
