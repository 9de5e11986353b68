"""Many pairs to a row: each once, whole, apart from its neighbours; and a model learns the same as from
padded batches."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import (
    Batches,
    PackedPairBatch,
    PairSplit,
    Ragged,
    SequencePacking,
    SortDedup,
    read_pairs,
    train_bpe,
)
from clearhead.errors import ConfigError, DataError
from clearhead.masks import causal, window
from clearhead.models.encoder_decoder import EncoderDecoderConfig
from clearhead.nn.positions import ALiBi, LearnedPositions, NoPE, RelativeBias, Rotary, Sinusoidal

WORDS = ["uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve"]


def _texts(n, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def text():
        length = int(torch.randint(1, 8, (1,), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator).tolist())

    return [(text(), text()) for _ in range(n)]


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in _texts(151)), encoding="utf-8")
    pairs = read_pairs(path)
    tokenizer = train_bpe([*pairs.sources, *pairs.targets], 281)
    return PairSplit(pairs, tokenizer, max_tokens=64)


pair_lengths = st.lists(st.tuples(st.integers(1, 23), st.integers(1, 19)), min_size=1, max_size=97)


@given(pair_lengths, st.integers(7, 61), st.integers(1, 5))
def test_groups_contain_every_example_once_within_the_width(lengths, width, rows):
    lengths = torch.tensor(lengths)
    order = torch.randperm(len(lengths))
    groups = SequencePacking(rows, width).groups(lengths, order)
    fits = [row for row in order.tolist() if int(lengths[row].max()) <= width]
    laid = [line[line >= 0] for group in groups for line in group]
    assert [example for line in laid for example in line.tolist()] == fits
    assert all(len(group) == rows for group in groups)
    filled = [line for line in laid if len(line)]
    assert all(int(lengths[line].sum(0).max()) <= width for line in filled)
    for line, following in itertools.pairwise(filled):  # no row could have taken the next example
        assert int(lengths[torch.cat([line, following[:1]])].sum(0).max()) > width


def test_packed_rows_contain_the_ids_of_their_examples():
    ragged = Ragged.of([[1, 2, 3], [4], [], [5, 6, 7, 8], [9, 10]])
    rows = torch.tensor([[3, 0, -1], [1, 2, 4], [-1, -1, -1]])
    layout = ragged.layout(rows, 8)
    assert ragged.packed(rows, layout, fill=0).tolist() == [
        [5, 6, 7, 8, 1, 2, 3, 0],
        [4, 9, 10, 0, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert layout.documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 3], [0, 2, 2, 3, 3, 3, 3, 3], [3] * 8]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2, 3, 4], [*range(8)]]
    assert layout.real.sum(1).tolist() == [7, 3, 0]
    # Without their last ids, and without their first: the input and the labels of one layout.
    rows = torch.tensor([[3, 0], [4, 1]])
    layout = ragged.layout(rows, 5, drop=1)
    assert ragged.packed(rows, layout, fill=0).tolist() == [[5, 6, 7, 1, 2], [9, 0, 0, 0, 0]]
    assert ragged.packed(rows, layout, fill=0, skip=1).tolist() == [[6, 7, 8, 2, 3], [10, 0, 0, 0, 0]]


def test_packed_counts_equal_those_of_the_pairs(split):
    batches = Batches(split, SequencePacking(rows=5, width=53), seed=7)
    counted = batches.statistics()
    batch_list = list(batches)
    assert {tuple(batch.source.shape) for batch in batch_list} == {(5, 53)}
    assert counted.n_batches == len(batch_list)
    assert counted.n_examples == len(split) == 151
    assert counted.n_tokens == sum(batch.n_tokens for batch in batch_list) == int(split.lengths().sum())
    assert counted.n_padded == sum(batch.n_padded for batch in batch_list) == len(batch_list) * 2 * 5 * 53
    assert sum(batch.n_labels for batch in batch_list) == int(split.lengths()[:, 1].sum())
    assert all(batch.n_labels == int(batch.weights.sum()) for batch in batch_list)


@pytest.mark.parametrize(
    "positions",
    [Sinusoidal(), LearnedPositions(max_len=64), Rotary(), RelativeBias(), ALiBi(), NoPE()],
    ids=lambda positions: type(positions).__name__,
)
def test_packed_loss_and_gradients_equal_padded_batches(split, positions):
    torch.manual_seed(3)
    config = EncoderDecoderConfig(
        vocab_size=281,
        max_len=64,
        d_model=12,
        n_heads=3,
        d_ff=17,
        n_encoder_layers=2,
        n_decoder_layers=2,
        positions=positions,
        decoder_mask=causal() & window(7, 0),
    )
    model = config.build().double()
    batches = Batches(split, SequencePacking(rows=3, width=53), seed=2)
    (group, *_), packed = batches.groups(), next(iter(batches))
    assert isinstance(packed, PackedPairBatch)
    padded = split.batch(group[group >= 0])
    results = []
    for batch in (packed, padded):
        model.zero_grad()
        each = F.cross_entropy(batch.logits(model).flatten(0, 1), batch.labels.flatten(), reduction="none")
        total = each @ batch.weights.flatten().double()
        total.backward()
        results.append([total.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_packed_pairs_are_independent(split):
    torch.manual_seed(4)
    model = EncoderDecoderConfig(
        vocab_size=281, max_len=64, d_model=12, n_heads=3, d_ff=17, n_encoder_layers=1, n_decoder_layers=1
    ).build()
    rows = Batches(split, SequencePacking(rows=3, width=53)).groups()[0]
    other = rows.clone()
    other[:, 1:] = other.roll(1, 0)[:, 1:]  # the same first pairs, with the neighbours of another row
    first, second = (split.packed(some, 2 * 53) for some in (rows, other))
    alone = first.target_documents == 0
    assert not torch.equal(first.target, second.target)
    a, b = (batch.logits(model)[alone] for batch in (first, second))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_batches", [0, 1, 5, 17])
def test_batches_resumed_continue_with_the_next_batch(split, n_batches):
    unbroken = Batches(split, SequencePacking(rows=4, width=53), seed=5)
    stream = unbroken.forever()
    for _ in range(n_batches):
        next(stream)
    resumed = Batches(split, SequencePacking(rows=4, width=53), seed=5)
    resumed.load_state_dict(unbroken.state_dict())
    for a, b in itertools.islice(zip(stream, resumed.forever(), strict=False), 20):
        assert torch.equal(a.target, b.target)
        assert torch.equal(a.source_documents, b.source_documents)


@given(world=st.integers(1, 5), rows=st.integers(1, 4))
def test_batches_of_all_processes_equal_one_process(split, world, rows):
    size = SequencePacking(rows=rows, width=53)
    single_process = list(Batches(split, size, seed=3))
    parts = [list(Batches(split, size, seed=3, rank=rank, world=world)) for rank in range(world)]
    assert {len(part) for part in parts} == {len(single_process)}
    for i, batch in enumerate(single_process):
        shares = [part[i] for part in parts]
        assert sum(share.n_labels for share in shares) == batch.n_labels
        assert sum(float(share.weights.sum()) for share in shares) == float(batch.weights.sum())
        lines = [line for share in shares if share.n_labels for line in share.source.tolist()]
        assert sorted(line for line in lines if any(line)) == sorted(
            line for line in batch.source.tolist() if any(line)
        )


@pytest.mark.bad_input
def test_packing_invalid_arguments_raise(split):
    with pytest.raises(ConfigError, match="SequencePacking: rows is 0; expected a whole number of at least 1"):
        SequencePacking(rows=0, width=53)
    with pytest.raises(DataError, match=r"no batch can be made: .*151 over the budget skipped"):
        Batches(split, SequencePacking(rows=3, width=1))
    task = SortDedup(n_symbols=5, max_length=7, n_train=11, n_validation=5)
    with pytest.raises(ConfigError, match=r"cannot be packed; use batch=TokenBudget"):
        Batches(task.train, SequencePacking(rows=3, width=53))
