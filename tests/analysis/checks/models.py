"""Small correct models: one of each kind of clearhead and of transformers."""

from __future__ import annotations

from clearhead.masks import blocks, causal, every, per_head, window
from clearhead.models import (
    AutoencoderConfig,
    ConvNetConfig,
    CTCEncoderConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    LogisticRegressionConfig,
    MeanPooling,
    RecurrentConfig,
    RecurrentSeq2SeqConfig,
    VisionConfig,
)
from clearhead.models.baselines.recurrent import GRU, Classify
from clearhead.models.baselines.recurrent_seq2seq import BeforeStep
from clearhead.nn import MultiHeadAttention
from clearhead.nn.mel import Mel
from clearhead.nn.positions import ALiBi, LearnedPositions, NoPE, RelativeBias, Rotary, Sinusoidal

TEXT = {
    "vocab_size": 31,
    "max_len": 23,
    "d_model": 14,
    "n_heads": 6,
    "n_kv_heads": 2,
    "d_head": 4,
    "d_ff": 19,
    "dropout": 0.1,
}
PICTURE = {
    "image_size": (14, 21),
    "patch_size": 7,
    "n_classes": 5,
    "d_model": 12,
    "n_heads": 3,
    "n_layers": 2,
}

CLEARHEAD = {
    "encoder, sinusoidal": EncoderConfig(**TEXT, n_layers=2, positions=Sinusoidal()),
    "encoder, alibi": EncoderConfig(**TEXT, n_layers=2, positions=ALiBi()),
    "encoder, no positions": EncoderConfig(**TEXT, n_layers=2, positions=NoPE()),
    "decoder, learned": DecoderConfig(**TEXT, n_layers=2, positions=LearnedPositions(max_len=23)),
    "decoder, rotary": DecoderConfig(**TEXT, n_layers=2, positions=Rotary(partial_rotary_factor=0.5)),
    "decoder, sparse": DecoderConfig(**TEXT, n_layers=2, mask=causal() & (window(2, 0) | every(5))),
    "decoder, mask per head": DecoderConfig(
        **TEXT, n_layers=2, mask=causal() & per_head(window(2, 0), every(5), repeat=3)
    ),
    "encoder-decoder, relative": EncoderDecoderConfig(
        **TEXT, n_encoder_layers=2, n_decoder_layers=2, positions=RelativeBias(n_buckets=6, max_distance=11)
    ),
    "vision, cls": VisionConfig(**PICTURE),
    "vision, mean": VisionConfig(**PICTURE, pooling=MeanPooling()),
    "speech": CTCEncoderConfig(
        d_model=12, n_heads=3, n_layers=2, n_symbols=5, mel=Mel(n_mels=5), mask=causal() & window(3, 0)
    ),
    "speech, blocks": CTCEncoderConfig(
        d_model=12, n_heads=3, n_layers=2, n_symbols=5, mel=Mel(n_mels=5), mask=(causal() | blocks(3)) & window(4, 2)
    ),
    "recurrent": RecurrentConfig(vocab_size=31, d_model=13, n_layers=2, dropout=0.1),
    "recurrent, both ways": RecurrentConfig(
        vocab_size=31, d_model=13, cell=GRU(), bidirectional=True, task=Classify(5)
    ),
    "recurrent pair": RecurrentSeq2SeqConfig(vocab_size=31, source_vocab_size=29, d_model=13),
    "recurrent pair, before": RecurrentSeq2SeqConfig(vocab_size=31, d_model=13, attention=BeforeStep()),
    "convnet": ConvNetConfig(),
    "logistic regression": LogisticRegressionConfig(n_features=7, n_classes=3),
    "autoencoder": AutoencoderConfig(n_features=17, d_latent=3),
}


def clearhead_model(name):
    if name == "attention":
        return MultiHeadAttention(12, 3)
    return CLEARHEAD[name].build()


def peer(name):
    import transformers as hf

    hf.logging.set_verbosity_error()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 12, "intermediate_size": 19}
    text = sizes | {"vocab_size": 31, "max_position_embeddings": 37}
    if name == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=31, n_positions=37, n_embd=12, n_layer=2, n_head=3))
    if name == "bert":
        return hf.BertModel(hf.BertConfig(**text))
    if name == "roberta":
        return hf.RobertaModel(hf.RobertaConfig(**text))
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**text, num_key_value_heads=3))
    if name == "mistral, window":
        return hf.MistralForCausalLM(hf.MistralConfig(**text, num_key_value_heads=1, sliding_window=4))
    if name == "gemma2, declared scale":
        # The declared scale is that of all heads together, which would be a bug in other models.
        return hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**text, num_key_value_heads=1, head_dim=4, query_pre_attn_scalar=12, sliding_window=5)
        )
    if name == "granite, declared scale":
        return hf.GraniteForCausalLM(hf.GraniteConfig(**text, num_key_value_heads=3, attention_multiplier=1 / 12))
    if name == "t5":
        sizes = {"d_model": 12, "d_kv": 4, "d_ff": 19, "num_layers": 2, "num_heads": 3}
        return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=31, **sizes, decoder_start_token_id=0))
    if name == "bart":
        sizes = {"encoder_ffn_dim": 19, "decoder_ffn_dim": 17, "encoder_layers": 2, "decoder_layers": 2}
        heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
        return hf.BartForConditionalGeneration(
            hf.BartConfig(vocab_size=31, d_model=12, **sizes, **heads, max_position_embeddings=37)
        )
    assert name == "vit"
    return hf.ViTModel(hf.ViTConfig(**sizes, image_size=16, patch_size=8))


SCALED = ("gemma2, declared scale", "granite, declared scale")
PEERS = ("gpt2", "bert", "roberta", "llama", "mistral, window", *SCALED, "t5", "bart", "vit")
