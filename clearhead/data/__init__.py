"""Data: from files to batches.

A task (`Translation`, `Text`, `Digits`, `SortDedup`) has a training and a validation part, and `Batches`
walks through a part:

    task = Translation.load("en-es")
    batches = Batches(task.train, ByTokens(8192), seed=1)
    for batch in batches:
        logits = batch.logits(model)  # against batch.labels, by batch.weights
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead._lazy import lazy

if TYPE_CHECKING:
    from clearhead.data.batch import Batch, ImageBatch, PackedPairBatch, PairBatch, Split, Task, TokenBatch
    from clearhead.data.batches import Batches, ByCount, ByTokens, Packed, Statistics
    from clearhead.data.digits import (
        Affine,
        Augmentation,
        Contrast,
        Digits,
        Images,
        ImageSplit,
        Normalisation,
        PerImage,
        PerSet,
        Shift,
        load_images,
        normalisation_from_dict,
        normalisation_to_dict,
        prepare,
    )
    from clearhead.data.files import Report
    from clearhead.data.pieces import BytePairs, train_bpe
    from clearhead.data.ragged import Ragged
    from clearhead.data.registry import KNOWN, DataSet, KnownFile, Remote, fetch, fetch_file, find, recognise
    from clearhead.data.shards import Shards, tokenize
    from clearhead.data.sort_dedup import SortDedup
    from clearhead.data.text import ConsecutiveWindows, RandomWindows, ShardSplit, Text, WindowSplit, read_text
    from clearhead.data.tokenizers import Characters, Symbols, Tokenizer
    from clearhead.data.tokenizers import load as load_tokenizer
    from clearhead.data.translation import PairSplit, Translation, encode_sources, encode_targets, read_pairs

lazy(__name__)

__all__ = [
    "KNOWN",
    "Affine",
    "Augmentation",
    "Batch",
    "Batches",
    "ByCount",
    "ByTokens",
    "BytePairs",
    "Characters",
    "ConsecutiveWindows",
    "Contrast",
    "DataSet",
    "Digits",
    "ImageBatch",
    "ImageSplit",
    "Images",
    "KnownFile",
    "Normalisation",
    "Packed",
    "PackedPairBatch",
    "PairBatch",
    "PairSplit",
    "PerImage",
    "PerSet",
    "Ragged",
    "RandomWindows",
    "Remote",
    "Report",
    "ShardSplit",
    "Shards",
    "Shift",
    "SortDedup",
    "Split",
    "Statistics",
    "Symbols",
    "Task",
    "Text",
    "TokenBatch",
    "Tokenizer",
    "Translation",
    "WindowSplit",
    "encode_sources",
    "encode_targets",
    "fetch",
    "fetch_file",
    "find",
    "load_images",
    "load_tokenizer",
    "normalisation_from_dict",
    "normalisation_to_dict",
    "prepare",
    "read_pairs",
    "read_text",
    "recognise",
    "tokenize",
    "train_bpe",
]
