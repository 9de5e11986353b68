"""Tests that invalid inputs of models raise errors with the expected and received values."""

from __future__ import annotations

import pytest
import torch

from clearhead.errors import DtypeError, MaskError, MaskTypeError, ShapeError
from clearhead.masks import allow, window
from clearhead.models import DecoderConfig, EncoderConfig, EncoderDecoderConfig, VisionConfig
from clearhead.nn.positions import LearnedPositions, Rotary

pytestmark = pytest.mark.bad_input

SIZES = {"vocab_size": 31, "max_len": 23, "d_model": 18, "n_heads": 3, "n_layers": 2}


def random_ids(*shape):
    return torch.randint(29, shape)


def test_text_models_with_invalid_inputs_raise(build):
    model = build(DecoderConfig(**SIZES, positions=LearnedPositions(max_len=23)))
    ids = random_ids(2, 7)
    with pytest.raises(DtypeError, match=r"ids are torch\.float32; expected token ids"):
        model(ids.float())
    with pytest.raises(DtypeError, match="ids are a list; expected a tensor of token ids"):
        model(ids.tolist())
    with pytest.raises(ShapeError, match=r"ids have shape \(7,\); expected \(batch, length\).*ids\[None\]"):
        model(ids[0])
    with pytest.raises(ShapeError, match="the vocabulary has 31 tokens"):
        model(ids + 31)
    with pytest.raises(ShapeError, match="a sequence of 24 tokens, but the table of learned positions has 23 rows"):
        model(random_ids(1, 24))
    with pytest.raises(MaskTypeError, match=r"allow\(.*forbid\("):
        model(ids, mask=torch.ones(7, 7, dtype=torch.bool))
    with pytest.raises(ShapeError, match="has no cross-attention; set cross_attention=True"):
        model(ids, memory=torch.zeros(2, 3, 18, dtype=torch.float64))


def test_encoder_with_bool_mask_tensor_raises(build):
    encoder = build(EncoderConfig(**SIZES))
    with pytest.raises(MaskTypeError, match=r"allow\(.*forbid\("):
        encoder(random_ids(2, 7), mask=torch.ones(2, 7, dtype=torch.bool))


def test_positions_without_position_embedding_raise(build):
    model = build(EncoderConfig(**SIZES, positions=Rotary()))
    with pytest.raises(
        ShapeError, match=r"got positions \(7,\), but this model adds no positions.*leave positions out"
    ):
        model(random_ids(2, 7), positions=torch.arange(7))


def test_decoder_without_memory_raises(build):
    model = build(DecoderConfig(**SIZES, cross_attention=True))
    with pytest.raises(ShapeError, match="pass the encoder output as memory="):
        model(random_ids(2, 7))


def test_source_mask_that_depends_on_target_raises(build):
    config = EncoderDecoderConfig(vocab_size=31, d_model=18, n_heads=3, n_encoder_layers=1, n_decoder_layers=1)
    encoder_decoder = build(config)
    with pytest.raises(MaskError, match=r"depends on the query's position.*encoder_mask"):
        encoder_decoder(random_ids(2, 7), random_ids(2, 5), source_mask=window(2, 2))
    rows = allow(torch.ones(7, 7, dtype=torch.bool).tril())  # of source tokens, not of target tokens
    with pytest.raises(MaskError, match=r"pass memory_mask as well"):
        encoder_decoder(random_ids(2, 7), random_ids(2, 7), source_mask=rows)
    with pytest.raises(MaskTypeError, match=r"allow\(.*forbid\("):
        encoder_decoder(random_ids(2, 7), random_ids(2, 5), source_mask=torch.ones(2, 7, dtype=torch.bool))


def test_vision_with_invalid_images_raises(build):
    vision = build(
        VisionConfig(image_size=(6, 9), patch_size=3, n_channels=2, n_classes=7, d_model=10, n_layers=1, n_heads=2)
    )
    with pytest.raises(DtypeError, match=r"images are torch\.uint8; expected floating point.*/ 255"):
        vision(torch.zeros(1, 2, 6, 9, dtype=torch.uint8))
    with pytest.raises(ShapeError, match=r"images have shape \(2, 6, 9\); expected \(batch, 2, 6, 9\)"):
        vision(torch.zeros(2, 6, 9))
    with pytest.raises(ShapeError, match=r"images are 9×6; expected 6×9.*model\.resized\(\(9, 6\)\)"):
        vision(torch.zeros(1, 2, 9, 6))
