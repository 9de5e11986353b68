"""Stored tensors that repeat a parameter, such as a tied output matrix: equal copies are ignored, others raise."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead.errors import StorageError
from clearhead.hub import checkpoint
from tests.hub.conftest import change_json

# A reference model, its embedding, and a tensor that repeats it in older files.
COPIES = {
    "llama biased, tied": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "falcon": ("transformer.word_embeddings.weight", "lm_head.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    "bart": ("model.shared.weight", "model.encoder.embed_tokens.weight"),
    "t5": ("shared.weight", "lm_head.weight"),
    "t5_encoder": ("shared.weight", "encoder.embed_tokens.weight"),
    "whisper": ("model.decoder.embed_tokens.weight", "proj_out.weight"),
    "bert masked": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "roberta masked": ("lm_head.bias", "lm_head.decoder.bias"),
    "modernbert masked": ("model.embeddings.tok_embeddings.weight", "decoder.weight"),
}


def with_copy(saved_peer, folder, name, *, is_equal):
    """Return a folder with a tensor that repeats another, or that differs from it in one value."""
    original, copied = COPIES[name]
    shutil.copytree(saved_peer(name)[1], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[copied] = tensors[original].clone()
    if not is_equal:
        tensors[copied].view(-1)[-1] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", COPIES)
def test_equal_copy_of_a_parameter_is_ignored(saved_peer, tmp_path, name):
    model = checkpoint.load_third_party(with_copy(saved_peer, tmp_path / "model", name, is_equal=True))
    assert all(map(torch.equal, model.parameters(), checkpoint.load_third_party(saved_peer(name)[1]).parameters()))


@pytest.mark.bad_input
@pytest.mark.parametrize("name", COPIES)
def test_copy_that_differs_from_a_tied_parameter_raises(saved_peer, tmp_path, name):
    """transformers would use both tensors, so that a model with one of them has other logits."""
    folder = with_copy(saved_peer, tmp_path / "model", name, is_equal=False)
    with pytest.raises(StorageError, match=r"differs from .*, and the configuration ties both"):
        checkpoint.load_third_party(folder)


def test_output_matrix_of_a_head_that_is_not_loaded_may_differ(saved_peer, tmp_path):
    folder = with_copy(saved_peer, tmp_path / "model", "bert masked", is_equal=False)
    change_json(folder / "config.json", architectures=["BertModel"])
    with pytest.warns(UserWarning, match="masked tokens"):
        assert checkpoint.load_third_party(folder).config.head != "masked_lm"
