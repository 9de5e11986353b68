"""Further families of decoders with a feed-forward network in every layer.

- StarCoder2 (Lozhkov et al., 2024): the blocks of Mistral with LayerNorm, biases and GELU.
- OLMo 2 (2024): a norm after each branch only, and norms of the queries and keys of all heads.
- SmolLM3 (2025): no rotary positions in every fourth layer.
- Granite (2024): constant factors of embeddings, branches, scores and logits.
- GPT-J (2021), Phi (2023) and Falcon (2023): parallel branches with a shared norm.
- OPT (2022): learned positions and ReLU. Bloom (2022): linear biases of the scores, and a norm of the embeddings.
"""

from __future__ import annotations

import dataclasses
import math

from clearhead.attention import Scaled
from clearhead.errors import StorageError
from clearhead.hub.families import common
from clearhead.hub.families.common import FULL, SLIDING
from clearhead.hub.families.decoders import LAYER, LLAMA, LLAMA_ROWS, MISTRAL, sliding_window
from clearhead.hub.family import ConfigReader, Converter, Family, Field, KeyValues
from clearhead.hub.weight_map import Transform, WeightMap, block, deinterleave, split_heads
from clearhead.models import DecoderConfig
from clearhead.nn import Biases, LayerNorm, Parallel, PostNorm, PreNorm, ResPostNorm, RMSNorm
from clearhead.nn.positions import ALiBi, NoPE, Rotary

_SHARED_NORM = Parallel(shared_norm=True)


def _ignore(key: str) -> Converter:
    """Return the converter for a dropout of the embeddings, for which clearhead uses that of the branches."""

    def read(keys: ConfigReader) -> KeyValues:
        keys(key, 0.0)
        return {}

    return Converter(read, lambda config: {key: config.dropout})


STARCODER2 = dataclasses.replace(
    MISTRAL,
    name="starcoder2",
    architecture=common.causal_lm("Starcoder2"),
    fields={key: value for key, value in MISTRAL.fields.items() if key not in ("head_dim", "rms_norm_eps")}
    | {
        "norm_epsilon": common.eps(LayerNorm, 1e-5),
        "hidden_act": common.activation("gelu_pytorch_tanh"),
        "use_bias": Field("bias", True, export=lambda bias: Biases.of(bias).q),
        "residual_dropout": ("dropout", 0.0),
        "sliding_window": sliding_window(None),
    },
    required={},
    defaults={},
    converters=(common.rotary(), common.lm_head(tied=True), _ignore("embedding_dropout")),
    rows=(*block(LAYER, up="mlp.c_fc", down="mlp.c_proj"), WeightMap("model.norm.*", "norm.*"), *LLAMA_ROWS),
    ignored_keys=("attention_softmax_in_fp32", "layer_norm_epsilon", "mlp_type", "norm_type", "scale_attn*"),
)

OLMO2 = dataclasses.replace(
    LLAMA,
    name="olmo2",
    architecture=common.causal_lm("Olmo2"),
    fields=LLAMA.fields | {"rms_norm_eps": common.eps(RMSNorm, 1e-5)},
    defaults=LLAMA.defaults | {"residual": ResPostNorm(), "qk_norm_all_heads": True},
    converters=(
        *(common.rotary(), common.biases(ff=False), common.lm_head()),
        Converter(lambda keys: {"qk_norm": RMSNorm(eps=keys("rms_norm_eps", 1e-5))}),
    ),
    rows=(*block(LAYER, norm1="post_attention_layernorm", norm2="post_feedforward_layernorm"), *LLAMA_ROWS),
)


def _read_smollm3(keys: ConfigReader) -> KeyValues:
    """Return the positions and masks: layers without rotary positions have the window, if it is used."""
    n, every = keys("num_hidden_layers"), keys("no_rope_layer_interval", 4)
    is_rotary = keys("no_rope_layers", None) or [int((i + 1) % every != 0) for i in range(n)]
    rotary = common.read_rotary(keys, 2e6)
    width = common.read_used_window(keys)
    masks = common.read_layer_masks(keys, width, lambda i: FULL if width is None or is_rotary[i] else SLIDING)
    cycle = common.shortest_cycle(is_rotary[:n])
    positions = tuple(rotary if value else NoPE() for value in cycle)
    return masks | {"positions": positions[0], "layer_rotary": positions if len(positions) > 1 else ()}


