"""GGUF files written by clearhead, compared with the gguf package, transformers and sentencepiece."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import hub
from clearhead.errors import DataError, StorageError
from clearhead.hub import checkpoint
from clearhead.hub.family import canonical
from clearhead.hub.gguf_architectures import ARCHITECTURES
from clearhead.hub.gguf_reader import GGUF
from clearhead.hub.gguf_tokenizer import read_tokenizer, tokenizer_fields
from clearhead.hub.gguf_writer import write_gguf
from clearhead.models import DecoderConfig
from clearhead.nn import RMSNorm, SwiGLU
from clearhead.nn.positions import ALiBi, Llama3Scaling, LongRopeScaling, NoPE, Rotary
from tests.support.gguf_layout import interleaved
from tests.support.third_party_models import PEERS

gguf = pytest.importorskip("gguf", reason="gguf, which reads such files, is not installed")

GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
# Reference models by architecture, with the changes that its files can express.
MODELS = {
    "llama": ("llama biased, tied", {}),
    "llama rope": ("llama linear", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2 yarn", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "phi3": ("phi3 longrope", {"sliding_window": 5}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 10}),
    "gemma3": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 10,
            "num_hidden_layers": 7,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) + ["sliding_attention"],
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
}


def loaded(name, changes, folder):
    """Return a reference model as clearhead loads it, in float32."""
    peer = PEERS[name]
    peer = dataclasses.replace(peer, sizes=peer.sizes | changes)
    peer.save(peer.build(), folder)
    return checkpoint.load_third_party(folder, dtype=torch.float32)


@pytest.mark.parametrize("architecture", MODELS)
def test_written_model_reads_back_as_the_same_model(architecture, tmp_path):
    name, changes = MODELS[architecture]
    model = loaded(name, changes, tmp_path / "peer")
    path = tmp_path / "model.gguf"
    assert write_gguf(model, path, dtype="float32", preferred=name.split()[0]) == architecture.split()[0]
    reloaded = ch.load(path)
    # The output compares the positions, whose factors are rounded to float32.
    actual, expected = (canonical(part.config).replace(positions=NoPE(), layer_rotary=()) for part in (reloaded, model))
    assert actual == expected
    ids = torch.randint(2, 31, (2, 11))
    assert (reloaded(ids) - model(ids)).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_written_tensors_have_the_layout_of_llama_cpp(dtype, tmp_path):
    config = DecoderConfig(
        vocab_size=31,
        d_model=32,
        n_heads=4,
        n_kv_heads=2,
        n_layers=1,
        d_ff=64,
        max_len=13,
        positions=Rotary(),
        norm=RMSNorm(),
        activation=SwiGLU(),
        bias=False,
        tie_embeddings=False,
    )
    torch.manual_seed(0)
    model = config.build()
    path = tmp_path / "model.gguf"
    write_gguf(model, path, dtype=dtype)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"F32", {"float16": "F16"}.get(dtype, "Q8_0")}
    block = model.blocks[0]
    expected = {
        "token_embd.weight": model.embedding.weight.detach().numpy(),
        "output.weight": model.head.weight.detach().numpy(),
        "output_norm.weight": model.norm.weight.detach().numpy(),
        "blk.0.attn_norm.weight": block.norm1.weight.detach().numpy(),
        "blk.0.ffn_norm.weight": block.norm2.weight.detach().numpy(),
        "blk.0.attn_q.weight": interleaved(block.attention.q_proj.weight.detach().numpy(), 4),
        "blk.0.attn_k.weight": interleaved(block.attention.k_proj.weight.detach().numpy(), 2),
        "blk.0.attn_v.weight": block.attention.v_proj.weight.detach().numpy(),
        "blk.0.attn_output.weight": block.attention.o_proj.weight.detach().numpy(),
        "blk.0.ffn_gate.weight": block.feed_forward.gate.weight.detach().numpy(),
        "blk.0.ffn_up.weight": block.feed_forward.up.weight.detach().numpy(),
        "blk.0.ffn_down.weight": block.feed_forward.down.weight.detach().numpy(),
    }
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        stored = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type).reshape(array.shape)
        largest = np.abs(array).max()
        # A block has a scale in float16 and 254 steps.
        limit = 0 if array.ndim == 1 else largest * {"float16": 2.0**-11, "q8_0": 1 / 254 + 2.0**-11}[dtype] * 1.01
        assert np.abs(stored - array).max() <= limit, name


def test_norms_of_gemma_are_stored_with_one_added(tmp_path):
    model = loaded("gemma", {}, tmp_path / "peer")
    write_gguf(model, tmp_path / "model.gguf")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    np.testing.assert_allclose(tensors["output_norm.weight"], 1 + model.norm.weight.detach().numpy(), rtol=1e-6)


def test_rope_factors_of_llama_3_are_recognized(tmp_path):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = Llama3Scaling(factor=32.0, low=1.0, high=4.0, original_max_len=8192)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    reference = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=rope)
    scaled, plain = ROPE_INIT_FUNCTIONS["llama3"](reference, "cpu")[0], 5e5 ** -(torch.arange(0, 64, 2) / 64)
    config = DecoderConfig(
        vocab_size=31,
        d_model=128,
        n_heads=2,
        n_layers=1,
        max_len=13,
        bias=False,
        norm=RMSNorm(),
        activation=SwiGLU(),
        positions=Rotary(base=5e5, scaling=scaling),
    )
    path = tmp_path / "model.gguf"
    write_gguf(config.build(), path)
    (factors,) = (tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == "rope_freqs.weight")
    np.testing.assert_allclose(factors, plain / scaled, rtol=1e-5)
    assert checkpoint.read_config(path).positions == config.positions
    other = config.replace(positions=Rotary(base=5e5, scaling=dataclasses.replace(scaling, factor=5.0)))
    path = tmp_path / "other.gguf"
    write_gguf(other.build(), path)
    positions = checkpoint.read_config(path).positions
    assert isinstance(positions.scaling, LongRopeScaling)
    x = torch.randn(11, 64)
    torch.testing.assert_close(positions.rotate(x, torch.arange(11)), other.positions.rotate(x, torch.arange(11)))


PHI3_VALUES = {
    "context_length": 64,
    "embedding_length": 8,
    "attention.head_count": 2,
    "attention.sliding_window": 0,
    "rope.scaling.original_context_length": 32,
}


def test_keys_of_phi3_from_the_converter_of_llama_cpp():
    """The converter writes a window of 0 for none, and the factors of LongRoPE without its name."""
    factors = {"short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0]}
    values = PHI3_VALUES | {"rope.scaling.attn_factor": 1.25}
    keys = ARCHITECTURES["phi3"].configuration(values, {"lm_head.weight"}, factors, 7)
    assert keys["rope_scaling"] == factors | {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "attention_factor": 1.25,
    }
    assert "sliding_window" not in keys
    assert "rope_scaling" not in ARCHITECTURES["phi3"].configuration(PHI3_VALUES, {"lm_head.weight"}, {}, 7)


@pytest.mark.bad_input
def test_longrope_without_factors_is_rejected():
    values = PHI3_VALUES | {"rope.scaling.type": "longrope"}
    with pytest.raises(StorageError, match=r"has no tensor rope_factors_long\.weight"):
        ARCHITECTURES["phi3"].configuration(values, {"lm_head.weight"}, {}, 7)


# ---------------------------------------------------------------------- tokenizers

TEXTS = [
    *("Hello world", "It's 1234567 o'clock.\n\n  Now, I'LL go", "ünïcode 日本語 — 12,5 %"),
    *("", "   ", "a\tb\r\nc  d "),
]


def byte_tokenizer(pre):
    """Return the tokenizer of a file with the 256 bytes, a few merges, and a pre-tokenizer."""
    from clearhead.data.tokenizers.library import byte_of_letter

    tokens = [*byte_of_letter(), "he", "ll", "12", "123", "34", "Ġw", "<s>", "</s>"]
    merges = ["h e", "l l", "1 2", "12 3", "3 4", "Ġ w"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": pre == "llama-bpe",
    }
    return read_tokenizer(Path("model.gguf"), fields), tokens, merges


def test_qwen2_tokenizer_equals_transformers():
    transformers = pytest.importorskip("transformers")
    tokenizer, tokens, merges = byte_tokenizer("qwen2")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    reference = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split()) for merge in merges])
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_llama_bpe_tokenizer_splits_digits_by_three():
    tokenizer, tokens, _ = byte_tokenizer("llama-bpe")
    assert [tokens[i] for i in tokenizer.encode("1234 hell")] == ["123", "4", "Ġ", "he", "ll"]
    assert [tokens[i] for i in byte_tokenizer("gpt-2")[0].encode("1234")] == ["123", "4"]
    assert [tokens[i] for i in byte_tokenizer("smollm")[0].encode("1234")] == ["1", "2", "3", "4"]
    assert tokenizer.prompt("a")[0] == tokenizer.bos_id


@pytest.mark.parametrize("pre", ["default", "smollm", "llama-bpe", "qwen2"])
def test_written_byte_level_tokenizer_reads_back_as_the_same(pre):
    tokenizer, tokens, _ = byte_tokenizer(pre)
    fields = tokenizer_fields(tokenizer, len(tokens) + 2)
    assert fields["tokens"][-2:] == [f"[PAD{len(tokens)}]", f"[PAD{len(tokens) + 1}]"]
    read_back = read_tokenizer(Path("model.gguf"), {f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    for text in [*TEXTS, "a<s>b"]:
        assert read_back.encode(text) == tokenizer.encode(text)
        assert read_back.prompt(text) == tokenizer.prompt(text)
    assert read_back.specials == tokenizer.specials


@pytest.fixture(scope="module")
def pieces():
    """A SentencePiece model of the library, and its metadata in a file."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    lines = ["the cat sat on the mat", "a hat and a bat", "It is 12 o'clock", "that the other hat"] * 3
    options = {"vocab_size": 300, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, remove_extra_whitespaces=False, minloglevel=2, **options
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.vocab_size())
    kinds = [(processor.is_unknown, 2), (processor.is_control, 3), (processor.is_byte, 6)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for test, kind in kinds if test(i)), 1) for i in ids],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }
    return processor, fields


