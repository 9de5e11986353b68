"""Families of audio encoders.

- wav2vec 2.0 (Baevski et al., 2020): convolutions over the waveform, positions from a convolution, and a head for CTC.
"""

from __future__ import annotations

from clearhead._core.validation import short_repr
from clearhead.errors import StorageError
from clearhead.hub.families.common import ACTIVATIONS, activation, eps
from clearhead.hub.family import ConfigReader, Converter, Family, Field, Fields, KeyValues
from clearhead.hub.weight_map import WeightMap, block
from clearhead.models.waveform import WaveformEncoderConfig
from clearhead.nn import LayerNorm, PostNorm, PreNorm

_POSITIONS = "wav2vec2.encoder.pos_conv_embed.conv"
_CONVOLUTIONS = {
    "conv_dim": "conv_widths",
    "conv_kernel": "conv_kernels",
    "conv_stride": "conv_strides",
}
_CONV_FIELDS: Fields = {
    key: Field(name, default, tuple, list)
    for (key, name), default in zip(
        _CONVOLUTIONS.items(), ((512,) * 7, (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)), strict=True
    )
}


def _read(keys: ConfigReader) -> KeyValues:
    is_pre_norm = keys("do_stable_layer_norm", False)
    n_layers = len(keys("conv_dim", (512,) * 7))
    keys.only("num_feat_extract_layers", n_layers)
    keys.expect(add_adapter=False, adapter_attn_dim=None)
    n_symbols, blank = keys("vocab_size", 32), keys("pad_token_id", 0)
    if not isinstance(blank, int):
        raise StorageError(f"pad_token_id, the blank of CTC, is {short_repr(blank)}; expected an id")
    has_head = "lm_head.weight" in keys.shapes
    return {
        "residual": PreNorm() if is_pre_norm else PostNorm(),
        "embedding_norm": not is_pre_norm,
        "n_symbols": n_symbols if has_head else 0,
        "blank": blank if has_head else 0,
    }


def _write(config: WaveformEncoderConfig) -> KeyValues:
    if config.embedding_norm is not isinstance(config.residual, PostNorm):
        raise StorageError("a norm of the embeddings belongs to post-norm blocks, and only to them")
    return {
        "do_stable_layer_norm": isinstance(config.residual, PreNorm),
        "num_feat_extract_layers": len(config.conv_widths),
        **({"vocab_size": config.n_symbols} if config.n_symbols else {}),
        "pad_token_id": config.blank,
        # Without these, transformers expects the vector of masked frames, which only training uses.
        "mask_time_prob": 0.0,
        "mask_feature_prob": 0.0,
    }


def _rows(config: WaveformEncoderConfig) -> tuple[WeightMap, ...]:
    norm = "embedding_norm" if config.embedding_norm else "norm"
    layer = "wav2vec2.encoder.layers.#"
    return (
        WeightMap("wav2vec2.feature_extractor.conv_layers.#.conv.*", "embedding.convolutions.#.*"),
        WeightMap("wav2vec2.feature_extractor.conv_layers.#.layer_norm.*", "embedding.conv_norms.#.*"),
        WeightMap("wav2vec2.feature_projection.layer_norm.*", "embedding.norm.*"),
        WeightMap("wav2vec2.feature_projection.projection.*", "embedding.projection.*"),
        WeightMap(f"{_POSITIONS}.parametrizations.weight.original0", "conv_positions.norm"),
        WeightMap(f"{_POSITIONS}.parametrizations.weight.original1", "conv_positions.direction"),
        WeightMap(f"{_POSITIONS}.bias", "conv_positions.bias"),
        WeightMap("wav2vec2.encoder.layer_norm.*", f"{norm}.*"),
        *block(layer, q="attention.q_proj", k="attention.k_proj", v="attention.v_proj", o="attention.out_proj"),
        *block(layer, up="feed_forward.intermediate_dense", down="feed_forward.output_dense"),
        *block(layer, norm1="layer_norm", norm2="final_layer_norm"),
        WeightMap("lm_head.*", "head.*"),
    )


WAV2VEC2 = Family(
    name="wav2vec2",
    architecture=lambda config: "Wav2Vec2ForCTC" if config.n_symbols else "Wav2Vec2Model",
    kind=WaveformEncoderConfig,
    fields={
        "hidden_size": ("d_model", 768),
        "num_hidden_layers": ("n_layers", 12),
        "num_attention_heads": ("n_heads", 12),
        "intermediate_size": ("d_ff", 3072),
        "hidden_act": activation("gelu"),
        "layer_norm_eps": eps(LayerNorm, 1e-5),
        "hidden_dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "activation_dropout": ("feed_forward_dropout", 0.1),
        **_CONV_FIELDS,
        "conv_bias": ("conv_bias", False),
        "feat_extract_norm": Field("conv_norm", "group", choices={"group": "group", "layer": "layer"}),
        "feat_extract_activation": Field("conv_activation", "gelu", choices=ACTIVATIONS),
        "num_conv_pos_embeddings": ("position_kernel", 128),
        "num_conv_pos_embedding_groups": ("position_groups", 16),
    },
    rows=_rows,
    converters=(Converter(_read, _write),),
    # Keys of training, of pre-training, and of other heads.
    ignored_keys=(
        *("adapter_kernel_size", "adapter_stride", "apply_spec_augment", "classifier_proj_size", "codevector_dim"),
        *("contrastive_logits_temperature", "ctc_loss_reduction", "ctc_zero_infinity", "diversity_loss_weight"),
        *("feat_extract_dropout", "feat_proj_dropout", "feat_quantizer_dropout", "final_dropout"),
        *("freeze_feat_extract_train", "hidden_dropout_prob", "layerdrop", "mask_*", "no_mask_*"),
        *("num_adapter_layers", "num_codevector*", "num_negatives", "output_hidden_size", "proj_codevector_dim"),
        *("tdnn_*", "use_weighted_layer_sum", "xvector_output_dim"),
    ),
    ignored_tensors=("wav2vec2.masked_spec_embed",),
    heads={
        "quantizer.*": "pre-training",
        "project_*": "pre-training",
        "dropout_features.*": "pre-training",
        "projector.*": "classification",
        "classifier.*": "classification",
    },
    prefix="wav2vec2.",
    aliases=(
        ("pos_conv_embed.conv.weight_g", "pos_conv_embed.conv.parametrizations.weight.original0"),
        ("pos_conv_embed.conv.weight_v", "pos_conv_embed.conv.parametrizations.weight.original1"),
    ),
)

AUDIO = (WAV2VEC2,)
