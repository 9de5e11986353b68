"""Tests that files of earlier versions are read, and written in the current form.

Version 0.1.0 wrote the texts below and the files of the bundled models.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead.attention import SoftCapped
from clearhead.config import Config
from clearhead.data import ConsecutiveWindows, FixedSize, RandomWindows, SequencePacking, TokenBudget
from clearhead.errors import ConfigError
from clearhead.hub.bundled import BUNDLED_FOLDER, names
from clearhead.masks import Mask, causal, dilated, every, prefix
from clearhead.models import VisionConfig, load_checkpoint, save_checkpoint, tiny_encoder
from clearhead.nn import RMSNorm
from clearhead.nn.positions import LearnedPositions, LinearScaling, Llama3Scaling, NoPE, Rotary, Sinusoidal, YarnScaling
from clearhead.training import EMA, Constant, InverseSqrt, Recipe, TrainConfig, WarmupCosine, checkpoint, train
from clearhead.training.tasks import TextData

TRAIN = """\
type = "TrainConfig"
steps = 9933
batch = {type = "ByTokens", budget = 8192, multiple = 8}
accumulation = 1
schedule = "SCHEDULE"
lr_max = 0.002
warmup_steps = 1000
weight_decay = 0.01
betas = [0.9, 0.98]
eps = 1e-09
clip = "none"
label_smoothing = 0.1
consistency = 5.0
averaging = {type = "EMA", decay = 0.999}
precision = "bf16"
compile = true
device = "auto"
seed = 0
log_every = 100
eval_every = 1000
checkpoint_every = 6000
keep = 2
keep_best = false
"""

TEXT = """\
type = "TextData"
path = "input.txt"
context = 64
hold_out = 0.1
random_windows = RANDOM
"""

VISION = """\
type = "VisionConfig"
d_model = 48
n_heads = 4
dropout = 0.1
attention_dropout = 0.0
feed_forward_dropout = 0.0
bias = true
norm = {type = "LayerNorm", eps = 1e-05, bias = true}
residual = {type = "PreNorm"}
activation = {type = "GELU", tanh = false}
init = {type = "Xavier"}
image_size = [8, 8]
patch_size = 2
n_classes = 10
n_layers = 2
channels = 1
pooling = {type = "Mean"}
"""


@pytest.mark.parametrize(
    ("word", "schedule"),
    [
        ("warmup-cosine", WarmupCosine(0.002, 1000)),
        ("inverse-root", InverseSqrt(0.002, 1000)),
        ("constant", Constant(0.002, 1000)),
    ],
)
def test_from_toml_of_schedule_name_and_separate_fields_returns_schedule(word, schedule):
    config = TrainConfig.from_toml(TRAIN.replace("SCHEDULE", word))
    assert config.schedule == schedule
    assert config.replace(schedule=WarmupCosine()) == TrainConfig(
        steps=9933,
        batch=TokenBudget(8192, multiple=8),
        clip=None,
        label_smoothing=0.1,
        r_drop_alpha=5.0,
        averaging=EMA(0.999),
        precision="bf16",
        compile=True,
        log_every=100,
        eval_every=1000,
        checkpoint_every=6000,
    )
    assert TrainConfig.from_toml(config.to_toml()) == config
    assert "lr_max = 0.002" not in config.to_toml().splitlines()


def test_from_toml_of_learning_rate_without_schedule_returns_warmup_cosine():
    config = TrainConfig.from_toml("steps = 9\nlr_max = 0.5\n")
    assert config.schedule == WarmupCosine(0.5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('schedule = "cosine"', "unknown variant 'cosine'; known: WarmupCosine, InverseSqrt, Constant"),
        ("lr_max = -1.0", r"WarmupCosine: lr_max is -1\.0; expected a number above 0"),
        ('schedule = {type = "Constant"}\nlr_max = 1.0', "TrainConfig has no field 'lr_max'"),
    ],
)
def test_from_toml_of_invalid_earlier_fields_raises(lines, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_toml(f"steps = 9\n{lines}\n")


@pytest.mark.parametrize(("word", "windows"), [("true", RandomWindows()), ("false", ConsecutiveWindows(shifted=True))])
def test_from_toml_of_boolean_random_windows_returns_windows(word, windows):
    config = Config.from_toml(TEXT.replace("RANDOM", word))
    assert config == TextData(path="input.txt", context=64, windows=windows)
    assert Config.from_toml(config.to_toml()) == config


def test_from_toml_of_earlier_channels_field_returns_n_channels():
    config = Config.from_toml(VISION)
    assert isinstance(config, VisionConfig)
    assert config.n_channels == 1
    assert "n_channels = 1" in config.to_toml().splitlines()
    assert Config.from_toml(config.to_toml()) == config


@pytest.mark.parametrize("name", names())
def test_bundled_recipes_and_configs_round_trip(name):
    recipe = Recipe.load(BUNDLED_FOLDER / name)
    assert recipe.preset == name
    assert isinstance(recipe.train.schedule, WarmupCosine)
    assert recipe.train.schedule.warmup_steps >= 200
    again = Recipe.from_toml(recipe.to_toml())
    assert again == recipe
    config = Config.from_toml((BUNDLED_FOLDER / name / "config.toml").read_text())
    assert config == recipe.model
    assert Config.from_toml(config.to_toml()) == config


SETTINGS = {
    "steps": 6,
    "schedule": "inverse-root",
    "warmup_steps": 2,
    "d_model": 16,
    "n_heads": 2,
    "batch": FixedSize(16),
    "n_train": 64,
    "n_validation": 32,
    "checkpoint_every": 3,
    "device": "cpu",
}


def _as_old(state):
    """Return a checkpoint's values under the names of version 0.2, with a fingerprint of version 0.1."""
    trainer = dict(state.pop("trainer"))
    trainer["waited"] = trainer.pop("evals_since_best")
    del state["fingerprint"]
    tensors = {name.replace("optimizer/", "optimiser/"): shape for name, shape in state.pop("tensors").items()}
    return state | {"recipe": "0" * 64, "standing": trainer, "tensors": tensors}


