"""Test every property of a module, and report verdict, difference, location, cause and a minimal example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from time import monotonic, perf_counter

import torch
from torch.nn.parameter import is_lazy

from clearhead._core.validation import check_int, validate
from clearhead.analysis.checks.check_report import CheckReport, Finding, Verdict
from clearhead.analysis.checks.harness import LENGTH, Harness, describe_inputs
from clearhead.analysis.checks.properties import Property, causality, invariance, numbers, padding, worst
from clearhead.analysis.inputs.infer_spec import spec_for
from clearhead.analysis.inputs.module_errors import error_summary
from clearhead.analysis.inputs.module_spec import CallInputs
from clearhead.errors import ConfigError

LARGE = 10_000_000  # parameters above which the number of threads is tuned
SECONDS = 4.0  # time limit of shrinking an example
PROPERTIES: tuple[Property, ...] = (  # in the order of a report
    invariance.Determinism(),
    causality.Causality(),
    causality.ContextUse(),
    padding.PaddingInvariance(),
    padding.MaskPolarity(),
    invariance.BatchInvariance(),
    invariance.CacheConsistency(),
    invariance.PermutationEquivariance(),
    numbers.DtypeAgreement(),
    numbers.Finiteness(),
    numbers.GradientFlow(),
    invariance.TrainEvalConsistency(),
    numbers.ScoreScale(),
)
NAMES = tuple(prop.name for prop in PROPERTIES)


def check(
    module: object,
    *,
    only: str | Sequence[str] | None = None,
    seed: int = 0,
    length: int = LENGTH,
    on_start: Callable[[str, int, int], None] | None = None,
    **options: object,
) -> CheckReport:
    """Test a module for causality, padding, cache, batch, numerics and gradient errors.

    The module is not changed: a copy in float64 is tested, which takes eight bytes per parameter.

    Args:
        module: A model of clearhead, transformers, torch.nn or timm, or any module with `options`.
        only: Names of the properties to test; see `clearhead.analysis.checks.NAMES`. Default: all.
        seed: Seed of the inputs.
        length: Tokens per input.
        on_start: Called before each property with its name, the number of finished properties, and the total.
        **options: How the module is called, if it is not a known model; see `spec_for`.

    Returns:
        One finding per property.

    Raises:
        ConfigError: An option is invalid, or the module cannot be called.

    Example:
        >>> print(check(model))
        >>> print(check(net, inputs=Ids(101), causal=True, padding=KeepMask("mask")))
    """
    check_int(length, "length", minimum=1)
    validate(seed, "seed", int)
    properties = _select(only)
    # Recording and rounding intercept every operation, so the RNG state is restored afterwards. The caller's no_grad
    # and autocast do not belong to the module.
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.manual_seed(seed)
        harness = Harness(spec_for(module, **options), seed=seed, length=length)
        findings: list[Finding] = []
        with _quickest_threads(harness):
            for prop in properties:
                if on_start is not None:
                    on_start(prop.name, len(findings), len(properties))
                findings.append(_finding(prop, harness))
        return CheckReport(harness.spec.name, tuple(findings))


@contextmanager
def _quickest_threads(harness: Harness) -> Iterator[None]:
    """Use all threads or one for a large module, whichever is faster.

    With a few tokens per input, threads on a busy machine wait for each other longer than one thread computes.
    """
    many = torch.get_num_threads()
    parameters = [p for part in harness.parts.values() for p in part.parameters(recurse=False)]
    if many == 1 or sum(p.numel() for p in parameters if not is_lazy(p)) < LARGE:
        yield
        return

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        start = perf_counter()
        harness.out(harness.inputs)
        return perf_counter() - start

    try:
        torch.set_num_threads(min((1, many), key=seconds))
        yield
    finally:
        torch.set_num_threads(many)


def _select(only: str | Sequence[str] | None) -> list[Property]:
    if only is None:
        return list(PROPERTIES)
    try:
        names = [only] if isinstance(only, str) else list(only)
    except TypeError:
        raise ConfigError(f"only is {only!r}; expected names of properties: {', '.join(NAMES)}") from None
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"unknown property {name!r}; there are: {', '.join(NAMES)}")
    return [prop for prop in PROPERTIES if prop.name in names]


def _finding(prop: Property, harness: Harness) -> Finding:
    finding = Finding(property=prop.name, verdict=Verdict.NOT_APPLICABLE)
    try:
        why_not = prop.why_not(harness)
        comparisons = [] if why_not else list(prop.evaluate(harness, harness.inputs))
    except Exception as error:
        why_not = f"the module raised: {error_summary(error)}"
        comparisons = []
    if not comparisons:
        return replace(finding, cause=why_not or "the input is too short")
    top = worst(comparisons)
    # If the output is this random (dropout), differences are not significant.
    if not top.fails and top.tolerance == harness.tolerance > 0.05 * harness.largest:
        return replace(
            finding, cause=f"the output itself varies by {harness.tolerance:.3g}, which hides any difference"
        )
    finding = replace(
        finding,
        verdict=Verdict.PASS,
        method=prop.method,
        quantity=prop.quantity,
        max_abs_difference=top.difference,
        tolerance=top.tolerance,
    )
    if not top.fails:
        return finding
    finding = replace(finding, location=top.location)
    if undecided := prop.undecided(harness):
        return replace(finding, verdict=Verdict.UNDECIDED, cause=undecided)
    try:
        cause = prop.cause(harness, harness.inputs, [x for x in comparisons if x.fails])
    except Exception as error:  # an incorrect module may raise while it is recorded
        cause = f"unknown, because another run of the module raised: {error_summary(error)}"
    inputs = shrunk(prop, harness, harness.inputs, top.kind) if prop.shrinks else harness.inputs
    return replace(
        finding,
        verdict=Verdict.FAIL,
        cause=cause,
        minimal_example=describe_inputs(inputs, harness.spec) if prop.shrinks else "any input",
        example={"x": inputs.x} if inputs.source is None else {"x": inputs.x, "source": inputs.source},
    )


# ---------------------------------------------------------------------- minimal examples


def shrunk(prop: Property, harness: Harness, inputs: CallInputs, kind: str) -> CallInputs:
    """Return small inputs for which the same kind of comparison fails."""
    end = monotonic() + SECONDS

    def fails(trial: CallInputs) -> bool:
        try:
            return any(x.fails for x in prop.evaluate(harness, trial) if x.kind == kind)
        except Exception:
            return False  # inputs that the module does not accept

    while monotonic() < end:
        trials = takewhile(lambda _: monotonic() <= end, _smaller(harness, inputs))
        smaller = next(filter(fails, trials), None)
        if smaller is None:
            break
        inputs = smaller
    return inputs


def _smaller(harness: Harness, inputs: CallInputs) -> Iterator[CallInputs]:
    """Yield smaller inputs, the smallest first."""
    B, T = inputs.x.shape[:2]
    if B > 1:
        yield inputs.rows(slice(0, 1))
        yield inputs.rows(slice(0, B - 1))
    if harness.spec.is_sequence:
        for n in sorted({1, 2, T // 2, T - 1}):
            if 0 < n < T:
                yield replace(inputs, x=inputs.x[:, :n])
    if inputs.source is not None:
        S = inputs.source.shape[1]
        for n in sorted({1, S // 2, S - 1}):
            if 0 < n < S:
                yield replace(inputs, source=inputs.source[:, :n])
    for n, value in enumerate([] if inputs.x.is_floating_point() else inputs.x.flatten().tolist()):
        if value:  # replace token by token by id 0
            x = inputs.x.clone()
            x.view(-1)[n] = 0
            yield replace(inputs, x=x)
