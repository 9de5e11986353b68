"""Problems 1.2 and 1.3: heads and filters, positions, permutations, convolutions and streaming masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clearhead.course.answers.content import AnswerTable, format_scientific
from clearhead.masks import causal, window
from clearhead.masks.drawing import Drawing, draw


def heads_and_filters() -> AnswerTable:
    """Return the parameters of heads and of filters as their number grows."""
    rows: list[list[int]] = []
    for count in (1, 4, 8, 16):
        attention = nn.MultiheadAttention(512, count, bias=False)
        convolution = nn.Conv2d(64, count, 3, bias=False)
        rows.append([count, *(sum(p.numel() for p in layer.parameters()) for layer in (attention, convolution))])
    header = ["heads or filters", "attention of width 512", "3 × 3 filters over 64 channels"]
    return AnswerTable(header, rows, "Parameters without biases.")


def positions_beyond_training() -> AnswerTable:
    """Return the accuracy of three encodings at the trained length, at twice and at four times that length."""
    from clearhead.course.claims.positions import previous_token_accuracy

    rows: list[list[str]] = []
    names = {"sinusoidal": "sinusoidal (absolute)", "relative bias": "relative bias", "rotary": "rotary (relative)"}
    for kind, name in names.items():
        accuracies = torch.tensor(previous_token_accuracy(kind, 0))  # (starts, lengths)
        rows.append([name, *(f"{low:.3f} to {high:.3f}" for low, high in zip(*accuracies.aminmax(dim=0), strict=True))])
    caption = (
        "Accuracy of a small layer, trained at length 12 to repeat the previous token; worst to best of three starts."
    )
    return AnswerTable(["encoding", "length 12", "length 24", "length 48"], rows, caption)


def unequal_norms() -> str:
    """Return the scores of the first of two tokens whose norms differ."""
    tokens = torch.tensor([1.0, 2.0])
    return ", ".join(f"{score:g}" for score in tokens[0] * tokens)


def sharpness_of_permutation() -> AnswerTable:
    """Return the weight on the selected key for n one-hot positions and a growing factor b."""
    rows: list[list[str]] = []
    for factor in (1.0, 5.0, 10.0, 20.0):
        cells = []
        for n in (4, 64):
            scores = torch.zeros(n, dtype=torch.float64)
            scores[0] = factor
            cells.append(format_scientific(1 - scores.softmax(0)[0].item()))
        rows.append([f"{factor:g}", *cells])
    caption = "Weight outside of the selected key, 1 − a = (n − 1)/(n − 1 + e^b)."
    return AnswerTable(["b", "n = 4", "n = 64"], rows, caption)


KERNEL = (0.25, 0.5, 0.25)


def convolution_by_bias() -> str:
    """Return the largest difference of biased attention and a convolution at positions with a whole window."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(9, 4, generator=generator).double(), torch.randn(4, 3, generator=generator).double()
    difference = _biased_attention(x, w) - _convolve(x, [k * w for k in KERNEL])
    return format_scientific(difference[1:-1].abs().max().item())


def convolution_by_bias_at_end() -> str:
    """Return the weights of the first position, whose window is incomplete."""
    weights = _biased_attention(torch.eye(9, dtype=torch.float64), torch.eye(9, dtype=torch.float64))[0, :2]
    return ", ".join(f"{weight:.4f}" for weight in weights.tolist())


def _biased_attention(x: Tensor, w: Tensor) -> Tensor:
    """Return attention whose scores are ln κ of the offset, without content."""
    offset = torch.arange(len(x)) - torch.arange(len(x))[:, None]
    kernel = torch.tensor(KERNEL, dtype=x.dtype)
    scores = kernel.log()[(offset + 1).clamp(0, 2)].masked_fill(offset.abs() > 1, -math.inf)
    return scores.softmax(-1) @ (x @ w)


def _convolve(x: Tensor, matrices: list[Tensor]) -> Tensor:
    """Return Σ_δ x_{i+δ} W_δ with zeros outside of the sequence, by a loop."""
    reach = len(matrices) // 2
    rows = []
    for i in range(len(x)):
        terms = [x[i + δ - reach] @ w for δ, w in enumerate(matrices) if 0 <= i + δ - reach < len(x)]
        rows.append(torch.stack(terms).sum(0))
    return torch.stack(rows)


def convolution_by_heads() -> str:
    """Return the largest difference of three shifting heads and a convolution with any three matrices."""
    return format_scientific(_heads_against_convolution(1000.0))


def convolution_by_soft_heads() -> AnswerTable:
    """Return the same difference for heads of several sharpness."""
    rows = [
        [f"{factor:g}", format_scientific(_heads_against_convolution(factor))] for factor in (2.0, 8.0, 32.0, 1000.0)
    ]
    return AnswerTable(
        ["b", "largest difference"], rows, "Three heads with scores −b(j − i − δ)² against the convolution."
    )


def _heads_against_convolution(factor: float) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    matrices = list(torch.randn(3, 4, 3, generator=generator, dtype=torch.float64))
    position = torch.arange(9)
    heads = []
    for shift, w in zip((-1, 0, 1), matrices, strict=True):
        offset = (position - position[:, None] - shift).double()
        heads.append((-factor * offset**2).softmax(-1) @ x @ w)
    return (sum(heads) - _convolve(x, matrices))[1:-1].abs().max().item()


def streaming_mask() -> Drawing:
    """Return a causal mask with bounded memory."""
    return draw(causal() & window(3, 0), 10)


def lookahead_mask() -> Drawing:
    """Return a mask with bounded memory and a look-ahead of one position."""
    return draw(window(3, 1), 10)
