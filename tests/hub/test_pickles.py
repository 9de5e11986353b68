"""`clearhead convert`: checkpoints that are pickles become folders of safetensors, and no code of a file runs."""

from __future__ import annotations

import base64
import pickle
import re
import zipfile

import pytest
import torch
from safetensors.torch import load_file

import clearhead as ch
from clearhead import hub
from clearhead.errors import DataError, StorageError
from clearhead.hub.whisper_checkpoint import build_tokenizer
from tests.hub.conftest import change_json
from tests.support.third_party_models import WHISPER

IDS = torch.tensor([[3, 1, 4]])


@pytest.fixture
def pickled(llama):
    """A Llama folder whose parameters are a pickle, with its tensors."""
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    return llama, tensors


def save_as_cuda(tensors, path):
    """Save tensors as if they had been on a GPU."""
    torch.save(tensors, path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    cpu, cuda = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content.replace(cpu, cuda) if name.endswith("data.pkl") else content)


@pytest.mark.parametrize(
    "wrap",
    [lambda tensors: tensors, lambda tensors: {"epoch": 3, "state_dict": tensors}, lambda tensors: {"model": tensors}],
    ids=["flat", "state_dict", "model"],
)
def test_converted_folder_loads_the_parameters(pickled, tmp_path, wrap):
    folder, tensors = pickled
    torch.save(wrap(tensors), folder / "pytorch_model.bin")
    conversion = hub.convert_pickle(folder / "pytorch_model.bin", tmp_path / "out")
    assert not conversion.notes
    assert "config.json" in conversion.files
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())
    assert ch.load(tmp_path / "out")(IDS).shape == (1, 3, 31)


def test_tied_tensors_are_converted(pickled, tmp_path):
    folder, tensors = pickled
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")
    hub.convert_pickle(folder, tmp_path / "out")
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(converted["lm_head.weight"], converted["model.embed_tokens.weight"])


def test_tensors_of_a_gpu_are_converted(pickled, tmp_path):
    folder, tensors = pickled
    save_as_cuda(tensors, folder / "pytorch_model.bin")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(folder / "pytorch_model.bin", weights_only=True)
    hub.convert_pickle(folder, tmp_path / "out")
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())


def test_shards_are_converted(pickled, tmp_path):
    import json

    folder, tensors = pickled
    names = sorted(tensors)
    shards = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, names_of_shard in shards.items():
        torch.save({name: tensors[name] for name in names_of_shard}, folder / file)
    table = {name: file for file, names_of_shard in shards.items() for name in names_of_shard}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    hub.convert_pickle(folder, tmp_path / "out")
    parameters = dict(ch.load(tmp_path / "out", dtype=None).named_parameters())
    assert torch.equal(parameters["embedding.weight"], tensors["model.embed_tokens.weight"])


