"""From a text to a model: byte pairs trained or given, shards that stay in their files, folders that can be used."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from clearhead import hub
from clearhead.config import Config
from clearhead.data import (
    ByteLevelBPE,
    FixedSize,
    LanguageModeling,
    WindowSplit,
    load_tokenizer,
    tokenize,
    train_bpe,
)
from clearhead.errors import ConfigError, DataError
from clearhead.generation.engine.program import unsupported_reason
from clearhead.models import DecoderConfig
from clearhead.training import Recipe, TrainConfig, Trainer, read_log, train
from clearhead.training.distributed import World
from clearhead.training.presets import recipe
from clearhead.training.step_runner import StepRunner
from tests.support.rounding import assert_equal_up_to_rounding
from tests.training.tiny import rows

BOOK = "".join(
    f"chapter {i}: the {i * 31 % 17} cats sat on {i * 7 % 13} mats,\nand so did the dogs.\n" for i in range(120)
)
SMALL = {
    "context": 13, "d_model": 12, "n_heads": 3, "n_layers": 1, "steps": 7, "warmup_steps": 1, "log_every": 1,
    "eval_every": 5, "batch.examples": 5, "checkpoint_every": 3, "device": "cpu",
}  # fmt: skip


@pytest.fixture
def book(tmp_path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(BOOK)
    return path


def test_train_text_trains_and_stores_a_tokenizer(tmp_path, book):
    summary = train("text", data=book, out=tmp_path / "run", overrides=SMALL | {"data.vocab_size": 290})
    tokenizer = load_tokenizer(tmp_path / "run")
    assert isinstance(tokenizer, ByteLevelBPE)
    assert tokenizer.vocab_size == 290
    assert tokenizer.to_json() == train_bpe([BOOK[: int(len(BOOK) * 0.9)]], 290).to_json()
    trained = hub.pipeline(tmp_path / "run")
    assert trained.tokenizer.to_json() == tokenizer.to_json()
    assert trained.model.config.vocab_size == 290
    assert 0 <= summary.data_wait < 1
    assert "waiting for data" in summary.table()


def test_train_text_with_tokenizer_uses_it(tmp_path, book):
    train_bpe([BOOK], 290).save(tmp_path / "tok")
    for path in (tmp_path / "tok", tmp_path / "tok/tokenizer.json"):
        out = tmp_path / path.name
        train("text", data=book, tokenizer=path, out=out / "run", overrides=SMALL)
        assert load_tokenizer(out / "run").to_json() == load_tokenizer(tmp_path / "tok").to_json()
        assert Recipe.load(out / "run").model.vocab_size == 290


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"model.vocab_size": 5000}, {}, r"model\.vocab_size=5000 has no effect.*determine it \(\d+\); remove it"),
        ({"data.vocab_size": 300}, {"tokenizer": "tok"}, "data.vocab_size=300 has no effect.*determine it .290"),
        ({"data.vocab_size": 300, "data.across_documents": True}, {}, "a text file is one document"),
        ({"data.vocab_size": 100}, {}, "vocab_size 100 is too small"),
    ],
)
def test_train_setting_without_effect_raises_config_error(tmp_path, book, settings, options, message):
    train_bpe([BOOK], 290).save(tmp_path / "tok")
    options = {name: tmp_path / value for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        train("text", data=book, out=tmp_path / "run", overrides=SMALL | settings, **options)
    assert not (tmp_path / "run").exists()


def test_train_text_with_fewer_tokens_than_requested_can_be_resumed(tmp_path, book):
    settings = SMALL | {"data.vocab_size": 400}
    train("text", data=book, out=tmp_path / "run", overrides=settings)
    assert load_tokenizer(tmp_path / "run").vocab_size < 400
    assert train(resume=tmp_path / "run").ending == "finished"
    train("text", data=book, init=tmp_path / "run/model", out=tmp_path / "next", overrides=settings)
    with pytest.raises(ConfigError, match=r"data\.vocab_size=350 has no effect"):
        train(
            "text",
            data=book,
            init=tmp_path / "run/model",
            out=tmp_path / "x",
            overrides=SMALL | {"data.vocab_size": 350},
        )


def test_train_tokenizer_without_use_raises_config_error(tmp_path):
    with pytest.raises(ConfigError, match="does not use a tokenizer"):
        train("sort-dedup", tokenizer=tmp_path, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="remove task, preset, out, init and tokenizer"):
        train(resume=tmp_path, tokenizer=tmp_path)


def test_train_on_shards_resumed_equals_uninterrupted(tmp_path, book):
    bpe = train_bpe([BOOK], 290)
    (tmp_path / "two.txt").write_text(BOOK[::2])
    tokenize([book, tmp_path / "two.txt"], bpe, tmp_path / "shards", bytes_per_shard=997, processes=1)
    train("text", data=tmp_path / "shards", out=tmp_path / "uninterrupted", overrides=SMALL)
    train("text", data=tmp_path / "shards", out=tmp_path / "part", overrides=SMALL)
    for later in (tmp_path / "part").glob("step-0000000[67]"):
        for path in sorted(later.rglob("*"), reverse=True):
            path.unlink()
        later.rmdir()
    train(resume=tmp_path / "part")
    assert rows(tmp_path / "uninterrupted") == rows(tmp_path / "part")
    assert len([row for row in read_log(tmp_path / "part") if row["kind"] == "train"]) == 7
    train_bpe([BOOK], 280).save(tmp_path / "tok")
    with pytest.raises(DataError, match="another tokenizer"):
        train("text", data=tmp_path / "shards", tokenizer=tmp_path / "tok", out=tmp_path / "x", overrides=SMALL)
    with pytest.raises(ConfigError, match=r"data\.vocab_size=400 has no effect"):
        train("text", data=tmp_path / "shards", out=tmp_path / "x", overrides=SMALL | {"data.vocab_size": 400})


def test_gpt2_recipe_has_the_published_size_and_batch():
    gpt2 = recipe("text", "gpt2")
    assert sum(p.numel() for p in _meta(gpt2).parameters()) == 124_439_808
    assert gpt2.train.accumulation * gpt2.train.batch.examples * gpt2.data.context == 1 << 19


def _meta(gpt2):
    with torch.device("meta"):
        return gpt2.model.build()


# ---------------------------------------------------------------------- custom modules


@dataclass(frozen=True, kw_only=True)
class BagConfig(Config):
    vocab_size: int
    max_len: int = 64

    def build(self) -> Bag:
        return Bag(self)


class Bag(nn.Module):
    def __init__(self, config: BagConfig) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.vocab_size, 7)
        self.out = nn.Linear(7, config.vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids).cumsum(1))


def custom_task() -> LanguageModeling:
    bpe = train_bpe([BOOK], 280)
    ids = bpe.encode_long(BOOK)
    from clearhead.data import ConsecutiveWindows, RowReport

    parts = [WindowSplit(part, context=11, windows=ConsecutiveWindows()) for part in (ids[:-99], ids[-99:])]
    return LanguageModeling(*parts, bpe, RowReport(source="mine", n_rows=1))


def test_trainer_with_custom_module_exports_a_loadable_model(tmp_path):
    task = custom_task()
    config = TrainConfig(steps=5, batch=FixedSize(7), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer = Trainer(Bag(BagConfig(vocab_size=280)), task, config, tmp_path / "deep/run")
        assert trainer.run() == "finished"
    assert trainer.missing == []
    trained = hub.pipeline(tmp_path / "deep/run")
    assert trained.task == "text"
    ids = torch.tensor([trained.tokenizer.encode("chapter 1: the")])
    assert_equal_up_to_rounding(trained.model(ids), trainer.model.eval()(ids))


@pytest.mark.bad_input
def test_trainer_reports_files_that_cannot_be_exported(tmp_path):
    task = custom_task()
    task.name = "poems"
    task.tokenizer = object()
    model = Bag(BagConfig(vocab_size=280))
    del model.config
    trainer = Trainer(model, task, TrainConfig(steps=2, batch=FixedSize(7), device="cpu"), tmp_path / "run")
    with pytest.warns(RuntimeWarning) as caught:
        trainer.run()
    messages = [str(warning.message).partition(" lacks ")[2] for warning in caught]
    assert messages == trainer.missing
    assert messages[0].startswith("config.toml: Bag has no .config")
    assert [reason.partition(":")[0] for reason in trainer.missing] == ["config.toml", "train.toml", "tokenizer.json"]
    assert (tmp_path / "run/model/model.safetensors").is_file()


def test_train_with_activation_checkpointing_logs_equal_rows(tmp_path, book):
    for name, settings in (("stored", {}), ("recomputed", {"activation_checkpointing": True})):
        train("text", data=book, out=tmp_path / name, overrides=SMALL | {"dropout": 0.1} | settings)
    assert rows(tmp_path / "stored") == rows(tmp_path / "recomputed")


def test_step_runner_with_activation_checkpointing_restores_forward(book):
    task = LanguageModeling.load(book, context=16)
    config = DecoderConfig(vocab_size=task.tokenizer.vocab_size, max_len=16, d_model=12, n_layers=2, n_heads=3)
    model = config.build()
    runner = StepRunner(model, TrainConfig(steps=1, activation_checkpointing=True, device="cpu"), World(), rows=None)
    batch = task.train.batch(torch.arange(3))
    loss = runner.train_step([batch], 1.0)
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []
    assert unsupported_reason(model.eval()) is None


def test_step_runner_with_activation_checkpointing_restores_custom_forward_after_an_error(book):
    task = LanguageModeling.load(book, context=16)
    config = DecoderConfig(vocab_size=task.tokenizer.vocab_size, max_len=16, d_model=12, n_layers=2, n_heads=3)
    model = config.build()
    forward = model.blocks[0].forward
    model.blocks[0].forward = forward

    def fail(*args, **kwargs):
        raise RuntimeError("stop")

    model.blocks[1].forward = fail
    runner = StepRunner(model, TrainConfig(steps=1, activation_checkpointing=True, device="cpu"), World(), rows=None)
    with pytest.raises(RuntimeError, match="stop"):
        runner.train_step([task.train.batch(torch.arange(3))], 1.0)
    assert vars(model.blocks[0])["forward"] is forward
    assert vars(model.blocks[1])["forward"] is fail


def test_step_runner_with_compile_does_not_compile_the_callers_model(book):
    task = LanguageModeling.load(book, context=16)
    config = DecoderConfig(vocab_size=task.tokenizer.vocab_size, max_len=16, d_model=12, n_layers=2, n_heads=3)
    model = config.build()
    StepRunner(model, TrainConfig(steps=1, compile=True, device="cpu"), World(), rows=None)
    assert all(module._compiled_call_impl is None for module in model.modules())
