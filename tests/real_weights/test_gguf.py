"""SmolLM from a GGUF file, written to GGUF files again: read by the gguf package, by clearhead and by llama.cpp."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead import hub

PROMPT = "The capital of France is Paris, and the capital of Italy is"
NEW = 20


@pytest.fixture(scope="module")
def model(smollm):
    return hub.pipeline(smollm)


@pytest.fixture(scope="module", params=["float16", "q8_0"])
def written(request, model, tmp_path_factory):
    """The dtype, and the file that the model was written to."""
    path = tmp_path_factory.mktemp("gguf") / f"smollm-{request.param}.gguf"
    assert hub.export_gguf(model, path, dtype=request.param) == "llama"
    return request.param, path


def greedy_text(pipeline):
    ids = ch.generate(pipeline.model, [pipeline.tokenizer.prompt(PROMPT)], max_new_tokens=NEW).sequence(0).tolist()
    return pipeline.tokenizer.decode(ids)


def test_written_file_has_the_parameters_of_the_model_in_the_gguf_package(model, written):
    gguf = pytest.importorskip("gguf")
    dtype, path = written
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "llama"
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == model.config.vocab_size
    stored = {tensor.name: tensor for tensor in reader.tensors}
    # llama.cpp interleaves the rotary features of queries and keys; these tensors have the same layout in both.
    for name, parameter in {
        "token_embd.weight": model.model.embedding.weight,
        "blk.29.ffn_down.weight": model.model.blocks[29].feed_forward.down.weight,
        "blk.7.attn_v.weight": model.model.blocks[7].attention.v_proj.weight,
        "output_norm.weight": model.model.norm.weight,
    }.items():
        values = torch.tensor(gguf.quants.dequantize(stored[name].data, stored[name].tensor_type))
        expected = parameter.detach()
        if dtype == "q8_0" and expected.dim() == 2:
            scale = expected.unflatten(1, (-1, 32)).abs().amax(-1) / 127  # of a block, rounded to half precision
            error = (values - expected).unflatten(1, (-1, 32)).abs().amax(-1)
            assert (error <= scale * (0.5 + 127 * 2**-11) + 1e-7).all(), name
        else:
            assert torch.equal(values, expected.half().float() if expected.dim() == 2 else expected), name


def test_written_file_generates_the_text_of_the_model(model, written):
    dtype, path = written
    text, expected = greedy_text(hub.pipeline(path)), greedy_text(model)
    print(f"\n{dtype}: {text!r}")
    if dtype == "float16":
        assert text == expected
    else:  # 8 bits change a digit of a number
        assert text.startswith(" Rome.\n\nThe United States has a population of")


def test_llama_cpp_generates_the_text_of_clearhead(written):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    dtype, path = written
    pipeline = hub.pipeline(path)
    llama = llama_cpp.Llama(str(path), n_ctx=64, verbose=False)
    ids = llama.tokenize(PROMPT.encode(), add_bos=False, special=True)
    assert ids == pipeline.tokenizer.prompt(PROMPT)
    new = []
    llama.eval(ids)
    while len(new) < NEW:
        new.append(llama.sample(temp=0.0, repeat_penalty=1.0))
        llama.eval(new[-1:])
    text = llama.detokenize(new).decode()
    print(f"\nllama.cpp, {dtype}: {text!r}")
    assert text == greedy_text(pipeline)
