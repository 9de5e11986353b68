"""Named recipes.

The "small" recipe of each task trains in about a minute on two CPU cores; the recipes of the bundled models are read
from the `train.toml` of these models.

A preset is a function that returns a recipe. Change parts of it with `recipe.with_overrides({...})`, or with `--set` on
the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

from clearhead._core.validation import lookup
from clearhead.data import FixedSize, RandomAffine, TokenBudget
from clearhead.data.tasks.speech import StreamSettings
from clearhead.models import CTCEncoderConfig, DecoderConfig, EncoderDecoderConfig, MeanPooling, VisionConfig
from clearhead.models import presets as models
from clearhead.nn import DepthScaled, Xavier
from clearhead.nn.positions import LearnedPositions, NoPE
from clearhead.training.averaging import EMA
from clearhead.training.config import TrainConfig
from clearhead.training.recipe import Recipe
from clearhead.training.schedules import WarmupCosine
from clearhead.training.tasks import DigitsData, SortDedupData, SpeechData, TextData, TranslationData


def translation_small() -> Recipe:
    """Return a small encoder-decoder for short sentences; the loss falls, but translations are poor."""
    return Recipe(
        preset="small",
        description="a small encoder-decoder, two layers each",
        data=TranslationData(vocab_size=2000, max_tokens=32),
        model=EncoderDecoderConfig(
            vocab_size=2000,
            max_len=32,
            d_model=64,
            n_heads=4,
            d_ff=128,
            n_encoder_layers=2,
            n_decoder_layers=2,
            dropout=0.1,
            scaled_embedding=True,
            share_embeddings=True,
            init=Xavier(),
        ),
        train=TrainConfig(
            steps=500,
            batch=TokenBudget(2048, multiple=8),
            schedule=WarmupCosine(4e-3, 50),
            label_smoothing=0.1,
            eval_every=250,
            checkpoint_every=100,
        ),
    )


def text_small() -> Recipe:
    """Return a small decoder over the characters of a text, or over BPE tokens if `vocab_size` is set."""
    schedule = WarmupCosine(4e-3, 50)
    return Recipe(
        preset="small",
        description="a small decoder over characters, two layers",
        data=TextData(context=64),
        model=DecoderConfig(
            vocab_size=65,
            max_len=64,
            d_model=64,
            n_layers=2,
            n_heads=4,
            positions=LearnedPositions(max_len=64),
            init=DepthScaled(),
        ),
        train=TrainConfig(steps=1000, batch=FixedSize(32), schedule=schedule, eval_every=500, checkpoint_every=100),
    )


def gpt2() -> Recipe:
    """Return GPT-2 small with the settings of its reproductions: half a million tokens per update."""
    return Recipe(
        preset="gpt2",
        description="GPT-2 with 124 million parameters, on shards of a large corpus; for a large GPU",
        data=TextData(context=1024, vocab_size=50_257, hold_out=0.005),
        model=models.gpt2().replace(dropout=0.0, attention_dropout=0.0),
        train=TrainConfig(
            steps=20_000,
            batch=FixedSize(64),
            accumulation=8,
            schedule=WarmupCosine(6e-4, 700),
            weight_decay=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            eval_every=250,
            checkpoint_every=1000,
            precision="bf16",
            compile=True,
        ),
    )


def digits_small() -> Recipe:
    """Return a small vision Transformer; without data it trains on the 8×8 digits of scikit-learn."""
    schedule = WarmupCosine(3e-3, 50)
    return Recipe(
        preset="small",
        description="a small vision Transformer, patches of 2×2",
        data=DigitsData(affine=RandomAffine(shift=0.08, scale=0.15, degrees=10.0)),
        model=VisionConfig(
            image_size=(8, 8),
            n_channels=1,
            n_classes=10,
            patch_size=2,
            d_model=48,
            n_layers=2,
            n_heads=4,
            dropout=0.1,
            pooling=MeanPooling(),
            init=Xavier(),
        ),
        train=TrainConfig(epochs=40, batch=FixedSize(64), schedule=schedule, checkpoint_every=100, log_every=20),
    )


def sort_dedup_small() -> Recipe:
    """Return a small decoder without positions for sorting and deduplicating letters."""
    batch = TokenBudget(1024, multiple=8)
    schedule = WarmupCosine(3e-3, 50)
    return Recipe(
        preset="small",
        description="a small decoder without positions, up to 10 letters",
        data=SortDedupData(max_length=10, n_train=1 << 13, n_validation=1 << 9),
        model=DecoderConfig(
            vocab_size=29,
            max_len=32,
            d_model=64,
            n_layers=2,
            n_heads=4,
            positions=NoPE(),
            tie_embeddings=False,
        ),
        train=TrainConfig(steps=600, batch=batch, schedule=schedule, eval_every=200, checkpoint_every=100),
    )


def speech_small() -> Recipe:
    """Return a small causal encoder; it trains in two minutes on two CPU cores and recognizes most digits."""
    streams = StreamSettings(
        seconds=1.62,
        digits=(1, 4),
        p_empty=0.04,
        p_single=0.4,
        pause=(0.0, 0.5),
        snr_db=(20.0, 45.0),
        p_clean=0.2,
        gain_db=6.0,
        speed=0.08,
    )
    return Recipe(
        preset="small",
        description="a small causal encoder on spoken digits, three layers",
        data=SpeechData(streams=streams, n_validation=60),
        model=CTCEncoderConfig(d_model=64, n_heads=4, n_layers=3, dropout=0.05, init=Xavier()),
        train=TrainConfig(
            steps=1200,
            batch=FixedSize(16),
            schedule=WarmupCosine(4e-3, 100),
            averaging=EMA(0.99),
            eval_every=600,
            checkpoint_every=600,
        ),
    )


# The description of each bundled model's recipe, and the settings that a new run resets: sizes that depended on the
# data, and defaults that have changed since.
_BUNDLED_FOLDER = Path(str(resources.files("clearhead.hub") / "models"))
_BUNDLED: dict[str, tuple[str, dict[str, object]]] = {
    # Its phrases are translations of "Hello world", which the data does not contain.
    "en-es": ("English to Spanish on 113,000 short sentences; for one large GPU", {"steps": 10_000}),
    "shakespeare": (
        "a character-level decoder on Shakespeare; for a GPU",
        {"model.vocab_size": 65, "data.windows": None},
    ),
    "digits-vit": ("a vision Transformer on 32×32 grayscale house numbers; for a GPU", {"model.init": Xavier()}),
    "digits-conv": ("the five-layer convolutional network with 3,722 parameters on 32×32 grayscale house numbers", {}),
    "sort-dedup": ("a decoder without positions, up to 32 letters of 26", {}),
    # 1.3 seconds of left context and no look-ahead. Streams of 3.22 seconds are 320 frames, a multiple of 64.
    "spoken-digits": (
        "a causal encoder on streams of spoken digits; for a GPU",
        {"model.mean": 0.0, "model.std": 1.0},
    ),
}


def _bundled(name: str) -> Callable[[], Recipe]:
    """Return a function that loads the recipe of a bundled model."""
    description, overrides = _BUNDLED[name]
    return lambda: replace(Recipe.load(_BUNDLED_FOLDER / name), description=description).with_overrides(overrides)


PRESETS: dict[str, dict[str, Callable[[], Recipe]]] = {
    "translation": {"small": translation_small, "en-es": _bundled("en-es")},
    "text": {"small": text_small, "shakespeare": _bundled("shakespeare"), "gpt2": gpt2},
    "digits": {
        "small": digits_small,
        "digits-vit": _bundled("digits-vit"),
        "digits-conv": _bundled("digits-conv"),
    },
    "sort-dedup": {"small": sort_dedup_small, "sort-dedup": _bundled("sort-dedup")},
    "speech": {"small": speech_small, "spoken-digits": _bundled("spoken-digits")},
}
TASKS = tuple(PRESETS)
SMALL = "small"  # preset of every task for about a minute on a CPU


def recipe(task: str, preset: str | None = None) -> Recipe:
    """Return the recipe of a preset; by default the task's "small" preset.

    Raises:
        ConfigError: There is no such task or preset.
    """
    presets = lookup(task, PRESETS, "unknown task")
    return lookup(SMALL if preset is None else preset, presets, f"the task {task} has no preset")()