def test_command_in_the_error_message_works(pickled, tmp_path, cli):
    folder, tensors = pickled
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(StorageError) as caught:
        ch.load(folder)
    words = re.search(r"clearhead (convert .+) --out FOLDER$", str(caught.value))[1].split()
    ran = cli(*words, "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    assert "model.safetensors" in ran.json["files"]
    assert ch.load(tmp_path / "out")(IDS).shape == (1, 3, 31)


def test_missing_model_type_is_reported_and_can_be_given(pickled, tmp_path):
    folder, tensors = pickled
    torch.save(tensors, folder / "pytorch_model.bin")
    change_json(folder / "config.json", model_type=None)
    assert "no model_type" in hub.convert_pickle(folder, tmp_path / "a").notes[0]
    assert not hub.convert_pickle(folder, tmp_path / "b", model_type="llama").notes
    assert ch.load(tmp_path / "b")(IDS).shape == (1, 3, 31)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was run')",)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"x": Bomb()}), "cannot be converted"),
        (b"hello", "cannot be converted"),
        (b"", "cannot be converted"),
        (None, "it contains no tensors"),
    ],
    ids=["code", "text", "empty", "no tensors"],
)
def test_unreadable_pickle_raises_one_sentence_and_writes_nothing(tmp_path, content, message):
    file = tmp_path / "model.pt"
    if content is None:
        torch.save({"epoch": 3}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(StorageError, match=message) as caught:
        hub.convert_pickle(file, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.bad_input
def test_invalid_arguments_raise(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(StorageError, match="is not a pickle"):
        hub.convert_pickle(tmp_path / "notes.txt", tmp_path / "out")
    with pytest.raises(StorageError, match="there is no"):
        hub.convert_pickle(tmp_path / "missing.pt", tmp_path / "out")
    with pytest.raises(StorageError, match=r"contains no pytorch_model\.bin"):
        hub.convert_pickle(tmp_path, tmp_path / "out")
    torch.save({"x": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(StorageError, match="is not empty"):
        hub.convert_pickle(tmp_path / "model.pt", tmp_path)


def openai_names(state):
    """Return a state dict of transformers' Whisper under OpenAI's names."""
    names = {
        "encoder.layer_norm.": "encoder.ln_post.",
        "decoder.layer_norm.": "decoder.ln.",
        "encoder_attn_layer_norm": "cross_attn_ln",
        "self_attn_layer_norm": "attn_ln",
        "final_layer_norm": "mlp_ln",
        "encoder_attn.": "cross_attn.",
        "self_attn.": "attn.",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "out_proj": "out",
        "fc1": "mlp.0",
        "fc2": "mlp.2",
        ".layers.": ".blocks.",
        "embed_tokens": "token_embedding",
        "embed_positions.weight": "positional_embedding",
    }
    renamed = {}
    for name, tensor in state.items():
        if name.startswith("proj_out"):
            continue
        name = name.removeprefix("model.")
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor.float()
    return renamed


def test_whisper_checkpoint_of_openai_gives_the_logits_of_transformers(tmp_path):
    sizes = {
        "n_mels": WHISPER["num_mel_bins"],
        "n_audio_ctx": WHISPER["max_source_positions"],
        "n_audio_state": WHISPER["d_model"],
        "n_audio_head": WHISPER["encoder_attention_heads"],
        "n_audio_layer": WHISPER["encoder_layers"],
        "n_vocab": WHISPER["vocab_size"],
        "n_text_ctx": WHISPER["max_target_positions"],
        "n_text_layer": WHISPER["decoder_layers"],
    }
    width = 4 * WHISPER["d_model"]
    config = {**WHISPER, "encoder_ffn_dim": width, "decoder_ffn_dim": width}
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    reference = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**config)).eval()
    torch.save({"dims": sizes, "model_state_dict": openai_names(reference.state_dict())}, tmp_path / "tiny.pt")
    conversion = hub.convert_pickle(tmp_path / "tiny.pt", tmp_path / "out")
    assert "no tokenizer: convert again to a new folder with --vocabulary" in conversion.notes[0]
    with pytest.raises(DataError, match="has no tokenizer"):
        ch.pipeline(tmp_path / "out").transcribe(torch.zeros(1600))
    frames = torch.randn(2, 2 * WHISPER["max_source_positions"], WHISPER["num_mel_bins"])
    ids = torch.tensor([[3, 1, 4], [2, 7, 1]])
    with torch.no_grad():
        expected = reference(frames.transpose(1, 2), decoder_input_ids=ids).logits
        torch.testing.assert_close(ch.load(tmp_path / "out")(frames, ids), expected, rtol=1e-4, atol=1e-4)


def test_tokenizer_from_ranks_merges_and_numbers_tokens_as_listed(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + [b"lo", b"low", b"er", b"lower"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "ranks").write_text("\n".join(lines))
    n_vocab = len(tokens) + 1501 + 8 + 99
    tokenizer, special_ids = build_tokenizer(tmp_path / "ranks", n_vocab)
    assert tokenizer.encode("lower low").ids == [tokens.index(b"lower"), ord(" "), tokens.index(b"low")]
    assert tokenizer.get_vocab_size() == n_vocab
    assert special_ids["<|endoftext|>"] == len(tokens)
    assert special_ids["<|notimestamps|>"] == n_vocab - 1502
    assert tokenizer.token_to_id("<|30.00|>") == n_vocab - 1
    with pytest.raises(StorageError, match="do not fit"):
        build_tokenizer(tmp_path / "ranks", n_vocab + 2)


def test_sentence_piece_model_next_to_the_file_is_copied(pickled, tmp_path):
    folder, tensors = pickled
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "tokenizer.model").write_bytes(b"\x00\xff")
    hub.convert_pickle(folder, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"\x00\xff"
