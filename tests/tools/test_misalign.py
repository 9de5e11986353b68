"""The stress options of the test suite: misaligned parameters and shuffled order."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.misalign import OFFSETS, misalign
from tests.support.ordering import shuffle_by_file


def test_misalign_moves_parameters_and_keeps_values_and_ties():
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7))
    model[2].weight = model[0].weight
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    misalign(model)
    assert model[2].weight is model[0].weight
    assert [p.data_ptr() % 64 for p in model.parameters()] == [OFFSETS[i % 4] for i in range(5)]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_shuffled_keeps_the_tests_of_a_file_together():
    class Item:
        def __init__(self, path, number):
            self.path, self.number = path, number

    items = [Item(path, number) for path in "abcdefg" for number in range(5)]
    shuffled = shuffle_by_file(items, seed=3)
    assert sorted((item.path, item.number) for item in shuffled) == [(item.path, item.number) for item in items]
    assert shuffled != items
    paths = [item.path for item in shuffled]
    assert all(len(set(paths[i : i + 5])) == 1 for i in range(0, 35, 5))
    assert [id(item) for item in shuffle_by_file(items, seed=3)] == [id(item) for item in shuffled]
