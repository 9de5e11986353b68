"""Question 7: the schedule, norms and initialization."""

from __future__ import annotations

from clearhead.course.answers.content import AnswerFigure, AnswerTable


def schedule_curve() -> AnswerFigure:
    """Return the curve of the schedule."""
    from clearhead.course.claims.figure import Lines
    from clearhead.training.schedules import WarmupCosine

    schedule = WarmupCosine(0.001, 4000, 100_000)
    steps = list(range(0, 100_001, 1000))
    return Lines("Warm-up and cosine decay", "step", "learning rate", steps, {"lr(step)": [schedule(s) for s in steps]})


def half_rate_step() -> str:
    """Return the step at which the rate has fallen to half."""
    return f"{(4000 + 100_000) // 2:,}"


def norm_placements() -> AnswerTable:
    """Return how the residual stream and the gradient change over 12 blocks, by the placement of the norm."""
    import torch
    from torch import nn

    from clearhead.nn import Block, BlockConfig, PostNorm, PreNorm

    rows = []
    for name, residual in (("pre-norm", PreNorm()), ("post-norm", PostNorm())):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = BlockConfig(d_model=64, n_heads=4, d_ff=256, residual=residual)
            blocks = nn.ModuleList(Block(config) for _ in range(12)).double()
            states = [torch.randn(4, 16, 64, dtype=torch.float64, requires_grad=True)]
            for block in blocks:
                states.append(block(states[-1]))
            output_gradient = torch.randn_like(states[-1])
        gradients = torch.autograd.grad(states[-1], states[:1], output_gradient)
        growth = (states[-1].norm() / states[1].norm()).item()
        rows.append([name, f"{growth:.2f}", f"{(gradients[0].norm() / output_gradient.norm()).item():.2f}"])
    return AnswerTable(
        ["placement", "‖x_12‖/‖x_1‖", "‖∂L/∂x_0‖/‖∂L/∂x_12‖"], rows, "12 blocks of width 64 at initialization."
    )


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
        jacobian = a.square().sum(-1) - 2 * a.pow(3).sum(-1) + a.square().sum(-1).square()  # ‖diag(a) − aaᵀ‖²
        rows.append(
            [name, f"{scores.var().item():,.2f}", f"{a.amax(-1).mean().item():.3f}", f"{jacobian.median().item():.4f}"]
        )
    header = ["initialization", "variance of the scores", "mean largest weight of 64", "median ‖J‖²"]
    return AnswerTable(header, rows, "Width 128, 64 standard normal inputs, one draw.")
