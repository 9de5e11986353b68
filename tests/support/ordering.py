"""Random order of tests."""

from __future__ import annotations

import itertools
import random


def shuffle_by_file(items, seed):
    """Shuffle files, and tests within a file; tests of a file stay together because they share its fixtures."""
    rng = random.Random(seed)
    files = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.path)]
    rng.shuffle(files)
    for file in files:
        rng.shuffle(file)
    return [item for file in files for item in file]
