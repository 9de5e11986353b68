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
    from clearhead.data.batch import Batch as Batch
    from clearhead.data.batch import ImageBatch as ImageBatch
    from clearhead.data.batch import PackedPairBatch as PackedPairBatch
    from clearhead.data.batch import PairBatch as PairBatch
    from clearhead.data.batch import Split as Split
    from clearhead.data.batch import Task as Task
    from clearhead.data.batch import TokenBatch as TokenBatch
    from clearhead.data.batches import Batches as Batches
    from clearhead.data.batches import ByCount as ByCount
    from clearhead.data.batches import ByTokens as ByTokens
    from clearhead.data.batches import Packed as Packed
    from clearhead.data.batches import Statistics as Statistics
    from clearhead.data.digits import Affine as Affine
    from clearhead.data.digits import Augmentation as Augmentation
    from clearhead.data.digits import Contrast as Contrast
    from clearhead.data.digits import Digits as Digits
    from clearhead.data.digits import Images as Images
    from clearhead.data.digits import ImageSplit as ImageSplit
    from clearhead.data.digits import Normalisation as Normalisation
    from clearhead.data.digits import PerImage as PerImage
    from clearhead.data.digits import PerSet as PerSet
    from clearhead.data.digits import Shift as Shift
    from clearhead.data.digits import load_images as load_images
    from clearhead.data.digits import normalisation_from_dict as normalisation_from_dict
    from clearhead.data.digits import normalisation_to_dict as normalisation_to_dict
    from clearhead.data.digits import prepare as prepare
    from clearhead.data.files import Report as Report
    from clearhead.data.pieces import BytePairs as BytePairs
    from clearhead.data.pieces import train_bpe as train_bpe
    from clearhead.data.ragged import Ragged as Ragged
    from clearhead.data.registry import KNOWN as KNOWN
    from clearhead.data.registry import DataSet as DataSet
    from clearhead.data.registry import KnownFile as KnownFile
    from clearhead.data.registry import Remote as Remote
    from clearhead.data.registry import fetch as fetch
    from clearhead.data.registry import fetch_file as fetch_file
    from clearhead.data.registry import find as find
    from clearhead.data.registry import recognise as recognise
    from clearhead.data.shards import Shards as Shards
    from clearhead.data.shards import tokenize as tokenize
    from clearhead.data.sort_dedup import SortDedup as SortDedup
    from clearhead.data.text import ConsecutiveWindows as ConsecutiveWindows
    from clearhead.data.text import RandomWindows as RandomWindows
    from clearhead.data.text import ShardSplit as ShardSplit
    from clearhead.data.text import Text as Text
    from clearhead.data.text import WindowSplit as WindowSplit
    from clearhead.data.text import read_text as read_text
    from clearhead.data.tokenizers import Characters as Characters
    from clearhead.data.tokenizers import Symbols as Symbols
    from clearhead.data.tokenizers import Tokenizer as Tokenizer
    from clearhead.data.tokenizers import load_tokenizer as load_tokenizer
    from clearhead.data.translation import PairSplit as PairSplit
    from clearhead.data.translation import Translation as Translation
    from clearhead.data.translation import encode_sources as encode_sources
    from clearhead.data.translation import encode_targets as encode_targets
    from clearhead.data.translation import read_pairs as read_pairs

lazy(__name__)
