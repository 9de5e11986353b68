"""Positions: formulas, parameters, uniqueness, and what happens beyond the trained length."""

from __future__ import annotations

import functools
from contextlib import suppress

import sympy as sp
import torch
from torch import nn

from clearhead.attention import attend
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import fit, max_abs_diff, n_parameters
from clearhead.course.claims.registry import ANSWERED, EXAM, HOMEWORK, claim
from clearhead.errors import ShapeError
from clearhead.masks import Mask, causal
from clearhead.nn import MultiHeadAttention
from clearhead.nn.positions import ALiBi, LearnedPositions, Positions, RelativeBias, Rotary, Sinusoidal

TRAINED, TWICE, BEYOND = 12, 24, 48
KINDS: dict[str, Positions] = {
    "sinusoidal": Sinusoidal(),
    "relative bias": RelativeBias(n_buckets=16, max_distance=24),
    "rotary": Rotary(),
}


@claim(
    EXAM,
    "Q4c",
    statement=(
        "PE(pos, 2i) = sin(pos / 10000^(2i/d)) and PE(pos, 2i+1) the cosine; asked for pos = 3, i = 0, 1, d = 512."
    ),
    method="The four numbers to 20 digits against the library's table, in float32.",
)
def sinusoid_values(t: Experiment) -> None:
    row = Sinusoidal().table(4, 512)[3]
    for i in (0, 1):
        angle = sp.Integer(3) / sp.Integer(10000) ** sp.Rational(2 * i, 512)
        for place, wave in ((2 * i, sp.sin), (2 * i + 1, sp.cos)):
            value = float(sp.N(wave(angle), 20))
            t.record_case(f"PE(3, {place})", f"{value:.7f}", abs(value - row[place].item()) < 1e-6)


@claim(
    EXAM,
    "Q4c, second of the three formulas (as the text at hand has it)",
    statement="PE(pos, 2i) = cos(pos / pos).",
    method="The line against the formula above it, for the same entry; symbolically, then at positions 0 and 1.",
)
def sinusoid_second_line(t: Experiment) -> None:
    p = sp.symbols("p", positive=True)
    first = sp.sin(p / sp.Integer(10000) ** 0)
    line = sp.cos(p / p)
    case_name = "PE(1, 0) by the first formula and by this line"
    t.record_case(case_name, f"{float(first.subs(p, 1)):.4f} and {float(line):.4f}", sp.simplify(first - line) == 0)
    t.note(f"the line does not depend on the position: {not line.free_symbols}; at position 0 it is 0/0")
    correct = "The line is a garbled copy of the third: even entries are the sines of the first, odd ones its cosines."
    t.intended(correct, abs(Sinusoidal().table(2, 4)[1, 0].item() - float(first.subs(p, 1))) < 1e-7)


@claim(
    ANSWERED,
    "Q1d",
    statement="Each position gets a unique encoding vector.",
    method=(
        "Two rows can only be equal if a whole number is a multiple of 2π, decided symbolically; then the closest pair."
    ),
)
def sinusoid_unique(t: Experiment) -> None:
    # sin p = 0 and cos p = 1 together need p / 2π whole.
    turns = (sp.symbols("p", integer=True, positive=True) / (2 * sp.pi)).is_rational
    case_name = "is p / 2π rational for a whole p > 0"
    t.record_case(case_name, "yes" if turns else "no", turns is not True and sp.pi.is_irrational)
    learned = LearnedPositions(max_len=1000).build(8).weight.detach()
    tables = ("1,000 positions, width 8", Sinusoidal().table(1000, 8)), ("1,000 learned ones as they begin", learned)
    for name, table in tables:
        gaps = torch.cdist(table.double(), table.double()) + 9 * torch.eye(1000, dtype=torch.float64)
        t.assert_above(f"{name}: closest pair", gaps.min(), 0, "distance {:.4f}")


@claim(
    ANSWERED,
    "Q1d, types",
    statement="Learned positions are trained parameters, one vector per position; sinusoidal ones are fixed functions.",
    method="Parameters of the built modules, counted.",
)
def position_parameters(t: Experiment) -> None:
    t.assert_equal("learned, 1000 × 512", n_parameters(LearnedPositions(max_len=1000).build(512)), 1000 * 512, "{:,}")
    t.assert_equal("sinusoidal", n_parameters(Sinusoidal().build(512)), 0)


