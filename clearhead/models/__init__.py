"""Models, each built from a configuration: `Model(config)` or `config.build()`.

Transformers (`Encoder`, `Decoder`, `EncoderDecoder`, `VisionTransformer`, `CTCEncoder`, `DualEncoder`), presets of
well-known ones, and baselines. `save_checkpoint` and `load_checkpoint` store a model in a folder."""

from __future__ import annotations

from clearhead.config import Config
from clearhead.models.baselines.convnet import ConvNet, ConvNetConfig
from clearhead.models.baselines.linear import (
    Autoencoder,
    AutoencoderConfig,
    LogisticRegression,
    LogisticRegressionConfig,
)
from clearhead.models.baselines.recurrent import Recurrent, RecurrentCache, RecurrentConfig
from clearhead.models.baselines.recurrent_seq2seq import RecurrentSeq2Seq, RecurrentSeq2SeqConfig
from clearhead.models.decoder import Decoder, DecoderConfig
from clearhead.models.dual_encoder import DualEncoder, DualEncoderConfig
from clearhead.models.encoder import Encoder, EncoderConfig
from clearhead.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
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
from clearhead.models.speech import AudioEncoder, AudioEncoderConfig, CTCEncoder, CTCEncoderConfig, StreamingSpec
from clearhead.models.storage import load_checkpoint, save_checkpoint
from clearhead.models.vision import (
    AttentionPooling,
    ClsMeanPooling,
    ClsPooling,
    DistillationPooling,
    MeanPooling,
    VisionConfig,
    VisionTransformer,
)
from clearhead.models.waveform import WaveformEncoder, WaveformEncoderConfig

__all__ = [
    "PRESETS",
    "AttentionPooling",
    "AudioEncoder",
    "AudioEncoderConfig",
    "Autoencoder",
    "AutoencoderConfig",
    "CTCEncoder",
    "CTCEncoderConfig",
    "ClsMeanPooling",
    "ClsPooling",
    "Config",
    "ConvNet",
    "ConvNetConfig",
    "Decoder",
    "DecoderConfig",
    "DistillationPooling",
    "DualEncoder",
    "DualEncoderConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "LogisticRegression",
    "LogisticRegressionConfig",
    "MeanPooling",
    "Recurrent",
    "RecurrentCache",
    "RecurrentConfig",
    "RecurrentSeq2Seq",
    "RecurrentSeq2SeqConfig",
    "StreamingSpec",
    "VisionConfig",
    "VisionTransformer",
    "WaveformEncoder",
    "WaveformEncoderConfig",
    "bert_base",
    "gpt2",
    "gpt2_large",
    "gpt2_medium",
    "gpt2_xl",
    "load_checkpoint",
    "save_checkpoint",
    "tiny_decoder",
    "tiny_encoder",
    "tiny_encoder_decoder",
    "tiny_speech",
    "tiny_vision",
    "transformer_base",
    "transformer_big",
    "vit_base",
    "vit_small",
    "vit_tiny",
]
