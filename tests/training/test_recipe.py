"""Recipes: presets, TOML round trips, overrides and fingerprints."""

from __future__ import annotations

import dataclasses

import pytest

from clearhead.data.sampler import FixedSize, TokenBudget
from clearhead.errors import ConfigError, DataError, StorageError
from clearhead.nn.positions import Rotary
from clearhead.training import (
    DDP,
    EMA,
    FSDP,
    PRESETS,
    CheckpointAverage,
    Constant,
    EarlyStopping,
    InverseSqrt,
    Recipe,
    TrainConfig,
    WarmupCosine,
)
from clearhead.training.presets import recipe
from clearhead.training.recipe import parse_setting
from clearhead.training.tasks import DataConfig

ALL = [(task, name) for task, names in PRESETS.items() for name in names]


@pytest.mark.parametrize(("task", "name"), ALL)
def test_presets_round_trip_through_toml(task, name):
    restored = PRESETS[task][name]()
    assert (restored.task, restored.preset) == (task, name)
    again = Recipe.from_toml(restored.to_toml())
    assert dataclasses.replace(again, description=restored.description) == restored
    assert again.fingerprint() == restored.fingerprint()


def test_train_config_fields_round_trip():
    config = TrainConfig(
        epochs=3,
        batch=FixedSize(7),
        accumulation=5,
        schedule=InverseSqrt(2e-3, 11),
        clip=None,
        averaging=CheckpointAverage(3, 17),
        precision="bf16",
        compile=True,
        parallel=FSDP(),
        early_stopping=EarlyStopping(2, 0.01),
        eval_every=13,
        keep_best=True,
    )
    assert TrainConfig.from_toml(config.to_toml()) == config


def test_with_overrides_finds_settings_by_name():
    changed = recipe("translation").with_overrides(
        {
            "lr_max": "2e-3",
            "data.vocab_size": 500,
            "d_model": "32",
            "batch.budget": "777",
            "averaging": '{type = "EMA", decay = 0.9}',
            "parallel": DDP(),
            "model.positions": Rotary(),
            "betas": (0.8, 0.9),
            "clip": "none",
        }
    )
    assert changed.train.schedule == WarmupCosine(2e-3, 50)
    assert changed.data.vocab_size == 500
    assert changed.model.vocab_size == 2000
    assert changed.model.d_model == 32
    assert changed.model.positions == Rotary()
    assert changed.train.batch == TokenBudget(777, multiple=8)
    assert changed.train.averaging == EMA(0.9)
    assert changed.train.parallel == DDP()
    assert changed.train.betas == (0.8, 0.9)
    assert changed.train.clip is None


def test_with_overrides_steps_and_epochs_replace_each_other():
    assert recipe("digits").train.epochs is not None
    assert recipe("digits").with_overrides({"steps": 90}).train.epochs is None
    assert recipe("text").with_overrides({"epochs": 3}).train.steps is None


def test_with_overrides_unknown_setting_lists_every_name_once():
    with pytest.raises(ConfigError, match="unknown setting 'nosuch'; known: steps, epochs") as caught:
        recipe("text").with_overrides({"nosuch": 3})
    names = str(caught.value).partition("known: ")[2].split(", ")
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_mx": 1}, "unknown setting 'lr_mx'; did you mean 'lr_max'"),
        ({"lr": 1}, "unknown setting 'lr'; did you mean 'lr_max'"),
        ({"train.learning_rate": 1}, "did you mean 'lr_max'"),
        ({"batch_size": 1}, "did you mean 'batch.budget'"),
        ({"n_head": 1}, "did you mean 'n_heads'"),
        ({"eps": 1}, r"'eps' is ambiguous; write train\.eps or model\.norm\.eps$"),
        ({"bias": True}, r"'bias' is ambiguous; write model\.bias or model\.norm\.bias$"),
        ({"vocab_size": 9}, r"'vocab_size' is ambiguous; write data\.vocab_size or model\.vocab_size$"),
        ({"model.d_modl": 1}, "did you mean 'd_model'"),
        ({"batch.budgt": 1}, "did you mean 'budget'"),
        ({"lr_max.x": 1}, "has no fields"),
        ({"lr_max": "fast"}, "TrainConfig.schedule: WarmupCosine: lr_max is 'fast'; expected a number above 0"),
        ({"type": "x"}, "unknown setting 'type'"),
        ({"averaging": '{type = "EMMA"}'}, "unknown variant 'EMMA'"),
    ],
)
def test_with_overrides_invalid_settings_raise_config_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        recipe("translation").with_overrides(settings)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "expected exactly one of them"),
        ({"steps": 5, "epochs": 5}, "steps is 5 and epochs is 5"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 5, "schedule": WarmupCosine(1e-3, 6)}, "warmup_steps is 6 and total_steps is 5"),
        ({"steps": 5, "label_smoothing": 1.0}, "label_smoothing"),
        ({"steps": 5, "betas": (0.9, 1.0)}, "betas"),
        ({"steps": 5, "precision": "fp8"}, "precision is 'fp8'"),
        ({"steps": 5, "schedule": "inverse-root"}, r"schedule is 'inverse-root'; expected WarmupCosine\(…\) or Inv"),
        ({"steps": 5, "weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"steps": 5, "accumulation": 0}, "accumulation is 0"),
        ({"steps": 5, "seed": -1}, "seed is -1"),
    ],
)
def test_train_config_invalid_values_raise_config_error(fields, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**fields)


