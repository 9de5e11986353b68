"""The smallest input that still shows a failure: fewer rows, fewer tokens, simpler tokens, as long as it fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import takewhile

from clearhead.checks.lab import Case, Lab
from clearhead.checks.properties.base import Property

SECONDS = 4.0  # a shrunk example is a help, not the result: it may not take longer than the check


def shrunk(prop: Property, lab: Lab, case: Case, kind: str) -> Case:
    """A case as small as can be found on which the same kind of comparison fails."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        trials = takewhile(lambda _: time.monotonic() <= end, _smaller(lab, case))
        smaller = next((one for one in trials if _fails(prop, lab, one, kind)), None)
        if smaller is None:
            break
        case = smaller
    return case


def _fails(prop: Property, lab: Lab, case: Case, kind: str) -> bool:
    try:
        return any(seen.fails for seen in prop.look(lab, case) if seen.kind == kind)
    except Exception:
        return False  # a case that cannot be run shows nothing


def _smaller(lab: Lab, case: Case) -> Iterator[Case]:
    """Smaller cases, the boldest first."""
    B, T = case.x.shape[:2]
    if B > 1:
        yield case.rows(slice(0, 1))
        yield case.rows(slice(0, B - 1))
    if lab.subject.is_sequence:
        for n in sorted({1, 2, T // 2, T - 1}):
            if 0 < n < T:
                yield Case(case.x[:, :n], case.source)
    if case.source is not None:
        S = case.source.shape[1]
        for n in sorted({1, S // 2, S - 1}):
            if 0 < n < S:
                yield Case(case.x, case.source[:, :n])
    if not case.x.is_floating_point():
        yield from _simpler(case)


def _simpler(case: Case) -> Iterator[Case]:
    """Token by token, 0 in place of an id."""
    for n, value in enumerate(case.x.flatten().tolist()):
        if value:
            x = case.x.clone()
            x.view(-1)[n] = 0
            yield Case(x, case.source)
