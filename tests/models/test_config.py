"""Tests of configurations: error messages, and round trips through dictionaries and TOML."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead.errors import ConfigError, KeywordError
from clearhead.masks import Mask, causal, every, padding, window
from clearhead.models import PRESETS, Config, DecoderConfig, EncoderConfig, MeanPooling, VisionConfig
from clearhead.models.encoder_decoder import EncoderDecoderConfig
from clearhead.nn import GELU, DepthScaled, LayerNorm, PostNorm, PreNorm, ReLU, RMSNorm, SwiGLU, Xavier
from clearhead.nn.positions import ALiBi, LearnedPositions, NoPE, RelativeBias, Rotary, Sinusoidal


@dataclass(frozen=True)
class Scale:
    amount: float = 0.5


@dataclass(frozen=True)
class Offset:
    amount: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class EverythingConfig(Config):
    """One field of every kind that a configuration can have."""

    count: int
    rate: float = 0.25
    yes: bool = True
    text: str = "plain"
    variant: Scale | Offset = Scale()
    maybe: int | None = None
    maybe_not: float | None = 1.0
    sizes: tuple[int, ...] = (2, 3)
    pair: tuple[int, float] | None = None
    mode: Literal["fast", "slow"] = "slow"
    mask: Mask = causal()

    def build(self) -> nn.Module:
        return nn.Identity()


def small(**changes) -> DecoderConfig:
    return DecoderConfig(**({"vocab_size": 31, "d_model": 12, "n_layers": 2, "n_heads": 3} | changes))


VARIANTS = [
    small(positions=position)
    for position in (
        Sinusoidal(base=500.0),
        LearnedPositions(max_len=512),
        Rotary(partial_rotary_factor=0.5),
        ALiBi(),
        NoPE(),
    )
] + [
    small(positions=RelativeBias(n_buckets=6, max_distance=17, bidirectional=False), n_kv_heads=1),
    small(norm=RMSNorm(eps=1e-7), activation=SwiGLU(), bias=False, residual=PostNorm(), init=Xavier()),
    small(norm=LayerNorm(eps=1e-12, bias=False), activation=GELU(tanh=True), init=DepthScaled(std=0.01)),
    small(mask=causal() & (window(5, 0) | every(3)), activation=ReLU(), residual=PreNorm(), d_head=5),
    VisionConfig(
        image_size=(6, 9), patch_size=3, n_classes=7, n_layers=1, d_model=10, n_heads=2, pooling=MeanPooling()
    ),
    VisionConfig(
        image_size=(6, 9),
        patch_size=3,
        n_classes=7,
        n_layers=1,
        d_model=10,
        n_heads=2,
        positions=LearnedPositions(grid=(2, 3), n_extra=1),
    ),
    EverythingConfig(count=3),
    EverythingConfig(
        count=-3, rate=1e-30, variant=Offset(5, 'a "quoted" \\ note\n'), maybe=0, maybe_not=None, pair=(2, 0.5)
    ),
    EverythingConfig(count=10**18, rate=math.inf, yes=False, sizes=(), mode="fast", mask=~window(1, 2).T),
]


@pytest.mark.parametrize("config", [*VARIANTS, *(preset() for preset in PRESETS.values())])
def test_config_round_trips_through_dict_and_toml(config):
    for kind in (Config, type(config)):
        assert kind.from_dict(config.to_dict()) == config
        again = kind.from_toml(config.to_toml())
        assert again == config
        assert type(again) is type(config)
        assert hash(again) == hash(config)


@pytest.mark.parametrize("config", VARIANTS)
def test_toml_equals_dict(config):
    def without_none(value):
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        return value

    assert tomllib.loads(config.to_toml()) == without_none(config.to_dict())


def test_toml_lines_match_constructor_arguments():
    lines = small(norm=RMSNorm(eps=1e-6), mask=causal() & window(5, 0)).to_toml().splitlines()
    assert lines[0] == 'type = "DecoderConfig"'
    assert 'norm = {type = "RMSNorm", eps = 1e-06, unit_offset = false}' in lines
    assert f'mask = "{causal() & window(5, 0)}"' in lines
    assert "d_model = 12" in lines
    assert not any(line.startswith("n_kv_heads") for line in lines)


@given(
    text=st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    rate=st.floats(allow_nan=False),
    count=st.integers(-(2**63), 2**63 - 1),
    sizes=st.lists(st.integers(-(2**40), 2**40)).map(tuple),
)
def test_random_values_round_trip_through_toml(text, rate, count, sizes):
    config = EverythingConfig(count=count, rate=rate, text=text, variant=Offset(count, text), sizes=sizes)
    assert EverythingConfig.from_toml(config.to_toml()) == config


def test_integer_in_toml_is_read_as_float():
    config = EverythingConfig.from_toml("count = 1\nrate = 2\n")
    assert type(config.rate) is float
    assert config.rate == 2.0


def test_replace_validates():
    config = small()
    assert config.replace(n_heads=4).n_heads == 4
    assert config.n_heads == 3
    with pytest.raises(ConfigError, match="d_model is 12 and n_heads is 5; expected a multiple of n_heads"):
        config.replace(n_heads=5)
    with pytest.raises(KeywordError, match="no keyword 'n_head'; use n_heads"):
        config.replace(n_head=4)


def test_config_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().d_model = 3
    with pytest.raises(TypeError):
        EncoderConfig(31, 12, 2, 3)


READING_FAULTS = {
    "nonsense": (Config, "d_model = = 3", "this is not TOML"),
    "no type": (Config, "count = 3", "has no 'type'.*one of: .*DecoderConfig"),
    "unknown type": (
        Config,
        'type = "DecoderConfg"',
        "configuration 'DecoderConfg'; did you mean 'DecoderConfig'",
    ),
    "type is a number": (Config, "type = 3", "unknown configuration 3"),
    "another type": (
        DecoderConfig,
        'type = "EverythingConfig"',
        "got a EverythingConfig, expected a DecoderConfig",
    ),
    "unknown field": (EverythingConfig, "count = 3\nrat = 1.0", "no field 'rat'; did you mean 'rate'"),
    "far field": (EverythingConfig, "count = 3\nzzzzzz = 1.0", "no field 'zzzzzz'; known: count, .*yes"),
    "lacking field": (EverythingConfig, "rate = 1.0", "lacks the field 'count', which has no default"),
    "bool for int": (
        EverythingConfig,
        "count = true",
        "EverythingConfig: count is True; expected a whole number",
    ),
    "int for bool": (
        EverythingConfig,
        "count = 3\nyes = 1",
        "EverythingConfig: yes is 1; expected True or False",
    ),
    "text for int": (EverythingConfig, 'count = "3"', "count is '3'; expected a whole number"),
    "float for int": (EverythingConfig, "count = 3.0", "count is 3.0; expected a whole number"),
    "unknown choice": (
        EverythingConfig,
        'count = 3\nvariant = {type = "Offste"}',
        "EverythingConfig.variant: unknown variant 'Offste'; did you mean 'Offset'",
    ),
    "choice of no word": (
        EverythingConfig,
        'count = 3\nvariant = {type = ["Scale"]}',
        r"unknown variant \['Scale'\]",
    ),
    "number beyond floats": (
        EverythingConfig,
        f"count = 3\nrate = {10**400}",
        "rate is 1000.*…; expected a number",
    ),
    "number without end": (EverythingConfig, "count = " + 9999 * "3", "this is not TOML: .*digits"),
    "choice without type": (EverythingConfig, "count = 3\nvariant = {amount = 1}", "unknown variant None"),
    "field of a choice": (
        EverythingConfig,
        'count = 3\nvariant = {type = "Offset", amont = 1}',
        "EverythingConfig.variant: Offset has no field 'amont'; did you mean 'amount'",
    ),
    "value of a choice": (
        EverythingConfig,
        'count = 3\nvariant = {type = "Offset", amount = 1.5}',
        "EverythingConfig.variant: Offset: amount is 1.5; expected a whole number",
    ),
    "table for a value": (EverythingConfig, "count = {a = 1}", "count is a table; expected a plain value"),
    "plain value for a choice": (
        EverythingConfig,
        "count = 3\nvariant = 2",
        r"EverythingConfig: variant is 2; expected Scale\(…\) or Offset\(…\)",
    ),
    "word for a choice": (
        EverythingConfig,
        'count = 3\nvariant = "offste"',
        "unknown variant 'offste'; did you mean 'Offset'",
    ),
    "word for a choice that needs more": (
        EverythingConfig,
        'count = 3\nvariant = "offset"',
        "Offset lacks the field 'amount'",
    ),
    "wrong mode": (EverythingConfig, 'count = 3\nmode = "medium"', "mode is 'medium'; expected 'fast' or 'slow'"),
    "wrong length": (
        EverythingConfig,
        "count = 3\npair = [1, 2.0, 3]",
        r"pair is \[1, 2.0, 3\]; expected \(a whole number, a number\)",
    ),
    "wrong item": (EverythingConfig, 'count = 3\nsizes = [1, "2"]', r"sizes is '2'; expected a whole number"),
    "bad mask": (EverythingConfig, 'count = 3\nmask = "causal( & "', "EverythingConfig.mask: "),
    "bad choice": (DecoderConfig, 'norm = {type = "LayerNorm", eps = -1.0}', "eps"),
}


@pytest.mark.parametrize("fault", READING_FAULTS)
def test_from_toml_with_invalid_text_raises(fault):
    kind, text, message = READING_FAULTS[fault]
    if kind is DecoderConfig and fault == "bad choice":
        text += "\nvocab_size = 3\nd_model = 2\nn_layers = 1\nn_heads = 1"
    with pytest.raises(ConfigError, match=message):
        kind.from_toml(text)


@pytest.mark.bad_input
def test_from_dict_of_other_type_raises():
    with pytest.raises(ConfigError, match="got list, expected a dict of fields"):
        Config.from_dict([1, 2])


MAKING_FAULTS = {
    "type": ({"d_model": 12.0}, "DecoderConfig: d_model is 12.0; expected a whole number of at least 1"),
    "class for a choice": (
        {"norm": LayerNorm},
        r"DecoderConfig: norm is .*expected LayerNorm\(…\) or RMSNorm\(…\); this is the class: add parentheses",
    ),
    "tensor for a mask": (
        {"mask": torch.ones(2, 2, dtype=torch.bool)},
        "DecoderConfig: mask is .*expected a Mask",
    ),
    "zero": ({"n_layers": 0}, "DecoderConfig: n_layers is 0; expected a whole number of at least 1"),
    "negative": ({"d_ff": -1}, "DecoderConfig: d_ff is -1; expected a whole number of at least 1 or None"),
    "dropout": ({"dropout": 1.0}, "DecoderConfig: dropout is 1.0; expected a number of at least 0 and below 1"),
    "heads": (
        {"n_heads": 5},
        "DecoderConfig: d_model is 12 and n_heads is 5; expected a multiple of n_heads: change one of them, or",
    ),
    "shared heads": ({"n_kv_heads": 2}, "n_heads is 3 and n_kv_heads is 2; expected a multiple of n_kv_heads"),
    "odd rotary": ({"positions": Rotary(), "d_head": 3}, "expected an even number"),
    "odd sinusoidal": ({"d_model": 9}, "d_model is 9; expected an even number for Sinusoidal positions"),
    "lengths": (
        {"positions": LearnedPositions(max_len=7)},
        "max_len is 512 and the table of learned positions has 7 rows",
    ),
    "grid": ({"positions": LearnedPositions(grid=(2, 3))}, "is a grid; text needs"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("fault", MAKING_FAULTS)
def test_constructor_with_invalid_values_raises(fault):
    changes, message = MAKING_FAULTS[fault]
    with pytest.raises(ConfigError, match=message):
        small(**changes)


def test_vision_config_with_invalid_values_raises():
    config = VARIANTS[9]
    assert isinstance(config, VisionConfig)
    with pytest.raises(ConfigError, match="an image of 7×9 is not divisible into patches of 3×3"):
        config.replace(image_size=(7, 9))
    with pytest.raises(
        ConfigError, match=r"does not match 2×3 patches and 0 extra.*LearnedPositions\(grid=\(2, 3\), n_extra=0\)"
    ):
        config.replace(positions=LearnedPositions(grid=(3, 2)))


def test_shared_embeddings_with_two_vocabularies_raise():
    with pytest.raises(ConfigError, match="source_vocab_size 5 is not vocab_size 7"):
        EncoderDecoderConfig(
            vocab_size=7,
            source_vocab_size=5,
            d_model=4,
            n_heads=1,
            n_encoder_layers=1,
            n_decoder_layers=1,
            share_embeddings=True,
        )


def test_to_toml_of_mask_with_data_raises():
    config = small(mask=causal() & padding(torch.tensor([3, 2])))
    with pytest.raises(ConfigError, match=r"contains data.*pass the other part to forward as mask="):
        config.to_dict()


def test_duplicate_config_class_name_raises():
    with pytest.raises(ConfigError, match="two configurations are called 'DecoderConfig'"):
        type("DecoderConfig", (Config,), {})


def test_build_of_config_without_model_raises():
    @dataclass(frozen=True, kw_only=True)
    class BareConfig(Config):
        pass

    with pytest.raises(ConfigError, match="BareConfig does not describe a model"):
        BareConfig().build()


@pytest.mark.bad_input
def test_invalid_mask_text_raises_one_line_message():
    text = DecoderConfig(vocab_size=5, d_model=12, n_heads=3, n_layers=1, d_ff=7, max_len=9).to_dict()
    with pytest.raises(ConfigError) as caught:
        DecoderConfig.from_dict(text | {"mask": "causl()"})
    assert str(caught.value) == "DecoderConfig.mask: column 1: unknown mask 'causl'; did you mean 'causal'?"


@dataclass(frozen=True)
class Shift:
    """A user's choice with a name that version 0.2 used for another class."""

    amount: int = 1


@dataclass(frozen=True, kw_only=True)
class ShiftConfig(Config):
    """A configuration with that choice."""

    variant: Scale | Shift = Scale()


def test_from_dict_of_a_variant_named_like_an_old_class_returns_the_variant():
    assert ShiftConfig.from_dict({"variant": {"type": "Shift", "amount": 3}}).variant == Shift(3)