def test_early_stopping_invalid_values_raise_config_error():
    with pytest.raises(ConfigError, match="patience is 0; expected a whole number of at least 1"):
        EarlyStopping(0)


def test_total_steps_of_epochs():
    config = TrainConfig(epochs=7, accumulation=3)
    assert config.total_steps(11) == 25  # 77 batches, three to an update
    assert TrainConfig(steps=9).total_steps(11) == 9
    assert config.rates(25) == WarmupCosine(1e-3, 0, 25)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 1e-3), ("true", True), ("bf16", "bf16"), ("[1, 2]", [1, 2]), ("a = 1", "a = 1")],
)
def test_parse_setting_reads_toml_or_text(text, value):
    assert parse_setting(text) == value


def test_fingerprint_depends_on_result_determining_settings_only():
    base = recipe("translation")
    assert base.with_overrides({"device": "cuda", "keep": 9}).fingerprint("x") == base.fingerprint("x")
    assert dataclasses.replace(base, data=base.data.with_path("somewhere")).fingerprint("x") == base.fingerprint("x")
    assert base.with_overrides({"steps": 7000}).fingerprint("x") == base.fingerprint("x")
    assert base.with_overrides({"lr_max": 0.5}).fingerprint("x") != base.fingerprint("x")
    assert base.with_overrides({"d_model": 32}).fingerprint("x") != base.fingerprint("x")
    assert base.fingerprint("y") != base.fingerprint("x")


def test_recipe_unknown_names_raise_config_error(tmp_path):
    with pytest.raises(ConfigError, match="unknown task 'sort_dedup'; did you mean 'sort-dedup'"):
        recipe("sort_dedup")
    with pytest.raises(ConfigError, match="has no preset 'digits-cov'; did you mean 'digits-conv'"):
        recipe("digits", "digits-cov")
    with pytest.raises(StorageError, match=r"has no train\.toml"):
        Recipe.load(tmp_path)
    with pytest.raises(ConfigError, match="missing: train, data, model"):
        Recipe.from_toml('preset = "x"')


@pytest.mark.parametrize("task", ["translation", "text"])
def test_load_without_data_raises_with_instructions(task):
    with pytest.raises(DataError, match=r"`clearhead data`.*--data PATH"):
        recipe(task).data.load()


def test_with_path_for_generated_data_raises_data_error():
    with pytest.raises(DataError, match="generates its data"):
        recipe("sort-dedup").data.with_path("file")
    assert isinstance(recipe("digits").data.with_path(None), DataConfig)


@pytest.mark.parametrize(
    ("word", "schedule"),
    [
        ("constant", Constant(4e-3, 50)),
        ("inverse-root", InverseSqrt(4e-3, 50)),
        ("WarmupCosine", WarmupCosine(4e-3, 50)),
        ('{type = "Constant", lr_max = 1}', Constant(1.0)),
        (InverseSqrt(1e-2, 7), InverseSqrt(1e-2, 7)),
    ],
)
def test_with_overrides_schedule_name_keeps_common_fields(word, schedule):
    assert recipe("text").with_overrides({"schedule": word}).train.schedule == schedule


def test_with_overrides_unknown_schedule_raises_config_error():
    with pytest.raises(ConfigError, match="schedule: unknown variant 'cosine'; known: WarmupCosine, Inv"):
        recipe("text").with_overrides({"schedule": "cosine"})
    with pytest.raises(ConfigError, match="warmup_steps is 0; expected a whole number of at least 1"):
        recipe("text").with_overrides({"warmup_steps": 0, "schedule": "inverse-root"})


def test_with_overrides_finds_nested_settings_by_name():
    changed = recipe("translation").with_overrides({"warmup_steps": 7, "budget": 99, "train.lr_max": 0.5})
    assert changed.train.schedule == WarmupCosine(0.5, 7)
    assert changed.train.batch == TokenBudget(99, multiple=8)


def test_with_overrides_prefix_selects_one_of_several_settings():
    changed = recipe("translation").with_overrides(
        {"train.eps": 1e-7, "model.eps": 1e-4, "model.bias": False, "norm.bias": False, "model.vocab_size": 99}
    )
    assert changed.train.eps == 1e-7
    assert changed.model.norm.eps == 1e-4
    assert changed.model.norm.bias is False
    assert changed.model.bias is False
    assert (changed.data.vocab_size, changed.model.vocab_size) == (2000, 99)
