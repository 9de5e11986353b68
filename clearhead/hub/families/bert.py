"""Families of text encoders with the blocks of BERT: post-norm, learned positions, and segments except in DistilBERT.

- BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019), XLM-R (Conneau et al., 2020) and CamemBERT (Martin et al.,
  2020), whose layouts differ in the first position and in the heads.
- ALBERT (Lan et al., 2020): factorized embeddings, and one block that all layers share.
- ELECTRA (Clark et al., 2020): factorized embeddings; its discriminator of replaced tokens is not loaded.
- DistilBERT (Sanh et al., 2019): no segments and no pooler.
- DeBERTa-v3 (He et al., 2021): disentangled scores of contents and relative positions.
- MPNet (Song et al., 2020): no segments, and a relative position bias in addition to learned positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from clearhead._core.validation import short_repr
from clearhead.attention import Scaled
from clearhead.errors import StorageError
from clearhead.hub.families.common import SIZES, activation, eps
from clearhead.hub.families.heads import (
    CLASSIFICATION,
    architecture,
    head_rows,
    read_head,
    read_head_with_gelu,
    write_head,
)
from clearhead.hub.family import ConfigReader, Converter, Family, KeyValues
from clearhead.hub.weight_map import WeightMap, block
from clearhead.models import EncoderConfig
from clearhead.nn import GELU, LayerNorm, PostNorm, ReLU
from clearhead.nn.positions import Disentangled, LearnedPositions, RelativeBias

_OLDER = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


def _read_positions(keys: ConfigReader, *, after_padding: bool = False) -> KeyValues:
    """Return the learned positions. In RoBERTa they start after the id of padding."""
    skipped = keys("pad_token_id", 1) + 1 if after_padding else 0
    keys.expect(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    max_len = keys("max_position_embeddings") - skipped
    return {"max_len": max_len, "positions": LearnedPositions(max_len=max_len, skipped=skipped)}


def _write_positions(config: EncoderConfig, *, after_padding: bool = False) -> KeyValues:
    skipped = config.positions.skipped if isinstance(config.positions, LearnedPositions) else 0
    padding = {"pad_token_id": skipped - 1} if after_padding else {}
    return {**padding, "max_position_embeddings": config.max_len + skipped}


_POSITIONS = Converter(_read_positions, _write_positions)
_POSITIONS_AFTER_PADDING = Converter(
    partial(_read_positions, after_padding=True), partial(_write_positions, after_padding=True)
)
_HEAD = Converter(read_head, write_head)
_HEAD_WITH_GELU = Converter(read_head_with_gelu, write_head)

_LAYER = "encoder.layer.#"
_EMBEDDINGS = (
    WeightMap("embeddings.word_embeddings.weight", "embedding.weight"),
    WeightMap("embeddings.position_embeddings.weight", "positions.weight"),
    WeightMap("embeddings.token_type_embeddings.weight", "segments.weight"),
    WeightMap("embeddings.LayerNorm.*", "embedding_norm.*"),
)
_ROWS = (
    *_EMBEDDINGS,
    *block(_LAYER, q="attention.self.query", k="attention.self.key", v="attention.self.value"),
    *block(_LAYER, o="attention.output.dense", norm1="attention.output.LayerNorm"),
    *block(_LAYER, up="intermediate.dense", down="output.dense", norm2="output.LayerNorm"),
    WeightMap("pooler.dense.*", "pooler.*"),
)


def _rows_bert(config: EncoderConfig) -> tuple[WeightMap, ...]:
    transform = "cls.predictions.transform"
    return (*head_rows(config, f"{transform}.dense", f"{transform}.LayerNorm", "cls.predictions.bias"), *_ROWS)


def _rows_roberta(config: EncoderConfig) -> tuple[WeightMap, ...]:
    head = head_rows(config, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias", deep_classifier=True)
    return (*head, *_ROWS)


def _tied(output: str, bias: str = "") -> Callable[[EncoderConfig], KeyValues]:
    """Return the `copies` of a head for masked tokens: the embedding as its output matrix, and its bias.

    Args:
        output: Stored name of the output layer.
        bias: Stored name of the bias, if the output layer repeats it.
    """
    copies = {f"{output}.weight": "embeddings.word_embeddings.weight", **({f"{output}.bias": bias} if bias else {})}
    return lambda config: copies if config.head == "masked_lm" else {}


BERT = Family(
    name="bert",
    architecture=partial(architecture, prefix="Bert"),
    kind=EncoderConfig,
    fields=SIZES
    | {
        "type_vocab_size": ("n_segments", 2),
        "hidden_act": activation("gelu"),
        "layer_norm_eps": eps(LayerNorm, 1e-12),
        "hidden_dropout_prob": ("dropout", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    },
    defaults={"residual": PostNorm(), "embedding_norm": True},
    converters=(_POSITIONS, _HEAD),
    rows=_rows_bert,
    # Without effect on outputs.
    ignored_keys=("classifier_dropout", "directionality", "pooler_*", "tie_word_embeddings"),
    # Indices 0, 1, 2, … that older versions stored, and the output matrix, which is the embedding.
    ignored_tensors=("embeddings.position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    copies=_tied("cls.predictions.decoder", "cls.predictions.bias"),
    heads={
        "cls.predictions.*": "masked tokens",
        "cls.seq_relationship.*": "next-sentence prediction",
        "classifier.*": CLASSIFICATION,
        "qa_outputs.*": "question answering",
    },
    aliases=(("bert.", ""), *_OLDER),
)
ROBERTA = dataclasses.replace(
    BERT,
    name="roberta",
    architecture=partial(architecture, prefix="Roberta"),
    rows=_rows_roberta,
    converters=(_POSITIONS_AFTER_PADDING, _HEAD_WITH_GELU),
    ignored_tensors=("embeddings.position_ids", "lm_head.decoder.weight", "lm_head.decoder.bias"),
    copies=_tied("lm_head.decoder", "lm_head.bias"),
    heads={"lm_head.*": "masked tokens", "classifier.*": CLASSIFICATION, "qa_outputs.*": "question answering"},
    aliases=(("roberta.", ""), *_OLDER),
)
XLM_ROBERTA = dataclasses.replace(ROBERTA, name="xlm-roberta", architecture=partial(architecture, prefix="XLMRoberta"))
CAMEMBERT = dataclasses.replace(ROBERTA, name="camembert", architecture=partial(architecture, prefix="Camembert"))


_SHARED = "encoder.albert_layer_groups.0.albert_layers.0"
_MAPS = {"q": "query", "k": "key", "v": "value", "o": "dense", "norm1": "LayerNorm"}
_ROWS_SHARED = (
    *block(_SHARED, target="blocks.0", **{part: f"attention.{name}" for part, name in _MAPS.items()}),
    *block(_SHARED, target="blocks.0", up="ffn", down="ffn_output", norm2="full_layer_layer_norm"),
    WeightMap("encoder.embedding_hidden_mapping_in.*", "embedding_proj.*"),
    WeightMap("pooler.*", "pooler.*"),
    *_EMBEDDINGS,
)


def _rows_albert(config: EncoderConfig) -> tuple[WeightMap, ...]:
    return (*head_rows(config, "predictions.dense", "predictions.LayerNorm", "predictions.bias"), *_ROWS_SHARED)


ALBERT = dataclasses.replace(
    BERT,
    name="albert",
    architecture=partial(architecture, prefix="Albert"),
    fields=BERT.fields
    | {
        "embedding_size": "embedding_dim",
        "hidden_act": activation("gelu_new"),
        "hidden_dropout_prob": ("dropout", 0.0),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    },
    rows=_rows_albert,
    defaults=BERT.defaults | {"share_layers": True},
    required={"num_hidden_groups": 1, "inner_group_num": 1},
    # Unused keys of the first release.
    ignored_keys=(
        *("classifier_dropout_prob", "down_scale_factor", "gap_size", "layers_to_keep", "net_structure_type"),
        *("num_memory_blocks", "structure_type", "tie_word_embeddings"),
    ),
    ignored_tensors=("embeddings.position_ids", "predictions.decoder.weight", "predictions.decoder.bias"),
    copies=_tied("predictions.decoder", "predictions.bias"),
    heads={
        "predictions.*": "masked tokens",
        "sop_classifier.*": "sentence-order prediction",
        "classifier.*": CLASSIFICATION,
        "qa_outputs.*": "question answering",
    },
    aliases=(("albert.", ""), *_OLDER),
)


def _read_electra(keys: ConfigReader) -> KeyValues:
    """Return the width of the embeddings, if they are projected, and the head."""
    fields = read_head_with_gelu(keys)
    if fields.get("head") == "choice":
        keys.expect(summary_type="first", summary_use_proj=True, summary_activation="gelu")
        keys.expect(summary_proj_to_labels=False)
    width = keys("embedding_size", 128)
    return fields | {"embedding_dim": None if width == keys("hidden_size") else width}


def _write_electra(config: EncoderConfig) -> KeyValues:
    return write_head(config) | {"embedding_size": config.embedding_dim or config.d_model}


def _rows_electra(config: EncoderConfig) -> tuple[WeightMap, ...]:
    predictions = "generator_predictions"
    names = (f"{predictions}.dense", f"{predictions}.LayerNorm", "generator_lm_head.bias")
    return (
        *head_rows(config, *names, deep_classifier=True),
        WeightMap("sequence_summary.summary.*", "pooler.*"),
        WeightMap("embeddings_project.*", "embedding_proj.*"),
        *_ROWS,
    )


ELECTRA = dataclasses.replace(
    BERT,
    name="electra",
    architecture=partial(architecture, prefix="Electra"),
    rows=_rows_electra,
    defaults=BERT.defaults | {"pooler_activation": GELU()},
    converters=(_POSITIONS, Converter(_read_electra, _write_electra)),
    ignored_keys=("classifier_dropout", "summary_*", "tie_word_embeddings"),
    ignored_tensors=("embeddings.position_ids", "generator_lm_head.weight"),
    copies=_tied("generator_lm_head"),
    heads={
        "generator_*": "masked tokens",
        "discriminator_predictions.*": "replaced tokens",
        "classifier.*": CLASSIFICATION,
        "sequence_summary.*": "multiple choice",
        "qa_outputs.*": "question answering",
    },
    aliases=(("electra.", ""), *_OLDER),
)


def _rows_distilbert(config: EncoderConfig) -> tuple[WeightMap, ...]:
    layer = "transformer.layer.#"
    return (
        *head_rows(config, "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        WeightMap("pre_classifier.*", "pooler.*"),
        *_EMBEDDINGS,
        *block(layer, **{x: f"attention.{x}_lin" for x in "qkv"}, o="attention.out_lin", norm1="sa_layer_norm"),
        *block(layer, up="ffn.lin1", down="ffn.lin2", norm2="output_layer_norm"),
    )


DISTILBERT = dataclasses.replace(
    BERT,
    name="distilbert",
    architecture=partial(architecture, prefix="DistilBert"),
    fields={
        "vocab_size": "vocab_size",
        "dim": "d_model",
        "n_layers": "n_layers",
        "n_heads": "n_heads",
        "hidden_dim": "d_ff",
        "activation": activation("gelu"),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
    },
    defaults=BERT.defaults | {"norm": LayerNorm(eps=1e-12), "pooler_activation": ReLU()},
    rows=_rows_distilbert,
    # Dropout of heads in training, and how the table of positions was initialized.
    ignored_keys=("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_w*"),
    ignored_tensors=("embeddings.position_ids", "vocab_projector.weight"),
    copies=_tied("vocab_projector"),
    heads={
        "vocab_*": "masked tokens",
        "pre_classifier.*": CLASSIFICATION,
        "classifier.*": CLASSIFICATION,
        "qa_outputs.*": "question answering",
    },
    aliases=(("distilbert.", ""), *_OLDER),
)


def _read_mpnet(keys: ConfigReader) -> KeyValues:
    # transformers always computes 32 buckets, whatever the size of the table.
    buckets = keys.only("relative_attention_num_buckets", 32)
    return {"relative_positions": RelativeBias(n_buckets=buckets, max_distance=128)}


def _rows_mpnet(config: EncoderConfig) -> tuple[WeightMap, ...]:
    return (
        WeightMap("encoder.relative_attention_bias.weight", "relative_positions.weight"),
        *block(_LAYER, **{x: f"attention.attn.{x}" for x in "qkvo"}, norm1="attention.LayerNorm"),
        *_rows_roberta(config),
    )


MPNET = dataclasses.replace(
    ROBERTA,
    name="mpnet",
    architecture=partial(architecture, prefix="MPNet"),
    fields={key: field for key, field in BERT.fields.items() if key != "type_vocab_size"},
    converters=(*ROBERTA.converters, Converter(_read_mpnet, lambda config: {"relative_attention_num_buckets": 32})),
    rows=_rows_mpnet,
    aliases=(("mpnet.", ""), *_OLDER),
)


def _read_deberta(keys: ConfigReader) -> KeyValues:
    """Return the positions; other relative attention and the convolution of the largest models are rejected."""
    keys.expect(relative_attention=True, position_biased_input=False, share_att_key=True, norm_rel_ebd="layer_norm")
    keys.only("conv_kernel_size", 0, None)
    keys.only("embedding_size", keys("hidden_size"))
    keys.only("attention_head_size", keys("hidden_size") // keys("num_attention_heads"))
    kinds = keys("pos_att_type")
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if sorted(kinds) != ["c2p", "p2c"]:
        raise StorageError(f"pos_att_type is {short_repr(kinds)}; expected 'p2c' and 'c2p'")
    length = keys("max_relative_positions", -1)
    positions = Disentangled(
        n_buckets=keys("position_buckets"),
        max_distance=length if length > 0 else keys("max_position_embeddings"),
        eps=keys("layer_norm_eps", 1e-7),
    )
    d_head = keys("hidden_size") // keys("num_attention_heads")
    return {"positions": positions, "scores": Scaled((3 * d_head) ** -0.5)}


def _write_deberta(config: EncoderConfig) -> KeyValues:
    positions = config.positions if isinstance(config.positions, Disentangled) else Disentangled()
    return {
        "relative_attention": True,
        "position_biased_input": False,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": positions.n_buckets,
        "max_relative_positions": positions.max_distance,
        # transformers does not derive the sizes of the pooler.
        "pooler_hidden_size": config.d_model,
        "pooler_hidden_act": "gelu",
        "pooler_dropout": 0.0,
    }


def _rows_deberta(config: EncoderConfig) -> tuple[WeightMap, ...]:
    names = {"q": "query", "k": "key", "v": "value"}
    return (
        *block(_LAYER, **{x: f"attention.self.{name}_proj" for x, name in names.items()}),
        WeightMap("encoder.rel_embeddings.weight", "positions.weight"),
        WeightMap("encoder.LayerNorm.*", "positions.norm.*"),
        *_rows_bert(config),
    )


DEBERTA_V2 = dataclasses.replace(
    BERT,
    name="deberta-v2",
    architecture=partial(architecture, prefix="DebertaV2"),
    fields=BERT.fields | {"type_vocab_size": ("n_segments", 0), "layer_norm_eps": eps(LayerNorm, 1e-7)},
    defaults=BERT.defaults | {"pooler_activation": GELU()},
    converters=(Converter(_read_deberta, _write_deberta), _HEAD),
    rows=_rows_deberta,
    ignored_keys=("cls_dropout", "legacy", "pooler_*", "tie_word_embeddings"),
    heads={**BERT.heads, "lm_predictions.*": "masked tokens", "mask_predictions.*": "masked tokens"},
    aliases=(("deberta.", ""), *_OLDER),
)

BERT_LIKE = (DEBERTA_V2, BERT, ROBERTA, ALBERT, XLM_ROBERTA, CAMEMBERT, ELECTRA, DISTILBERT, MPNET)
