"""Tests that initial parameters have the configured standard deviations, within five standard errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from clearhead.errors import ConfigError
from clearhead.nn import Block, BlockConfig, DepthScaled, TokenEmbedding, TruncatedNormal, Xavier
from clearhead.nn.positions import LearnedPositions

M, F, V, T, LAYERS = 101, 211, 307, 103, 7
CHOICES = [Xavier(), TruncatedNormal(), TruncatedNormal(std=0.5), DepthScaled(), DepthScaled(std=0.5)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(V, M)
        self.positions = LearnedPositions(max_len=T).build(M)
        self.block = Block(BlockConfig(d_model=M, n_heads=1, d_ff=F), cross=True)
        self.head = nn.Linear(M, V)
        self.other = nn.Parameter(torch.full((3,), 17.0))


def applied(choice) -> Model:
    model = Model()
    with torch.no_grad():  # so that what is left alone can be told from what is set
        for weight in model.parameters():
            weight.fill_(17.0)
    choice.apply(model, n_layers=LAYERS)
    return model


def assert_spread(weight: torch.Tensor, std: float, kurtosis: float) -> None:
    """Mean 0 and standard deviation `std`, within five standard errors of n independent draws."""
    n = weight.numel()
    assert abs(weight.mean().item()) < 5 * std / math.sqrt(n)
    assert abs(weight.var().item() / std**2 - 1) < 5 * math.sqrt((kurtosis - 1) / n)


def weights(model: Model) -> dict[str, torch.Tensor]:
    """Everything that a choice sets: all but norms, biases and the stray parameter."""
    return {name: p for name, p in model.named_parameters() if p.ndim == 2 and "norm" not in name and name != "other"}


def test_xavier_has_expected_standard_deviations():
    for name, weight in weights(applied(Xavier())).items():
        if name in ("embedding.weight", "positions.weight"):
            assert_spread(weight, M**-0.5, kurtosis=3)
        else:
            assert_spread(weight, math.sqrt(2 / sum(weight.shape)), kurtosis=9 / 5)
            limit = math.sqrt(6 / sum(weight.shape))  # uniform: it fills its interval and stays inside
            assert 0.99 * limit < weight.abs().max().item() <= limit


def cut_normal_moments() -> tuple[float, float]:
    """Variance and kurtosis of a standard normal cut at ±2, by the midpoint rule."""
    steps = 100_000
    at = [(-2 + 4 * (i + 0.5) / steps) for i in range(steps)]
    density = [math.exp(-t * t / 2) for t in at]
    second, fourth = (sum(d * t**power for d, t in zip(density, at, strict=True)) / sum(density) for power in (2, 4))
    return second, fourth / second**2


@pytest.mark.parametrize("std", [0.02, 0.5])
def test_truncated_normal_has_expected_moments_and_bounds(std):
    variance, kurtosis = cut_normal_moments()
    assert math.sqrt(variance) == pytest.approx(0.88, abs=0.001)  # what the docstring says
    for weight in weights(applied(TruncatedNormal(std))).values():
        assert_spread(weight, std * math.sqrt(variance), kurtosis)
        assert 1.9 * std < weight.abs().max().item() <= 2 * std * (1 + 1e-6)


@pytest.mark.parametrize("std", [0.02, 0.5])
def test_depth_scaled_divides_branch_outputs_by_sqrt_of_2_n_layers(std):
    scaled = set()
    for name, weight in weights(applied(DepthScaled(std))).items():
        ends_branch = name.endswith(("o_proj.weight", "down.weight"))
        assert_spread(weight, std / math.sqrt(2 * LAYERS) if ends_branch else std, kurtosis=3)
        scaled |= {name} if ends_branch else set()
    assert scaled == {
        "block.attention.o_proj.weight",
        "block.cross_attention.o_proj.weight",
        "block.feed_forward.down.weight",
    }


def test_depth_scaled_residual_variance_is_independent_of_depth():
    """2L branches of unit input each add variance M · std² / 2L: the sum does not depend on L."""
    for n_layers in (2, 23):
        total = torch.zeros(2003)
        for _ in range(2 * n_layers):
            branch = nn.ModuleDict({"down": nn.Linear(M, 2003)})
            DepthScaled(std=M**-0.5).apply(branch, n_layers)
            total += branch["down"](torch.ones(M))
        assert_spread(total.detach(), 1.0, kurtosis=3)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_init_zeroes_biases_and_keeps_norms_and_other_parameters(choice):
    model = applied(choice)
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            assert (part.bias == 0).all(), name
        if isinstance(part, nn.LayerNorm):
            assert (part.weight == 17).all(), name
            assert (part.bias == 17).all(), name
    assert (model.other == 17).all()
    assert all((weight != 17).all() for weight in weights(model).values())


def test_init_of_tied_weight_uses_its_first_owner():
    model = nn.ModuleDict({"embedding": nn.Embedding(307, 101), "head": nn.Linear(101, 307, bias=False)})
    model["head"].weight = model["embedding"].weight
    Xavier().apply(model, 1)
    assert_spread(model["head"].weight, 101**-0.5, kurtosis=3)


def test_init_with_equal_seeds_is_equal():
    def drawn(seed):
        torch.manual_seed(seed)
        return applied(DepthScaled()).head.weight

    assert torch.equal(drawn(5), drawn(5))
    assert not torch.equal(drawn(5), drawn(7))


@pytest.mark.parametrize("choice", [TruncatedNormal, DepthScaled])
@pytest.mark.parametrize("std", [0, -0.02, float("inf"), "0.02"])
def test_init_with_invalid_std_raises(unchecked, choice, std):
    with pytest.raises(ConfigError, match=f"{choice.__name__}: std is .*; expected a number above 0"):
        choice(std=std)


def test_depth_scaled_without_layers_raises():
    with pytest.raises(ConfigError, match="n_layers is 0; expected a whole number of at least 1"):
        DepthScaled().apply(nn.Linear(2, 3), n_layers=0)
