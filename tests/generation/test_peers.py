"""Ids and scores equal those of transformers' `generate`, for a tiny random GPT-2 with copied parameters."""

from __future__ import annotations

import pytest
import torch

from clearhead.generation import BeamSearch, Greedy, generate
from clearhead.models.decoder import DecoderConfig
from clearhead.nn import GELU
from clearhead.nn.positions import LearnedPositions

transformers = pytest.importorskip("transformers", reason="transformers (extra `peers`) is the oracle here")

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, STOP = 29, 12, 3, 2, 61, 7


@pytest.fixture(scope="module")
def pair():
    """GPT-2 of transformers and as a `Decoder`, with the same float64 parameters."""
    torch.manual_seed(2)
    hf_model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            initializer_range=0.5,
            bos_token_id=STOP,
            eos_token_id=STOP,
            pad_token_id=STOP,
        )
    )
    hf_model = hf_model.double().eval()
    with torch.no_grad():  # raise the stop id a little, so that some rows finish
        row = hf_model.transformer.wte.weight[STOP]
        hf_model.transformer.ln_f.bias += row / row.square().sum()
    model = DecoderConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_heads=HEADS,
        n_layers=LAYERS,
        max_len=LENGTH,
        positions=LearnedPositions(max_len=LENGTH),
        activation=GELU(tanh=True),
    ).build()
    model.load_state_dict(convert_state(hf_model.state_dict()))
    return hf_model, model.double().eval()


def convert_state(weights):
    """Convert the names and (in, out) matrices of transformers."""
    parts = {
        "ln_1": "norm1",
        "attn.c_proj": "attention.o_proj",
        "ln_2": "norm2",
        "mlp.c_fc": "feed_forward.up",
        "mlp.c_proj": "feed_forward.down",
    }
    out = {
        "embedding.weight": weights["transformer.wte.weight"],
        "positions.weight": weights["transformer.wpe.weight"],
        "norm.weight": weights["transformer.ln_f.weight"],
        "norm.bias": weights["transformer.ln_f.bias"],
    }
    for i in range(LAYERS):
        for kind in ("weight", "bias"):
            for hf_name, name in parts.items():
                value = weights[f"transformer.h.{i}.{hf_name}.{kind}"]
                out[f"blocks.{i}.{name}.{kind}"] = value.T if value.dim() == 2 else value
            joined = weights[f"transformer.h.{i}.attn.c_attn.{kind}"]
            for letter, value in zip("qkv", joined.chunk(3, dim=-1), strict=True):
                out[f"blocks.{i}.attention.{letter}_proj.{kind}"] = value.T if value.dim() == 2 else value
    return out


def padded_left(rows):
    length = max(len(row) for row in rows)
    ids = torch.tensor([[STOP] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def without_stop(ids):
    ids = ids.tolist()
    return ids[: ids.index(STOP)] if STOP in ids else ids


ROWS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 11], [13], [17, 19, 23, 28, 2, 4, 6, 8, 10, 12, 14]]


def test_logits_equal_transformers(pair):
    hf_model, model = pair
    ids = torch.randint(VOCAB, (3, 17))
    torch.testing.assert_close(model(ids), hf_model(ids).logits)


def test_greedy_ids_equal_transformers(pair):
    hf_model, model = pair
    ids, mask = padded_left(ROWS)
    expected = hf_model.generate(ids, attention_mask=mask, max_new_tokens=31, do_sample=False)[:, ids.shape[1] :]
    actual = generate(model, ROWS, strategy=Greedy(), max_new_tokens=31, stop_ids=STOP)
    assert [row.tolist() for row in actual.best] == [without_stop(row) for row in expected]
    assert 0 < int(actual.finished.sum()) < len(ROWS)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("alpha", [-0.7, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 5])
def test_beam_search_equals_transformers(pair, width, alpha, early_stopping):
    hf_model, model = pair
    ids, mask = padded_left(ROWS)
    expected = hf_model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=23,
        do_sample=False,
        num_beams=width,
        num_return_sequences=2,
        length_penalty=alpha,
        early_stopping=early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
    )
    strategy = BeamSearch(width, length_penalty=alpha, n_best=2, early_stopping=early_stopping)
    actual = generate(model, ROWS, strategy=strategy, max_new_tokens=23, stop_ids=STOP)
    sequences = expected.sequences[:, ids.shape[1] :].unflatten(0, (len(ROWS), 2))
    for row in range(len(ROWS)):
        for rank in range(2):
            assert actual.sequence(row, rank).tolist() == without_stop(sequences[row, rank])
    torch.testing.assert_close(actual.scores.flatten(), expected.sequences_scores, check_dtype=False)
    # Without an early end, a strong penalty favors sequences of the largest length.
    n_finished = int(actual.finished.sum())
    assert n_finished < 2 * len(ROWS)
    assert n_finished or (alpha == 2.0 and early_stopping is not True)
