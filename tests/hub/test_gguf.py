"""GGUF files, written here with the package's own writer in the way llama.cpp's converter lays a Llama out."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import StorageError
from tests.support.gguf_layout import interleaved
from tests.support.reference_models import B, D, F, H, L, T, V

gguf = pytest.importorskip("gguf", reason="gguf, which reads such files, is not installed")

M = 32  # a multiple of 32, the size of a quantized block
SIZES = {"num_key_value_heads": 2, "hidden_size": M, "intermediate_size": 64}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers.": "blk.",
}


def write(path, model, config, kind, add_text=lambda writer: None):
    writer = gguf.GGUFWriter(path, "llama")
    add_text(writer)
    writer.add_context_length(13)
    writer.add_embedding_length(M)
    writer.add_block_count(L)
    writer.add_feed_forward_length(64)
    writer.add_head_count(H)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(M // H)
    writer.add_vocab_size(V)
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        for part, heads in (("q_proj", H), ("k_proj", 2)):
            if part in name:
                array = interleaved(array, heads)
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if array.ndim == 2 and kind is not None:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def peer():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, num_hidden_layers=L, num_attention_heads=H, max_position_embeddings=13, **SIZES
    )
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_load_gguf_matches_transformers(peer, tmp_path, kind):
    path = tmp_path / "m.gguf"
    quantized = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
    write(path, peer, peer.config, quantized)
    model = ch.load(path, dtype=torch.float32)
    # The reference model gets the dequantized values.
    with torch.no_grad():
        for weight in peer.parameters():
            if weight.dim() == 2 and quantized is not None:
                blocks = gguf.quants.quantize(weight.numpy(), quantized)
                dequantized = torch.from_numpy(gguf.quants.dequantize(blocks, quantized))
                error = (weight - dequantized).abs().max()
                assert 0 < error <= {"F16": 1e-4, "Q8_0": 1e-3, "Q4_0": 2e-2}[kind]
                weight.copy_(dequantized)
    ids = torch.randint(0, V, (B, T))
    with torch.no_grad():
        expected = peer(ids).logits
        # q and k are stored in another row order; blocks are quantized row by row, so the order does not matter.
        assert (model(ids) - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-5
    assert (model.config.n_layers, model.config.d_ff, model.config.n_kv_heads) == (L, 64, 2)
    assert D != F


@pytest.mark.bad_input
def test_load_truncated_gguf_raises(peer, tmp_path):
    path = tmp_path / "m.gguf"
    write(path, peer, peer.config, None)
    data = path.read_bytes()
    for size in (0, 3, 100, len(data) // 2, len(data) - 40):
        path.write_bytes(data[:size])
        with pytest.raises(StorageError, match="not a complete GGUF file"):
            ch.load(path)


@pytest.mark.bad_input
def test_load_of_unknown_architecture_raises(peer, tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "falcon")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StorageError, match="'falcon' model; known architectures"):
        ch.load(path)


# ---------------------------------------------------------------------- counts and offsets that no file can have


def text(value: str) -> bytes:
    """Return a string as GGUF stores it: its length and its bytes."""
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int, keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


def array(kind: int, length: int) -> bytes:
    return text("some.key") + struct.pack("<IIQ", 9, kind, length)


def tensor_info(dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text("token_embd.weight") + sizes + struct.pack("<IQ", kind, offset)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(0, 1) + array(4, 2**40) + bytes(40), "an array of 1,099,511,627,776 values"),
        (header(0, 1) + array(4, 2**62) + bytes(40), "an array of 4,611,686,018,427,387,904 values"),
        (header(0, 1) + array(8, 2**40) + bytes(40), "an array of"),
        (header(0, 1) + array(9, 2**40) + bytes(40), "an array of"),
        (header(0, 1) + text("k") + struct.pack("<IQ", 8, 2**40) + bytes(40), "a string of"),
        (header(0, 1) + struct.pack("<Q", 2**63) + bytes(40), "a string of"),
        (header(0, 2**40) + bytes(40), "1,099,511,627,776 keys"),
        (header(2**40, 0) + bytes(40), "1,099,511,627,776 tensors"),
        (header(1, 0) + text("t") + struct.pack("<I", 2**31) + bytes(60), "dimensions"),
        (header(1, 0) + tensor_info((2**40,), 0, 0) + bytes(60), "token_embd.weight"),
        (header(1, 0) + tensor_info((2**62, 2**62), 0, 0) + bytes(60), "token_embd.weight"),
        (header(1, 0) + tensor_info((2,), 0, 2**40) + bytes(60), "token_embd.weight"),
        (header(0, 1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000 + bytes(12), "nested"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_gguf_counts_beyond_the_file_raise_before_reading(tmp_path, monkeypatch, content, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    monkeypatch.setattr(gguf, "GGUFReader", lambda *_: pytest.fail("the reader was called"))
    with pytest.raises(StorageError, match=f"(?s)not a complete GGUF file.*{words}"):
        ch.load(path)


@pytest.mark.bad_input
def test_gguf_with_an_array_as_architecture_raises_one_sentence(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(header(0, 1) + text("general.architecture") + struct.pack("<IIQ2I", 9, 4, 2, 7, 7) + bytes(64))
    with pytest.raises(StorageError, match=r"model_type is \[7, 7\]; expected a string"):
        ch.load(path)


@pytest.mark.fixed_memory
def test_dequantized_parameters_start_at_multiples_of_64_bytes(peer, tmp_path):
    path = tmp_path / "m.gguf"
    write(path, peer, peer.config, gguf.GGMLQuantizationType.Q8_0)
    addresses = {
        weight.data_ptr() % 64 for weight in ch.load(path, dtype=torch.float32).parameters() if weight.dim() == 2
    }
    assert addresses == {0}


def test_export_of_gguf_contains_the_chat_template_and_the_special_tokens(peer, tmp_path):
    import json

    from clearhead import hub

    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokens = ["<s>", "</s>", *(chr(ord("a") + i) if i < 26 else f"token{i}" for i in range(V - 2))]

    def add_text(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, *[1] * (V - 2)])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template(template)

    file = tmp_path / "model.gguf"
    tokens[2 + 26] = "ab"  # the result of the merge
    write(file, peer, peer.config, None, add_text)
    trained = hub.pipeline(file)
    hub.export(trained, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    reloaded = hub.pipeline(tmp_path / "out")
    assert reloaded.stop_ids == trained.stop_ids == (1,)
    assert reloaded.tokenizer.encode("abc") == trained.tokenizer.encode("abc")
    messages = [{"role": "user", "content": "abc"}]
    assert hub.encode_chat(reloaded, messages) == hub.encode_chat(trained, messages)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
