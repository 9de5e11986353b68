"""Tests of the options that DINOv2 and DeiT add to a vision Transformer, each against its equation."""

from __future__ import annotations

import pytest
import torch

from clearhead.analysis.checks import check
from clearhead.analysis.cost import cost
from clearhead.config import Config
from clearhead.errors import ConfigError
from clearhead.models import ClsMeanPooling, DistillationPooling, MeanPooling, VisionConfig

CONFIG = VisionConfig(image_size=(6, 9), patch_size=3, n_channels=2, n_classes=5, d_model=14, n_heads=2, n_layers=2)
OPTIONS = [
    {"pooling": ClsMeanPooling()},
    {"pooling": DistillationPooling()},
    {"n_registers": 3},
    {"n_registers": 3, "pooling": MeanPooling()},
    {"n_classes": 0},
]


@pytest.fixture
def images():
    return torch.randn(2, 2, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def tokens(model, images):
    """Return the output of the last norm: extra tokens, registers, patches."""
    x = model.embedding(images)
    x = x if model.cls is None else torch.cat((model.cls.expand(2, -1, -1), x), dim=1)
    x = model.add_positions(x)
    n = model.config.pooling.n_extra
    parts = [x[:, :n], *([] if model.registers is None else [model.registers.expand(2, -1, -1)]), x[:, n:]]
    return model.run_blocks(torch.cat(parts, dim=1))


def test_cls_mean_pooling_concatenates_class_token_and_mean(images):
    model = CONFIG.replace(pooling=ClsMeanPooling(), n_registers=3).build().double().eval()
    x = tokens(model, images)
    assert x.shape == (2, 1 + 3 + 6, 14)
    torch.testing.assert_close(model(images), model.head(torch.cat((x[:, 0], x[:, 4:].mean(1)), dim=1)))


def test_distillation_pooling_averages_two_heads(images):
    model = CONFIG.replace(pooling=DistillationPooling()).build().double().eval()
    x = tokens(model, images)
    torch.testing.assert_close(model(images), (model.head(x[:, 0]) + model.teacher_head(x[:, 1])) / 2)


def test_registers_have_no_position_and_are_dropped(images):
    model = CONFIG.replace(pooling=MeanPooling(), n_registers=3).build().double().eval()
    assert model.positions.weight.shape == (6, 14)
    torch.testing.assert_close(model(images), model.head(tokens(model, images)[:, 3:].mean(1)))


def test_vision_without_classes_returns_features(images):
    model = CONFIG.replace(n_classes=0).build().double().eval()
    torch.testing.assert_close(model(images), tokens(model, images)[:, 0])


@pytest.mark.parametrize("options", OPTIONS)
def test_vision_options_round_trip_and_pass_check_and_cost(options):
    config = CONFIG.replace(**options)
    assert Config.from_toml(config.to_toml()) == config
    model = config.build()
    assert check(model).ok
    assert cost(config).parameters.value == sum(weight.numel() for weight in model.parameters())
    assert model.resized((9, 9))(torch.randn(1, 2, 9, 9)).shape[0] == 1


@pytest.mark.bad_input
@pytest.mark.parametrize("options", [{"n_registers": -1}, {"n_classes": -1}, {"pooling": 3}])
def test_invalid_vision_options_raise(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        CONFIG.replace(**options)
