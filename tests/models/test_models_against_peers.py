"""With the same weights, the same outputs and the same gradients as torch's own Transformer.

The models of transformers and timm are in `tests/interop`, through the tables that read their weights.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from clearhead.masks import padding
from clearhead.models import (
    EncoderDecoderConfig,
)
from clearhead.nn import PostNorm, PreNorm, ReLU
from clearhead.nn.positions import Sinusoidal
from tests.models import peers

B, T, S, V, L, H, M, F = 2, 11, 7, 31, 2, 3, 18, 23


def shaken(model: nn.Module) -> nn.Module:
    """Every weight away from its start (zero biases and unit norms would hide a swap), in float64, for evaluation."""
    torch.manual_seed(13)
    model = model.double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


def assert_agree(model: nn.Module, got, expected, gradients, assert_close, factor=3000):
    """Outputs, then the gradients of one random linear function of them; `gradients` maps the peer's to our names."""
    assert_close(got, expected, factor)
    direction = torch.randn_like(expected)
    (got * direction).sum().backward()
    (expected * direction).sum().backward()
    expected_gradients = gradients()
    names = {name for name, _ in model.named_parameters()}
    assert names == set(expected_gradients), "a parameter is compared with nothing"
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert_close(weight.grad, expected_gradients[name], factor)


def random_ids(*shape, low=1):
    return torch.randint(low, V, shape)


class TorchTransformer(nn.Module):
    """The 2017 model put together from nn.Transformer and the paper's formulas for embeddings, positions and logits."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.shared = nn.Embedding(V, M)
        self.stacks = nn.Transformer(
            M, H, L, L + 1, F, dropout=0.0, activation="relu", batch_first=True, norm_first=norm_first
        )
        if not norm_first:
            self.stacks.encoder.norm = self.stacks.decoder.norm = None  # post-norm layers end in one already

    def embed(self, ids):
        x = self.shared(ids) * math.sqrt(M)
        angle = [[p / 10000 ** (2 * (i // 2) / M) for i in range(M)] for p in range(ids.shape[1])]
        waves = [[math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(row)] for row in angle]
        return x + torch.tensor(waves, dtype=x.dtype)

    def forward(self, source, target, lengths):
        hidden = torch.arange(source.shape[1]) >= lengths[:, None]
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        out = self.stacks(
            self.embed(source),
            self.embed(target),
            tgt_mask=future,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
        )
        return out @ self.shared.weight.T

    def mapped(self, tensors):
        inner = {name.removeprefix("stacks."): x for name, x in tensors.items()}
        embedding = {"encoder.embedding.weight": tensors["shared.weight"]}
        return embedding | peers.from_torch(inner, L, "encoder") | peers.from_torch(inner, L + 1, "decoder")


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_encoder_decoder_outputs_and_gradients_equal_torch_transformer(norm_first, assert_close):
    # In training mode torch takes its plain path; the fused one of evaluation has other edge cases under padding.
    reference = shaken(TorchTransformer(norm_first=norm_first)).train()
    config = EncoderDecoderConfig(
        vocab_size=V,
        d_model=M,
        n_heads=H,
        d_ff=F,
        n_encoder_layers=L,
        n_decoder_layers=L + 1,
        residual=PreNorm() if norm_first else PostNorm(),
        activation=ReLU(),
        positions=Sinusoidal(),
        scaled_embedding=True,
        share_embeddings=True,
    )
    model = config.build().double()
    peers.copy_into(model, reference.mapped(peers.weights(reference)))
    source, target, lengths = random_ids(B, S), random_ids(B, T), torch.tensor([S, 3])
    assert_agree(
        model,
        model(source, target, source_mask=padding(lengths)),
        reference(source, target, lengths),
        lambda: reference.mapped(peers.gradients(reference)),
        assert_close,
    )
