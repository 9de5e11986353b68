"""Invalid third-party folders: errors of one line before anything is loaded, and no code from a folder runs."""

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


def assert_load_raises(folder, *words):
    """Assert that loading raises an error of one line that contains these words."""
    with pytest.raises(ClearheadError) as caught:
        ch.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def sharded(folder):
    """Split the parameters into two shards with an index; return the index and its table."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, names_of_shard in shards.items():
        save_file({name: weights[name] for name in names_of_shard}, folder / file)
    (folder / "model.safetensors").unlink()
    table = {name: file for file, names_of_shard in shards.items() for name in names_of_shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder / "model.safetensors.index.json", table


def test_load_sharded_folder_equals_single_file(llama):
    ids = torch.tensor([[3, 1, 4]])
    expected = ch.load(llama)(ids)
    sharded(llama)
    assert_equal_up_to_rounding(ch.load(llama)(ids), expected)


def test_load_without_parameters_raises(llama):
    (llama / "model.safetensors").unlink()
    assert_load_raises(llama, "no parameters", "model.safetensors")


def test_load_peft_adapter_raises(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base", "r": 8}))
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    assert_load_raises(tmp_path, "PEFT adapter of 'org/base'", "merge_and_unload")


def test_load_model_next_to_a_peft_adapter_raises(llama):
    """transformers would apply the adapter."""
    (llama / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    assert_load_raises(llama, "PEFT adapter of 'org/base' next to a model", "remove adapter_config.json")


@pytest.mark.parametrize("suffix", ["qweight", "SCB", "weight_packed", "weight_scale_inv"])
def test_load_quantized_tensors_raises(llama, suffix):
    weights = load_file(llama / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{suffix}"
    save_file(weights | {name: torch.zeros(3, dtype=torch.int32)}, llama / "model.safetensors")
    assert_load_raises(llama, "quantized", name, ".gguf")


def test_load_empty_quantization_config_is_ignored(llama):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    assert ch.load(llama).config.n_layers == 2


def test_load_missing_shard_raises(llama):
    sharded(llama)
    (llama / "b.safetensors").unlink()
    assert_load_raises(llama, "b.safetensors", "missing")


def test_load_tensor_missing_in_shard_raises(llama):
    index, table = sharded(llama)
    index.write_text(json.dumps({"weight_map": table | {"model.norm.bias": "a.safetensors"}}))
    assert_load_raises(llama, "model.norm.bias", "a.safetensors")


@pytest.mark.parametrize("path", ["../model.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin"])
def test_load_index_outside_folder_raises(llama, path):
    index, table = sharded(llama)
    index.write_text(json.dumps({"weight_map": table | {"model.norm.weight": path}}))
    assert_load_raises(llama, repr(path), "in the same folder")


def test_load_index_without_map_raises(llama):
    index, _ = sharded(llama)
    index.write_text('{"weight_map": [1]}')
    assert_load_raises(llama, "weight_map")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": torch.zeros(5)}, ("model.norm.weight", "(5,)", "(24,)")),
        ({"model.norm.weight": None}, ("missing", "model.norm.weight")),
        ({"model.norm.bias": torch.zeros(24)}, ("not known to llama", "model.norm.bias")),
        ({"model.norm.weight": torch.zeros(24, dtype=torch.int8)}, ("model.norm.weight", "I8")),
    ],
    ids=["shape", "missing", "unknown", "dtype"],
)
def test_load_mismatched_tensor_raises(llama, change, words):
    file = llama / "model.safetensors"
    weights = load_file(file) | change
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, file)
    assert_load_raises(llama, *words)


def test_load_truncated_file_raises(llama):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_load_raises(llama, "not a complete safetensors file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bloomy"}, ("'bloomy'", "gpt_neox, gpt_oss", "register_family")),
        ({"model_type": None}, ("no model_type",)),
        ({"model_type": ["llama"]}, ("model_type is ['llama']", "expected a string")),
        ({"model_type": {"name": "llama"}}, ("model_type is {'name': 'llama'}", "expected a string")),
        ({"residual_multiplier": 2.0}, ("'residual_multiplier'", "2.0")),
        ({"quantization_config": {"bits": 4}}, ("'quantization_config'",)),
        ({"compression_config": {"format": "int-quantized"}}, ("quantized", "'int-quantized'")),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ("quantized", "'mxfp4'", ".gguf")),
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
def test_load_unsupported_configuration_raises(llama, change, words):
    change_json(llama / "config.json", **change)
    assert_load_raises(llama, *words)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\ud800".encode("utf-8", "surrogatepass")], ids=repr)
def test_load_invalid_json_raises(llama, text):
    (llama / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_load_raises(llama, "config.json")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was run')",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_load_pickle_raises_without_opening_it(llama, name):
    (llama / "model.safetensors").unlink()
    (llama / name).write_bytes(pickle.dumps(Bomb()))
    assert_load_raises(llama, name, "pickle", "clearhead convert")
    assert_load_raises(llama / name, name, "pickle", "clearhead convert")


def test_load_checks_all_shapes_before_reading(llama, monkeypatch):
    """If one tensor has a wrong shape, no tensor is read."""
    weights = load_file(llama / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.zeros(5)}, llama / "model.safetensors")
    monkeypatch.setattr(HFFolder, "reading", lambda *_, **__: pytest.fail("a tensor was read"))
    assert_load_raises(llama, "model.norm.weight", "(5,)")


def test_load_does_not_run_code_of_the_folder(llama):
    """With trust_remote_code, transformers would import the module that this key names."""
    (llama / "modeling.py").write_text("raise SystemExit('the code of a folder was run')")
    change_json(llama / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert ch.load(llama)(torch.tensor([[3, 1, 4]])).shape == (1, 3, 31)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen2", {"num_hidden_layers": 10**12}, ("num_hidden_layers", "10,000")),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types", "sliding_window is None")),
        ("qwen3", {"num_hidden_layers": 0}, ("num_hidden_layers is 0; expected 1 to 10,000",)),
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 1.0}, ("partial_rotary_factor is 1.0",)),
        ("whisper", {"max_source_positions": 10**12}, ("embed_positions.weight", "(1000000000000, 24)")),
        ("whisper", {"max_source_positions": 10**400}, ("constants of whisper",)),
        ("gpt_oss", {"intermediate_size": 24}, ("experts.gate_up_proj", "10 in all")),
        ("gptj", {"n_head": 0}, ("a gptj configuration cannot be read: ZeroDivisionError",)),
        ("modernbert", {"num_hidden_layers": 10**12}, ("num_hidden_layers", "10,000")),
        ("modernbert", {"layer_types": ["full_attention"]}, ("layer_types", "expected 5")),
        ("modernbert", {"local_attention": -6}, ("modernbert", "-3")),
        ("mixtral", {"num_local_experts": 10**9}, ("more than", "parameter tensors")),
        ("mixtral", {"num_local_experts": 6}, ("missing", "experts.5.w1")),
        ("mixtral", {"num_experts_per_tok": 6}, ("top_k is 6",)),
        ("clip", {"text_config": {"num_hidden_layers": 10**9}}, ("more than", "parameter tensors")),
        ("gemma3_text", {"attn_logit_softcapping": 3.0}, ("attn_logit_softcapping is 3.0",)),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, ("parallel_attn is False",)),
        ("clip", {"projection_dim": 8}, ("text_projection.weight", "(8, 24)")),
    ],
)
def test_load_configuration_that_does_not_match_tensors_raises(saved_peer, tmp_path, name, change, words):
    folder = shutil.copytree(saved_peer(name)[1], tmp_path / name)
    change_json(folder / "config.json", **change)
    assert_load_raises(folder, *words)


def test_load_unknown_name_raises(tmp_path):
    assert_load_raises("no-such-model", "is not a bundled model")
    assert_load_raises(tmp_path, "config.json")
    (tmp_path / "notes.txt").write_text("hello")
    assert_load_raises(tmp_path / "notes.txt", "notes.txt", "is a file")


def test_export_to_invalid_target_raises(llama, tmp_path):
    model = ch.load(llama)
    with pytest.raises(StorageError, match="new folder"):
        convert.export_third_party(model, llama)
    with pytest.raises(StorageError, match="'lama' is not a family"):
        convert.export_third_party(model, tmp_path / "x", family="lama")
    with pytest.raises(StorageError, match="gpt2: "):
        convert.export_third_party(model, tmp_path / "x", family="gpt2")
    with pytest.raises(StorageError, match=r"no \.config"):
        convert.export_third_party(torch.nn.Linear(2, 3), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_weight_map_export_without_inverse_raises():
    first_row = Transform(lambda source, shapes: [source[0][:1]])
    weight_map = WeightMap("a.#", "b.#", (first_row,)).match("a.3", is_source=True)
    assert weight_map.target == ("b.3",)
    assert torch.equal(weight_map.load([torch.eye(2)], [(1, 2)])[0], torch.tensor([[1.0, 0.0]]))
    with pytest.raises(StorageError, match="without an inverse"):
        weight_map.export([torch.zeros(1, 2)])


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
