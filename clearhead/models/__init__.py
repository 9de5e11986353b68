"""Whole models, each built from a configuration: `Model(config)`, or `config.build()`.

The Transformers (`Encoder`, `Decoder`, `EncoderDecoder`, `VisionTransformer`, `SpeechEncoder`, `DualEncoder`), the
presets of well-known ones, and the baselines that they have to beat. `save` and `load` keep one in a folder."""

from __future__ import annotations

from clearhead.config import Config
from clearhead.models.convnet import ConvNet, ConvNetConfig
from clearhead.models.decoder import Decoder, DecoderConfig
from clearhead.models.dual_encoder import DualEncoder, DualEncoderConfig
from clearhead.models.encoder import Encoder, EncoderConfig
from clearhead.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from clearhead.models.linear import Autoencoder, AutoencoderConfig, LogisticRegression, LogisticRegressionConfig
from clearhead.models.presets import (
    PRESETS,
    bert_base,
    gpt2,
    gpt2_large,
    gpt2_medium,
    gpt2_xl,
    tiny_decoder,
    tiny_encoder,
    tiny_encoder_decoder,
    tiny_speech,
    tiny_vision,
    transformer_base,
    transformer_big,
    vit_base,
    vit_small,
    vit_tiny,
)
from clearhead.models.recurrent import Recurrent, RecurrentCache, RecurrentConfig
from clearhead.models.recurrent_seq2seq import RecurrentSeq2Seq, RecurrentSeq2SeqConfig
from clearhead.models.speech import Pace, SoundConfig, SoundEncoder, SpeechConfig, SpeechEncoder
from clearhead.models.storage import load, save
from clearhead.models.vision import Cls, ClsAndMean, Distilled, Mean, VisionConfig, VisionTransformer

__all__ = [
    "PRESETS", "Autoencoder", "AutoencoderConfig", "Cls", "ClsAndMean", "Config", "ConvNet", "ConvNetConfig", "Decoder",
    "DecoderConfig", "Distilled", "DualEncoder", "DualEncoderConfig", "Encoder", "EncoderConfig", "EncoderDecoder",
    "EncoderDecoderConfig", "LogisticRegression", "LogisticRegressionConfig", "Mean", "Pace", "Recurrent",
    "RecurrentCache", "RecurrentConfig", "RecurrentSeq2Seq", "RecurrentSeq2SeqConfig", "SoundConfig", "SoundEncoder",
    "SpeechConfig", "SpeechEncoder", "VisionConfig", "VisionTransformer", "bert_base", "gpt2", "gpt2_large",
    "gpt2_medium", "gpt2_xl", "load", "save", "tiny_decoder", "tiny_encoder", "tiny_encoder_decoder", "tiny_speech",
    "tiny_vision", "transformer_base", "transformer_big", "vit_base", "vit_small", "vit_tiny",
]  # fmt: skip
