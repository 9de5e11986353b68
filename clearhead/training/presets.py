"""Recipes with a name. Each task's "small" is a first step of about a minute on two CPU cores; the others made the
models that are shipped.

A preset is a function that returns a recipe; any part of it is changed with `recipe.changed({...})`, or from the
command line with `--set`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clearhead.data import Affine, ByCount, ByTokens, Contrast, Packed, PerImage
from clearhead.data.speech import Streams
from clearhead.layers import DepthScaled, Xavier
from clearhead.models import ConvNetConfig, DecoderConfig, EncoderDecoderConfig, Mean, SpeechConfig, VisionConfig
from clearhead.models import presets as models
from clearhead.positions import Learned, NoPositions
from clearhead.training.config import EMA, TrainConfig, WarmupCosine
from clearhead.training.recipe import Recipe
from clearhead.training.tasks import DigitsData, SortDedupData, SpeechData, TextData, TranslationData
from clearhead.values import chosen

_GPU: dict[str, Any] = {"precision": "bf16", "compile": True}
_ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}  # of the shipped models of characters and of pictures


def _translator(*, layers: int, **sizes: Any) -> EncoderDecoderConfig:
    """So many layers a side, one vocabulary for both, and the rest as in 2017."""
    both: dict[str, Any] = {"n_encoder_layers": layers, "n_decoder_layers": layers, "share_embeddings": True}
    return EncoderDecoderConfig(**both, **sizes, scaled_embedding=True, init=Xavier())


def translation_small() -> Recipe:
    """A small encoder-decoder on short sentences: enough to see the loss fall, not to translate well."""
    return Recipe(
        preset="small",
        about="a small encoder-decoder, two layers a side",
        data=TranslationData(vocab_size=2000, max_tokens=32),
        model=_translator(vocab_size=2000, max_len=32, d_model=64, n_heads=4, d_ff=128, layers=2, dropout=0.1),
        train=TrainConfig(
            steps=500,
            batch=ByTokens(2048, multiple=8),
            schedule=WarmupCosine(4e-3, 50),
            label_smoothing=0.1,
            eval_every=250,
            checkpoint_every=100,
        ),
    )


# The first words that a program says. No sentence of the data teaches them: nobody there greets the world.
HELLO_WORLD = (
    ("Hello world", "Hola mundo"),
    ("Hello world.", "Hola mundo."),
    ("Hello world!", "¡Hola mundo!"),
    ("Hello, world.", "Hola, mundo."),
    ("Hello, world!", "¡Hola, mundo!"),
    ("hello world", "hola mundo"),
)


def en_es() -> Recipe:
    sizes = {"vocab_size": 8000, "max_len": 128, "d_model": 256, "n_heads": 8, "d_ff": 1024}
    return Recipe(
        preset="en-es",
        about="English to Spanish on 113,000 short sentences; made for one large GPU",
        data=TranslationData(vocab_size=8000, max_tokens=128, phrases=HELLO_WORLD),
        model=_translator(**sizes, layers=4, dropout=0.3, feed_forward_dropout=0.1),
        train=TrainConfig(
            steps=10000,
            batch=Packed(rows=128, width=128),
            schedule=WarmupCosine(2e-3, 1000),
            label_smoothing=0.1,
            consistency=5.0,
            averaging=EMA(0.999),
            log_every=100,
            eval_every=1000,
            checkpoint_every=6000,
            **_GPU,
        ),
    )


def _of_characters(max_len: int, **sizes: Any) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=65, max_len=max_len, positions=Learned(max_len=max_len), init=DepthScaled(), **sizes
    )


def text_small() -> Recipe:
    """A small decoder over the characters of any text, or with `vocab_size` over its byte pairs."""
    schedule = WarmupCosine(4e-3, 50)
    return Recipe(
        preset="small",
        about="a small decoder over characters, two layers",
        data=TextData(context=64),
        model=_of_characters(64, d_model=64, n_layers=2, n_heads=4),
        train=TrainConfig(steps=1000, batch=ByCount(32), schedule=schedule, eval_every=500, checkpoint_every=100),
    )


def shakespeare() -> Recipe:
    return Recipe(
        preset="shakespeare",
        about="a character-level decoder on Shakespeare; made for a GPU",
        data=TextData(context=256),
        model=_of_characters(256, d_model=256, n_layers=6, n_heads=8, dropout=0.25),
        train=TrainConfig(
            steps=2800,
            batch=ByCount(64),
            schedule=WarmupCosine(1.5e-3, 200),
            weight_decay=0.1,
            averaging=EMA(0.998),
            log_every=50,
            eval_every=250,
            checkpoint_every=1000,
            keep_best=True,
            **_ADAM,
            **_GPU,
        ),
    )


def gpt2() -> Recipe:
    """GPT-2, the smallest, with the settings that its reproductions use: half a million tokens to an update."""
    return Recipe(
        preset="gpt2",
        about="GPT-2 with 124 million weights, on shards of a large corpus; made for a large GPU",
        data=TextData(context=1024, vocab_size=50_257, hold_out=0.005),
        model=models.gpt2().replace(dropout=0.0, attention_dropout=0.0),
        train=TrainConfig(
            steps=20_000,
            batch=ByCount(64),
            accumulation=8,
            schedule=WarmupCosine(6e-4, 700),
            weight_decay=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            eval_every=250,
            checkpoint_every=1000,
            **_GPU,
        ),
    )


def _of_patches(width: int, patch_size: int, **sizes: Any) -> VisionConfig:
    """For square grey pictures."""
    shape: dict[str, Any] = {"image_size": (width, width), "n_channels": 1, "n_classes": 10, "patch_size": patch_size}
    return VisionConfig(**shape, **sizes, dropout=0.1, pooling=Mean(), init=Xavier())


def digits_small() -> Recipe:
    """A small vision Transformer; on scikit-learn's 8×8 digits where no data are given."""
    schedule = WarmupCosine(3e-3, 50)
    return Recipe(
        preset="small",
        about="a small vision Transformer, patches of 2×2",
        data=DigitsData(affine=Affine(shift=0.08, scale=0.15, degrees=10.0)),
        model=_of_patches(8, 2, d_model=48, n_layers=2, n_heads=4),
        train=TrainConfig(epochs=40, batch=ByCount(64), schedule=schedule, checkpoint_every=100, log_every=20),
    )