def test_resume_of_run_of_earlier_version_matches_uninterrupted_run(tmp_path):
    train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS)
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "run", half)
    shutil.rmtree(half / "step-00000006")
    shutil.rmtree(half / "model")
    # As version 0.1.0 left it: the schedule in three lines, and another kind of mark.
    text = (half / "train.toml").read_text()
    table = next(line for line in text.splitlines() if line.startswith("schedule = "))
    numbers = Recipe.load(half).train.schedule
    old = f'schedule = "inverse-root"\nlr_max = {numbers.lr_max}\nwarmup_steps = {numbers.warmup_steps}'
    (half / "train.toml").write_text(text.replace(table, old))
    folder = half / "step-00000003"
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(_as_old(state)))
    path = folder / "optimizer.safetensors"
    tensors = {name.replace("optimizer/", "optimiser/"): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, folder / "optimiser.safetensors")
    path.unlink()
    names = ["model.safetensors", "optimiser.safetensors", "rng.safetensors", "state.json"]
    manifest = {name: checkpoint.sha256(folder / name) for name in names}
    (folder / "manifest.json").write_text(json.dumps(manifest))

    assert train(resume=half).steps == 6
    ended, began = (
        load_checkpoint(half / "model").state_dict(),
        load_checkpoint(tmp_path / "run" / "model").state_dict(),
    )
    assert all(torch.equal(ended[name], began[name]) for name in began)


def test_from_text_of_an_earlier_mask_notation_returns_the_same_mask():
    text = "causal() & (stride(3) | every(4, offset=1)) | prefix(2)"
    assert Mask.from_text(text) == causal() & (dilated(3) | every(4, start=1)) | prefix(2)


