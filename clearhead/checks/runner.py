"""`check`: every property of a module, tested, with verdict, difference, place, cause and the smallest input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from time import monotonic, perf_counter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from clearhead.checks.guess import subject_of
from clearhead.checks.lab import LENGTH, Lab, described, reason
from clearhead.checks.properties import Property, causality, invariance, numbers, padding, worst
from clearhead.checks.report import Finding, Report, Verdict
from clearhead.checks.subject import Batch
from clearhead.errors import ConfigError
from clearhead.values import checked, whole

LARGE = 10_000_000  # parameters from which on threads are worth a trial
SECONDS = 4.0  # a shrunk example is a help, not the result: it may not take longer than the check
PROPERTIES: tuple[Property, ...] = (  # in the order of a report
    invariance.Determinism(),
    causality.FutureLeak(),
    causality.PastReach(),
    padding.PaddingInvariance(),
    padding.MaskPolarity(),
    invariance.BatchInvariance(),
    invariance.CacheConsistency(),
    invariance.PermutationEquivariance(),
    numbers.DtypeAgreement(),
    numbers.Finiteness(),
    numbers.GradientsReach(),
    invariance.TrainIsEval(),
    numbers.ScoreScale(),
)
NAMES = tuple(prop.name for prop in PROPERTIES)


def check(
    module: Any,
    *,
    only: str | Sequence[str] | None = None,
    seed: int = 0,
    length: int = LENGTH,
    on_start: Callable[[str, int, int], None] | None = None,
    **how: Any,
) -> Report:
    """Is this Transformer right? Tests `module` for leaks, padding, cache, numbers and more, and says what it found.

        check(model)                                                      # ours, transformers, torch.nn, timm
        check(net, inputs=Ids(101), causal=True, padding=TrueIsReal("mask"))  # anything else

    `only` names one or some properties; inputs are drawn from `seed`, `length` tokens long. `on_start` is
    told each property before it is tested: its name, how many are done, and of how many. `how` says how the module is
    called, where that is not known: see `subject_of`. The module itself is not changed: a copy of it is tried, in
    float64, which takes eight bytes for each parameter."""
    whole(length, "length", least=1)
    checked(seed, "seed", int)
    wanted = _chosen(only)
    # Watching and rounding hold every operation: the module's own random numbers are put back where they were.
    # The caller's no_grad or autocast is no property of the module.
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.manual_seed(seed)
        lab = Lab(subject_of(module, **how), seed=seed, length=length)
        findings: list[Finding] = []
        with _quickest_threads(lab):
            for prop in wanted:
                if on_start is not None:
                    on_start(prop.name, len(findings), len(wanted))
                findings.append(_finding(prop, lab))
        return Report(lab.subject.name, tuple(findings))


@contextmanager
def _quickest_threads(lab: Lab) -> Iterator[None]:
    """A large module runs on all threads or on one, whichever is quicker here: an input of a few tokens gives each
    little to do, and on cores that others use too they wait for each other many times as long as one would work."""
    many = torch.get_num_threads()
    parameters = [p for part in lab.parts.values() for p in part.parameters(recurse=False)]
    if many == 1 or sum(p.numel() for p in parameters if not is_lazy(p)) < LARGE:
        yield
        return

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        start = perf_counter()
        lab.out(lab.case)
        return perf_counter() - start

    try:
        torch.set_num_threads(min((1, many), key=seconds))
        yield
    finally:
        torch.set_num_threads(many)


def _chosen(only: str | Sequence[str] | None) -> list[Property]:
    if only is None:
        return list(PROPERTIES)
    try:
        names = [only] if isinstance(only, str) else list(only)
    except TypeError:
        raise ConfigError(f"only is {only!r}; expected names of properties: {', '.join(NAMES)}") from None
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"there is no property {name!r}; there are: {', '.join(NAMES)}")
    return [prop for prop in PROPERTIES if prop.name in names]


def _finding(prop: Property, lab: Lab) -> Finding:
    found: dict[str, Any] = {"property": prop.name}
    try:
        why_not = prop.why_not(lab)
        seen = [] if why_not else list(prop.look(lab, lab.case))
    except Exception as error:
        why_not, seen = f"the module refused: {reason(error)}", []
    if not seen:
        cause = why_not or "the input is too short to show anything"
        return Finding(**found, verdict=Verdict.NOT_APPLICABLE, cause=cause)
    top = worst(seen)
    # Where rounding alone moves the output so much (dropout, a coin that is tossed) differences mean nothing.
    if not top.fails and top.tolerance == lab.tolerance > 0.05 * lab.largest:
        cause = f"the output moves by {lab.tolerance:.3g} by itself, so that no difference could be told from it"
        return Finding(**found, verdict=Verdict.NOT_APPLICABLE, cause=cause)
    found |= {"done": prop.done, "difference": top.difference, "tolerance": top.tolerance}
    if not top.fails:
        return Finding(**found, verdict=Verdict.PASS)
    found["where"] = top.where
    if undecided := prop.undecided(lab):
        return Finding(**found, verdict=Verdict.UNDECIDED, cause=undecided)
    try:
        found["cause"] = prop.cause(lab, lab.case, [one for one in seen if one.fails])
    except Exception as error:  # a module that is wrong may break while it is watched; what was found stays found
        found["cause"] = f"not narrowed down, because another run of the module failed: {reason(error)}"
    case = shrunk(prop, lab, lab.case, top.kind) if prop.shrinks else lab.case
    found["smallest"] = described(case, lab.subject) if prop.shrinks else "any input"
    example = {"x": case.x} if case.source is None else {"x": case.x, "source": case.source}
    return Finding(**found, verdict=Verdict.FAIL, example=example)


# ---------------------------------------------------------------------- the smallest input that still fails


def shrunk(prop: Property, lab: Lab, case: Batch, kind: str) -> Batch:
    """A case as small as can be found on which the same kind of comparison fails."""
    end = monotonic() + SECONDS

    def fails(trial: Batch) -> bool:
        try:
            return any(seen.fails for seen in prop.look(lab, trial) if seen.kind == kind)
        except Exception:
            return False  # a case that cannot be run shows nothing

    while monotonic() < end:
        trials = takewhile(lambda _: monotonic() <= end, _smaller(lab, case))
        smaller = next(filter(fails, trials), None)
        if smaller is None:
            break
        case = smaller
    return case


def _smaller(lab: Lab, case: Batch) -> Iterator[Batch]:
    """Smaller cases, the boldest first."""
    B, T = case.x.shape[:2]
    if B > 1:
        yield case.rows(slice(0, 1))
        yield case.rows(slice(0, B - 1))
    if lab.subject.is_sequence:
        for n in sorted({1, 2, T // 2, T - 1}):
            if 0 < n < T:
                yield replace(case, x=case.x[:, :n])
    if case.source is not None:
        S = case.source.shape[1]
        for n in sorted({1, S // 2, S - 1}):
            if 0 < n < S:
                yield replace(case, source=case.source[:, :n])
    for n, value in enumerate([] if case.x.is_floating_point() else case.x.flatten().tolist()):
        if value:  # token by token, 0 in place of an id
            x = case.x.clone()
            x.view(-1)[n] = 0
            yield replace(case, x=x)
