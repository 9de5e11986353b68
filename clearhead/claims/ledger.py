"""What a claim is, and how its verdict comes about.

A claim is a statement of a course or an exam, in our words, with a function that tries it. The function is handed a
`Trial`, computes, and reports cases; the verdict follows from the cases and is never written down by hand."""

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

from clearhead.claims.figure import Figure
from clearhead.errors import ClearheadError
from clearhead.values import require_known

HOLDS = "holds"
HOLDS_CONDITIONALLY = "holds conditionally"
DOES_NOT_HOLD = "does not hold"
MISPRINT = "misprint"
VERDICTS = (HOLDS, HOLDS_CONDITIONALLY, DOES_NOT_HOLD, MISPRINT)

# The documents whose statements are tried, by course.
EXAM = "CENG 403 (Transformers and Attention), exam"
ANSWERED = "CENG 403 (Self-Attention and Transformers), answered exam"
HOMEWORK = "CSCI-GA 2572 (Deep Learning), Transformer homework"
EXERCISES = "Transformer exercises (scaled dot product, multi-head, layer norm), with solutions"
FINAL = "Deep learning final exam of January 2025 (version A), with solutions"
DOCUMENTS = (EXAM, ANSWERED, HOMEWORK, EXERCISES, FINAL)

# One file a theme, in the order of a course.
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
    """A claim that is not known, that reported nothing, or whose correction is itself wrong."""


@dataclass(frozen=True)
class Case:
    """One thing that was tried: what, the numbers that came out, and whether the statement was right about it."""

    what: str
    got: str
    ok: bool
    in_scope: bool = True  # within the condition of the claim, where it has one

    def __str__(self) -> str:
        return f"{self.what}: {self.got}"


