"""With a cache or without: the same answers, however the tokens come.

B batch   T tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.checks.lab import Case, Lab, by_position, reason
from clearhead.checks.noise import difference
from clearhead.checks.properties.base import Property, Seen
from clearhead.checks.subject import Batch, Caching


class CacheConsistency(Property):
    """What comes out piece by piece is what comes out at once."""

    name = "cache = no cache"
    done = "fed all at once, one by one and in chunks, after reordering rows and after truncating, against no cache"

    def why_not(self, lab: Lab) -> str | None:
        sees = lab.subject.sees
        if lab.subject.caching is None:
            if not lab.subject.is_sequence:
                return "the module reads no sequence"
            if sees is not None and bool(sees.dense(lab.length).triu(1).any()):
                return "outputs see later tokens, so that nothing of them can be kept"
            return "it is not said that the module has a cache: give caching=Caching(new=…)"
        if not lab.per_token:
            return "there is no output for each token"
        return None

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        caching = lab.subject.caching
        assert caching is not None
        T = case.length
        whole = lab.out(case.batch())
        yield self._fed(lab, case, whole, [T], "prefill")
        yield self._fed(lab, case, whole, [1] * T, "one by one")
        yield self._fed(lab, case, whole, _chunks(T), "in chunks")
        if T >= 2:
            if caching.reorder is not None and case.x.shape[0] > 1:
                yield self._reordered(lab, case, whole, caching)
            if caching.truncate is not None:
                yield self._truncated(lab, case, whole, caching)

    def _fed(self, lab: Lab, case: Case, whole: Tensor, sizes: list[int], kind: str) -> Seen:
        caching = lab.subject.caching
        assert caching is not None
        cache = caching.new()
        try:
            out = _feed(lab, case, cache, sizes, 0)
        except Exception as error:
            return _broken(lab, kind, error)
        return _compared(lab, out, whole, 0, kind)

    def _reordered(self, lab: Lab, case: Case, whole: Tensor, caching: Caching) -> Seen:
        kind = "after reorder"
        half = case.length // 2
        B = case.x.shape[0]
        rows = (torch.arange(B).roll(1) // 2 * 2) % B if B > 2 else torch.tensor([1, 0])
        cache = caching.new()
        try:
            _feed(lab, Case(case.x[:, :half], case.source), cache, [half], 0)
            assert caching.reorder is not None
            caching.reorder(cache, rows)
            rest = case.rows(rows)
            out = _feed(lab, Case(rest.x[:, half:], rest.source), cache, [1] * (case.length - half), half)
        except Exception as error:
            return _broken(lab, kind, error)
        return _compared(lab, out, whole[rows][:, half:], half, kind)

    def _truncated(self, lab: Lab, case: Case, whole: Tensor, caching: Caching) -> Seen:
        kind = "after truncate"
        half = case.length // 2
        cache = caching.new()
        try:
            first = case.x[:, :half]
            junk = lab.another(case.x[:, half:])
            _feed(lab, Case(torch.cat((first, junk), 1), case.source), cache, [half, case.length - half], 0)
            assert caching.truncate is not None
            caching.truncate(cache, half)
            out = _feed(lab, Case(case.x[:, half:], case.source), cache, [1] * (case.length - half), half)
        except Exception as error:
            return _broken(lab, kind, error)
        return _compared(lab, out, whole[:, half:], half, kind)

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        kinds = {seen.kind for seen in failed}
        if "prefill" in kinds and "Error: " in failed[0].where:
            return "the module cannot be called with a cache in this way: it raises an error at the first call"
        if "prefill" in kinds:
            return "the first call with an empty cache already differs: the cache changes the mask or the positions"
        if "one by one" not in kinds:
            if "in chunks" in kinds:
                return (
                    "a chunk of several tokens is masked as if nothing came before it: the causal mask of a chunk "
                    "needs the number of cached tokens as its offset"
                )
            if "after reorder" in kinds:
                return (
                    "the cache is not reordered for beams (in all of its parts): rows go on with another row's history"
                )
            return "truncating leaves something behind: keys, or the count of tokens that positions are made from"
        first = min(int(seen.where.rsplit(" ", 1)[1]) for seen in failed if seen.kind == "one by one")
        if first <= 1:
            return (
                "positions restart at 0 with every cached call (or the cached keys are not used): positions must start "
                "at the number of tokens in the cache"
            )
        return (
            f"a window is ignored when decoding: the first {first} tokens agree, then the cache shows keys that the "
            "mask hides without a cache"
        )


def _chunks(T: int) -> list[int]:
    sizes, left = [], T
    for size in (3, 1, 4, 2):
        if left:
            sizes.append(min(size, left))
            left -= sizes[-1]
    return [*sizes, left] if left else sizes


def _feed(lab: Lab, case: Case, cache: Any, sizes: Sequence[int], start: int) -> Tensor:
    """The outputs of the case's tokens, given in pieces that follow `start` cached ones."""
    outs, at = [], 0
    for size in sizes:
        piece = case.x[:, at : at + size]
        outs.append(lab.out(Batch(x=piece, source=case.source, cache=cache, start=start + at)))
        at += size
    return torch.cat(outs, dim=1)


def _compared(lab: Lab, out: Tensor, wanted: Tensor, start: int, kind: str) -> Seen:
    if out.shape != wanted.shape:
        where = f"{kind}: got {tuple(out.shape)} for {tuple(wanted.shape)}, from output 0"
        return Seen(difference=float("inf"), tolerance=lab.tolerance, where=where, kind=kind)
    gap = (out.double() - wanted.double()).abs().nan_to_num(float("inf"))
    gap = by_position(gap).amax(2).amax(0)  # (T,)
    over = (gap > lab.tolerance).nonzero()
    first = start + (int(over[0]) if len(over) else 0)
    return Seen(
        difference=difference(out, wanted),
        tolerance=lab.tolerance,
        where=f"{kind}: differs from output {first}",
        kind=kind,
    )


def _broken(lab: Lab, kind: str, error: Exception) -> Seen:
    where = f"{kind}: {reason(error)}, at output 0"
    return Seen(difference=float("inf"), tolerance=lab.tolerance, where=where, kind=kind)
