"""BERT and ALBERT for chemical reactions: hidden states, classes and attention match transformers."""

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


def encode_reactions(folder):
    """Return the ids of the reactions and their lengths, with the vocabulary of the folder."""
    id_by_piece = {piece: i for i, piece in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    rows = [["[CLS]", *_PIECE.findall(text), "[SEP]"] for text in REACTIONS]
    rows = [torch.tensor([id_by_piece[piece] for piece in row]) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


def compare_with_transformers(folder, class_name, output, comparable):
    """Compare an output and the attention weights with transformers; return the output."""
    transformers = pytest.importorskip("transformers")
    reference = getattr(transformers, class_name).from_pretrained(folder, attn_implementation="eager").eval()
    model = checkpoint.load_third_party(folder)
    ids, lengths = encode_reactions(folder)
    is_token = torch.arange(ids.shape[1]) < lengths[:, None]
    with torch.no_grad(), trace(model) as t:
        x = model(ids, mask=padding(lengths))
        outputs = reference(ids, attention_mask=is_token.long(), output_attentions=True)
        actual, expected = comparable(model, x), outputs[output]
    if actual.dim() == 3:
        actual, expected = actual[is_token], expected[is_token]
    error, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
    shared = len(outputs.attentions) > len(model.blocks)
    weights = [
        t.weights("blocks.0.attention", run=i) if shared else t.weights(f"blocks.{i}.attention")
        for i in range(len(outputs.attentions))
    ]
    is_pair = is_token[:, None, :, None] & is_token[:, None, None, :]
    weights_error = max(
        ((a - b).abs() * is_pair).max().item() for a, b in zip(weights, outputs.attentions, strict=True)
    )
    print(f"\n{class_name}: {output} differs by {error:.1e}, largest {largest:.1f}; weights by {weights_error:.1e}")
    assert error <= len(weights) * 100 * torch.finfo(torch.float32).eps * max(1.0, largest)
    assert weights_error <= 1e-4
    return actual


def test_rxnfp_matches_transformers(rxnfp):
    compare_with_transformers(rxnfp, "BertModel", "last_hidden_state", lambda model, x: x)
    compare_with_transformers(rxnfp, "BertModel", "pooler_output", lambda model, x: model.pool(x))


def test_rxnfp_classes_match_transformers(rxnfp_classifier):
    logits = compare_with_transformers(
        rxnfp_classifier, "BertForSequenceClassification", "logits", lambda model, x: model.classify(x)
    )
    predictions = logits.softmax(-1).max(-1)
    print(
        f"classes {predictions.indices.tolist()} of 50 with probabilities "
        f"{[round(p, 3) for p in predictions.values.tolist()]}"
    )
    assert hub.pipeline(rxnfp_classifier).model.config.n_classes == 50


def test_rxnmapper_matches_transformers(rxnmapper):
    compare_with_transformers(rxnmapper, "AlbertModel", "last_hidden_state", lambda model, x: x)
    compare_with_transformers(rxnmapper, "AlbertForMaskedLM", "logits", lambda model, x: model.predict_tokens(x))


def test_export_third_party_returns_bit_equal_tensors(rxnfp, rxnmapper, tmp_path):
    from safetensors.torch import load_file

    for folder, ignored in ((rxnfp, ()), (rxnmapper, ("predictions.decoder.",))):
        convert.export_third_party(checkpoint.load_third_party(folder), tmp_path / folder.name)
        before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / folder.name))
        before = {
            name.removeprefix("albert."): tensor for name, tensor in before.items() if not name.startswith(ignored)
        }
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        print(
            f"\n{folder.name}: {len(after)} tensors, {sum(tensor.numel() for tensor in after.values()):,} values equal"
        )


def write_tokenizer(folder):
    """Write tokenizer.json: the pieces of the pattern are words of vocab.txt."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = (folder / "vocab.txt").read_text().split("\n")
    id_by_piece = {piece: i for i, piece in enumerate(pieces) if piece}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(id_by_piece, "[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PIECE.pattern), "isolated")
    special = ["[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"]
    inner.add_special_tokens(special)
    ends = [(piece, id_by_piece[piece]) for piece in special[:2]]
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    inner.save(str(folder / "tokenizer.json"))


def load_reference(folder, class_name):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, class_name).from_pretrained(folder).eval()


def test_pipeline_of_rxnfp_classifies_reactions_as_transformers(rxnfp_classifier):
    write_tokenizer(rxnfp_classifier)
    ids, lengths = encode_reactions(rxnfp_classifier)
    is_token = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    with torch.no_grad():
        expected = load_reference(rxnfp_classifier, "BertForSequenceClassification")(ids, attention_mask=is_token)
    classes = hub.pipeline(rxnfp_classifier).classify(REACTIONS)
    for probabilities, logits in zip(classes, expected.logits.softmax(-1), strict=True):
        assert list(probabilities.values()) == pytest.approx(logits.sort(descending=True).values.tolist(), abs=1e-5)
    print(f"\nclasses {[next(iter(probabilities.items())) for probabilities in classes]}")


def test_pipeline_of_rxnfp_embeds_reactions_as_transformers(rxnfp):
    write_tokenizer(rxnfp)
    ids, lengths = encode_reactions(rxnfp)
    is_token = torch.arange(ids.shape[1]) < lengths[:, None]
    with torch.no_grad():
        x = load_reference(rxnfp, "BertModel")(ids, attention_mask=is_token.long()).last_hidden_state
    expected = (x * is_token[..., None]).sum(1) / lengths[:, None]
    torch.testing.assert_close(hub.pipeline(rxnfp).embed(REACTIONS), expected, rtol=1e-4, atol=1e-4)


def test_pipeline_of_rxnmapper_fills_a_masked_atom_as_transformers(rxnmapper):
    write_tokenizer(rxnmapper)
    text = REACTIONS[0][:-3] + "[MASK]CC"
    pipeline = hub.pipeline(rxnmapper)
    ids = torch.tensor([pipeline.tokenizer.prompt(text)])
    (position,) = (ids[0] == pipeline.tokenizer.prompt("[MASK]")[1]).nonzero().flatten().tolist()
    with torch.no_grad():
        logits = load_reference(rxnmapper, "AlbertForMaskedLM")(ids).logits
    expected = logits[0, position].softmax(-1).topk(3)
    (candidates,) = pipeline.fill_mask(text, n=3)
    print(f"\n{text}: {candidates}")
    assert [candidate.id for candidate in candidates] == expected.indices.tolist()
    assert [candidate.probability for candidate in candidates] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert candidates[0].text == "O"  # ethyl acetate
