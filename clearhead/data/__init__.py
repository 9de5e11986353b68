"""Data: from files to batches.

A task (`TranslationTask`, `LanguageModeling`, `DigitClassification`, `SortDedup`) has a training and a validation
split, and `Batches` iterates over a split:

    task = TranslationTask.load("en-es")
    batches = Batches(task.train, TokenBudget(8192), seed=1)
    for batch in batches:
        logits = batch.logits(model)  # compare with batch.labels, weighted by batch.weights
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead._core.lazy import lazy

if TYPE_CHECKING:
    from clearhead.data.batch import Batch as Batch
    from clearhead.data.batch import ImageBatch as ImageBatch
    from clearhead.data.batch import PackedPairBatch as PackedPairBatch
    from clearhead.data.batch import PairBatch as PairBatch
    from clearhead.data.batch import Split as Split
    from clearhead.data.batch import Task as Task
    from clearhead.data.batch import TokenBatch as TokenBatch
    from clearhead.data.dataset import DatasetSplit as DatasetSplit
    from clearhead.data.dataset import DatasetTask as DatasetTask
    from clearhead.data.dataset import InputBatch as InputBatch
    from clearhead.data.download import DATASETS as DATASETS
    from clearhead.data.download import DatasetFile as DatasetFile
    from clearhead.data.download import DatasetInfo as DatasetInfo
    from clearhead.data.download import Download as Download
    from clearhead.data.download import fetch as fetch
    from clearhead.data.download import fetch_file as fetch_file
    from clearhead.data.download import get_dataset as get_dataset
    from clearhead.data.download import identify as identify
    from clearhead.data.files import RowReport as RowReport
    from clearhead.data.image_files import Images as Images
    from clearhead.data.image_files import load_images as load_images
    from clearhead.data.image_transforms import Augmentation as Augmentation
    from clearhead.data.image_transforms import DatasetNormalize as DatasetNormalize
    from clearhead.data.image_transforms import ImageNormalize as ImageNormalize
    from clearhead.data.image_transforms import Normalization as Normalization
    from clearhead.data.image_transforms import RandomAffine as RandomAffine
    from clearhead.data.image_transforms import RandomContrast as RandomContrast
    from clearhead.data.image_transforms import RandomShift as RandomShift
    from clearhead.data.image_transforms import normalization_from_dict as normalization_from_dict
    from clearhead.data.image_transforms import normalization_to_dict as normalization_to_dict
    from clearhead.data.image_transforms import prepare as prepare
    from clearhead.data.packing import Ragged as Ragged
    from clearhead.data.sampler import Batches as Batches
    from clearhead.data.sampler import BatchStatistics as BatchStatistics
    from clearhead.data.sampler import FixedSize as FixedSize
    from clearhead.data.sampler import SequencePacking as SequencePacking
    from clearhead.data.sampler import TokenBudget as TokenBudget
    from clearhead.data.shards import Shards as Shards
    from clearhead.data.shards import tokenize as tokenize
    from clearhead.data.tasks.digits import DigitClassification as DigitClassification
    from clearhead.data.tasks.digits import ImageSplit as ImageSplit
    from clearhead.data.tasks.sort_dedup import SortDedup as SortDedup
    from clearhead.data.tasks.text import ConsecutiveWindows as ConsecutiveWindows
    from clearhead.data.tasks.text import LanguageModeling as LanguageModeling
    from clearhead.data.tasks.text import RandomWindows as RandomWindows
    from clearhead.data.tasks.text import ShardSplit as ShardSplit
    from clearhead.data.tasks.text import WindowSplit as WindowSplit
    from clearhead.data.tasks.text import read_text as read_text
    from clearhead.data.tasks.translation import PairSplit as PairSplit
    from clearhead.data.tasks.translation import TranslationTask as TranslationTask
    from clearhead.data.tasks.translation import encode_sources as encode_sources
    from clearhead.data.tasks.translation import encode_targets as encode_targets
    from clearhead.data.tasks.translation import read_pairs as read_pairs
    from clearhead.data.tokenizers.base import CharTokenizer as CharTokenizer
    from clearhead.data.tokenizers.base import Tokenizer as Tokenizer
    from clearhead.data.tokenizers.base import WordLevelTokenizer as WordLevelTokenizer
    from clearhead.data.tokenizers.base import load_tokenizer as load_tokenizer
    from clearhead.data.tokenizers.library import ByteLevelBPE as ByteLevelBPE
    from clearhead.data.tokenizers.library import train_bpe as train_bpe

lazy(__name__)