def _write_smollm3(config: DecoderConfig) -> KeyValues:
    positions = config.layer_rotary or (config.positions,)
    rotary = next((value for value in positions if isinstance(value, Rotary)), Rotary())
    masks = common.write_layer_masks(config)
    return {
        **common.write_rotary(rotary),
        **masks,
        "use_sliding_window": masks["sliding_window"] is not None,
        "no_rope_layers": [int(isinstance(positions[i % len(positions)], Rotary)) for i in range(config.n_layers)],
    }


SMOLLM3 = dataclasses.replace(
    LLAMA,
    name="smollm3",
    architecture=common.causal_lm("SmolLM3"),
    converters=(Converter(_read_smollm3, _write_smollm3), common.biases(), common.lm_head(tied=True)),
    ignored_keys=("max_window_layers", "pretraining_tp"),
)


def _inverse(x: float) -> float:
    """Return a number whose inverse is `x`, up to the last digit if there is none."""
    y = 1 / x
    return next((near for near in (y, math.nextafter(y, 0), math.nextafter(y, math.inf)) if 1 / near == x), y)


GRANITE = dataclasses.replace(
    LLAMA,
    name="granite",
    architecture=common.causal_lm("Granite"),
    fields=LLAMA.fields
    | {
        "embedding_multiplier": ("embedding_multiplier", 1.0),
        "residual_multiplier": ("branch_multiplier", 1.0),
        "attention_multiplier": Field("scores", 1.0, Scaled, lambda scores: getattr(scores, "scale", 1.0)),
        "logits_scaling": Field("logit_scale", 1.0, _inverse, _inverse),
    },
)


PHI = dataclasses.replace(
    LLAMA,
    name="phi",
    architecture=common.causal_lm("Phi"),
    fields={key: value for key, value in LLAMA.fields.items() if key not in ("head_dim", "rms_norm_eps")}
    | {
        "layer_norm_eps": common.eps(LayerNorm, 1e-5),
        "hidden_act": common.activation("gelu_new"),
        "resid_pdrop": ("dropout", 0.0),
    },
    required={},
    defaults={"residual": _SHARED_NORM, "logit_bias": True},
    converters=(
        Converter(
            lambda keys: {"positions": common.read_rotary(keys, partial_rotary_factor=0.5)},
            lambda config: {"partial_rotary_factor": 1.0, **common.write_rotary(config.positions)},
        ),
        Converter(
            lambda keys: {"qk_norm": LayerNorm(keys("layer_norm_eps", 1e-5)) if keys("qk_layernorm", False) else None},
            lambda config: {"qk_layernorm": config.qk_norm is not None},
        ),
        *(common.lm_head(), _ignore("embd_pdrop")),
    ),
    rows=(
        *block(LAYER, o="self_attn.dense", up="mlp.fc1", down="mlp.fc2"),
        *(WeightMap(f"{LAYER}.self_attn.{x}_layernorm.*", f"blocks.#.attention.{x}_norm.*") for x in "qk"),
        WeightMap("model.final_layernorm.*", "norm.*"),
        WeightMap("lm_head.bias", "logit_bias"),
        *LLAMA_ROWS,
    ),
)