def test_sentence_pieces_equal_the_library(pieces):
    processor, fields = pieces
    tokenizer = read_tokenizer(Path("model.gguf"), fields)
    for text in ["the cat", "that  other hat sat 12", "ünïcode 日本", "a\nb"]:
        assert tokenizer.encode(text) == processor.encode(text)
        assert tokenizer.decode(processor.encode(text)) == text
    assert tokenizer.prompt("the cat") == [processor.bos_id(), *processor.encode("the cat")]


def test_written_sentence_pieces_read_back_as_the_same(pieces):
    processor, fields = pieces
    tokenizer = read_tokenizer(Path("model.gguf"), fields)
    written = tokenizer_fields(tokenizer, processor.vocab_size())
    assert written["token_type"] == fields["tokenizer.ggml.token_type"]
    read_back = read_tokenizer(Path("model.gguf"), {f"tokenizer.ggml.{name}": value for name, value in written.items()})
    for text in ["the cat", "that  other hat sat 12", "ünïcode 日本", "a\nb"]:
        assert read_back.encode(text) == processor.encode(text)


# ---------------------------------------------------------------------- bad input


@pytest.mark.bad_input
def test_unknown_pre_tokenizer_is_named():
    with pytest.raises(DataError, match="pre-tokenizer 'tekken'; expected one of default"):
        byte_tokenizer("tekken")