@claim(
    HOMEWORK,
    "1.3b",
    statement="A relative encoding depends on the distance of two positions, not on where they stand.",
    method="Bias at (i, j) against (i + 1, j + 1) for RelativeBias and ALiBi, 13 positions.",
)
def relative_depends_on_distance(t: Experiment) -> None:
    for choice in (RelativeBias(), ALiBi()):
        built = choice.build(2)
        for p in built.parameters():
            nn.init.normal_(p)
        bias = built(13, 13, 0, torch.device("cpu")).dense(13)
        t.assert_equal(
            type(choice).__name__, max_abs_diff(bias[:, 1:, 1:], bias[:, :-1, :-1]), 0, "largest difference {:g}"
        )
    table = Sinusoidal().table(13, 8)
    least = (table[1:] - table[:-1]).norm(dim=1).min()
    t.note(f"an absolute encoding differs from place to place: by at least {least:.3f}")


@functools.cache
def previous_token_accuracy(kind: str, seed: int) -> tuple[tuple[float, ...], ...]:
    """Train three attention layers on 'repeat the token before this one' at length TRAINED.

    Returns the accuracy of each at that length, at twice that length and at BEYOND. The three are heads of one call,
    and share nothing.
    """
    torch.manual_seed(seed)
    choice = KINDS[kind]
    starts = torch.arange(3)
    width = 32
    shapes = {"embed": (7, width), "q": (width, width), "k": (width, width), "v": (width, width), "read": (width, 7)}
    w = {name: (torch.randn(3, *shape) / shape[0] ** 0.5).requires_grad_() for name, shape in shapes.items()}
    bias = choice.build(3) if isinstance(choice, RelativeBias) else None

    def logits(ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(n := ids.shape[-1])
        x = w["embed"][starts[:, None], ids]
        if isinstance(choice, Sinusoidal):
            x = x + choice.table(n, width)
        q, k, v = (x @ w[name] for name in "qkv")
        if isinstance(choice, Rotary):
            q, k = (choice.rotate(part, places) for part in (q, k))
        return attend(q, k, v, bias=bias(n, n, 0, places.device) if bias else None) @ w["read"]

    def loss() -> torch.Tensor:
        ids = torch.randint(0, 7, (32, 3, TRAINED))
        return 3 * nn.functional.cross_entropy(logits(ids)[:, :, 1:].flatten(0, 2), ids[:, :, :-1].flatten())

    fit([*w.values(), *(bias.parameters() if bias else ())], loss, 100, lr=0.01)
    results = []
    with torch.no_grad():
        for length in (TRAINED, TWICE, BEYOND):
            ids = torch.randint(0, 7, (100, 3, length))
            results.append((logits(ids)[:, :, 1:].argmax(-1) == ids[:, :, :-1]).float().mean((0, 2)).tolist())
    return tuple(zip(*results, strict=True))


TASK = f"A layer of attention trained to repeat the previous token at length {TRAINED}, three starts, 100 texts each; "
EXAMPLE = "One task and one small layer: an example, not a law."


@claim(
    HOMEWORK,
    "1.5b.3",
    statement=(
        "Fixed sinusoidal encodings can generalize to longer sequences than those of training, because they "
        "are a formula."
    ),
    method=f"{TASK}accuracy there and at {BEYOND}. {EXAMPLE}",
    condition=(
        "'generalize' means only that the encoding is defined there; what the model learned need not carry over"
    ),
)
def sinusoid_longer(t: Experiment) -> None:
    norm = Sinusoidal().table(1, 32, start=10_000).norm()
    result_text = f"norm {norm:.3f}, as everywhere: √16"
    t.record_case("defined at position 10,000", result_text, torch.isclose(norm, torch.tensor(4.0)))
    for number, (accuracy_in_range, _, beyond) in enumerate(previous_token_accuracy("sinusoidal", t.seed), 1):
        case_name = f"start {number}: accuracy at {TRAINED} (trained) and {BEYOND}"
        t.record_case(
            case_name, f"{accuracy_in_range:.3f} and {beyond:.3f}", beyond > accuracy_in_range - 0.05, in_scope=False
        )


@claim(
    HOMEWORK,
    "1.3b",
    statement="Relative encodings generalize better to sequences longer than those of training.",
    method=(
        f"{TASK}RelativeBias, Rotary and Sinusoidal, at {TWICE} and {BEYOND}: the worst start of each relative "
        f"one against the best of the absolute one. {EXAMPLE}"
    ),
    condition=(
        "the sequence is about twice as long; at four times the length rotary is still ahead, a learned bias, "
        "whose weights spread over more keys, is not"
    ),
)
def relative_longer(t: Experiment) -> None:
    results = {kind: previous_token_accuracy(kind, t.seed) for kind in KINDS}
    for kind, place in (("relative bias", 1), ("rotary", 1), ("rotary", 2), ("relative bias", 2)):
        worst = min(row[place] for row in results[kind])
        best = max(row[place] for row in results["sinusoidal"])
        case_name = f"{kind} and sinusoidal, length {(TWICE, BEYOND)[place - 1]}"
        t.record_case(
            case_name, f"{worst:.3f} and {best:.3f}", worst > best, in_scope=(kind, place) != ("relative bias", 2)
        )
    means = {kind: [sum(column) / 3 for column in zip(*rows, strict=True)] for kind, rows in results.items()}
    t.draw(Lines("Repeating the previous token", "length", "accuracy", (TRAINED, TWICE, BEYOND), means))


@claim(
    HOMEWORK,
    "1.5b.3",
    statement=(
        "Learned embeddings belong to the number of patches seen in training; for another resolution they may "
        "need to be interpolated."
    ),
    method=(
        "A learned 4 × 6 grid with one extra row: beyond it an error; resized to its own size, to 8 × 12, and back."
    ),
)
def learned_bound_to_length(t: Experiment) -> None:
    grid = LearnedPositions(grid=(4, 6), n_extra=1).build(8)
    nn.init.normal_(grid.weight)
    refused = True
    with suppress(ShapeError):
        grid(torch.zeros(1, 97, 8), torch.arange(97))
        refused = False
    t.record_case("97 tokens where 25 were trained", "rejected with an error" if refused else "accepted", refused)
    t.assert_equal("resized to 8 × 12", tuple(grid.resized((8, 12)).weight.shape), (97, 8))
    t.assert_below("resized to its own size: change", max_abs_diff(grid.resized((4, 6)).weight, grid.weight), 1e-6)


@claim(
    HOMEWORK,
    "1.4a.4",
    statement=(
        "Positional encodings must be explicitly added to the input embeddings for a Transformer to know the order."
    ),
    method=(
        "Does the last output depend on the order of the tokens before it? One layer without positions, with a bias on "
        "the scores and with rotated queries and keys; then two causal layers without positions."
    ),
)
def positions_must_be_added(t: Experiment) -> None:
    x = t.normal(1, 4, 8)
    distance = (torch.arange(4)[:, None] - torch.arange(4)).abs()
    plain = change_by_order(x, [MultiHeadAttention(8, 2)])
    t.note(f"one layer without positions: the last output changes by {plain:.1e}")
    changes = {
        "bias −|i − j| on the scores": change_by_order(x, [MultiHeadAttention(8, 2)], bias=-distance.double()),
        "rotated queries and keys": change_by_order(x, [MultiHeadAttention(8, 2, rotary=Rotary())]),
        "two causal layers": change_by_order(x, [MultiHeadAttention(8, 2) for _ in range(2)], mask=causal()),
    }
    for name, change in changes.items():
        t.assert_below(f"{name}, nothing added to the input: the last output changes by", change, 1e-9, "{:.3f}")
    t.correction(
        "Something must distinguish the orders: encodings added to the input, biases on the scores, rotated queries "
        "and keys, or a causal mask and a second layer.",
        plain < 1e-12 and min(changes.values()) > 1e-6,
    )


def change_by_order(
    x: torch.Tensor,
    layers: list[MultiHeadAttention],
    *,
    bias: torch.Tensor | None = None,
    mask: Mask | None = None,
) -> float:
    """Return how much the last output of these layers changes if the first two tokens are exchanged."""
    outputs = []
    for h in (x, x[:, [1, 0, 2, 3]]):
        for layer in layers:
            h = layer.double()(h, bias=bias, mask=mask)
        outputs.append(h[0, -1])
    return max_abs_diff(*outputs)
