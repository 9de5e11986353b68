"""AdamW's parameter groups, one step, and gradient clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from clearhead.errors import ConfigError
from clearhead.models.presets import tiny_decoder, tiny_encoder_decoder, tiny_vision
from clearhead.nn.positions import RelativeBias
from clearhead.training.optimizer import adamw, clip_grad_norm, decay_groups


@pytest.mark.parametrize("make", [tiny_decoder, tiny_encoder_decoder, tiny_vision])
def test_decay_groups_contain_every_parameter_once(make):
    model = make().build()
    decay, keep = decay_groups(model)
    assert sorted(decay + keep) == sorted(name for name, _ in model.named_parameters())


def test_decay_groups_only_matrices_decay():
    decay, keep = decay_groups(tiny_decoder().build())
    ends = {name.split(".", 2)[-1] for name in decay}
    assert ends == {f"attention.{part}_proj.weight" for part in "qkvo"} | {
        "feed_forward.up.weight",
        "feed_forward.down.weight",
    }
    assert {"embedding.weight", "positions.weight", "norm.weight", "norm.bias"} <= set(keep)


def test_decay_groups_cls_and_position_tables_do_not_decay():
    decay, keep = decay_groups(tiny_vision().build())
    assert "cls" in keep
    assert "positions.weight" in keep
    assert "head.weight" in decay
    assert any(name.startswith("embedding.") for name in decay)  # the projection of patches is a matrix
    biased = tiny_decoder().replace(positions=RelativeBias()).build()
    table = [name for name, _ in biased.named_parameters() if name.startswith("positions.")]
    assert table
    assert set(table) <= set(decay_groups(biased)[1])


def test_decay_groups_exclude_frozen_parameters():
    model = nn.Linear(3, 5)
    model.bias.requires_grad_(False)
    assert decay_groups(nn.Sequential(model)) == (["0.weight"], [])


def test_adamw_one_step_equals_formula():
    """AdamW's first step moves every weight by lr·g/(|g| + ε), after decay has taken lr·λ of the matrices."""
    model = nn.Sequential(nn.Linear(3, 5).double())
    weight, bias = (p.detach().clone() for p in model.parameters())
    optimiser = adamw(model, lr=0.1, weight_decay=0.3, betas=(0.9, 0.98), eps=1e-9)
    for parameter in model.parameters():
        parameter.grad = torch.linspace(-2, 3, parameter.numel(), dtype=torch.float64).view_as(parameter)
    step = [0.1 * p.grad / (p.grad.abs() + 1e-9) for p in model.parameters()]
    optimiser.step()
    torch.testing.assert_close(model[0].weight.detach(), weight * (1 - 0.1 * 0.3) - step[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(model[0].bias.detach(), bias - step[1], rtol=0, atol=1e-12)


def test_clip_grad_norm_scales_all_gradients_together():
    a, b, unused = (nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 3, 5))
    a.grad = torch.tensor([3.0, 0.0], dtype=torch.float64)
    b.grad = torch.tensor([0.0, 4.0, 12.0], dtype=torch.float64)
    assert clip_grad_norm([a, b, unused], None).item() == pytest.approx(13.0)
    assert a.grad[0] == 3.0
    assert clip_grad_norm([a, b, unused], 6.5).item() == pytest.approx(13.0)  # the norm from before
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in (a, b)))
    assert norm == pytest.approx(6.5, rel=1e-6)
    assert (a.grad[0] / b.grad[2]).item() == pytest.approx(3 / 12)


def test_adamw_of_a_frozen_model_raises():
    model = tiny_decoder().build().requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model requires a gradient"):
        adamw(model, lr=0.1)
