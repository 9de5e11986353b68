"""Tests of the dual encoder against its equation, and of its errors."""

from __future__ import annotations

import pytest
import torch

from clearhead.config import Config
from clearhead.errors import ConfigError
from clearhead.masks import causal, padding
from clearhead.models import DualEncoderConfig, EncoderConfig, VisionConfig
from clearhead.models.storage import load_checkpoint, save_checkpoint
from clearhead.nn.positions import LearnedPositions
from tests.support.rounding import assert_equal_up_to_rounding

TEXT = EncoderConfig(
    vocab_size=17, d_model=10, n_heads=2, n_layers=2, max_len=7, positions=LearnedPositions(max_len=7), mask=causal()
)
IMAGE = VisionConfig(
    image_size=(6, 6), patch_size=3, n_channels=1, n_classes=0, d_model=6, n_heads=2, n_layers=1, patch_bias=False
)
CONFIG = DualEncoderConfig(text=TEXT, image=IMAGE, d_shared=5, eos=16)
IDS, IMAGES = torch.tensor([[3, 16, 2, 16, 9], [4, 5, 6, 7, 16]]), torch.randn(3, 1, 6, 6, dtype=torch.float64)


def test_dual_encoder_logits_equal_scaled_cosines():
    model = CONFIG.build().double()
    x = model.text(IDS)
    ends = torch.stack((x[0, 1], x[1, 4]))  # the first end of each
    texts, images = ends @ model.text_proj.weight.T, model.image(IMAGES) @ model.image_proj.weight.T
    expected = torch.nn.functional.cosine_similarity(images[:, None], texts[None], dim=-1) / 0.07
    torch.testing.assert_close(model(IDS, IMAGES), expected)


def test_dual_encoder_without_eos_pools_at_largest_id():
    model = CONFIG.replace(eos=None).build().double()
    ids = torch.tensor([[3, 14, 2, 1, 14]])
    until = model.embed_texts(torch.tensor([[3, 14]]))
    torch.testing.assert_close(model.embed_texts(ids), until)


def test_tokens_after_eos_do_not_change_logits():
    model = CONFIG.build().double()
    longer = torch.cat((IDS, torch.tensor([[1, 1], [2, 3]])), dim=1)
    torch.testing.assert_close(model(longer, IMAGES, mask=padding(torch.tensor([5, 5]))), model(IDS, IMAGES))


def test_loaded_dual_encoder_equals_saved_model(tmp_path):
    assert Config.from_toml(CONFIG.to_toml()) == CONFIG
    model = CONFIG.build().double().eval()
    save_checkpoint(model, tmp_path / "m")
    loaded = load_checkpoint(tmp_path / "m")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert_equal_up_to_rounding(loaded(IDS, IMAGES), model(IDS, IMAGES))


@pytest.mark.bad_input
def test_dual_encoder_with_invalid_options_raises():
    with pytest.raises(ConfigError, match="n_classes=4; expected 0"):
        CONFIG.replace(image=IMAGE.replace(n_classes=4))
    with pytest.raises(ConfigError, match="eos is 17; expected one of the text's 17 ids"):
        CONFIG.replace(eos=17)
