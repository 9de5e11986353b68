"""What is wrong with a foreign folder is said in one sentence, before anything is loaded; no code of it runs."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import clearhead as ch
from clearhead.errors import ClearheadError, DataError, StorageError
from clearhead.hub import convert
from clearhead.hub.formats import HFFolder
from clearhead.hub.weight_map import Transform, WeightMap
from tests.hub.conftest import change_json
from tests.support.rounding import assert_equal_up_to_rounding

pytestmark = pytest.mark.bad_input


def refused(folder, *words):
    with pytest.raises(ClearheadError) as caught:
        ch.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def sharded(folder):
    """The same folder with two shards and an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file)
    (folder / "model.safetensors").unlink()
    table = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder / "model.safetensors.index.json", table


def test_shards_are_one_model(llama):
    ids = torch.tensor([[3, 1, 4]])
    whole = ch.load(llama)(ids)
    sharded(llama)
    assert_equal_up_to_rounding(ch.load(llama)(ids), whole)


def test_no_weights(llama):
    (llama / "model.safetensors").unlink()
    refused(llama, "no parameters", "model.safetensors")


def test_a_shard_is_missing(llama):
    sharded(llama)
    (llama / "b.safetensors").unlink()
    refused(llama, "b.safetensors", "missing")


def test_an_index_names_a_tensor_that_its_shard_lacks(llama):
    index, table = sharded(llama)
    index.write_text(json.dumps({"weight_map": table | {"model.norm.bias": "a.safetensors"}}))
    refused(llama, "model.norm.bias", "a.safetensors")


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin"])
def test_an_index_points_outside(llama, place):
    index, table = sharded(llama)
    index.write_text(json.dumps({"weight_map": table | {"model.norm.weight": place}}))
    refused(llama, repr(place), "in the same folder")


def test_an_index_without_a_map(llama):
    index, _ = sharded(llama)
    index.write_text('{"weight_map": [1]}')
    refused(llama, "weight_map")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": torch.zeros(5)}, ("model.norm.weight", "(5,)", "(24,)")),
        ({"model.norm.weight": None}, ("missing", "model.norm.weight")),
        ({"model.norm.bias": torch.zeros(24)}, ("not known to llama", "model.norm.bias")),
        ({"model.norm.weight": torch.zeros(24, dtype=torch.int8)}, ("model.norm.weight", "I8")),
    ],
    ids=["shape", "missing", "strange", "dtype"],
)
def test_tensors_that_do_not_fit(llama, change, words):
    file = llama / "model.safetensors"
    weights = load_file(file) | change
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, file)
    refused(llama, *words)


