"""SmolLM and MiniLM with real parameters: known outputs, and comparison with transformers."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead import hub
from clearhead.analysis import trace
from clearhead.hub import convert

PROMPT = "The capital of France is Paris, and the capital of Italy is"
SENTENCES = [
    "A cat sits on the mat.",
    "A kitten rests on a rug.",
    "Stocks fell sharply on Monday after a night in which nobody in the trading rooms had slept at all.",
    "",
    "Ünïcödé, 漢字 and 🙂.",
]


@pytest.fixture(scope="module")
def model(smollm):
    return hub.pipeline(smollm)


@pytest.fixture(scope="module")
def reference(smollm):
    """The same file, loaded by transformers."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    settings = load_gguf_checkpoint(str(smollm))["config"]
    config = transformers.LlamaConfig(**settings, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    loaded = load_gguf_checkpoint(str(smollm), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    assert not unexpected
    return model


def test_smollm_generates_known_completion(model):
    text = model.generate(PROMPT, max_new_tokens=8)
    print(f"\n{PROMPT}{text}")
    assert text.startswith(" Rome")
    assert "".join(model.stream(PROMPT, max_new_tokens=8)) == text
    assert model.generate([PROMPT, "One, two, three,"], max_new_tokens=8)[0] == text


def test_smollm_logits_match_transformers(model, reference):
    ids = torch.tensor([model.tokenizer.prompt(PROMPT)])
    with torch.no_grad(), trace(model.model) as t:
        actual = model.model(ids)
        expected = reference(ids, output_attentions=True)
    error = (actual - expected.logits).abs().max().item()
    largest = expected.logits.abs().max().item()
    print(f"\nlogits differ by {error:.1e} at most; the largest is {largest:.1f}")
    # Two summation orders in float32 over 30 layers.
    assert error <= 30 * 100 * torch.finfo(torch.float32).eps * largest
    errors = [
        (t.weights(f"blocks.{i}.attention") - weights).abs().max().item()
        for i, weights in enumerate(expected.attentions)
    ]
    print(f"attention weights differ by {max(errors):.1e} at most, over {len(errors)} layers")
    assert max(errors) <= 1e-4


def test_smollm_greedy_ids_match_transformers(model, reference):
    ids = torch.tensor([model.tokenizer.prompt(PROMPT)])
    expected = reference.generate(ids, max_new_tokens=20, do_sample=False, repetition_penalty=1.0)[
        0, ids.shape[1] :
    ].tolist()
    ids = ch.generate(model.model, ids, max_new_tokens=20, stop_ids=model.stop_ids).sequence(0).tolist()
    print(f"\n{len(ids)} greedy ids: {model.tokenizer.decode(ids)!r}")
    assert expected[: len(ids)] == ids


def test_smollm_tokenizer_matches_transformers(model, smollm):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm.parent, gguf_file=smollm.name)
    for text in [*SENTENCES, PROMPT, "def f(x):\n    return x + 12345", "  two  spaces\t\n\n"]:
        ids = model.tokenizer.prompt(text)
        assert ids == tokenizer(text)["input_ids"], text
        assert model.tokenizer.decode(ids) == text


def test_smollm_chat_matches_transformers(model, reference, smollm):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm.parent, gguf_file=smollm.name)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = hub.encode_chat(model, messages)
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    reply = model.chat(messages, max_new_tokens=20)
    generated = reference.generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=list(model.stop_ids)
    )
    print(f"\n{messages[0]['content']} {reply}")
    assert reply == tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True)
    assert "Paris" in reply


def test_exported_smollm_loads_in_transformers(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    hub.export(model, tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        assert tokenizer.decode(exported(ids).logits[0, -1].argmax()) == " Rome"


def test_minilm_embeddings_match_sentence_transformers(minilm):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        x = reference(**inputs).last_hidden_state
    is_token = inputs["attention_mask"][..., None]
    # Mean pooling and normalization, as in sentence-transformers.
    expected = torch.nn.functional.normalize((x * is_token).sum(1) / is_token.sum(1), dim=1)
    actual = hub.pipeline(minilm).embed(SENTENCES)
    error = (actual @ actual.T - expected @ expected.T).abs().max().item()
    kitten, stocks = (actual[0] @ actual[1]).item(), (actual[0] @ actual[2]).item()
    print(f"\nsimilarities differ by {error:.1e} at most; cat and kitten {kitten:.3f}, cat and stocks {stocks:.3f}")
    assert error <= 1e-6
    assert kitten > 0.6 > 0.2 > stocks


def test_embed_long_text_equals_truncated_text(minilm):
    trained = hub.pipeline(minilm)
    long = "word " * 1000
    assert len(trained.tokenizer.prompt(long, 256)) == 256
    assert trained.tokenizer.prompt(long, 256)[-1] == trained.tokenizer.prompt("word")[-1]  # [SEP]
    torch.testing.assert_close(trained.embed(long), trained.embed("word " * 254))


def test_export_third_party_minilm_returns_bit_equal_tensors(minilm, tmp_path):
    from safetensors.torch import load_file

    trained = hub.pipeline(minilm, dtype=None)
    convert.export_third_party(trained.model, tmp_path / "out")
    before, after = load_file(minilm / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    before.pop("embeddings.position_ids", None)  # 0, 1, 2, …
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    print(f"\n{len(after)} tensors, {sum(tensor.numel() for tensor in after.values()):,} values, all equal")
