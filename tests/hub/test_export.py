"""Export to folders of transformers: the same logits, ids and text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead import hub
from clearhead.data import CharTokenizer, WordLevelTokenizer, train_bpe
from clearhead.hub.export_folder import tokenizer_json
from clearhead.hub.family import join_reasons
from clearhead.models import DecoderConfig
from clearhead.nn import GELU
from clearhead.nn.positions import LearnedPositions
from tests.support.third_party_models import PEERS

TEXT = "ROMEO: What, shall I speak?\n\nJULIET:"


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers, which loads what is written, is not installed")


def test_export_bundled_model_loads_in_transformers(transformers, tmp_path, cli):
    ran = cli("export", "shakespeare", "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["family"] == "gpt2"
    assert set(ran.json["files"]) == {path.name for path in (tmp_path / "out").iterdir()}
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    trained = hub.pipeline("shakespeare", dtype=torch.float64)
    ids = trained.tokenizer.encode(TEXT)
    assert tokenizer(TEXT)["input_ids"] == ids
    assert tokenizer.decode(ids) == TEXT
    batch = torch.tensor([ids])
    with torch.no_grad():
        logits, expected = reference(batch).logits, trained.model(batch)
    assert (logits - expected).abs().max() <= 3000 * torch.finfo(torch.float64).eps * expected.abs().max()
    reference_ids = reference.generate(batch, max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    new_ids = ch.generate(trained.model, batch, max_new_tokens=20, stop_ids=trained.stop_ids).sequence(0).tolist()
    assert reference_ids[: len(new_ids)] == new_ids


def test_commands_accept_an_exported_folder(tmp_path, cli):
    assert cli("export", "shakespeare", "--out", tmp_path / "out").code == 0
    for command in (
        ["generate", TEXT, "--max-new-tokens", 20, "--greedy", "--model"],
        ["inspect", "--json"],
        ["check", "--only", "causality"],
    ):
        ran = cli(*command, tmp_path / "out", *([TEXT] if command[0] == "inspect" else []))
        assert ran.code == 0, ran.err
        if command[0] == "generate":
            assert ran.out == cli(*command, "shakespeare").out


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (CharTokenizer.of("abc \nü"), "a cab\n üb"),
        (CharTokenizer.of("abc", unknown=True), "abxc"),
        (WordLevelTokenizer(["A", "D", "<PAD>", "<S>", "<E>"], pad="<PAD>", bos="<S>", eos="<E>"), "D A A <S> A D"),
        (train_bpe(["low lower lowest", "new newer"], 270), "a new low ü"),
    ],
    ids=["characters", "unknown", "symbols", "bytes"],
)
def test_exported_tokenizer_encodes_like_the_original(transformers, tokenizer, text):
    from tokenizers import Tokenizer

    reference = Tokenizer.from_str(tokenizer_json(tokenizer))
    ids = tokenizer.encode(text)
    assert reference.encode(text, add_special_tokens=False).ids == ids
    plain = reference.decode(ids, skip_special_tokens=True)
    assert plain.replace("<unk>", "") == tokenizer.decode(ids).replace("�", "")


def test_export_copies_tokenizer_and_generation_files(llama, tmp_path):
    settings = {"eos_token_id": [2, 7], "temperature": 0.6}
    (llama / "generation_config.json").write_text(json.dumps(settings))
    (llama / "chat_template.jinja").write_text("{{ messages }}")
    trained = hub.pipeline(llama)
    assert trained.stop_ids == (2, 7)
    hub.export(trained, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == settings
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [2, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_export_keeps_dtype_and_bits(llama, tmp_path, dtype):
    model = ch.load(llama, dtype=dtype)
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    from clearhead.hub import convert

    convert.export_third_party(model, tmp_path / "out")
    reloaded = ch.load(tmp_path / "out", dtype=None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reloaded.parameters(), strict=True))


def test_loaded_model_can_be_trained_without_changing_its_file(llama):
    before = (llama / "model.safetensors").read_bytes()
    model = ch.load(llama).train()
    model(torch.tensor([[3, 1, 4]])).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert (llama / "model.safetensors").read_bytes() == before


@pytest.mark.bad_input
def test_export_inexpressible_field_raises(tmp_path):
    config = DecoderConfig(
        vocab_size=7,
        d_model=8,
        n_heads=2,
        n_layers=1,
        max_len=5,
        positions=LearnedPositions(max_len=5),
        scaled_embedding=True,
    )
    from clearhead.errors import StorageError
    from clearhead.hub import convert

    with pytest.raises(StorageError, match="gpt2: scaled_embedding is True, which can only be expressed as False"):
        convert.export_third_party(config.build(), tmp_path / "out")
    plain = config.replace(scaled_embedding=False, dropout=0.25, activation=GELU(tanh=True))
    assert convert.export_third_party(plain.build(), tmp_path / "out").name == "gpt2"


def test_every_family_has_a_reference_model():
    from clearhead.hub import families

    assert {name.split()[0] for name in PEERS} == set(families.FAMILIES)


def test_table_of_families_lists_every_family_with_every_check():
    from clearhead.hub import families
    from tools.families import CHECKS

    rows = json.loads((Path(__file__).parents[2] / "docs/results/families.json").read_text())
    assert rows.keys() == families.FAMILIES.keys()
    for family, row in rows.items():
        assert {row[check] for check in CHECKS.values()} <= {"passed", "skipped"}, family
        for check in ("outputs and gradients", "bit-exact export", "check", "trace", "cost", "odd configurations"):
            assert row[check] == "passed", (family, check)


def test_cost_accepts_a_hugging_face_folder(llama, cli):
    parameters = sum(weight.numel() for weight in ch.load(llama).parameters())
    ran = cli("cost", llama, "--tokens", 7, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["parameters"]["value"] == parameters
    assert cli("cost", "en-es", "--tokens", 7).code == 0


def test_export_of_en_es_gives_the_logits_and_translations_in_transformers(transformers, tmp_path):
    """Pegasus has the sinusoids in another order, so the features are permuted."""
    translator = hub.pipeline("en-es", dtype=torch.float64)
    assert hub.export(translator, tmp_path / "out") == "pegasus"
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = ["Hello world", "Where is the library?", "I think my suitcase was stolen."]
    for text in texts:
        source = tokenizer(text, return_tensors="pt")["input_ids"]
        assert source[0].tolist() == [*translator.tokenizer.encode(text), translator.tokenizer.eos_id]
        target = torch.tensor([[1, 77, 5, 300]])
        with torch.no_grad():
            logits, expected = reference(source, decoder_input_ids=target).logits, translator.model(source, target)
        assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max()
    reloaded = hub.pipeline(tmp_path / "out", dtype=torch.float64)
    assert reloaded.generation_settings.strategy == translator.generation_settings.strategy
    assert reloaded.translate(texts) == translator.translate(texts)


@pytest.mark.parametrize(
    ("name", "changes"), [("phi3", {"sliding_window": None}), ("mistral", {"sliding_window": None})], ids=str
)
def test_export_prefers_the_family_of_the_checkpoint(saved_peer, tmp_path, name, changes):
    folder = saved_peer(name)[1]
    copy = tmp_path / name
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    trained = hub.pipeline(copy)
    assert hub.export(trained, tmp_path / "out") == name
    assert hub.export(trained, tmp_path / "llama", family="llama") == "llama"


def test_families_with_the_same_reason_share_it_in_messages():
    reasons = {"a": "too wide", "b": "too deep", "c": "too wide", "d": "too long", "e": "too new", "f": "too old"}
    assert join_reasons(reasons) == "a, c: too wide; b: too deep; d: too long; and 2 other reasons"
    assert join_reasons({"a": "too wide"}) == "a: too wide"
