"""With a cache or without: the same answers, however the tokens come.

B batch   T tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.checks.lab import Case, Lab, by_position, reason
from clearhead.checks.noise import difference
from clearhead.checks.properties.base import Property, Seen
from clearhead.checks.subject import Batch


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
        whole, half = lab.plain(case), T // 2
        first, rest = Case(case.x[:, :half], case.source), Case(case.x[:, half:], case.source)
        one_by_one = [1] * (T - half)
        reorder: Any = caching.reorder
        truncate: Any = caching.truncate

        def reordered(cache: Any) -> Tensor:
            _feed(lab, first, cache, [half])
            reorder(cache, rows)
            return _feed(lab, rest.rows(rows), cache, one_by_one, half)

        def truncated(cache: Any) -> Tensor:
            junk = Case(torch.cat((first.x, lab.another(rest.x)), 1), case.source)
            _feed(lab, junk, cache, [half, T - half])
            truncate(cache, half)
            return _feed(lab, rest, cache, one_by_one, half)

        for kind, sizes in (("prefill", [T]), ("one by one", [1] * T), ("in chunks", _chunks(T))):
            yield self._seen(lab, kind, lambda cache, sizes=sizes: _feed(lab, case, cache, sizes), whole)  # type: ignore[misc]
        B = case.x.shape[0]
        if T >= 2 and B > 1 and reorder is not None:
            rows = (torch.arange(B).roll(1) // 2 * 2) % B if B > 2 else torch.tensor([1, 0])
            yield self._seen(lab, "after reorder", reordered, whole[rows][:, half:], half)
        if T >= 2 and truncate is not None:
            yield self._seen(lab, "after truncate", truncated, whole[:, half:], half)

    def _seen(self, lab: Lab, kind: str, run: Callable[[Any], Tensor], wanted: Tensor, start: int = 0) -> Seen:
        """What a run with a new cache gives, against what is wanted of the outputs from `start` on."""
        assert lab.subject.caching is not None
        try:
            out = run(lab.subject.caching.new())
        except Exception as error:
            where = f"{kind}: {reason(error)}, at output 0"
            return Seen(difference=float("inf"), tolerance=lab.tolerance, where=where, kind=kind)
        where = f"{kind}: got {tuple(out.shape)} for {tuple(wanted.shape)}, from output 0"
        if out.shape == wanted.shape:
            gap = (out.double() - wanted.double()).abs().nan_to_num(float("inf"))
            over = (by_position(gap).amax((0, 2)) > lab.tolerance).nonzero()  # (T,)
            where = f"{kind}: differs from output {start + (int(over[0]) if len(over) else 0)}"
        return Seen(difference=difference(out, wanted), tolerance=lab.tolerance, where=where, kind=kind)

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


def _feed(lab: Lab, case: Case, cache: Any, sizes: Sequence[int], start: int = 0) -> Tensor:
    """The outputs of the case's tokens, given in pieces that follow `start` cached ones."""
    outs, at = [], 0
    for size in sizes:
        piece = case.x[:, at : at + size]
        outs.append(lab.out(Batch(x=piece, source=case.source, cache=cache, start=start + at)))
        at += size
    return torch.cat(outs, dim=1)
