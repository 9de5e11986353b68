"""Families of text encoders.

- BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019) and ALBERT (Lan et al., 2020): post-norm, learned positions and
  segments. ALBERT has factorized embeddings and shares one block between all layers.
- ModernBERT (Warner et al., 2024): pre-norm, gated feed-forward, rotary positions. Layers with full and with windowed
  attention alternate, with a smaller rotary base under the window.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from clearhead._core.validation import short_repr
from clearhead.errors import StorageError
from clearhead.hub.families import common
from clearhead.hub.families.common import FULL, SIZES, SLIDING, activation, classes, eps, labels
from clearhead.hub.family import ConfigReader, Converter, Family, Field, KeyValues
from clearhead.hub.weight_map import SPLIT, WeightMap, block
from clearhead.masks import Window, full, window
from clearhead.models import EncoderConfig
from clearhead.nn import GeGLU, LayerNorm, PostNorm, SwiGLU
from clearhead.nn.positions import LearnedPositions, Positions

_OLDER = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


def _read(keys: ConfigReader, *, after_padding: bool = False) -> KeyValues:
    """Return positions, classes and pooler. In RoBERTa, positions start after the id of padding."""
    skipped = keys("pad_token_id", 1) + 1 if after_padding else 0
    keys.expect(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    max_len = keys("max_position_embeddings") - skipped
    # In transformers the pooler is a constructor argument, so only the tensors show whether the model has one.
    poolers = ("pooler.dense.weight", "pooler.weight", "classifier.dense.weight")
    return {
        **_read_head(keys),
        "max_len": max_len,
        "positions": LearnedPositions(max_len=max_len, skipped=skipped),
        "pooler": any(name.endswith(poolers) for name in keys.shapes),
    }


# Heads by the ends of the names of transformers' classes, and the tensors that show that a head is stored.
_HEADS = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "span",
    "ForMultipleChoice": "choice",
    "ForMaskedLM": "masked_lm",
    "ForPreTraining": "masked_lm",
}
_EXPORTED_AS = {head: suffix for suffix, head in reversed(_HEADS.items())}
_CLASSIFIERS = ("classifier.weight", "classifier.out_proj.weight", "qa_outputs.weight")
_MASKED_LM = ("cls.predictions.transform.dense.weight", "lm_head.dense.weight", "predictions.dense.weight")


def _read_head(keys: ConfigReader) -> KeyValues:
    """Return the head that `architectures` names, if its tensors are stored."""
    names = keys("architectures", None)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = []
    heads = [head for name in names for suffix, head in _HEADS.items() if name.endswith(suffix)]
    has_classifier = any(name in keys.shapes for name in _CLASSIFIERS)
    has_masked_lm = any(name in keys.shapes for name in _MASKED_LM)
    is_bare = all(name.endswith("Model") for name in names)
    if not heads and names and not is_bare and (has_classifier or has_masked_lm):
        raise StorageError(
            f"architectures is {short_repr(names)}, whose head is not supported; expected a class that ends in Model, "
            f"{', '.join(_HEADS)}"
        )
    if heads and heads[0] == "masked_lm":
        if not has_masked_lm:
            return {}
        keys.only("tie_word_embeddings", True)
        return {"head": "masked_lm"}
    if not has_classifier or (names and is_bare):
        return {}
    head = heads[0] if heads else "span" if "qa_outputs.weight" in keys.shapes else "sequence"
    return {"head": head, "n_classes": {"span": 2, "choice": 1}.get(head) or classes(keys)}


def _architecture(config: EncoderConfig, *, prefix: str) -> str:
    """Return the class that transformers loads an export into."""
    has_head = config.n_classes or config.head == "masked_lm"
    return prefix + (_EXPORTED_AS[config.head] if has_head else "Model")


def _write(config: EncoderConfig, *, after_padding: bool = False) -> KeyValues:
    skipped = config.positions.skipped if isinstance(config.positions, LearnedPositions) else 0
    padding = {"pad_token_id": skipped - 1} if after_padding else {}
    names = labels(config.n_classes) if config.n_classes and config.head in ("sequence", "token") else {}
    return {**padding, **names, "max_position_embeddings": config.max_len + skipped}


_LAYER = "encoder.layer.#"
_ROWS = (
    WeightMap("embeddings.word_embeddings.weight", "embedding.weight"),
    WeightMap("embeddings.position_embeddings.weight", "positions.weight"),
    WeightMap("embeddings.token_type_embeddings.weight", "segments.weight"),
    WeightMap("embeddings.LayerNorm.*", "embedding_norm.*"),
    *block(_LAYER, q="attention.self.query", k="attention.self.key", v="attention.self.value"),
    *block(_LAYER, o="attention.output.dense", norm1="attention.output.LayerNorm"),
    *block(_LAYER, up="intermediate.dense", down="output.dense", norm2="output.LayerNorm"),
    WeightMap("pooler.dense.*", "pooler.*"),
)


def _head_rows(config: EncoderConfig, *masked_lm: WeightMap) -> tuple[WeightMap, ...]:
    """Return the weight maps of the head: `masked_lm`, or those of a classifier."""
    if config.head == "masked_lm":
        return masked_lm
    return (WeightMap("qa_outputs.*" if config.head == "span" else "classifier.*", "head.*"),)


def _rows_bert(config: EncoderConfig) -> tuple[WeightMap, ...]:
    head = _head_rows(
        config,
        WeightMap("cls.predictions.transform.dense.*", "head.dense.*"),
        WeightMap("cls.predictions.transform.LayerNorm.*", "head.norm.*"),
        WeightMap("cls.predictions.bias", "head.bias"),
    )
    return (*head, *_ROWS)


def _rows_roberta(config: EncoderConfig) -> tuple[WeightMap, ...]:
    """Return the weight maps; if texts are classified, the pooler is a part of the classifier."""
    if config.head == "sequence" and config.n_classes:
        return (
            WeightMap("classifier.dense.*", "pooler.*"),
            WeightMap("classifier.out_proj.*", "head.*"),
            *_ROWS,
        )
    head = _head_rows(
        config,
        WeightMap("lm_head.dense.*", "head.dense.*"),
        WeightMap("lm_head.layer_norm.*", "head.norm.*"),
        WeightMap("lm_head.bias", "head.bias"),
    )
    return (*head, *_ROWS)


_SHARED = "encoder.albert_layer_groups.0.albert_layers.0"
_MAPS = {"q": "query", "k": "key", "v": "value", "o": "dense", "norm1": "LayerNorm"}
_ROWS_SHARED = (
    *block(_SHARED, target="blocks.0", **{part: f"attention.{name}" for part, name in _MAPS.items()}),
    *block(_SHARED, target="blocks.0", up="ffn", down="ffn_output", norm2="full_layer_layer_norm"),
    WeightMap("encoder.embedding_hidden_mapping_in.*", "embedding_proj.*"),
    WeightMap("pooler.*", "pooler.*"),
    *(row for row in _ROWS if not row.target[0].startswith(("blocks", "pooler"))),
)


def _rows_albert(config: EncoderConfig) -> tuple[WeightMap, ...]:
    head = _head_rows(
        config,
        WeightMap("predictions.dense.*", "head.dense.*"),
        WeightMap("predictions.LayerNorm.*", "head.norm.*"),
        WeightMap("predictions.bias", "head.bias"),
    )
    return (*head, *_ROWS_SHARED)


def _read_roberta(keys: ConfigReader) -> KeyValues:
    fields = _read(keys, after_padding=True)
    if fields.get("head") == "masked_lm":
        keys.only("hidden_act", "gelu")  # the head always uses it
    return fields


_CLASSIFIER = "classification"


BERT = Family(
    name="bert",
    architecture=partial(_architecture, prefix="Bert"),
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
    converters=(Converter(_read, _write),),
    rows=_rows_bert,
    # Without effect on outputs.
    ignored_keys=("classifier_dropout", "directionality", "pooler_*", "tie_word_embeddings"),
    # Indices 0, 1, 2, … that older versions stored, and the output matrix, which is the embedding.
    ignored_tensors=("embeddings.position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    heads={
        "cls.predictions.*": "masked tokens",
        "cls.seq_relationship.*": "next-sentence prediction",
        "classifier.*": _CLASSIFIER,
        "qa_outputs.*": "question answering",
    },
    aliases=(("bert.", ""), *_OLDER),
)
ROBERTA = dataclasses.replace(
    BERT,
    name="roberta",
    architecture=partial(_architecture, prefix="Roberta"),
    rows=_rows_roberta,
    converters=(Converter(_read_roberta, partial(_write, after_padding=True)),),
    ignored_tensors=("embeddings.position_ids", "lm_head.decoder.weight", "lm_head.decoder.bias"),
    heads={"lm_head.*": "masked tokens", "classifier.*": _CLASSIFIER, "qa_outputs.*": "question answering"},
    aliases=(("roberta.", ""), *_OLDER),
)
ALBERT = dataclasses.replace(
    BERT,
    name="albert",
    architecture=partial(_architecture, prefix="Albert"),
    fields=BERT.fields | {"embedding_size": "embedding_dim", "hidden_act": activation("gelu_new")},
    rows=_rows_albert,
    defaults=BERT.defaults | {"share_layers": True},
    required={"num_hidden_groups": 1, "inner_group_num": 1},
    # Unused keys of the first release.
    ignored_keys=(
        *("classifier_dropout_prob", "down_scale_factor", "gap_size", "layers_to_keep", "net_structure_type"),
        *("num_memory_blocks", "structure_type", "tie_word_embeddings"),
    ),
    ignored_tensors=("embeddings.position_ids", "predictions.decoder.weight", "predictions.decoder.bias"),
    heads={
        "predictions.*": "masked tokens",
        "sop_classifier.*": "sentence-order prediction",
        "classifier.*": _CLASSIFIER,
        "qa_outputs.*": "question answering",
    },
    aliases=(("albert.", ""), *_OLDER),
)


_GATES = {"gelu": GeGLU(), "gelu_pytorch_tanh": GeGLU(tanh=True), "gelu_new": GeGLU(tanh=True), "silu": SwiGLU()}
_GATE_NAMES = {activation: name for name, activation in reversed(_GATES.items())}


def _read_modern(keys: ConfigReader) -> KeyValues:
    period = keys("global_attn_every_n_layers", 3)  # transformers 4, as are the bases of both layer types
    theta = {FULL: keys("global_rope_theta", 160_000.0), SLIDING: keys("local_rope_theta", 10_000.0)}
    keys.only("rope_scaling", None)
    parameters = keys("rope_parameters", None) or {}
    length = {"max_position_embeddings": keys("max_position_embeddings")}
    rotary = {
        kind: common.read_rotary(ConfigReader(length | {"rope_parameters": parameters.get(kind)}), theta[kind])
        for kind in theta
    }
    half = keys("local_attention", 128) // 2
    masks = {FULL: full(), SLIDING: window(half, half)}
    cycle = common.read_layer_cycle(keys, lambda i: SLIDING if i % period else FULL)
    return {
        **_read_modern_head(keys),
        "norm": LayerNorm(eps=keys("norm_eps", 1e-5), bias=keys("norm_bias", False)),
        "positions": rotary[cycle[0]],
        "layer_masks": tuple(masks[kind] for kind in cycle) if cycle != [FULL] else (),
        "layer_rotary": tuple(rotary[kind] for kind in cycle) if cycle != [FULL] else (),
    }


def _read_modern_head(keys: ConfigReader) -> KeyValues:
    """Return the head for masked tokens; classifiers, which share its first layer, are not supported."""
    if "classifier.weight" in keys.shapes:
        raise StorageError(
            f"architectures is {short_repr(keys('architectures', None))}, whose head is not supported; expected "
            "ModernBertModel or ModernBertForMaskedLM"
        )
    if "head.dense.weight" not in keys.shapes or keys("architectures", None) == ["ModernBertModel"]:
        return {}
    keys.only("tie_word_embeddings", True)
    keys.only("classifier_activation", keys("hidden_activation", "gelu"), default="gelu")
    keys.only("classifier_bias", keys("mlp_bias", False), default=False)
    keys.only("decoder_bias", True)
    return {"head": "masked_lm"}


def _write_modern(config: EncoderConfig) -> KeyValues:
    head = {"classifier_activation": _GATE_NAMES[config.activation], "classifier_bias": config.biases.ff}
    masks = config.layer_masks or (full(),)
    rotary = config.layer_rotary or (config.positions,)
    kinds = [FULL if masks[i % len(masks)] == full() else SLIDING for i in range(config.n_layers)]
    positions: dict[str, Positions] = {FULL: rotary[0], SLIDING: rotary[0]}
    positions |= {kind: rotary[i % len(rotary)] for i, kind in enumerate(kinds)}
    parameters = {kind: common.write_rotary(value)["rope_parameters"] for kind, value in positions.items()}
    return {
        **(head if config.head == "masked_lm" else {}),
        "norm_eps": config.norm.eps,
        "norm_bias": getattr(config.norm, "bias", False),
        "layer_types": kinds,
        "local_attention": next((2 * mask.before for mask in masks if isinstance(mask, Window)), 128),
        "rope_parameters": parameters,
        # For transformers 4, which can only express such cycles.
        "global_attn_every_n_layers": len(masks),
        "global_rope_theta": parameters[FULL]["rope_theta"],
        "local_rope_theta": parameters[SLIDING]["rope_theta"],
    }


MODERNBERT = Family(
    name="modernbert",
    architecture=partial(_architecture, prefix="ModernBert"),
    kind=EncoderConfig,
    fields=SIZES
    | {
        "hidden_activation": Field("activation", "gelu", choices=_GATES),
        "embedding_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "mlp_dropout": ("feed_forward_dropout", 0.0),
    },
    rows=(
        WeightMap("embeddings.tok_embeddings.weight", "embedding.weight"),
        WeightMap("embeddings.norm.*", "embedding_norm.*"),
        *block("layers.#", SPLIT, qkv="attn.Wqkv", gate_up="mlp.Wi"),
        *block("layers.#", o="attn.Wo", norm1="attn_norm", down="mlp.Wo", norm2="mlp_norm"),
        WeightMap("final_norm.*", "norm.*"),
        WeightMap("head.dense.*", "head.dense.*"),
        WeightMap("head.norm.*", "head.norm.*"),
        WeightMap("decoder.bias", "head.bias"),
    ),
    defaults={"embedding_norm": True, "first_norm": False},
    converters=(common.biases(), Converter(_read_modern, _write_modern)),
    # Keys of heads, of equivalent implementations, and unused keys.
    ignored_keys=(
        *("classifier_*", "cls_token_id", "decoder_bias", "deterministic_flash_attn", "initializer_cutoff_factor"),
        *("layer_norm_eps", "position_embedding_type", "reference_compile", "repad_logits_with_grad", "sparse_pred*"),
        "tie_word_embeddings",
    ),
    ignored_tensors=("decoder.weight",),
    heads={"head.*": "masked tokens", "decoder.*": "masked tokens"},
    aliases=(("model.", ""),),
)

ENCODERS = (BERT, ROBERTA, ALBERT, MODERNBERT)