def test_weights_that_are_cut_short(llama):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(llama, "not a complete safetensors file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bloomy"}, ("'bloomy'", "gpt_neox, llama")),
        ({"model_type": None}, ("no model_type",)),
        ({"model_type": ["llama"]}, ("model_type is ['llama']", "expected a string")),
        ({"model_type": {"name": "llama"}}, ("model_type is {'name': 'llama'}", "expected a string")),
        ({"residual_multiplier": 2.0}, ("'residual_multiplier'", "2.0")),
        ({"quantization_config": {"bits": 4}}, ("'quantization_config'",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        ({"hidden_size": None}, ("no 'hidden_size'",)),
        ({"hidden_size": "24"}, ("d_model", "'24'")),
        ({"num_attention_heads": 5}, ("n_heads is 5",)),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ("'spiral'",)),
        ({"rope_parameters": 7}, ("llama",)),
        ({"num_hidden_layers": 10**12}, ("more than", "parameter tensors")),
        ({"vocab_size": 30}, ("model.embed_tokens.weight", "(30, 24)")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_is_not_understood(llama, change, words):
    change_json(llama / "config.json", **change)
    refused(llama, *words)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\ud800".encode("utf-8", "surrogatepass")], ids=repr)
def test_a_configuration_that_is_no_json(llama, text):
    (llama / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(llama, "config.json")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was run')",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_not_opened(llama, name):
    (llama / "model.safetensors").unlink()
    (llama / name).write_bytes(pickle.dumps(Bomb()))
    refused(llama, name, "pickle", "save_file")
    refused(llama / name, name, "pickle", "save_file")


def test_the_way_to_convert_a_pickle_works(llama):
    import subprocess
    import sys

    ids, file = torch.tensor([[3, 1, 4]]), llama / "model.safetensors"
    whole = ch.load(llama)(ids)
    torch.save(load_file(file), llama / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(StorageError) as caught:
        ch.load(llama)
    command = str(caught.value).partition("convert it: python -c ")[2].strip('"')
    subprocess.run([sys.executable, "-c", command], check=True)
    assert_equal_up_to_rounding(ch.load(llama)(ids), whole)


def test_nothing_is_read_before_everything_fits(llama, monkeypatch):
    """One tensor of another shape, and no number of the others is touched."""
    weights = load_file(llama / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.zeros(5)}, llama / "model.safetensors")
    monkeypatch.setattr(HFFolder, "reading", lambda *_, **__: pytest.fail("a tensor was read"))
    refused(llama, "model.norm.weight", "(5,)")


def test_code_in_a_folder_is_not_run(llama):
    """transformers would import a module beside the weights for this key, where it is trusted."""
    (llama / "modeling.py").write_text("raise SystemExit('the code of a folder was run')")
    change_json(llama / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert ch.load(llama)(torch.tensor([[3, 1, 4]])).shape == (1, 3, 31)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen2", {"num_hidden_layers": 10**12}, ("num_hidden_layers", "10,000")),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types", "cannot express")),
        ("modernbert", {"num_hidden_layers": 10**12}, ("num_hidden_layers", "10,000")),
        ("modernbert", {"layer_types": ["full_attention"]}, ("layer_types", "expected 5")),
        ("modernbert", {"local_attention": -6}, ("modernbert", "-3")),
        ("mixtral", {"num_local_experts": 10**9}, ("more than", "parameter tensors")),
        ("mixtral", {"num_local_experts": 6}, ("missing", "experts.5.w1")),
        ("mixtral", {"num_experts_per_tok": 6}, ("top_k is 6",)),
        ("clip", {"text_config": {"num_hidden_layers": 10**9}}, ("more than", "parameter tensors")),
        ("clip", {"projection_dim": 8}, ("text_projection.weight", "(8, 24)")),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights(made, tmp_path, name, change, words):
    folder = shutil.copytree(made(name)[1], tmp_path / name)
    change_json(folder / "config.json", **change)
    refused(folder, *words)


def test_names_that_stand_for_nothing(tmp_path):
    refused("no-such-model", "is not a bundled model")
    refused(tmp_path, "config.json")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "notes.txt", "is a file")


def test_an_export_goes_to_a_new_folder(llama, tmp_path):
    model = ch.load(llama)
    with pytest.raises(StorageError, match="new folder"):
        convert.export_third_party(model, llama)
    with pytest.raises(StorageError, match="no family 'lama'"):
        convert.export_third_party(model, tmp_path / "x", family="lama")
    with pytest.raises(StorageError, match="gpt2: "):
        convert.export_third_party(model, tmp_path / "x", family="gpt2")
    with pytest.raises(StorageError, match=r"no \.config"):
        convert.export_third_party(torch.nn.Linear(2, 3), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_transform_that_loses_information_has_no_way_back():
    first_row = Transform(lambda theirs, shapes: [theirs[0][:1]])
    move = WeightMap("a.#", "b.#", (first_row,)).match("a.3", is_source=True)
    assert move.target == ("b.3",)
    assert torch.equal(move.load([torch.eye(2)], [(1, 2)])[0], torch.tensor([[1.0, 0.0]]))
    with pytest.raises(StorageError, match="without an inverse"):
        move.export([torch.zeros(1, 2)])


@pytest.mark.parametrize("key", ["model_type", "hidden_act", "hidden_size", "layer_types", "rope_parameters"])
def test_long_text_of_a_configuration_is_shortened_in_the_error(llama, key):
    text = "x" * 100_000
    value = {"rope_type": text, "rope_theta": 1e4} if key == "rope_parameters" else text
    change_json(llama / "config.json", **{key: value})
    with pytest.raises(ClearheadError) as caught:
        ch.load(llama)
    assert len(str(caught.value)) < 1_500


def test_long_name_of_a_configuration_key_is_shortened_in_the_error(llama):
    change_json(llama / "config.json", **{"x" * 100_000: 1})
    with pytest.raises(ClearheadError) as caught:
        ch.load(llama)
    assert len(str(caught.value)) < 1_500


def test_chat_template_that_is_not_utf8_raises_one_sentence(llama):
    (llama / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(StorageError, match=r"chat_template\.jinja is not UTF-8"):
        HFFolder(llama).template()


def test_word_level_tokenizer_without_its_unknown_token_raises_one_sentence(llama):
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(llama / "tokenizer.json"))
    tokenizer = HFFolder(llama).tokenizer()
    assert tokenizer.encode("a b") == [0, 1]
    with pytest.raises(DataError, match="cannot encode"):
        tokenizer.encode("a c")


@pytest.mark.fixed_memory
@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
def test_parameters_converted_while_loading_start_at_multiples_of_64_bytes(llama, stored):
    file = llama / "model.safetensors"
    tensors = {name: tensor.to(stored) for name, tensor in load_file(file).items()}
    # Parts of one stored tensor, and mixed dtypes: some tensors keep theirs and are read next to converted ones.
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    save_file(tensors, file, {"padding": "x" * 9})
    model = ch.load(llama, dtype=torch.float32)
    assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}