def readable(text: str) -> str:
    """A program's way of writing, as people write it: 2*n**2 is 2·n², oo and inf are ∞."""
    text = re.sub(r"\*\*(\d)\b", lambda found: "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(found[1])], text)
    text = re.sub(r"(?<=[\w)⁰¹²³⁴⁵⁶⁷⁸⁹])\*(?=[\w(])", "·", text)
    text = re.sub(r"sqrt\((\w+)\)", r"√\1", text)
    text = re.sub(r"\b(oo|inf)\b", "∞", text)
    return re.sub(r"\bnan\b", "NaN", text)


def max_abs_diff(a: Tensor, b: Tensor) -> float:
    """The largest difference of two entries in the same place."""
    return (a - b).abs().max().item()


def jacobian_row(y: Tensor, x: Tensor, weights_of_y: Tensor | None = None) -> Tensor:
    """The gradient of y in x, times `along` where y is no single number."""
    return torch.autograd.grad(y, x, weights_of_y)[0]


def gradient_ratio(y: Tensor, x: Tensor, generator: torch.Generator | None = None) -> float:
    """How long a random gradient at y still is at x, as a share of its length."""
    gradient = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    return (jacobian_row(y, x, gradient).norm() / gradient.norm()).item()


def fit(parameters: Iterable[Tensor], loss: Callable[[], Tensor], steps: int, lr: float) -> list[float]:
    """So many steps of Adam, and their losses."""
    optimiser = torch.optim.Adam(parameters, lr=lr)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        value = loss()
        value.backward()
        optimiser.step()
        losses.append(value.item())
    return losses


def single_head_attention(q: Tensor, k: Tensor, v: Tensor | None = None, **how: Any) -> Tensor:
    """`attend` with one head on one text: (T, D), (S, D), (S, E). Without values, what comes out are the weights."""
    from clearhead.attention import attend

    v = torch.eye(len(k), dtype=k.dtype) if v is None else v
    return attend(q[None, None], k[None, None], v[None, None], **how)[0, 0]


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """What autograd keeps of the operations inside, for the way back."""
    held: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        held.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield held


def n_parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def join_numbers(numbers: Iterable[float], form: str) -> str:
    """Numbers one after the other, each in this format."""
    return ", ".join(format(number, form) for number in numbers)


def is_increasing(values: Iterable[Any]) -> bool:
    return all(a < b for a, b in pairwise(values))


def is_decreasing(values: Iterable[Any]) -> bool:
    return all(a > b for a, b in pairwise(values))


_Form: TypeAlias = str | Callable[[Any], str]


class Experiment:
    """What a claim's function reports to. `generator` is its only source of chance."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.cases: list[Case] = []
        self.notes: list[str] = []
        self.corrections: list[tuple[str, bool]] = []
        self.misprint = False
        self.figure: Figure | None = None

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in float64."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def record_case(self, what: str, got: object, ok: object, *, in_scope: bool = True) -> None:
        """One case, smallest first: the first that fails is the counter-example."""
        self.cases.append(Case(readable(what), readable(str(got)), bool(ok), in_scope))

    def assert_equal(self, what: str, got: Any, expected: Any, form: _Form = "{}", *, in_scope: bool = True) -> None:
        """A case that is right where something is what was expected; `form` shows what it is."""
        shown = form.format(got) if isinstance(form, str) else form(got)
        self.record_case(what, shown, got == expected, in_scope=in_scope)

    def assert_below(self, what: str, got: Any, limit: float, form: str = "{:.1e}", *, in_scope: bool = True) -> None:
        """A case that is right where a number is less than the limit."""
        self.record_case(what, form.format(got), got < limit, in_scope=in_scope)

    def assert_above(self, what: str, got: Any, limit: float, form: str = "{:.1e}", *, in_scope: bool = True) -> None:
        """A case that is right where a number is more than the limit."""
        self.record_case(what, form.format(got), got > limit, in_scope=in_scope)

    def note(self, text: str) -> None:
        """A number worth knowing that decides nothing."""
        self.notes.append(readable(text))

    def correction(self, text: str, ok: object) -> None:
        """The correct statement, tried as well."""
        self.corrections.append((text, bool(ok)))

    def intended(self, text: str, ok: object) -> None:
        """What a slip of the pen stands for: an index, a sign, a column too many. Tried as well."""
        self.misprint = True
        self.correction(text, ok)

    def draw(self, figure: Figure) -> None:
        """Keep a drawing, which is shown under the evidence."""
        self.figure = figure


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement, where it stands, how it is tried, and the condition under which it is thought to hold (if any)."""

    id: str
    source: str
    location: str
    statement: str
    method: str
    condition: str
    theme: str
    function: Callable[[Experiment], None]

    def run(self, seed: int = 0) -> Outcome:
        """Tries it. The same seed gives the same outcome."""
        started = time.perf_counter()
        trial = Experiment(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # modules draw their first weights from torch's own generator
            self.function(trial)
        return judge(self, trial, time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A claim after it was tried."""

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
        """Cases and notes, a line each; was the statement right about a case?"""
        cases = (f"{'✓' if case.ok else '✗'} {case}" for case in self.cases)
        return (*cases, *(f"· {note}" for note in self.notes))

    @property
    def summary(self) -> str:
        """The case that decides, in one line."""
        return (self.counter_example or self.example_against or self.evidence[0]).lstrip("✓✗ ")

    def to_dict(self) -> dict[str, Any]:
        """As `clearhead claims run --json` prints it."""
        known = {name: getattr(self.claim, name) for name in ("id", "source", "location", "statement")}
        known |= {"verdict": self.verdict, "evidence": list(self.evidence), "seconds": round(self.seconds, 3)}
        if self.verdict == HOLDS_CONDITIONALLY:
            known |= {"condition": self.claim.condition}
            known |= {"example_for": self.example_for, "example_against": self.example_against}
        if self.verdict in (DOES_NOT_HOLD, MISPRINT):
            known |= {"counter_example": self.counter_example, "correction": self.correction}
        return known


def judge(claim: Claim, trial: Experiment, seconds: float = 0.0) -> Outcome:
    """The verdict that follows from the cases.

    All right: it holds. Wrong only outside of the claim's condition: it holds when that is met. Wrong anywhere else: it
    does not hold as printed, or is a misprint where only the typography is at fault; a correct statement has to be
    given then, and to pass its own test."""
    if not trial.cases:
        raise ClaimError(f"the claim {claim.id!r} reported no case, so there is nothing to judge: call case(...)")
    wrong = [text for text, ok in trial.corrections if not ok]
    if wrong:
        raise ClaimError(f"the correction that {claim.id!r} offers does not hold either: {wrong[0]}")
    failed = [c for c in trial.cases if not c.ok]
    in_scope = [c for c in trial.cases if c.in_scope]
    cases, notes = tuple(trial.cases), tuple(trial.notes)
    outcome = partial(Outcome, claim=claim, cases=cases, notes=notes, figure=trial.figure, seconds=seconds)
    if not failed:
        return outcome(verdict=HOLDS)
    if claim.condition and in_scope and all(c.ok for c in in_scope):
        return outcome(verdict=HOLDS_CONDITIONALLY, example_for=str(in_scope[0]), example_against=str(failed[0]))
    correction = " ".join(text for text, _ in trial.corrections)
    verdict = MISPRINT if trial.misprint else DOES_NOT_HOLD
    return outcome(verdict=verdict, counter_example=str(failed[0]), correction=correction)


_REGISTRY: dict[str, Claim] = {}
_Function: TypeAlias = Callable[[Experiment], None]
_CONSTANT = re.compile(r"\{[A-Z_]+(:[^{}]+)?\}")


def claim(source: str, location: str) -> Callable[[_Function], _Function]:
    """Enters a function into the ledger under its own name. It stays a plain function, so that a test may call it.

    Its docstring is what the claim says, then how it is tried, and last "Holds when …" if it has a condition. A {NAME}
    in it is a constant of the function's module."""

    def enter(function: _Function) -> _Function:
        id = function.__name__.replace("_", "-")
        if id in _REGISTRY:
            raise ClaimError(f"two claims are called {id!r}; every id is used once: rename one")
        known = vars(sys.modules[function.__module__])
        written = _CONSTANT.sub(lambda found: found[0].format_map(known), inspect.cleandoc(function.__doc__ or ""))
        statement, _, remainder = written.partition("\n\n")
        method, _, condition = remainder.partition("\nHolds when")
        statement, method, condition = (
            " ".join(part.split()) for part in (statement, method, condition.removesuffix("."))
        )
        if not method:
            raise ClaimError(f"the docstring of {id!r} has one paragraph; expected what it says, then how it is tried")
        theme = function.__module__.rsplit(".", 1)[-1]
        words = {"statement": statement, "method": method, "condition": condition}
        _REGISTRY[id] = Claim(id=id, source=source, location=location, **words, theme=theme, function=function)
        return function

    return enter


def claims() -> dict[str, Claim]:
    """The whole ledger by id, theme after theme."""
    for theme in THEMES:
        importlib.import_module(f"clearhead.claims.{theme}")
    return {c.id: c for theme in THEMES for c in _REGISTRY.values() if c.theme == theme}


def find(ids: Iterable[str]) -> list[Claim]:
    """The claims of these ids; all of them if there is no id."""
    known, wanted = claims(), list(ids)
    for name in wanted:
        require_known(name, known, "no claim is called", ClaimError, otherwise="`clearhead claims` lists them")
    return [known[name] for name in wanted] if wanted else list(known.values())


def run(ids: Iterable[str] = (), seed: int = 0) -> list[Outcome]:
    """Tries the claims of these ids, or all."""
    return [c.run(seed) for c in find(ids)]