def _read_gptj(keys: ConfigReader) -> KeyValues:
    rotated = keys("rotary_dim", 64) or keys("n_embd") // keys("n_head")
    return {"positions": Rotary(partial_rotary_factor=rotated / (keys("n_embd") // keys("n_head")))}


def _rotary_dim(config: DecoderConfig) -> int:
    return config.positions.rotary_dim(config.head_width) if isinstance(config.positions, Rotary) else 2


def _rows_gptj(config: DecoderConfig) -> tuple[WeightMap, ...]:
    layer, heads = "transformer.h.#", deinterleave(config.n_heads, _rotary_dim(config))
    return (
        WeightMap("transformer.wte.weight", "embedding.weight"),
        *block(layer, heads, q="attn.q_proj", k="attn.k_proj"),
        *block(layer, v="attn.v_proj", o="attn.out_proj", norm1="ln_1", up="mlp.fc_in", down="mlp.fc_out"),
        WeightMap("transformer.ln_f.*", "norm.*"),
        WeightMap("lm_head.weight", "head.weight"),
        WeightMap("lm_head.bias", "logit_bias"),
    )


GPTJ = Family(
    name="gptj",
    architecture=common.causal_lm("GPTJ"),
    kind=DecoderConfig,
    fields={
        "vocab_size": "vocab_size",
        "n_positions": ("max_len", 2048),
        "n_embd": "d_model",
        "n_layer": "n_layers",
        "n_head": "n_heads",
        "n_inner": ("d_ff", None),
        "activation_function": common.activation("gelu_new"),
        "layer_norm_epsilon": common.eps(LayerNorm, 1e-5),
        "resid_pdrop": ("dropout", 0.0),
        "attn_pdrop": ("attention_dropout", 0.0),
    },
    defaults={"residual": _SHARED_NORM, "logit_bias": True, "bias": Biases(q=False, k=False, v=False, out=False)},
    converters=(
        Converter(_read_gptj, lambda config: {"rotary_dim": _rotary_dim(config)}),
        *(common.lm_head(), _ignore("embd_pdrop")),
    ),
    rows=_rows_gptj,
    ignored_keys=("gradient_checkpointing", "n_ctx", "rotary", "scale_attn_weights", "summary_*"),
    # The causal mask, which older versions stored.
    ignored_tensors=("transformer.h.#.attn.bias", "transformer.h.#.attn.masked_bias"),
    prefix="transformer.",
)


def _read_opt(keys: ConfigReader) -> KeyValues:
    keys.only("word_embed_proj_dim", keys("hidden_size"))
    keys.expect(enable_bias=True, layer_norm_elementwise_affine=True, _remove_final_layer_norm=False)
    return {}


_OPT_LAYER = "model.decoder.layers.#"
OPT = Family(
    name="opt",
    architecture=common.causal_lm("OPT"),
    kind=DecoderConfig,
    fields={key: value for key, value in common.SIZES.items() if key != "intermediate_size"}
    | {
        "ffn_dim": "d_ff",
        "activation_function": common.activation("relu"),
        "do_layer_norm_before": Field("residual", True, choices={True: PreNorm(), False: PostNorm()}),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    defaults={"norm": LayerNorm(eps=1e-5)},
    # The first two rows of the position table are unused.
    converters=(
        common.learned("max_position_embeddings", skipped=2),
        Converter(_read_opt, lambda config: {"word_embed_proj_dim": config.d_model}),
        common.lm_head(tied=True),
    ),
    rows=(
        WeightMap("model.decoder.embed_tokens.weight", "embedding.weight"),
        WeightMap("model.decoder.embed_positions.weight", "positions.weight"),
        *block(_OPT_LAYER, **{x: f"self_attn.{x}_proj" for x in "qkv"}, o="self_attn.out_proj", up="fc1", down="fc2"),
        *block(_OPT_LAYER, norm1="self_attn_layer_norm", norm2="final_layer_norm"),
        WeightMap("model.decoder.final_layer_norm.*", "norm.*"),
        WeightMap("lm_head.weight", "head.weight"),
    ),
    ignored_keys=("activation_dropout", "init_std", "layerdrop", "prefix"),
    ignored_tensors=("lm_head.weight",),
    copies=lambda config: {"lm_head.weight": "model.decoder.embed_tokens.weight"},
    prefix="model.",
)


def _rows_fused(layer: str, attention: str, transform: Transform) -> tuple[WeightMap, ...]:
    """Return the weight maps that Bloom and Falcon share."""
    return (
        WeightMap("transformer.word_embeddings.weight", "embedding.weight"),
        *block(layer, transform, qkv=f"{attention}.query_key_value"),
        *block(layer, o=f"{attention}.dense", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
        *block(layer, norm1="input_layernorm", norm2="post_attention_layernorm"),
        WeightMap("transformer.ln_f.*", "norm.*"),
        WeightMap("lm_head.weight", "head.weight"),
    )


def _copies_fused(config: DecoderConfig) -> dict[str, str]:
    return {"lm_head.weight": "transformer.word_embeddings.weight"}


BLOOM = Family(
    name="bloom",
    architecture=common.causal_lm("Bloom"),
    kind=DecoderConfig,
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "n_layer": "n_layers",
        "n_head": "n_heads",
        "layer_norm_epsilon": common.eps(LayerNorm, 1e-5),
        "hidden_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    required={"apply_residual_connection_post_layernorm": False},
    defaults={"positions": ALiBi(), "embedding_norm": True, "max_len": 2048},
    converters=(common.lm_head(tied=True), Converter(lambda keys: {"activation": common.ACTIVATIONS["gelu_new"]})),
    rows=lambda config: (
        WeightMap("transformer.word_embeddings_layernorm.*", "embedding_norm.*"),
        *_rows_fused("transformer.h.#", "self_attention", split_heads(config.n_heads)),
    ),
    # Splitting of products in training, and the length of training sequences.
    ignored_keys=(
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "offset_alibi",
        "pretraining_*",
        "seq_length",
        "skip_bias_add*",
        "slow_but_exact",
        "unk_token_id",
        "n_embed",
    ),
    ignored_tensors=("lm_head.weight",),
    copies=_copies_fused,
    prefix="transformer.",
)


def _read_falcon(keys: ConfigReader) -> KeyValues:
    keys.expect(alibi=False)  # transformers rounds its linear biases to bfloat16
    heads, is_parallel, bias = keys("num_attention_heads"), keys("parallel_attn", True), keys("bias", False)
    is_new = keys("new_decoder_architecture", False)
    if is_new and not is_parallel:
        raise StorageError("parallel_attn is False, and new_decoder_architecture is True; expected parallel branches")
    n_norms = keys("num_ln_in_parallel_attn", None) or (2 if is_new else 1)
    n_kv = keys("num_kv_heads", None) or heads
    multi_query = 1 if keys("multi_query", True) else heads
    residual = PreNorm() if not (is_parallel or is_new) else Parallel() if is_new and n_norms == 2 else _SHARED_NORM
    return {
        "residual": residual,
        "n_kv_heads": n_kv if is_new else multi_query,
        "d_ff": keys("ffn_hidden_size", None) or 4 * keys("hidden_size"),
        "bias": bias,
    }


def _write_falcon(config: DecoderConfig) -> KeyValues:
    is_old = config.residual != Parallel() and config.kv_heads in (1, config.n_heads)
    return {
        "alibi": False,
        "parallel_attn": config.residual != PreNorm(),
        "new_decoder_architecture": not is_old,
        "num_ln_in_parallel_attn": None if is_old else 2 if config.residual == Parallel() else 1,
        "num_kv_heads": config.kv_heads,
        "multi_query": config.kv_heads == 1 or not is_old,
        "ffn_hidden_size": config.ff_width,
        "bias": config.biases.ff,
    }


FALCON = Family(
    name="falcon",
    architecture=common.causal_lm("Falcon"),
    kind=DecoderConfig,
    fields={key: value for key, value in common.SIZES.items() if key != "intermediate_size"}
    | {
        "max_position_embeddings": ("max_len", 2048),
        "activation": common.activation("gelu"),
        "layer_norm_epsilon": common.eps(LayerNorm, 1e-5),
        "hidden_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    converters=(common.rotary(), common.lm_head(tied=True), Converter(_read_falcon, _write_falcon)),
    rows=lambda config: (
        *(block("transformer.h.#", norm1="ln_attn", norm2="ln_mlp") if config.residual == Parallel() else ()),
        *_rows_fused("transformer.h.#", "self_attention", split_heads(config.n_heads, config.kv_heads)),
    ),
    ignored_keys=("apply_residual_connection_post_layernorm", "n_embed"),
    ignored_tensors=("lm_head.weight",),
    copies=_copies_fused,
    prefix="transformer.",
)

DENSE = (STARCODER2, OLMO2, SMOLLM3, GRANITE, PHI, GPTJ, OPT, BLOOM, FALCON)