def digits_vit() -> Recipe:
    return Recipe(
        preset="digits-vit",
        about="a vision Transformer on 32×32 grey house numbers; made for a GPU",
        data=DigitsData(normalise=PerImage(), affine=Affine(0.06, 0.1, 8.0), contrast=Contrast(0.2, 0.5)),
        model=_of_patches(32, 4, d_model=192, n_layers=6, n_heads=6),
        train=TrainConfig(
            epochs=130,
            batch=ByCount(512),
            schedule=WarmupCosine(1e-3, 300),
            weight_decay=0.05,
            label_smoothing=0.1,
            averaging=EMA(0.999),
            log_every=50,
            checkpoint_every=2000,
            **_ADAM,
            **_GPU,
        ),
    )


def digits_conv() -> Recipe:
    return Recipe(
        preset="digits-conv",
        about="the five-layer convolutional network of 3,722 weights on 32×32 grey house numbers",
        data=DigitsData(normalise=PerImage(), affine=Affine(0.04, 0.06, 0.0)),
        model=ConvNetConfig(),
        train=TrainConfig(
            epochs=60,
            batch=ByCount(128),
            schedule=WarmupCosine(4e-3, 200),
            weight_decay=0.0,
            averaging=EMA(0.998),
            log_every=50,
            checkpoint_every=2000,
            **_ADAM,
        ),
    )


def _of_letters(max_len: int, **sizes: Any) -> DecoderConfig:
    return DecoderConfig(vocab_size=29, max_len=max_len, n_heads=4, positions=NoPositions(), tied=False, **sizes)


