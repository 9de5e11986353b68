"""Families of text encoders; those with the blocks of BERT are in `bert`.

- ModernBERT (Warner et al., 2024): pre-norm, gated feed-forward, rotary positions. Layers with full and with windowed
  attention alternate, with a smaller rotary base under the window.
"""

from __future__ import annotations

from functools import partial

from clearhead._core.validation import short_repr
from clearhead.errors import StorageError
from clearhead.hub.families import common
from clearhead.hub.families.bert import BERT_LIKE
from clearhead.hub.families.common import FULL, SIZES, SLIDING
from clearhead.hub.families.heads import architecture
from clearhead.hub.family import ConfigReader, Converter, Family, Field, KeyValues
from clearhead.hub.weight_map import SPLIT, WeightMap, block
from clearhead.masks import Window, full, window
from clearhead.models import EncoderConfig
from clearhead.nn import GeGLU, LayerNorm, SwiGLU
from clearhead.nn.positions import Positions

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
    architecture=partial(architecture, prefix="ModernBert"),
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
    copies=lambda config: {"decoder.weight": "embeddings.tok_embeddings.weight"} if config.head == "masked_lm" else {},
    heads={"head.*": "masked tokens", "decoder.*": "masked tokens"},
    aliases=(("model.", ""),),
)

ENCODERS = (*BERT_LIKE, MODERNBERT)
