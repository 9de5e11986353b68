"""Table models without a network, whose log-probabilities depend on all previous ids, and reference searches.

The searches use lists and loops over one sequence at a time, and share no code with the package.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def chaotic(vocab: int, *, seed: int = 0, sharpness: float = 1.5):
    """Return a function from ids (R, n) to unnormalized float64 logits (R, V) that depend on the whole history."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(1009, vocab, generator=generator, dtype=torch.float64) * sharpness

    def logits(ids: Tensor) -> Tensor:
        key = torch.full((ids.shape[0],), seed % 1009, dtype=torch.int64)
        for column in ids.unbind(1):
            key = (key * 31 + column + 7) % 1009
        return table[key]

    @functools.cache
    def row(key: int) -> list[float]:
        return table[key].log_softmax(-1).tolist()

    def log_probs_after(ids: list[int]) -> list[float]:
        return row(functools.reduce(lambda key, id_: (key * 31 + id_ + 7) % 1009, ids, seed % 1009))

    logits.log_probs_after = log_probs_after  # the same values for one history, without tensors
    return logits


def log_probs_after(logits, ids: list[int]) -> list[float]:
    return logits.log_probs_after(ids)


def exhaustive(logits, prompt, *, vocab, max_new_tokens, stops, alpha):
    """Return every possible sequence as (score, new ids, finished), best first."""
    sequences = []

    def extend(new, total):
        if new and new[-1] in stops:
            sequences.append((total / len(new) ** alpha, new, True))
            return
        if len(new) == max_new_tokens:
            sequences.append((total / len(new) ** alpha, new, False))
            return
        row = log_probs_after(logits, [*prompt, *new])
        for id_ in range(vocab):
            extend([*new, id_], total + row[id_])

    extend([], 0.0)
    return sorted(sequences, key=lambda item: -item[0])


def plain_beam(logits, prompt, *, width, max_new_tokens, stops, alpha, early_stopping=True):
    """Return the results of beam search for one prompt: (score, new ids, finished), best first.

    It ends by the rule of `early_stopping` alone.
    """
    live, ended = [([], 0.0)], []
    for n in range(1, max_new_tokens + 1):
        options = [
            ([*new, id_], total + log_prob)
            for new, total in live
            for id_, log_prob in enumerate(log_probs_after(logits, [*prompt, *new]))
        ]
        options.sort(key=lambda option: -option[1])
        is_last = n == max_new_tokens
        ended += [
            (total / n**alpha, new, new[-1] in stops) for new, total in options[:width] if is_last or new[-1] in stops
        ]
        live = [option for option in options if option[0][-1] not in stops][:width]
        if not live or (len(ended) >= width and early_stopping is True):
            break
        if len(ended) >= width:
            longest = max_new_tokens if early_stopping == "never" and alpha > 0 else n
            worst = sorted(ended, key=lambda item: -item[0])[width - 1][0]
            if live[0][1] / longest**alpha <= worst:
                break
    return sorted(ended, key=lambda item: -item[0])[:width]


def plain_greedy(logits, prompt, *, max_new_tokens, stops):
    """Return the ids of greedy decoding and their log-probabilities."""
    new, log_probs = [], []
    while len(new) < max_new_tokens and not (new and new[-1] in stops):
        row = log_probs_after(logits, [*prompt, *new])
        new.append(max(range(len(row)), key=row.__getitem__))
        log_probs.append(row[new[-1]])
    return new, log_probs


def plain_filter(logits: list[float], *, temperature=1.0, top_k=None, top_p=None, min_p=None) -> list[float]:
    """Return the distribution of `Sample`; each filter uses the renormalized result of the previous one."""
    weight = [math.exp((x - max(logits)) / temperature) for x in logits]
    if top_k is not None and top_k < len(weight):
        edge = sorted(weight, reverse=True)[top_k - 1]
        weight = [w if w >= edge else 0.0 for w in weight]
    if top_p is not None:
        total, reached, edge = math.fsum(weight), 0.0, math.inf
        for w in sorted(weight, reverse=True):
            if reached / total >= top_p:
                break
            reached, edge = reached + w, w
        weight = [w if w >= edge else 0.0 for w in weight]
    if min_p is not None:
        weight = [w if w >= min_p * max(weight) else 0.0 for w in weight]
    total = math.fsum(weight)
    return [w / total for w in weight]