POSITIONS = [
    ({"type": "Learned", "max_len": 7}, LearnedPositions(max_len=7)),
    ({"type": "NoPositions"}, NoPE()),
    ({"type": "Sinusoidal", "base": 500.0, "halves": True}, Sinusoidal(500.0, layout="split")),
    ({"type": "Sinusoidal", "halves": False}, Sinusoidal()),
    (
        {"type": "Rotary", "fraction": 0.5, "stretch": {"type": "Linear", "factor": 2.0}},
        Rotary(10000.0, 0.5, LinearScaling(2.0)),
    ),
    (
        {"type": "Rotary", "stretch": {"type": "Yarn", "factor": 3.0, "trained_len": 9, "lengthened": 1.5}},
        Rotary(scaling=YarnScaling(3.0, original_max_len=9, attention_factor=1.5)),
    ),
    (
        {"type": "Rotary", "stretch": {"type": "Llama3", "trained_len": 9}},
        Rotary(scaling=Llama3Scaling(original_max_len=9)),
    ),
]


@pytest.mark.parametrize(("fields", "positions"), POSITIONS, ids=lambda x: x["type"] if isinstance(x, dict) else "")
def test_from_dict_of_earlier_position_names_returns_the_same_positions(fields, positions):
    sizes = {"type": "DecoderConfig", "vocab_size": 11, "d_model": 32, "n_heads": 2, "n_layers": 1, "max_len": 7}
    config = Config.from_dict(sizes | {"positions": fields})
    assert config.positions == positions
    assert Config.from_dict(config.to_dict()) == config


def test_from_dict_of_earlier_norm_field_returns_the_same_norm():
    sizes = {"type": "DecoderConfig", "vocab_size": 11, "d_model": 32, "n_heads": 2, "n_layers": 1}
    config = Config.from_dict(sizes | {"norm": {"type": "RMSNorm", "eps": 1e-6, "plus_one": True}})
    assert config.norm == RMSNorm(1e-6, unit_offset=True)


def test_from_dict_of_earlier_score_name_returns_the_same_scores():
    sizes = {"type": "DecoderConfig", "vocab_size": 11, "d_model": 32, "n_heads": 2, "n_layers": 1}
    config = Config.from_dict(sizes | {"scores": {"type": "Capped", "cap": 50.0}})
    assert config.scores == SoftCapped(50.0)


def test_load_reads_parameters_that_version_0_2_named_differently(tmp_path):
    model = tiny_encoder().replace(embedding_dim=6).build().eval()
    save_checkpoint(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "embedding_proj.weight" in tensors
    save_file({name.replace("embedding_proj.", "widen."): tensor for name, tensor in tensors.items()}, path)
    config = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(config.replace("embedding_dim", "d_embedding"))
    loaded = load_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_renamed_choices_and_fields_of_version_0_2_are_read():
    lines = ['type = "DecoderConfig"', "vocab_size = 5", "d_model = 4", "n_heads = 2", "n_layers = 1"]
    config = Config.from_toml("\n".join([*lines, "tied = false", "logit_cap = 2.0"]))
    assert (config.tie_embeddings, config.logit_softcap) == (False, 2.0)
    lines = ['type = "SpeechConfig"', "d_model = 4", "n_heads = 2", "n_layers = 1", "n_stacked = 3", "n_earlier = 1"]
    config = Config.from_toml("\n".join(lines))
    assert (type(config).__name__, config.frame_stacking, config.left_frames) == ("CTCEncoderConfig", 3, 1)
    config = TrainConfig.from_toml('steps = 3\nbatch = {type = "Packed", rows = 2, width = 7}\nrecompute = true\n')
    assert (config.batch, config.activation_checkpointing) == (SequencePacking(2, 7), True)


def test_read_of_tensors_that_version_0_2_named_differently_fills_current_names(tmp_path):
    old_names = ["blocks.0.after1.weight", "widen.weight", "optimiser/exp_avg/blocks.0.after_cross.weight"]
    stored = {name: torch.randn(3, 5) for name in old_names}
    checkpoint.write(tmp_path, 7, stored, {})
    (restored,) = checkpoint.valid_checkpoints(tmp_path)
    names = ["blocks.0.post_attention.weight", "embedding_proj.weight"]
    names.append("optimizer/exp_avg/blocks.0.post_cross_attention.weight")
    targets = {name: torch.zeros(3, 5) for name in names}
    checkpoint.read(restored, targets)
    for name, old_name in zip(names, old_names, strict=True):
        assert torch.equal(targets[name], stored[old_name])
