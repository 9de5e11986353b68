"""A vision Transformer compared with a convolutional network by amount of training data.

Training takes minutes on a GPU, so these claims are judged from a results file that is part of the package and that
`python -m tools.study` writes in a checkout. Compared networks were trained on the same images in the same order, so
differences are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import stdev

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import join_numbers
from clearhead.course.claims.registry import HOMEWORK, claim
from clearhead.course.claims.study import ORIGINAL, Study

SMALL = 4_000  # pictures: what these claims call little data
LEARNED = 0.25  # right answers: naming the commonest digit every time gives 0.18
REDRAWN = (
    "Redrawn from results/vit-against-cnn.json, which comes with the package (SVHN in gray; trained on a GPU, the "
    "smallest network in part on a CPU); "
    "`python -m tools.study` reproduces it in a checkout. 95 % intervals: Student's t over seeds if there are "
    "three or more; with fewer, from the number of validation pictures, which leaves out the chance of training. "
)
_NAMES = {
    "vit": "Transformer",
    "cnn": "convolution",
    "vit-large": "larger Transformer",
    "exam-cnn": "an exam's network",
}
# Student's t, two-sided 95 %, for 2, 3, … degrees of freedom, and for infinitely many.
_T95 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_Z95 = 1.960


study = cache(Study.read)  # of the file that comes with the package


@dataclass(frozen=True)
class Interval:
    """A mean difference of shares, with its 95 % interval."""

    mean: float
    half: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float], sampling: float) -> Interval:
        """Return the interval of paired differences; `sampling` is the sampling error of one difference."""
        n = len(values)
        mean = sum(values) / n
        if n < 3:
            return cls(mean, _Z95 * sampling, n)
        return cls(mean, _T95[min(n - 2, len(_T95)) - 1] * stdev(values) / math.sqrt(n), n)

    @property
    def above(self) -> bool:
        return self.mean - self.half > 0

    @property
    def below(self) -> bool:
        return self.mean + self.half < 0

    def __str__(self) -> str:
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        return f"{100 * self.mean:+.1f} ± {100 * self.half:.1f} points ({seeds})".replace("-", "−")


Cell = tuple[str, int, str]  # network, number of training pictures, original or permuted


def contrast(terms: Sequence[tuple[int, Cell]]) -> Interval:
    """Return a signed sum of validation accuracies, paired by seed, for the seeds that have all of them."""
    results = [(sign, study().of(*cell)) for sign, cell in terms]
    seeds = sorted(set.intersection(*(set(rows) for _, rows in results)))
    values = [sum(sign * rows[seed].validation for sign, rows in results) for seed in seeds]
    n = study().about["data"]["validation"]
    shares = [rows[seeds[0]].validation for _, rows in results]
    return Interval.of(values, math.sqrt(sum(p * (1 - p) / n for p in shares)))


def lead(first: str, second: str, n: int, *, pictures: str = ORIGINAL) -> Interval:
    """Return how much higher the validation accuracy of `first` is than that of `second`."""
    return contrast([(1, (first, n, pictures)), (-1, (second, n, pictures))])


def mean(network: str, n: int, pictures: str = ORIGINAL) -> float:
    rows = study().of(network, n, pictures).values()
    return sum(row.validation for row in rows) / len(rows)


def little() -> list[int]:
    """Return the training sizes that count as little data."""
    return [n for n in study().sizes(["vit", "cnn"]) if n <= SMALL]


def beyond_chance(t: Experiment, case_name: str, results: Interval, otherwise: str) -> None:
    """Record a case that passes if the whole interval is above 0; `otherwise` is the correction if it is not."""
    t.record_case(case_name, results, results.above)
    if not results.above:
        t.correction(f"{otherwise}: {results}.", not results.above)


def drawn(title: str, *networks: str, pictures: str = ORIGINAL) -> Lines:
    """Return a figure of accuracy against the number of training images: mean, minimum and maximum over seeds."""
    trained = [name for name in networks if study().sizes([name], pictures)]
    sizes = sorted({n for name in trained for n in study().sizes([name], pictures)})
    means: dict[str, list[float]] = {}
    ends: dict[str, list[tuple[float, float]]] = {}
    for name in trained:
        label = f"{_NAMES[name]}, {study().about['networks'][name]['weights']:,} parameters"
        values = [[row.validation for row in study().of(name, n, pictures).values()] for n in sizes]
        means[label] = [sum(v) / len(v) if v else math.nan for v in values]
        ends[label] = [(min(v), max(v)) if v else (math.nan, math.nan) for v in values]
    y = "validation accuracy, mean and range over seeds"
    return Lines(title, "training images", y, sizes, means, log_x=True, spread=ends)


@claim(
    HOMEWORK,
    "1.5d.1",
    statement="On small data sets convolutional networks outperform vision Transformers of comparable size.",
    method=(
        f"{REDRAWN}A Transformer and a residual network of about equal size and equally many updates, each "
        f"with the learning rate that was best on held-out pictures; up to {SMALL:,} training pictures."
    ),
)
def cnn_better_on_little(t: Experiment) -> None:
    for n in little():
        otherwise = f"At {n:,} pictures the convolutional network is not better"
        beyond_chance(t, f"{n:,} pictures: convolution − Transformer", lead("cnn", "vit", n), otherwise)
    rows = [row for name in ("vit", "cnn") for n in little() for row in study().of(name, n).values()]
    lowest = min(row.training for row in rows)
    if lowest == 1.0:
        t.note(
            f"training accuracy is 1 in all {len(rows)} trainings: training minus validation accuracy, a measure of "
            "overfitting, gives the same differences and is not a second result"
        )
    t.draw(drawn("Accuracy as the data grow", *_NAMES))


@claim(
    HOMEWORK,
    "1.5d.2",
    statement="With more data the gap between convolutional networks and vision Transformers narrows.",
    method=(
        f"{REDRAWN}The lead of the convolutional network up to {SMALL:,} pictures against its lead with all of "
        "them; then the errors of the Transformer for each error of the convolutional network."
    ),
    condition=(
        "the gap is counted in points of accuracy (as a ratio of errors it can widen all the same), from a "
        f"size on at which the Transformer has begun to learn: it is right more than {LEARNED:.0%} of the time"
    ),
)
def gap_narrows(t: Experiment) -> None:
    sizes = study().sizes(["vit", "cnn"])
    last = sizes[-1]
    for n in little():
        pair = ((1, "cnn", last), (-1, "vit", last), (-1, "cnn", n), (1, "vit", n))
        change = contrast([(sign, (name, m, ORIGINAL)) for sign, name, m in pair])
        first, second = (100 * lead("cnn", "vit", m).mean for m in (n, last))
        got = f"{first:.1f} → {second:.1f} points, a change of {change}"
        learned = mean("vit", n) > LEARNED
        t.record_case(f"lead with {n:,} → {last:,} pictures", got, change.below, in_scope=learned)
        if learned and not change.below:
            t.correction(f"From {n:,} to {last:,} pictures it does not narrow: {change}.", not change.below)
    for n in little():
        # How many errors the Transformer makes for each of the convolutional network.
        first, second = ((1 - mean("vit", m)) / (1 - mean("cnn", m)) for m in (n, last))
        case_name = f"errors for one of convolution, {n:,} → {last:,} pictures"
        t.record_case(case_name, f"{first:.2f} → {second:.2f}", second < first, in_scope=False)
    steps = [100 * lead("cnn", "vit", n).mean for n in sizes]
    t.note(f"the lead at {join_numbers(sizes, ',')} pictures: {join_numbers(steps, '.1f')} points")
    t.note("the homework sees Transformers ahead with 300 million pictures, which this study cannot try")
    t.draw(drawn("Accuracy as the data grow", "vit", "cnn"))


@claim(
    HOMEWORK,
    "1.5d, summary",
    statement="Convolutional networks are more data-efficient than vision Transformers.",
    method=(
        f"{REDRAWN}How many pictures the Transformer needs for the accuracy that the convolutional network has "
        "with n, by interpolation between the sizes (in the logarithm of their number); in brackets for the "
        "ends of the interval."
    ),
)
def cnn_data_efficient(t: Experiment) -> None:
    sizes = study().sizes(["vit", "cnn"])
    for n in sizes[:-1]:
        results = lead("cnn", "vit", n)
        ends = (mean("vit", n) + results.mean + side * results.half for side in (-1, 0, 1))
        low, middle, high = (times_as_many(n, end, sizes) for end in ends)
        result_text = [
            f"more than all {sizes[-1]:,}" if x is None else f"{x:.1f} times as many" for x in (low, middle, high)
        ]
        got = result_text[0] if low is None else f"{result_text[1]} ({result_text[0]} … {result_text[2]})"
        case = f"images that the Transformer needs for the accuracy of the convolution with {n:,}"
        t.record_case(case, got, low is None or low > 1)
        if low is not None and low <= 1:
            t.correction(f"With {n:,} pictures neither is more efficient beyond chance.", low <= 1)


def times_as_many(n: int, target: float, sizes: Sequence[int]) -> float | None:
    """Return how many times n images the Transformer needs for this accuracy; None if all images are not enough."""
    curve = [(math.log(m), mean("vit", m)) for m in sizes]
    if target <= curve[0][1]:
        return sizes[0] / n
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y0 < target <= y1:
            return math.exp(x0 + (x1 - x0) * (target - y0) / (y1 - y0)) / n
    return None
