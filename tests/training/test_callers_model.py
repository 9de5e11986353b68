"""`Trainer` trains the model of its caller, and leaves everything but the parameters as it was, with every option."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist

from clearhead.data import FixedSize, SequencePacking, TokenBudget
from clearhead.data.tasks.sort_dedup import SortDedup
from clearhead.data.tasks.translation import TranslationTask
from clearhead.generation.engine.program import unsupported_reason
from clearhead.models import DecoderConfig, EncoderDecoderConfig
from clearhead.training import DDP, EMA, FSDP, CheckpointAverage, Constant, EarlyStopping, TrainConfig, Trainer
from clearhead.training.distributed import World
from tests.training.workers import write_pairs

SETTINGS = {"steps": 3, "batch": FixedSize(7), "device": "cpu", "eval_every": 2}
OPTIONS = {
    "plain": {},
    "other intervals": {"log_every": 1, "checkpoint_every": 2, "keep": 1, "seed": 3},
    "other optimizer": {"schedule": Constant(0.01), "weight_decay": 0.0, "betas": (0.5, 0.5), "eps": 1e-3},
    "checkpointing": {"activation_checkpointing": True},
    "averaging": {"averaging": EMA(0.5), "keep_best": True, "early_stopping": EarlyStopping()},
    "checkpoint average": {"averaging": CheckpointAverage(k=2, every=1), "accumulation": 2, "clip": None},
    "bf16 and R-Drop": {"precision": "bf16", "r_drop_alpha": 0.3, "label_smoothing": 0.1},
    "token budget": {"batch": TokenBudget(99), "steps": None, "epochs": 1},
    "packing": {"batch": SequencePacking(3, 40)},
    "compiled": {"compile": True},
    "compiled checkpointing": {"compile": True, "activation_checkpointing": True},
    "DDP": {"parallel": DDP()},
    "DDP and checkpointing": {"parallel": DDP(), "activation_checkpointing": True},
    "FSDP": {"parallel": FSDP()},
    "FSDP and checkpointing": {"parallel": FSDP(), "activation_checkpointing": True},
}


@pytest.fixture
def process_group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def task(request, tmp_path):
    """Letters, or pairs of sentences for the options that need rows to pack."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("name") == "packing":
        return TranslationTask.load(write_pairs(tmp_path / "pairs.tsv"), vocab_size=283, max_tokens=29)
    return SortDedup(n_symbols=5, max_length=7, n_train=31, n_validation=11)


def build_model(task):
    sizes = {"vocab_size": task.tokenizer.vocab_size, "d_model": 12, "n_heads": 3, "dropout": 0.1, "max_len": 40}
    if isinstance(task, TranslationTask):
        return EncoderDecoderConfig(n_encoder_layers=2, n_decoder_layers=2, **sizes).build()
    return DecoderConfig(n_layers=2, **sizes).build()


def module_state(model):
    """Return the class and the contents of each module: its attributes, parameters, hooks and mode."""
    return {
        name: {"__class__": type(module)}
        | {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def test_options_include_every_field_of_train_config():
    assert set(SETTINGS).union(*OPTIONS.values()) == {field.name for field in fields(TrainConfig)}


CASES = [pytest.param(name, True, marks=[pytest.mark.compiled] * ("compile" in name)) for name in OPTIONS]
CASES.append(pytest.param("plain", False))


@pytest.mark.parametrize(("name", "training"), CASES)
def test_trainer_leaves_the_callers_modules_as_they_were(tmp_path, process_group, task, name, training):
    torch._dynamo.reset()
    model = build_model(task).train(training)
    first = next(module for module in model.modules() if hasattr(module, "norm2"))
    first.train(not training)
    before = module_state(model)
    config = TrainConfig(**(SETTINGS | OPTIONS[name]))
    Trainer(model, task, config, tmp_path / "run", world=World(parallel=config.parallel)).run()
    after = module_state(model)
    assert after.keys() == before.keys()
    for path, state in before.items():
        assert after[path].keys() == state.keys(), path
        for key, value in state.items():
            assert after[path][key] is value or after[path][key] == value, (path, key)
    assert unsupported_reason(model.eval()) is None


@pytest.mark.parametrize("parallel", [DDP(), FSDP()], ids=["DDP", "FSDP"])
def test_trainer_trains_the_callers_model_in_every_strategy(tmp_path, process_group, task, parallel):
    trained = {}
    for name, strategy in (("one", None), ("parallel", parallel)):
        torch.manual_seed(7)
        model = build_model(task)
        start = {name: parameter.clone() for name, parameter in model.named_parameters()}
        config = TrainConfig(**(SETTINGS | {"parallel": strategy}))
        Trainer(model, task, config, tmp_path / name, world=World(parallel=strategy)).run()
        assert all(not torch.equal(parameter, start[name]) for name, parameter in model.named_parameters())
        trained[name] = dict(model.named_parameters())
    torch.testing.assert_close(trained["parallel"], trained["one"])


def test_fsdp_does_not_keep_a_model_that_its_caller_dropped(tmp_path, process_group, task):
    model = build_model(task)
    original = weakref.ref(model)
    config = TrainConfig(**(SETTINGS | {"parallel": FSDP()}))
    trainer = Trainer(model, task, config, tmp_path / "run", world=World(parallel=FSDP()))
    del model
    gc.collect()
    assert original() is None
    assert trainer.run() == "finished"
