"""Registry of claims, and the rule that derives a verdict.

A claim is a paraphrased statement of a course or an exam, with a function that tests it. The function receives an
`Experiment`, computes, and records cases; the verdict follows from the cases and is never written by hand."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead._core.validation import require_known
from clearhead.course.claims.figure import Figure
from clearhead.errors import ClearheadError

HOLDS = "holds"
HOLDS_CONDITIONALLY = "holds conditionally"
DOES_NOT_HOLD = "does not hold"
MISPRINT = "misprint"
VERDICTS = (HOLDS, HOLDS_CONDITIONALLY, DOES_NOT_HOLD, MISPRINT)

# The course documents whose statements are tested.
EXAM = "CENG 403 (Transformers and Attention), exam"
ANSWERED = "CENG 403 (Self-Attention and Transformers), answered exam"
HOMEWORK = "CSCI-GA 2572 (Deep Learning), Transformer homework"
EXERCISES = "Transformer exercises (scaled dot product, multi-head, layer norm), with solutions"
FINAL = "Deep learning final exam of January 2025 (version A), with solutions"
DOCUMENTS = (EXAM, ANSWERED, HOMEWORK, EXERCISES, FINAL)

# One module per theme, in the order of a course.
THEMES = {
    "scores_and_scaling": "Scores and their scale",
    "softmax": "The softmax",
    "temperature": "Temperature",
    "perturbation": "Disturbing a key or a query",
    "permutation": "Order and permutations",
    "selection": "Hard and soft selection",
    "masks": "Masks",
    "training_and_generation": "Training and generation",
    "positions": "Positions",
    "multihead": "Many heads",
    "complexity": "What it costs",
    "sparse": "Sparse attention",
    "norms_and_residuals": "Norms and residual connections",
    "feed_forward": "The feed-forward layer",
    "training": "Training",
    "dedup_decoder": "A decoder that sorts and drops repeats",
    "convnet": "Convolutional networks",
    "recurrent": "Recurrent networks",
    "logistic": "Logistic regression",
    "autoencoder": "Auto-encoders",
    "vision": "Vision Transformers",
    "data_efficiency": "Transformer against convolution as the data grow",
    "inductive_bias": "Inductive bias",
    "papers": "The papers themselves",
}


class ClaimError(ClearheadError, RuntimeError):
    """Raised for an unknown claim, a claim without cases, or a correction that fails its own test."""


@dataclass(frozen=True)
class Case:
    """One tested case: description, result, and whether it agrees with the statement."""

    description: str
    result: str
    passed: bool
    in_scope: bool = True  # within the condition of the claim, if it has one

    def __str__(self) -> str:
        return f"{self.description}: {self.result}"


def readable(text: str) -> str:
    """Return code notation as mathematics: 2*n**2 becomes 2·n², oo and inf become ∞."""
    text = re.sub(r"\*\*(\d)\b", lambda match: "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(match[1])], text)
    text = re.sub(r"(?<=[\w)⁰¹²³⁴⁵⁶⁷⁸⁹])\*(?=[\w(])", "·", text)
    text = re.sub(r"sqrt\((\w+)\)", r"√\1", text)
    text = re.sub(r"\b(oo|inf)\b", "∞", text)
    return re.sub(r"\bnan\b", "NaN", text)


def max_abs_diff(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of corresponding entries."""
    return (a - b).abs().max().item()


def jacobian_row(y: Tensor, x: Tensor, weights_of_y: Tensor | None = None) -> Tensor:
    """Return the gradient of y with respect to x; `weights_of_y` is required if y is not a scalar."""
    return torch.autograd.grad(y, x, weights_of_y)[0]


def gradient_ratio(y: Tensor, x: Tensor, generator: torch.Generator | None = None) -> float:
    """Return the norm of a random gradient at y after backpropagation to x, relative to its norm at y."""
    gradient = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    return (jacobian_row(y, x, gradient).norm() / gradient.norm()).item()


