"""With the same weights, the same outputs and the same gradients as the models of transformers, timm and torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from clearhead.layers import GELU, LayerNorm, PostNorm, PreNorm, ReLU, RMSNorm, SwiGLU
from clearhead.masks import padding
from clearhead.models import (
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    Mean,
    VisionConfig,
)
from clearhead.positions import Learned, Rotary, Sinusoidal
from tests.models import peers

B, T, S, V, L, H, M, F = 2, 11, 7, 31, 2, 3, 18, 23


@pytest.fixture
def transformers():
    return peers.import_transformers()


def shaken(model: nn.Module) -> nn.Module:
    """Every weight away from its start (zero biases and unit norms would hide a swap), in float64, for evaluation."""
    torch.manual_seed(13)
    model = model.double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


def assert_agree(ours: nn.Module, got, wanted, gradients, assert_close, factor=3000):
    """Outputs, then the gradients of one random linear function of them; `gradients` maps the peer's to our names."""
    assert_close(got, wanted, factor)
    direction = torch.randn_like(wanted)
    (got * direction).sum().backward()
    (wanted * direction).sum().backward()
    expected = gradients()
    names = {name for name, _ in ours.named_parameters()}
    assert names == set(expected), "a parameter is compared with nothing"
    for name, weight in ours.named_parameters():
        assert weight.grad is not None, name
        assert_close(weight.grad, expected[name], factor)


def random_ids(*shape, low=1):
    return torch.randint(low, V, shape)


def test_gpt2(transformers, assert_close):
    peer = shaken(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=V, n_positions=13, n_embd=M, n_layer=L, n_head=H, n_inner=F)
        )
    )
    config = DecoderConfig(
        vocab_size=V,
        max_len=13,
        d_model=M,
        n_layers=L,
        n_heads=H,
        d_ff=F,
        activation=GELU(tanh=True),
        positions=Learned(max_len=13),
    )
    ours = config.build().double().eval()
    peers.copy_into(ours, peers.from_gpt2(peers.weights(peer), L))
    ids = random_ids(B, T, low=0)
    assert_agree(ours, ours(ids), peer(ids).logits, lambda: peers.from_gpt2(peers.gradients(peer), L), assert_close)


def test_bert_with_padding(transformers, assert_close):
    peer = shaken(
        transformers.BertModel(
            transformers.BertConfig(
                vocab_size=V,
                max_position_embeddings=13,
                hidden_size=M,
                num_hidden_layers=L,
                num_attention_heads=H,
                intermediate_size=F,
            ),
            add_pooling_layer=False,
        )
    )
    config = EncoderConfig(
        vocab_size=V,
        max_len=13,
        d_model=M,
        n_layers=L,
        n_heads=H,
        d_ff=F,
        norm=LayerNorm(eps=1e-12),
        residual=PostNorm(),
        activation=GELU(),
        positions=Learned(max_len=13),
        embedding_norm=True,
    )
    ours = config.build().double().eval()
    peers.copy_into(ours, peers.from_bert(peers.weights(peer), L, fold=True))
    ids, lengths = random_ids(B, T), torch.tensor([T, 5])
    real = torch.arange(T) < lengths[:, None]
    wanted = peer(ids, attention_mask=real.long()).last_hidden_state[real]
    got = ours(ids, mask=padding(lengths))[real]
    assert_agree(ours, got, wanted, lambda: peers.from_bert(peers.gradients(peer), L, fold=False), assert_close)


def vision_config(**changes):
    sizes = {"image_size": (6, 9), "patch_size": 3, "n_channels": 2, "n_classes": 5}
    blocks = {"d_model": M, "n_layers": L, "n_heads": H, "d_ff": F, "activation": GELU()}
    return VisionConfig(**(sizes | blocks | changes))


def test_vit_of_transformers(transformers, assert_close):
    peer = shaken(
        transformers.ViTForImageClassification(
            transformers.ViTConfig(
                image_size=(6, 9),
                patch_size=3,
                num_channels=2,
                hidden_size=M,
                num_hidden_layers=L,
                num_attention_heads=H,
                intermediate_size=F,
                num_labels=5,
            )
        )
    )
    ours = vision_config(norm=LayerNorm(eps=1e-12)).build().double().eval()
    peers.copy_into(ours, peers.from_vit(peers.weights(peer), L))
    images = torch.randn(B, 2, 6, 9, dtype=torch.float64)
    assert_agree(
        ours,
        ours(images),
        peer(images).logits,
        lambda: peers.from_vit(peers.gradients(peer), L),
        assert_close,
    )


@pytest.mark.parametrize("pooling", ["token", "avg"])
def test_vit_of_timm(pooling, assert_close):
    timm = peers.import_timm()
    peer = shaken(
        timm.models.vision_transformer.VisionTransformer(
            img_size=(6, 9),
            patch_size=3,
            in_chans=2,
            num_classes=5,
            embed_dim=M,
            depth=L,
            num_heads=H,
            mlp_ratio=F / M + 1e-9,
            global_pool=pooling,
            class_token=pooling == "token",
            fc_norm=False,  # the norm comes before the mean, not after it
        )
    )
    changes = {} if pooling == "token" else {"pooling": Mean()}
    ours = vision_config(norm=LayerNorm(eps=1e-6), **changes).build().double().eval()
    peers.copy_into(ours, peers.from_timm(peers.weights(peer), L))
    images = torch.randn(B, 2, 6, 9, dtype=torch.float64)
    assert_agree(ours, ours(images), peer(images), lambda: peers.from_timm(peers.gradients(peer), L), assert_close)


def test_llama(transformers, assert_close):
    """RMSNorm, SwiGLU, rotary positions, grouped-query heads, no biases, an output matrix of its own."""
    peer = shaken(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=V,
                hidden_size=M,
                intermediate_size=F,
                num_hidden_layers=L,
                num_attention_heads=H,
                num_key_value_heads=1,
                max_position_embeddings=13,
                rms_norm_eps=1e-6,
                tie_word_embeddings=False,
            )
        )
    )
    config = DecoderConfig(
        vocab_size=V,
        d_model=M,
        n_layers=L,
        n_heads=H,
        n_kv_heads=1,
        d_ff=F,
        bias=False,
        norm=RMSNorm(eps=1e-6),
        residual=PreNorm(),
        activation=SwiGLU(),
        positions=Rotary(),
        tied=False,
    )
    ours = config.build().double().eval()
    peers.copy_into(ours, peers.from_llama(peers.weights(peer), L))
    ids = random_ids(B, T, low=0)
    # The peer computes its angles, and its norms, in float32 whatever the model's dtype: the comparison is as exact
    # as that.
    factor = 100 * torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
    assert_agree(
        ours,
        ours(ids),
        peer(ids).logits,
        lambda: peers.from_llama(peers.gradients(peer), L),
        assert_close,
        factor,
    )


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
        ours = {"encoder.embedding.weight": tensors["shared.weight"]}
        return ours | peers.from_torch(inner, L, "encoder") | peers.from_torch(inner, L + 1, "decoder")


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_torch_transformer(norm_first, assert_close):
    # In training mode torch takes its plain path; the fused one of evaluation has other edge cases under padding.
    peer = shaken(TorchTransformer(norm_first=norm_first)).train()
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
    ours = config.build().double()
    peers.copy_into(ours, peer.mapped(peers.weights(peer)))
    source, target, lengths = random_ids(B, S), random_ids(B, T), torch.tensor([S, 3])
    assert_agree(
        ours,
        ours(source, target, source_mask=padding(lengths)),
        peer(source, target, lengths),
        lambda: peer.mapped(peers.gradients(peer)),
        assert_close,
    )