@pytest.mark.bad_input
def test_tokenizer_whose_merges_do_not_match_its_tokens_raises_one_sentence(tmp_path):
    tokenizer, _, _ = byte_tokenizer("qwen2")
    path = tmp_path / "model.gguf"
    model = loaded("llama", {"vocab_size": 264}, tmp_path / "peer")
    write_gguf(model, path, tokenizer=tokenizer)
    path.write_bytes(path.read_bytes().replace(b"12 3", b"1q 3"))
    with pytest.raises(DataError, match=r"has a tokenizer that cannot be read: .*1q"):
        GGUF(path).tokenizer()


@pytest.mark.bad_input
def test_write_gguf_to_an_existing_file_raises(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    with pytest.raises(StorageError, match="already exists"):
        write_gguf(torch.nn.Linear(2, 2), path)


@pytest.mark.bad_input
def test_model_that_files_cannot_express_is_rejected_with_the_reason(tmp_path):
    config = DecoderConfig(vocab_size=7, d_model=8, n_heads=2, n_layers=1, positions=ALiBi())
    with pytest.raises(StorageError, match="no architecture of GGUF files can express this model: llama, "):
        write_gguf(config.build(), tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rope.scaling.type", "ntk", "rope.scaling.type is 'ntk'"),
        ("rope.scaling.strength", 2, "rope.scaling.strength is not known"),
        ("attention.clamp_kqv", 2.0, "attention.clamp_kqv"),
        ("expert_count", 4, "expert_count"),
        ("rope.dimension_count", "x", "the metadata of the model cannot be read: TypeError"),
    ],
)
def test_unknown_metadata_is_rejected_by_name(tmp_path, key, value, words):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 13, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8, "vocab_size": 5}
    for name, size in (sizes | {"attention.head_count": 2}).items():
        writer.add_uint32(f"llama.{name}", size)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
    add(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((5, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StorageError, match=words):
        ch.load(path)


def test_export_command_writes_a_gguf_file_with_tokenizer_and_template(tmp_path, cli):
    model = loaded("llama", {"vocab_size": 264}, tmp_path / "peer")
    tokenizer, _, _ = byte_tokenizer("qwen2")
    source = tmp_path / "source.gguf"
    write_gguf(model, source, dtype="float32", tokenizer=tokenizer, template="{{ x }}")
    ran = cli("export", source, "--out", tmp_path / "out.gguf", "--dtype", "float32", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["architecture"] == "llama"
    original, exported = hub.pipeline(source), hub.pipeline(tmp_path / "out.gguf")
    assert exported.tokenizer.encode("Hello 123") == original.tokenizer.encode("Hello 123")
    assert GGUF(tmp_path / "out.gguf").template() == "{{ x }}"
    assert all(map(torch.equal, original.model.parameters(), exported.model.parameters()))