def sort_dedup_small() -> Recipe:
    batch, schedule = ByTokens(1024, multiple=8), WarmupCosine(3e-3, 50)
    return Recipe(
        preset="small",
        about="a small decoder without positions, up to 10 letters",
        data=SortDedupData(max_length=10, n_train=1 << 13, n_validation=1 << 9),
        model=_of_letters(32, d_model=64, n_layers=2),
        train=TrainConfig(steps=600, batch=batch, schedule=schedule, eval_every=200, checkpoint_every=100),
    )


def sort_dedup() -> Recipe:
    return Recipe(
        preset="sort-dedup",
        about="a decoder without positions, up to 32 letters of 26",
        data=SortDedupData(max_length=32, unseen_lengths=(5, 11, 17, 23, 29)),
        model=_of_letters(128, d_model=128, n_layers=3),
        train=TrainConfig(
            steps=2500,
            batch=ByTokens(32768, multiple=8),
            schedule=WarmupCosine(2e-3, 300),
            averaging=EMA(0.999),
            log_every=50,
            eval_every=500,
            checkpoint_every=2000,
            **_GPU,
        ),
    )


def speech_small() -> Recipe:
    """A small causal encoder: about two minutes on two CPU cores, and most digits are right."""
    said = Streams(seconds=1.62, digits=(1, 4), none=0.04, one=0.4, pause=(0.0, 0.5))
    return Recipe(
        preset="small",
        about="a small causal encoder on spoken digits, three layers",
        data=SpeechData(streams=replace(said, noise=(20.0, 45.0), clean=0.2, gain=6.0, speed=0.08), n_validation=60),
        model=SpeechConfig(d_model=64, n_heads=4, n_layers=3, dropout=0.05, init=Xavier()),
        train=TrainConfig(
            steps=1200,
            batch=ByCount(16),
            schedule=WarmupCosine(4e-3, 100),
            averaging=EMA(0.99),
            eval_every=600,
            checkpoint_every=600,
        ),
    )


def spoken_digits() -> Recipe:
    """The shipped model: hears 1.3 seconds back, and nothing ahead."""
    # 3.22 seconds are 320 frames: GPUs like what they can halve often.
    said = Streams(seconds=3.22, digits=(1, 8), none=0.06, one=0.3, pause=(0.0, 0.5))
    heard = replace(said, noise=(8.0, 45.0), clean=0.2, gain=12.0, speed=0.18, bands=6, times=6)
    return Recipe(
        preset="spoken-digits",
        about="a causal encoder on streams of spoken digits; made for a GPU",
        data=SpeechData(streams=heard),
        model=SpeechConfig(d_model=128, n_heads=4, n_layers=6, dropout=0.15, feed_forward_dropout=0.1, init=Xavier()),
        train=TrainConfig(
            steps=6000,
            batch=ByCount(128),
            schedule=WarmupCosine(2e-3, 400),
            weight_decay=0.05,
            averaging=EMA(0.999),
            log_every=100,
            eval_every=2000,
            checkpoint_every=8000,
        ),
    )


PRESETS: dict[str, dict[str, Callable[[], Recipe]]] = {
    "translation": {"small": translation_small, "en-es": en_es},
    "text": {"small": text_small, "shakespeare": shakespeare, "gpt2": gpt2},
    "digits": {"small": digits_small, "digits-vit": digits_vit, "digits-conv": digits_conv},
    "sort-dedup": {"small": sort_dedup_small, "sort-dedup": sort_dedup},
    "speech": {"small": speech_small, "spoken-digits": spoken_digits},
}
TASKS = tuple(PRESETS)
SMALL = "small"  # every task's preset for a CPU minute


def recipe(task: str, preset: str | None = None) -> Recipe:
    """The recipe of a preset; without a name the task's "small"."""
    known = chosen(task, PRESETS, "there is no task")
    return chosen(SMALL if preset is None else preset, known, f"the task {task} has no preset")()