def fit(parameters: Iterable[Tensor], loss: Callable[[], Tensor], steps: int, lr: float) -> list[float]:
    """Run `steps` steps of Adam and return their losses."""
    optimizer = torch.optim.Adam(parameters, lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def single_head_attention(q: Tensor, k: Tensor, v: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Call `attend` with one head and no batch: (T, D), (S, D), (S, E). Without values, return the weights."""
    from clearhead.attention import attend

    v = torch.eye(len(k), dtype=k.dtype) if v is None else v
    return attend(q[None, None], k[None, None], v[None, None], **kwargs)[0, 0]


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Collect the tensors that autograd saves for the backward pass."""
    tensors: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield tensors


def n_parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def join_numbers(numbers: Iterable[float], form: str) -> str:
    """Join formatted numbers with commas."""
    return ", ".join(format(number, form) for number in numbers)


def is_increasing(values: Iterable[Any]) -> bool:
    return all(a < b for a, b in pairwise(values))


def is_decreasing(values: Iterable[Any]) -> bool:
    return all(a > b for a, b in pairwise(values))


_Form: TypeAlias = str | Callable[[Any], str]


class Experiment:
    """Records the cases of a claim. `generator` is its only source of randomness.

    Example:
        >>> experiment = Experiment(seed=0)
        >>> experiment.assert_below("largest difference", 1e-16, 1e-12)
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.cases: list[Case] = []
        self.notes: list[str] = []
        self.corrections: list[tuple[str, bool]] = []
        self.misprint = False
        self.figure: Figure | None = None

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal values in float64."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def record_case(self, description: str, result: object, passed: object, *, in_scope: bool = True) -> None:
        """Record a case, smallest first: the first case that fails is the counter-example."""
        self.cases.append(Case(readable(description), readable(str(result)), bool(passed), in_scope))

    def assert_equal(
        self, description: str, result: Any, expected: Any, form: _Form = "{}", *, in_scope: bool = True
    ) -> None:
        """Record a case that passes if `result` equals `expected`; `form` formats it."""
        formatted = form.format(result) if isinstance(form, str) else form(result)
        self.record_case(description, formatted, result == expected, in_scope=in_scope)

    def assert_below(
        self, description: str, result: Any, limit: float, form: str = "{:.1e}", *, in_scope: bool = True
    ) -> None:
        """Record a case that passes if `result` is below `limit`."""
        self.record_case(description, form.format(result), result < limit, in_scope=in_scope)

    def assert_above(
        self, description: str, result: Any, limit: float, form: str = "{:.1e}", *, in_scope: bool = True
    ) -> None:
        """Record a case that passes if `result` is above `limit`."""
        self.record_case(description, form.format(result), result > limit, in_scope=in_scope)

    def note(self, text: str) -> None:
        """Add a result that does not influence the verdict."""
        self.notes.append(readable(text))

    def correction(self, text: str, passed: object) -> None:
        """Record the correct statement, which is tested too."""
        self.corrections.append((text, bool(passed)))

    def intended(self, text: str, passed: object) -> None:
        """Record the intended statement of a misprint (a wrong index or sign), which is tested too."""
        self.misprint = True
        self.correction(text, passed)

    def draw(self, figure: Figure) -> None:
        """Set the figure shown below the evidence."""
        self.figure = figure


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement, its location in a document, the method that tests it, and the condition for it to hold, if any."""

    id: str
    source: str
    location: str
    statement: str
    method: str
    condition: str
    theme: str
    function: Callable[[Experiment], None]

    def run(self, seed: int = 0) -> Outcome:
        """Test the claim; the same seed gives the same outcome."""
        started = time.perf_counter()
        trial = Experiment(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # modules initialize their parameters from torch's global generator
            self.function(trial)
        return judge(self, trial, time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a tested claim."""

    claim: Claim
    verdict: str
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()
    counter_example: str = ""
    correction: str = ""
    example_for: str = ""
    example_against: str = ""
    figure: Figure | None = None
    seconds: float = 0.0

    @property
    def evidence(self) -> tuple[str, ...]:
        """One line per case, with ✓ or ✗, and per note."""
        cases = (f"{'✓' if case.passed else '✗'} {case}" for case in self.cases)
        return (*cases, *(f"· {note}" for note in self.notes))

    @property
    def summary(self) -> str:
        """The deciding case in one line."""
        return (self.counter_example or self.example_against or self.evidence[0]).lstrip("✓✗ ")

    def to_dict(self) -> dict[str, Any]:
        """Return the document printed by `clearhead claims run --json`."""
        fields = {name: getattr(self.claim, name) for name in ("id", "source", "location", "statement")}
        fields |= {"verdict": self.verdict, "evidence": list(self.evidence), "seconds": round(self.seconds, 3)}
        if self.verdict == HOLDS_CONDITIONALLY:
            fields |= {"condition": self.claim.condition}
            fields |= {"example_for": self.example_for, "example_against": self.example_against}
        if self.verdict in (DOES_NOT_HOLD, MISPRINT):
            fields |= {"counter_example": self.counter_example, "correction": self.correction}
        return fields


def judge(claim: Claim, trial: Experiment, seconds: float = 0.0) -> Outcome:
    """Derive the verdict from the recorded cases.

    A claim holds if all cases pass, and holds conditionally if only cases outside its condition fail. Otherwise it does
    not hold as printed, or is a misprint if only the typography is wrong; then a correction is required, which must
    pass its own test.
    """
    if not trial.cases:
        raise ClaimError(f"the claim {claim.id!r} recorded no case, so it has no verdict; call record_case(...)")
    wrong = [text for text, passed in trial.corrections if not passed]
    if wrong:
        raise ClaimError(f"the correction of {claim.id!r} does not hold either: {wrong[0]}")
    failed = [c for c in trial.cases if not c.passed]
    in_scope = [c for c in trial.cases if c.in_scope]
    cases, notes = tuple(trial.cases), tuple(trial.notes)
    outcome = partial(Outcome, claim=claim, cases=cases, notes=notes, figure=trial.figure, seconds=seconds)
    if not failed:
        return outcome(verdict=HOLDS)
    if claim.condition and in_scope and all(c.passed for c in in_scope):
        return outcome(verdict=HOLDS_CONDITIONALLY, example_for=str(in_scope[0]), example_against=str(failed[0]))
    correction = " ".join(text for text, _ in trial.corrections)
    verdict = MISPRINT if trial.misprint else DOES_NOT_HOLD
    return outcome(verdict=verdict, counter_example=str(failed[0]), correction=correction)


_REGISTRY: dict[str, Claim] = {}
_Function: TypeAlias = Callable[[Experiment], None]
_CONSTANT = re.compile(r"\{[A-Z_]+(:[^{}]+)?\}")


def claim(source: str, location: str) -> Callable[[_Function], _Function]:
    """Return a decorator that registers a function as a claim under its name; the function itself is unchanged.

    The docstring contains the statement, after an empty line the method, and at the end "Holds when …" if the claim
    has a condition. {NAME} in it is replaced by a constant of the function's module.
    """

    def enter(function: _Function) -> _Function:
        id = function.__name__.replace("_", "-")
        if id in _REGISTRY:
            raise ClaimError(f"two claims are called {id!r}; rename one of them")
        fields = vars(sys.modules[function.__module__])
        written = _CONSTANT.sub(lambda match: match[0].format_map(fields), inspect.cleandoc(function.__doc__ or ""))
        statement, _, remainder = written.partition("\n\n")
        method, _, condition = remainder.partition("\nHolds when")
        statement, method, condition = (
            " ".join(part.split()) for part in (statement, method, condition.removesuffix("."))
        )
        if not method:
            raise ClaimError(
                f"the docstring of {id!r} has one paragraph; expected the statement, an empty line and the method"
            )
        theme = function.__module__.rsplit(".", 1)[-1]
        words = {"statement": statement, "method": method, "condition": condition}
        _REGISTRY[id] = Claim(id=id, source=source, location=location, **words, theme=theme, function=function)
        return function

    return enter


def claims() -> dict[str, Claim]:
    """Return all claims by id, ordered by theme."""
    for theme in THEMES:
        importlib.import_module(f"clearhead.course.claims.{theme}")
    return {c.id: c for theme in THEMES for c in _REGISTRY.values() if c.theme == theme}


def find(ids: Iterable[str]) -> list[Claim]:
    """Return the claims with these ids, or all if there are no ids."""
    fields, names = claims(), list(ids)
    for name in names:
        require_known(name, fields, "no claim is called", ClaimError, fallback="`clearhead claims` lists them")
    return [fields[name] for name in names] if names else list(fields.values())


def run(ids: Iterable[str] = (), seed: int = 0) -> list[Outcome]:
    """Test claims.

    Args:
        ids: Ids of claims; all claims if empty.
        seed: Random seed; the same seed gives the same outcomes.

    Returns:
        An outcome with verdict and evidence per claim.

    Raises:
        ClaimError: If an id is unknown.
    """
    return [c.run(seed) for c in find(ids)]
