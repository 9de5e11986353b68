"""Tests that presets have the parameter counts of the published models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead import models
from clearhead.models import PRESETS, Config


def count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def hollow(build) -> nn.Module:
    """Built without memory for its weights."""
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build(name):
    config = PRESETS[name]()
    assert isinstance(config, Config)
    model = hollow(config.build)
    assert model.config == config
    assert all(weight.is_meta for weight in model.parameters())


# Published: the released GPT-2 files; timm's table of vit_{tiny,small,base}_patch16_224.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "vit-tiny": 5_717_416,
    "vit-small": 22_050_664,
    "vit-base": 86_567_656,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_parameter_counts_equal_published_counts(name):
    assert count(hollow(PRESETS[name]().build)) == PUBLISHED[name]


def test_bert_parameter_count_equals_transformers():
    transformers = pytest.importorskip("transformers", reason="BERT's reference implementation is not installed")
    peer = hollow(lambda: transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False))
    segments = peer.embeddings.token_type_embeddings.weight.numel()
    assert count(hollow(models.bert_base().build)) == count(peer) - segments


@pytest.mark.parametrize(("name", "d_model", "n_heads", "d_ff"), [("base", 512, 8, 2048), ("big", 1024, 16, 4096)])
def test_original_transformer_parameter_counts_equal_torch(name, d_model, n_heads, d_ff):
    def peer():
        stacks = nn.Transformer(d_model, n_heads, 6, 6, d_ff)
        stacks.encoder.norm = stacks.decoder.norm = None  # torch adds a last norm that the paper does not have
        return stacks

    model = hollow(PRESETS[name]().build)
    assert count(model) == count(hollow(peer)) + 37_000 * d_model
    assert model.encoder.embedding.weight is model.decoder.embedding.weight
    # The paper's table says 65 and 213 million, rounded its own way.
    assert count(model) == pytest.approx({"base": 65e6, "big": 213e6}[name], rel=0.04)


def test_gpt2_initializes_residual_outputs_smaller():
    torch.manual_seed(3)
    model = models.gpt2().replace(n_layers=8, vocab_size=101, d_model=192).build()
    block = model.blocks[0]
    assert block.feed_forward.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.feed_forward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.o_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_model_repr_contains_parameter_count():
    assert "124,439,808 parameters" in repr(hollow(models.gpt2().build))
