"""Keys that a configuration lacks have the defaults of transformers, and keys of every configuration are known."""

from __future__ import annotations

import json

import pytest

from clearhead.errors import StorageError
from clearhead.hub.families import FAMILIES
from clearhead.hub.family import ConfigReader, canonical
from tests.support.third_party_models import PEERS

transformers = pytest.importorskip("transformers", reason="transformers, the reference to compare with, is missing")

CLASSES = {name.split()[0]: peer.config for name, peer in reversed(PEERS.items()) if peer.config}
# Values without which clearhead cannot express the default model.
CHANGES = {
    "deberta-v2": {
        "relative_attention": True,
        "position_biased_input": False,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256,
    }
}
# The number of key/value heads is missing only if it is that of queries, which the shapes of the tensors confirm.
SIZES = {"num_key_value_heads"}


def default_keys(family):
    """Return all keys of a configuration of transformers."""
    config = getattr(transformers, CLASSES[family])(**CHANGES.get(family, {}))
    return json.loads(json.dumps(config.to_dict()))


def is_needed(key, family, rest):
    """Return whether a family has no default for a key, such as a width."""
    try:
        FAMILIES[family].config(ConfigReader(rest))
    except StorageError as error:
        return f"no {key!r}, which this family needs" in str(error)
    return False


@pytest.mark.parametrize("family", CLASSES)
def test_missing_keys_have_the_defaults_of_transformers(family):
    keys = default_keys(family)
    expected = canonical(FAMILIES[family].config(ConfigReader(keys)))
    for missing in keys.keys() - CHANGES.get(family, {}).keys() - SIZES:
        rest = {key: value for key, value in keys.items() if key != missing}
        if is_needed(missing, family, rest):
            continue
        assert canonical(FAMILIES[family].config(ConfigReader(rest))) == expected, missing


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_missing_width_of_a_used_window_is_that_of_transformers(family):
    keys = default_keys(family) | {"use_sliding_window": True, "max_window_layers": 0}
    keys = {key: value for key, value in keys.items() if key not in ("sliding_window", "layer_types")}
    assert str(FAMILIES[family].config(ConfigReader(keys)).mask) == "causal() & window(4095, 0)"


# Keys that published files of these families contain in addition to those of the class.
PUBLISHED = {
    "gptj": {"tokenizer_class": "GPT2Tokenizer", "task_specific_params": {"text-generation": {"do_sample": True}}},
    "m2m_100": {"tokenizer_class": "NllbTokenizer", "max_length": 200, "num_hidden_layers": 12},
    "mbart": {"tokenizer_class": "MBart50Tokenizer", "classif_dropout": 0.0, "normalize_before": True},
    "mt5": {"tokenizer_class": "T5Tokenizer", "feed_forward_proj": "gated-gelu", "is_gated_act": True},
    "albert": {"tie_encoder_decoder": False, "cross_attention_hidden_size": None, "tf_legacy_loss": False},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_keys_of_published_files_are_known(family):
    keys = default_keys(family)
    assert FAMILIES[family].config(ConfigReader(keys | PUBLISHED[family])) == FAMILIES[family].config(
        ConfigReader(keys)
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"is_encoder_decoder": True}),
        ("gpt2", {"cross_attention_hidden_size": 8}),
        ("bart", {"tie_encoder_decoder": True}),
        ("t5", {"is_gated_act": True}),
        ("mt5", {"dense_act_fn": "relu"}),
    ],
    ids=str,
)
def test_keys_that_would_change_the_model_are_rejected(family, change):
    ((key, value),) = change.items()
    with pytest.raises(StorageError, match=f"{key} is {value!r}, which clearhead cannot express"):
        FAMILIES[family].config(ConfigReader(default_keys(family) | change))
