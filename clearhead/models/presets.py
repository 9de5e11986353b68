"""Named configurations: models of well-known papers, and tiny models for tests and first experiments.

Each preset is a function that returns a configuration; parameters are allocated by `build()`. Sizes are those of the
papers (or of the released checkpoints, if they differ); change a field with `gpt2().replace(dropout=0.0)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from clearhead._core.keywords import CONVENTIONAL
from clearhead.config import Config
from clearhead.errors import KeywordError
from clearhead.models.decoder import DecoderConfig
from clearhead.models.encoder import EncoderConfig
from clearhead.models.encoder_decoder import EncoderDecoderConfig
from clearhead.models.speech import CTCEncoderConfig
from clearhead.models.vision import VisionConfig
from clearhead.nn import GELU, DepthScaled, LayerNorm, PostNorm, PreNorm, ReLU, TruncatedNormal, Xavier
from clearhead.nn.positions import LearnedPositions, Sinusoidal

C = TypeVar("C", bound=Config)


def _preset(function: Callable[[], C]) -> Callable[[], C]:
    """Decorate a preset: a keyword raises an error that names `replace`."""
    name = function.__name__

    @functools.wraps(function)
    def wrapper(**changes: object) -> C:
        for keyword in changes:
            field = CONVENTIONAL.get(keyword, (keyword,))[0].partition("=")[0]
            raise KeywordError(f"{name} has no keyword {keyword!r}; use {name}().replace({field}=…)")
        return function()

    return wrapper


@_preset
def transformer_base() -> EncoderDecoderConfig:
    """Return the configuration of the original base Transformer (Vaswani et al., 2017): English to German."""
    return EncoderDecoderConfig(
        vocab_size=37_000, d_model=512, d_ff=2048, n_heads=8, n_encoder_layers=6, n_decoder_layers=6,
        dropout=0.1, residual=PostNorm(), activation=ReLU(), positions=Sinusoidal(),
        scaled_embedding=True, tie_embeddings=True, share_embeddings=True, init=Xavier(),
    )  # fmt: skip


@_preset
def transformer_big() -> EncoderDecoderConfig:
    """Return the configuration of the original big Transformer: twice the width, and more dropout."""
    return transformer_base().replace(d_model=1024, d_ff=4096, n_heads=16, dropout=0.3)


@_preset
def gpt2() -> DecoderConfig:
    """Return the configuration of GPT-2 small (Radford et al., 2019): 124 million parameters."""
    return DecoderConfig(
        vocab_size=50_257, max_len=1024, d_model=768, n_layers=12, n_heads=12,
        dropout=0.1, attention_dropout=0.1, norm=LayerNorm(eps=1e-5), residual=PreNorm(), activation=GELU(tanh=True),
        positions=LearnedPositions(max_len=1024), tie_embeddings=True, init=DepthScaled(std=0.02),
    )  # fmt: skip


@_preset
def gpt2_medium() -> DecoderConfig:
    """Return the configuration of GPT-2 medium: 355 million parameters."""
    return gpt2().replace(d_model=1024, n_layers=24, n_heads=16)


@_preset
def gpt2_large() -> DecoderConfig:
    """Return the configuration of GPT-2 large: 774 million parameters."""
    return gpt2().replace(d_model=1280, n_layers=36, n_heads=20)


@_preset
def gpt2_xl() -> DecoderConfig:
    """Return the configuration of GPT-2 XL: 1.56 billion parameters."""
    return gpt2().replace(d_model=1600, n_layers=48, n_heads=25)


@_preset
def bert_base() -> EncoderConfig:
    """Return the configuration of BERT base (Devlin et al., 2019), without segment embeddings."""
    return EncoderConfig(
        vocab_size=30_522, max_len=512, d_model=768, n_layers=12, n_heads=12,
        dropout=0.1, attention_dropout=0.1, norm=LayerNorm(eps=1e-12), residual=PostNorm(), activation=GELU(),
        positions=LearnedPositions(max_len=512), embedding_norm=True, init=TruncatedNormal(std=0.02),
    )  # fmt: skip


@_preset
def vit_base() -> VisionConfig:
    """Return the configuration of ViT base (Dosovitskiy et al., 2021): patches of 16, images of 224, 1,000 classes."""
    return VisionConfig(
        image_size=(224, 224), patch_size=16, n_classes=1000, d_model=768, n_layers=12, n_heads=12,
        norm=LayerNorm(eps=1e-6), residual=PreNorm(), activation=GELU(), init=TruncatedNormal(std=0.02),
    )  # fmt: skip


@_preset
def vit_small() -> VisionConfig:
    """Return the configuration of ViT small (from DeiT): patches of 16, images of 224, 1,000 classes."""
    return vit_base().replace(d_model=384, n_heads=6)


@_preset
def vit_tiny() -> VisionConfig:
    """Return the configuration of ViT tiny (from DeiT): patches of 16, images of 224, 1,000 classes."""
    return vit_base().replace(d_model=192, n_heads=3)


@_preset
def tiny_encoder() -> EncoderConfig:
    """Return the configuration of a small encoder for tests and first experiments."""
    return EncoderConfig(vocab_size=101, max_len=64, d_model=32, n_layers=2, n_heads=4, positions=Sinusoidal())


@_preset
def tiny_decoder() -> DecoderConfig:
    """Return the configuration of a small decoder for tests and first experiments."""
    return DecoderConfig(
        vocab_size=101, max_len=64, d_model=32, n_layers=2, n_heads=4, positions=LearnedPositions(max_len=64)
    )


@_preset
def tiny_encoder_decoder() -> EncoderDecoderConfig:
    """Return the configuration of a small encoder-decoder for tests and first experiments."""
    return EncoderDecoderConfig(
        vocab_size=101, max_len=64, d_model=32, n_heads=4, n_encoder_layers=2, n_decoder_layers=2,
        scaled_embedding=True, share_embeddings=True,
    )  # fmt: skip


@_preset
def tiny_vision() -> VisionConfig:
    """Return the configuration of a small vision Transformer for 32×32 grayscale digits."""
    return VisionConfig(
        image_size=(32, 32), patch_size=8, n_channels=1, n_classes=10, d_model=32, n_layers=2, n_heads=4
    )


@_preset
def tiny_speech() -> CTCEncoderConfig:
    """Return the configuration of a small streaming speech encoder with a left context of 64 encoder frames."""
    return CTCEncoderConfig(d_model=32, n_layers=2, n_heads=4)


_BY_NAME = (gpt2, gpt2_medium, gpt2_large, gpt2_xl, bert_base, vit_tiny, vit_small, vit_base)
_TINY = (tiny_encoder, tiny_decoder, tiny_encoder_decoder, tiny_vision, tiny_speech)
PRESETS: dict[str, Callable[[], Config]] = {"base": transformer_base, "big": transformer_big}
PRESETS |= {preset.__name__.replace("_", "-"): preset for preset in (*_BY_NAME, *_TINY)}
