"""BERT and ALBERT that read chemical reactions: hidden states, classes and attention are those of transformers."""

from __future__ import annotations

import re

import pytest
import torch

from clearhead import hub
from clearhead.analysis import trace
from clearhead.hub import checkpoint, convert
from clearhead.masks import padding

# An ester from an acid and an alcohol; an amide from an acid chloride and an amine.
REACTIONS = ["CC(=O)O.OCC>>CC(=O)OCC", "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1"]
_PIECE = re.compile(r"\[[^]]+]|Br|Cl|>>|%\d\d|.")


def ids_of(folder):
    """The reactions' ids, and their lengths, by the folder's own list of pieces."""
    number = {piece: i for i, piece in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    rows = [["[CLS]", *_PIECE.findall(text), "[SEP]"] for text in REACTIONS]
    rows = [torch.tensor([number[piece] for piece in row]) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


def compared(folder, kind, output, of_ours):
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()
    ours = checkpoint.load_third_party(folder)
    ids, lengths = ids_of(folder)
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    with torch.no_grad(), trace(ours) as seen:
        x = ours(ids, mask=padding(lengths))
        wanted = theirs(ids, attention_mask=real.long(), output_attentions=True)
        got, wanted_x = of_ours(ours, x), wanted[output]
    if got.dim() == 3:
        got, wanted_x = got[real], wanted_x[real]
    worst, largest = (got - wanted_x).abs().max().item(), wanted_x.abs().max().item()
    shared = len(wanted.attentions) > len(ours.blocks)
    weights = [
        seen.weights("blocks.0.attention", run=i) if shared else seen.weights(f"blocks.{i}.attention")
        for i in range(len(wanted.attentions))
    ]
    heads = real[:, None, :, None] & real[:, None, None, :]
    apart = max(((a - b).abs() * heads).max().item() for a, b in zip(weights, wanted.attentions, strict=True))
    n = len(weights)
    print(f"\n{kind}: {output} differs by {worst:.1e}, the largest is {largest:.1f}; attention weights by {apart:.1e}")
    assert worst <= n * 100 * torch.finfo(torch.float32).eps * max(1.0, largest)
    assert apart <= 1e-4
    return got


def test_rxnfp(fingerprints):
    compared(fingerprints, "BertModel", "last_hidden_state", lambda model, x: x)
    compared(fingerprints, "BertModel", "pooler_output", lambda model, x: model.pool(x))


def test_rxnfp_classifies(classes):
    logits = compared(classes, "BertForSequenceClassification", "logits", lambda model, x: model.classify(x))
    best = logits.softmax(-1).max(-1)
    print(f"classes {best.indices.tolist()} of 50 with probabilities {[round(p, 3) for p in best.values.tolist()]}")
    assert hub.pipeline(classes).model.config.n_classes == 50


def test_rxnmapper(mapper):
    compared(mapper, "AlbertModel", "last_hidden_state", lambda model, x: x)


def test_both_come_back_to_the_same_bits(fingerprints, mapper, tmp_path):
    from safetensors.torch import load_file

    for folder, gone in ((fingerprints, ()), (mapper, ("predictions.",))):
        convert.export_third_party(checkpoint.load_third_party(folder), tmp_path / folder.name)
        before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / folder.name))
        before = {name.removeprefix("albert."): tensor for name, tensor in before.items() if not name.startswith(gone)}
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        print(
            f"\n{folder.name}: {len(after)} tensors, {sum(tensor.numel() for tensor in after.values()):,} numbers equal"
        )
