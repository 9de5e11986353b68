"""Question 7: the schedule, norms and initialization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clearhead.course.answers.content import AnswerFigure, AnswerTable, format_scientific
from clearhead.course.claims.figure import Lines

if TYPE_CHECKING:
    from clearhead.nn import Residual


@dataclass(frozen=True)
class PlottedCurve(Lines):
    """One curve from 0 to its maximum, drawn with axes in terminals, too."""

    def text(self, width: int = 80) -> str:
        """Return the curve as dots between labeled axes, at most `width` columns wide."""
        (values,) = self.series.values()
        top, height, margin = max(values), 11, 10
        columns = max(11, min(51, width - margin - 4))
        points = [round(i * (len(values) - 1) / (columns - 1)) for i in range(columns)]
        rows = [round(values[point] / top * (height - 1)) for point in points]
        lines = [f"{self.title} ({self.y_label} over {self.x_label})"]
        for row in reversed(range(height)):
            label = f"{top * row / (height - 1):.4f}" if row % 5 == 0 else ""
            dots = "".join("•" if at == row else " " for at in rows)
            lines.append(f"{label:>{margin - 2}} {'┤' if label else '│'}{dots}".rstrip())
        ticks = [f"{self.x[points[at]]:,.0f}" for at in (0, columns // 2, columns - 1)]
        space = columns - len("".join(ticks))
        axis = f"{ticks[0]}{' ' * (space // 2)}{ticks[1]}{' ' * (space - space // 2)}{ticks[2]}"
        return "\n".join([*lines, f"{' ' * (margin - 1)}└{'─' * columns}", f"{' ' * margin}{axis}"])


def schedule_curve() -> AnswerFigure:
    """Return the curve of the schedule."""
    from clearhead.training.schedules import WarmupCosine

    schedule = WarmupCosine(0.001, 4000, 100_000)
    steps = list(range(0, 100_001, 1000))
    rates = {"lr(step)": [schedule(step) for step in steps]}
    return PlottedCurve("Warm-up and cosine decay", "step", "learning rate", steps, rates)


def half_rate_step() -> str:
    """Return the step at which the rate has fallen to half."""
    return f"{(4000 + 100_000) // 2:,}"


def norm_placements() -> AnswerTable:
    """Return, by placement and depth, the gradient of the last block's parameters at initialization."""
    from clearhead.nn import PostNorm, PreNorm

    depths = (6, 12, 24, 48)
    rows = []
    for name, residual in (("pre-norm", PreNorm()), ("post-norm", PostNorm())):
        gradients = [_last_gradient(residual, depth) for depth in depths]
        rows.append([name, *(f"{gradient / gradients[0]:.2f}" for gradient in gradients)])
    header = ["gradient of the last block", *(f"L = {depth}" for depth in depths)]
    return AnswerTable(header, rows, "Norm relative to 6 blocks, width 32, at initialization; one draw each.")


def _last_gradient(residual: Residual, depth: int) -> float:
    """Return the norm of the gradient of the last block's parameters."""
    import torch
    from torch import nn

    from clearhead.nn import Block, BlockConfig, PreNorm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BlockConfig(d_model=32, n_heads=4, d_ff=64, residual=residual)
        blocks = nn.Sequential(*(Block(config) for _ in range(depth))).double()
        output = blocks(torch.randn(4, 8, 32, dtype=torch.float64))
        if isinstance(residual, PreNorm):
            output = nn.functional.layer_norm(output, (32,))  # the final norm of a pre-norm model
        loss = (output * torch.randn_like(output)).sum()
    gradients = torch.autograd.grad(loss, list(blocks[-1].parameters()))
    return sum(gradient.square().sum().item() for gradient in gradients) ** 0.5


def initial_scores() -> AnswerTable:
    """Return variance of the scores and the largest weight under two initializations."""
    import math

    import torch

    generator = torch.Generator().manual_seed(0)
    width, tokens = 128, 64
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    rows = []
    for name, deviation in (("Xavier, Var[W] = 1/d", width**-0.5), ("Var[W] = 1", 1.0)):
        w_q, w_k = (deviation * torch.randn(width, width, generator=generator, dtype=torch.float64) for _ in range(2))
        scores = x @ w_q @ (x @ w_k).T / math.sqrt(width)
        a = scores.softmax(-1)
        others = 1 - torch.eye(tokens, dtype=torch.float64)
        # ‖diag(a) − aaᵀ‖² with 1 − a as the sum of the other weights, which keeps its digits if a is close to 1.
        jacobian = (a * (a @ others)).square().sum(-1) + (a.square() @ others * a.square()).sum(-1)
        largest, slope = a.amax(-1).mean().item(), jacobian.median().item()
        rows.append([name, f"{scores.var().item():,.2f}", f"{largest:.3f}", format_scientific(slope)])
    header = ["initialization", "variance of the scores", "mean largest weight of 64", "median ‖J‖²"]
    return AnswerTable(header, rows, "Width 128, 64 standard normal inputs, one draw.")
