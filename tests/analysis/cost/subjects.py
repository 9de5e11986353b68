"""Models of every kind with distinct primes as sizes, so that swapped sizes and missing factors are detected."""

from __future__ import annotations

from clearhead.masks import causal, window
from clearhead.models import DecoderConfig, EncoderConfig, EncoderDecoderConfig, MeanPooling, VisionConfig
from clearhead.models.baselines.convnet import ConvHead, ConvNetConfig, PointwiseHead
from clearhead.models.baselines.linear import AutoencoderConfig, LogisticRegressionConfig
from clearhead.models.baselines.recurrent import GRU, LSTM, RNN, Classify, NextToken, RecurrentConfig
from clearhead.models.baselines.recurrent_seq2seq import BeforeStep, RecurrentSeq2SeqConfig
from clearhead.nn import GELU, LayerNorm, PostNorm, ReLU, RMSNorm, SwiGLU
from clearhead.nn.positions import LearnedPositions, NoPE, Rotary

TEXT = {"vocab_size": 101, "d_model": 22, "n_heads": 11, "d_ff": 37, "max_len": 41}

TRANSFORMERS = {
    "encoder": EncoderConfig(**TEXT, n_layers=3),
    "encoder, post-norm, embedding norm": EncoderConfig(
        **TEXT,
        n_layers=2,
        residual=PostNorm(),
        embedding_norm=True,
        activation=ReLU(),
        positions=LearnedPositions(max_len=41),
    ),
    "encoder, window": EncoderConfig(**TEXT, n_layers=2, mask=window(3, 1), positions=NoPE()),
    "decoder": DecoderConfig(**TEXT, n_layers=3, scaled_embedding=True),
    "decoder, untied, no bias, rms": DecoderConfig(
        **TEXT,
        n_layers=2,
        tie_embeddings=False,
        bias=False,
        norm=RMSNorm(),
        activation=SwiGLU(),
        positions=NoPE(),
    ),
    "decoder, grouped, rotary, head width": DecoderConfig(
        **TEXT | {"n_heads": 6},
        n_layers=2,
        n_kv_heads=2,
        d_head=14,
        positions=Rotary(),
        norm=LayerNorm(bias=False),
    ),
    "decoder, multi-query": DecoderConfig(**TEXT, n_layers=2, n_kv_heads=1, activation=GELU(tanh=True)),
    "decoder, sparse": DecoderConfig(**TEXT, n_layers=2, mask=causal() & window(5, 0)),
    "decoder, cross": DecoderConfig(**TEXT, n_layers=2, cross_attention=True),
    "encoder-decoder": EncoderDecoderConfig(
        **TEXT,
        n_encoder_layers=2,
        n_decoder_layers=3,
        share_embeddings=True,
        residual=PostNorm(),
        activation=ReLU(),
    ),
    "encoder-decoder, two vocabularies": EncoderDecoderConfig(
        **TEXT, n_encoder_layers=3, n_decoder_layers=2, source_vocab_size=89, tie_embeddings=False
    ),
    "vision": VisionConfig(image_size=(15, 20), patch_size=5, n_classes=7, d_model=22, n_layers=2, n_heads=11, d_ff=37),
    "vision, mean": VisionConfig(
        image_size=(21, 14),
        patch_size=7,
        n_classes=13,
        d_model=22,
        n_layers=3,
        n_heads=2,
        n_channels=1,
        pooling=MeanPooling(),
    ),
}

BASELINES = {
    "convnet": ConvNetConfig(),
    "convnet, convolution": ConvNetConfig(filters=(7, 13), head=ConvHead(), n_classes=5),
    "convnet, pointwise": ConvNetConfig(
        filters=(7,), kernels=(3,), paddings=(1,), pools=(2,), head=PointwiseHead(), n_channels=3
    ),
    "rnn": RecurrentConfig(vocab_size=101, d_model=23, n_layers=2, cell=RNN()),
    "gru, tied": RecurrentConfig(
        vocab_size=101, d_model=23, n_layers=1, cell=GRU(), task=NextToken(tie_embeddings=True)
    ),
    "lstm, both ways": RecurrentConfig(
        vocab_size=101, d_model=23, n_layers=2, cell=LSTM(), task=Classify(5), bidirectional=True
    ),
    "seq2seq": RecurrentSeq2SeqConfig(vocab_size=101, source_vocab_size=89, d_model=23, d_attention=13, cell=GRU()),
    "seq2seq, before": RecurrentSeq2SeqConfig(
        vocab_size=101, d_model=23, cell=RNN(), attention=BeforeStep(), n_layers=2
    ),
    "logistic, two": LogisticRegressionConfig(n_features=31),
    "logistic": LogisticRegressionConfig(n_features=31, n_classes=5, bias=False),
    "autoencoder": AutoencoderConfig(n_features=31, d_latent=3, hidden=(17, 11)),
    "autoencoder, gelu": AutoencoderConfig(n_features=31, d_latent=3, hidden=(17,), activation=GELU()),
}

SUBJECTS = TRANSFORMERS | BASELINES


def has_tokens(config) -> bool:
    return hasattr(config, "vocab_size") or hasattr(config, "n_symbols")  # text or speech


def has_source(config) -> bool:
    return isinstance(config, (EncoderDecoderConfig, RecurrentSeq2SeqConfig)) or getattr(
        config, "cross_attention", False
    )


def token_counts(config, source: int, target: int):
    """Return `tokens` of `cost` for a model: None without tokens, (source, target) if it reads a source."""
    if not has_tokens(config):
        return None
    return (source, target) if has_source(config) else target
