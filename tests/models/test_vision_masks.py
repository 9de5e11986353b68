"""A vision Transformer with neighborhood attention: it trains, classifies and is stored, and all tools accept it."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.errors import ShapeError
from clearhead.masks import catalogue, full
from clearhead.models import MeanPooling, VisionConfig, VisionTransformer, load_checkpoint, save_checkpoint
from clearhead.training.optimizer import adamw

GRID = (4, 6)


def neighborhood_vit(**options):
    torch.manual_seed(0)
    return VisionTransformer(
        VisionConfig(
            image_size=(8, 12),
            patch_size=2,
            n_classes=3,
            n_channels=1,
            d_model=16,
            n_layers=2,
            n_heads=2,
            pooling=MeanPooling(),
            layer_masks=(catalogue.neighborhood(GRID, 3), full()),
            **options,
        )
    )


def images(n=24):
    """Return images and their classes: the third of the columns that is bright."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(n) % 3
    x = 0.1 * torch.randn(n, 1, 8, 12, generator=generator)
    for image, label in zip(x, labels.tolist(), strict=True):
        image[:, :, 4 * label : 4 * label + 4] += 1
    return x, labels


def test_vit_with_neighborhood_attention_learns_to_classify():
    model, (x, labels) = neighborhood_vit(), images()
    optimizer = adamw(model.train(), lr=1e-2)
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert bool((model.eval()(x).argmax(-1) == labels).all())


def test_first_layer_sees_the_neighborhood_only():
    model = neighborhood_vit().eval()
    row = 1 * 6 + 5
    x = images(2)[0]
    changed = x.clone()
    changed[:, :, :2, :2] += 5  # patch (0, 0), outside of the neighborhood of patch (1, 5)
    block = model.blocks[0]
    recorded = []
    handle = block.register_forward_hook(lambda module, args, out: recorded.append(out))
    with torch.no_grad():
        model(x)
        model(changed)
    handle.remove()
    assert torch.equal(recorded[0][:, row], recorded[1][:, row])
    assert not torch.equal(recorded[0][:, 0], recorded[1][:, 0])


def test_vit_with_neighborhood_attention_is_stored_with_its_mask(tmp_path):
    model, (x, _) = neighborhood_vit().eval(), images(2)
    save_checkpoint(model, tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model").eval()
    assert loaded.config.layer_masks == model.config.layer_masks
    assert torch.equal(loaded(x), model(x))


def test_image_of_another_size_does_not_match_the_grid():
    model = neighborhood_vit().resized((12, 12))
    with pytest.raises(ShapeError, match="describes a grid of 24 positions"):
        model(torch.zeros(1, 1, 12, 12))


def test_tools_accept_a_mask_on_a_grid():
    """`trace`, `cost`, `check` and `apply_mask` have no special case for it."""
    mask = catalogue.neighborhood(GRID, 3)
    model, (x, _) = neighborhood_vit().eval(), images(2)
    with torch.no_grad(), ch.trace(model) as trace:
        model(x)
    weights = trace["blocks.0.attention.weights"]
    assert torch.equal(weights > 0, mask.dense(24).expand_as(weights))
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    inputs = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), ch.apply_mask(layer, mask):
        applied = layer(inputs, inputs, inputs, need_weights=False)[0]
    with torch.no_grad():
        expected = layer(inputs, inputs, inputs, attn_mask=~mask.dense(24), need_weights=False)[0]
    torch.testing.assert_close(applied, expected)
    attention = ch.nn.MultiHeadAttention(16, 2)
    sparse, dense = (ch.cost(attention, tokens=24, mask=each, device="cpu") for each in (mask, full()))
    assert sparse.flops.value <= dense.flops.value
    report = ch.check(model)
    assert not report.failures, str(report)
