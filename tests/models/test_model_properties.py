"""Tests of causality, padding invariance and batch independence for random parameters."""

from __future__ import annotations

import pytest
import torch

from clearhead.masks import causal, documents, every, forbid, padding, window
from clearhead.models import DecoderConfig, MeanPooling, VisionConfig
from clearhead.nn.positions import LearnedPositions, Rotary, Sinusoidal

SIZES = {"vocab_size": 31, "max_len": 23, "d_model": 18, "n_heads": 3, "n_layers": 2}


def random_ids(*shape, vocab=29, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- the future


def test_logits_do_not_depend_on_later_tokens(decoder):
    """Changing token j changes no logit before j, to the last bit, and changes the logits from j on."""
    ids = random_ids(2, 11)
    before = decoder(ids)
    for j in range(11):
        changed = ids.clone()
        changed[:, j] = (changed[:, j] + 1) % 29
        after = decoder(changed)
        assert torch.equal(after[:, :j], before[:, :j])
        assert not torch.isclose(after[:, j], before[:, j]).all()


def test_gradients_do_not_flow_from_earlier_logits_to_later_tokens(decoder):
    ids = random_ids(1, 11)
    rows = []
    decoder.embedding.register_forward_hook(lambda module, args, out: rows.append(out.requires_grad_()))
    logits = decoder(ids)
    for i in range(11):
        (gradient,) = torch.autograd.grad(logits[0, i].square().sum(), rows[0], retain_graph=True)
        assert (gradient[0, i + 1 :] == 0).all()
        assert (gradient[0, : i + 1] != 0).any(-1).all()


def test_target_logits_depend_on_whole_source_and_earlier_target(encoder_decoder):
    source, target = random_ids(2, 7), random_ids(2, 5, seed=1)
    before = encoder_decoder(source, target)
    changed = target.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 29
    after = encoder_decoder(source, changed)
    assert torch.equal(after[:, :3], before[:, :3])
    for s in range(7):
        changed = source.clone()
        changed[:, s] = (changed[:, s] + 1) % 29
        assert not torch.isclose(encoder_decoder(changed, target)[:, 0], before[:, 0]).all()


def test_configured_sparse_mask_limits_receptive_field(build, assert_close):
    """One layer: token i reads exactly the tokens that the mask draws, and no others."""
    mask = causal() & (window(2, 0) | every(4))
    model = build(DecoderConfig(**(SIZES | {"n_layers": 1}), mask=mask, positions=Sinusoidal()))
    ids = random_ids(1, 11)
    rows = []
    model.embedding.register_forward_hook(lambda module, args, out: rows.append(out.requires_grad_()))
    logits = model(ids)
    reads = torch.zeros(11, 11, dtype=torch.bool)
    for i in range(11):
        (gradient,) = torch.autograd.grad(logits[0, i].square().sum(), rows[0], retain_graph=True)
        reads[i] = (gradient[0] != 0).any(-1)
    assert torch.equal(reads, mask.dense(11))


# ---------------------------------------------------------------------- padding and batches


def test_padding_does_not_change_encoder_outputs(encoder, assert_close):
    lengths = torch.tensor([9, 4, 1])
    ids = random_ids(3, 9)
    out = encoder(ids, mask=padding(lengths))
    other = torch.where(torch.arange(9) < lengths[:, None], ids, (ids + 5) % 29)
    again = encoder(other, mask=padding(lengths))
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(again[row, :length], out[row, :length])
        alone = encoder(ids[row : row + 1, :length])
        assert_close(out[row : row + 1, :length], alone)


def test_source_padding_does_not_change_logits(encoder_decoder, assert_close):
    lengths = torch.tensor([7, 3])
    source, target = random_ids(2, 7), random_ids(2, 5, seed=1)
    out = encoder_decoder(source, target, source_mask=padding(lengths))
    other = torch.where(torch.arange(7) < lengths[:, None], source, (source + 5) % 29)
    assert torch.equal(encoder_decoder(other, target, source_mask=padding(lengths)), out)
    assert_close(out[1:], encoder_decoder(source[1:, :3], target[1:]))


def test_target_padding_does_not_change_earlier_logits(decoder, assert_close):
    lengths = torch.tensor([11, 6])
    ids = random_ids(2, 11)
    out = decoder(ids, mask=padding(lengths))
    assert_close(out[1:, :6], decoder(ids[1:, :6]))
    assert_close(out[:1], decoder(ids[:1]))


def test_left_padded_prompt_with_positions_equals_unpadded_prompt(decoder, assert_close):
    """A prompt of 4 tokens behind 3 tokens of padding gives the logits that it gives alone."""
    ids = random_ids(2, 7)
    skip = torch.tensor([3, 0])
    real = torch.arange(7) >= skip[:, None]  # (B, S)
    hidden = forbid(~real[:, None, None, :].expand(2, 1, 7, 7))
    added = decoder.config.positions.kind == "added"
    positions = (torch.arange(7) - skip[:, None]).clamp(min=0) if added else None
    out = decoder(ids, mask=hidden, positions=positions)
    assert_close(out[:1, 3:], decoder(ids[:1, 3:]))
    assert_close(out[1:], decoder(ids[1:]))


def test_packed_documents_equal_separate_documents(build, assert_close):
    model = build(DecoderConfig(**SIZES, positions=Rotary()))
    ids = random_ids(1, 11)
    packed = model(ids, mask=documents(torch.tensor([[0] * 4 + [1] * 7])))
    assert_close(packed[:, :4], model(ids[:, :4]))
    assert_close(packed[:, 4:], model(ids[:, 4:]))


def test_batch_rows_are_independent(decoder, assert_close):
    ids = random_ids(5, 7)
    together = decoder(ids)
    for row in range(5):
        assert_close(together[row : row + 1], decoder(ids[row : row + 1]))


@pytest.mark.parametrize("length", [0, 1])
def test_models_accept_short_texts(decoder, encoder, length):
    ids = random_ids(2, length)
    assert decoder(ids).shape == (2, length, 31)
    assert encoder(ids).shape == (2, length, 14)


def test_float32_logits_are_close_to_float64(decoder):
    """Rounding stays rounding: errors are some thousand units in float32's last place, not more."""
    ids = random_ids(2, 11)
    expected = decoder(ids)
    got = decoder.float()(ids)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 4000 * torch.finfo(torch.float32).eps * expected.abs().max()


# ---------------------------------------------------------------------- vision


@pytest.fixture(params=["cls", "mean"])
def vision(request, build):
    pooling = {} if request.param == "cls" else {"pooling": MeanPooling()}
    return build(
        VisionConfig(
            image_size=(6, 9),
            patch_size=3,
            n_channels=2,
            n_classes=7,
            d_model=10,
            n_layers=2,
            n_heads=2,
            **pooling,
        )
    )


def test_vision_logits_depend_on_every_pixel(vision):
    images = torch.randn(2, 2, 6, 9, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(vision(images).square().sum(), images)
    assert (gradient != 0).all()


def test_vision_without_positions_is_permutation_invariant(vision, assert_close):
    with torch.no_grad():
        vision.positions.weight[vision.config.pooling.n_extra :] = 0.5
    images = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    swapped = torch.cat((images[..., 3:6], images[..., :3], images[..., 6:]), -1)
    assert_close(vision(swapped), vision(images))


def test_vision_resized_accepts_other_image_size(vision, assert_close):
    same = vision.resized((6, 9))
    images = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    assert_close(same(images), vision(images))
    larger = vision.resized((12, 15))
    assert larger.config.image_size == (12, 15)
    assert larger.positions.weight.shape[0] == 4 * 5 + vision.config.pooling.n_extra
    assert larger(torch.randn(3, 2, 12, 15, dtype=torch.float64)).shape == (3, 7)
    # The original is left alone, and shares nothing with the copy.
    assert vision.config.image_size == (6, 9)
    with torch.no_grad():
        larger.head.weight.zero_()
    assert vision.head.weight.abs().sum() > 0
    # The configuration of the copy builds a table of the same shape.
    assert larger.config.build().positions.weight.shape == larger.positions.weight.shape


def test_vision_resized_resizes_explicit_grid_positions(build):
    config = VisionConfig(
        image_size=(6, 9),
        patch_size=3,
        n_classes=7,
        d_model=10,
        n_layers=1,
        n_heads=2,
        positions=LearnedPositions(grid=(2, 3), n_extra=1),
    )
    assert build(config).resized((9, 9)).config.positions == LearnedPositions(grid=(3, 3), n_extra=1)
