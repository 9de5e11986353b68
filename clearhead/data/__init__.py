"""Data: from files to batches.

A task (`TranslationTask`, `LanguageModeling`, `DigitClassification`, `SortDedup`) has a training and a validation part;
`Batches`
walks through a part:

    task = TranslationTask.load("en-es")
    batches = Batches(task.train, TokenBudget(8192), seed=1)
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
    from clearhead.data.batches import FixedSize as FixedSize
    from clearhead.data.batches import SequencePacking as SequencePacking
    from clearhead.data.batches import Statistics as Statistics
    from clearhead.data.batches import TokenBudget as TokenBudget
    from clearhead.data.digits import Augmentation as Augmentation
    from clearhead.data.digits import DatasetNormalize as DatasetNormalize
    from clearhead.data.digits import DigitClassification as DigitClassification
    from clearhead.data.digits import ImageNormalize as ImageNormalize
    from clearhead.data.digits import Images as Images
    from clearhead.data.digits import ImageSplit as ImageSplit
    from clearhead.data.digits import Normalization as Normalization
    from clearhead.data.digits import RandomAffine as RandomAffine
    from clearhead.data.digits import RandomContrast as RandomContrast
    from clearhead.data.digits import RandomShift as RandomShift
    from clearhead.data.digits import load_images as load_images
    from clearhead.data.digits import normalization_from_dict as normalization_from_dict
    from clearhead.data.digits import normalization_to_dict as normalization_to_dict
    from clearhead.data.digits import prepare as prepare
    from clearhead.data.files import Report as Report
    from clearhead.data.pieces import ByteLevelBPE as ByteLevelBPE
    from clearhead.data.pieces import train_bpe as train_bpe
    from clearhead.data.ragged import Ragged as Ragged
    from clearhead.data.registry import KNOWN as KNOWN
    from clearhead.data.registry import DataSet as DataSet
    from clearhead.data.registry import DatasetFile as DatasetFile
    from clearhead.data.registry import Download as Download
    from clearhead.data.registry import fetch as fetch
    from clearhead.data.registry import fetch_file as fetch_file
    from clearhead.data.registry import get_dataset as get_dataset
    from clearhead.data.registry import identify as identify
    from clearhead.data.shards import Shards as Shards
    from clearhead.data.shards import tokenize as tokenize
    from clearhead.data.sort_dedup import SortDedup as SortDedup
    from clearhead.data.text import ConsecutiveWindows as ConsecutiveWindows
    from clearhead.data.text import LanguageModeling as LanguageModeling
    from clearhead.data.text import RandomWindows as RandomWindows
    from clearhead.data.text import ShardSplit as ShardSplit
    from clearhead.data.text import WindowSplit as WindowSplit
    from clearhead.data.text import read_text as read_text
    from clearhead.data.tokenizers import CharTokenizer as CharTokenizer
    from clearhead.data.tokenizers import Symbols as Symbols
    from clearhead.data.tokenizers import Tokenizer as Tokenizer
    from clearhead.data.tokenizers import load_tokenizer as load_tokenizer
    from clearhead.data.translation import PairSplit as PairSplit
    from clearhead.data.translation import TranslationTask as TranslationTask
    from clearhead.data.translation import encode_sources as encode_sources
    from clearhead.data.translation import encode_targets as encode_targets
    from clearhead.data.translation import read_pairs as read_pairs

lazy(__name__)
