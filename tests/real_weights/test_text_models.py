"""What is built on tiny random models holds on real ones: they say what they are known to say, and what their makers'
own code says. Every test prints what it compared."""

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
def peer(smollm):
    """transformers' own reading of the same file."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    settings = load_gguf_checkpoint(str(smollm))["config"]
    config = transformers.LlamaConfig(**settings, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    loaded = load_gguf_checkpoint(str(smollm), return_tensors=True, model_to_load=model)["tensors"]
    missing, strange = model.load_state_dict(loaded, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    assert not strange
    return model


def test_smollm_knows_the_capital_of_italy(model):
    text = model.generate(PROMPT, max_new_tokens=8)
    print(f"\n{PROMPT}{text}")
    assert text.startswith(" Rome")
    assert "".join(model.stream(PROMPT, max_new_tokens=8)) == text
    assert model.generate([PROMPT, "One, two, three,"], max_new_tokens=8)[0] == text


def test_smollm_gives_the_logits_of_transformers(model, peer):
    ids = torch.tensor([model.tokenizer.prompt(PROMPT)])
    with torch.no_grad(), trace(model.model) as seen:
        got = model.model(ids)
        wanted = peer(ids, output_attentions=True)
    worst = (got - wanted.logits).abs().max().item()
    largest = wanted.logits.abs().max().item()
    print(f"\nlogits differ by {worst:.1e} at most; the largest is {largest:.1f}")
    # Two orders of float32 sums through 30 layers.
    assert worst <= 30 * 100 * torch.finfo(torch.float32).eps * largest
    apart = [
        (seen.weights(f"blocks.{i}.attention") - weights).abs().max().item()
        for i, weights in enumerate(wanted.attentions)
    ]
    print(f"attention weights differ by {max(apart):.1e} at most, over {len(apart)} layers")
    assert max(apart) <= 1e-4


def test_smollm_generates_the_ids_of_transformers(model, peer):
    ids = torch.tensor([model.tokenizer.prompt(PROMPT)])
    theirs = peer.generate(ids, max_new_tokens=20, do_sample=False, repetition_penalty=1.0)[0, ids.shape[1] :].tolist()
    ours = ch.generate(model.model, ids, max_new_tokens=20, stop_ids=model.stop_ids).sequence(0).tolist()
    print(f"\n{len(ours)} greedy ids: {model.tokenizer.decode(ours)!r}")
    assert theirs[: len(ours)] == ours


def test_smollm_reads_text_as_transformers_does(model, smollm):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm.parent, gguf_file=smollm.name)
    for text in [*SENTENCES, PROMPT, "def f(x):\n    return x + 12345", "  two  spaces\t\n\n"]:
        ids = model.tokenizer.prompt(text)
        assert ids == theirs(text)["input_ids"], text
        assert model.tokenizer.decode(ids) == text


def test_smollm_answers_by_its_template(model, peer, smollm):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm.parent, gguf_file=smollm.name)
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    ids = hub.encode_chat(model, talk)
    assert ids == theirs.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    answer = model.chat(talk, max_new_tokens=20)
    made = peer.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=list(model.stop_ids))
    print(f"\n{talk[0]['content']} {answer}")
    assert answer == theirs.decode(made[0, len(ids) :], skip_special_tokens=True)
    assert "Paris" in answer


def test_smollm_goes_out_as_a_folder(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    hub.export(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        assert tokenizer.decode(theirs(ids).logits[0, -1].argmax()) == " Rome"


def test_minilm_gives_the_vectors_of_its_makers(minilm):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    given = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        x = theirs(**given).last_hidden_state
    real = given["attention_mask"][..., None]
    wanted = torch.nn.functional.normalize((x * real).sum(1) / real.sum(1), dim=1)  # as sentence-transformers does it
    got = hub.pipeline(minilm).embed(SENTENCES)
    worst = (got @ got.T - wanted @ wanted.T).abs().max().item()
    kitten, stocks = (got[0] @ got[1]).item(), (got[0] @ got[2]).item()
    print(f"\nsimilarities differ by {worst:.1e} at most; cat and kitten {kitten:.3f}, cat and stocks {stocks:.3f}")
    assert worst <= 1e-6
    assert kitten > 0.6 > 0.2 > stocks


def test_minilm_leaves_out_what_is_too_long(minilm):
    trained = hub.pipeline(minilm)
    long = "word " * 1000
    assert len(trained.tokenizer.prompt(long, 256)) == 256
    assert trained.tokenizer.prompt(long, 256)[-1] == trained.tokenizer.prompt("word")[-1]  # [SEP]
    torch.testing.assert_close(trained.embed(long), trained.embed("word " * 254))


def test_minilm_comes_back_to_the_same_bits(minilm, tmp_path):
    from safetensors.torch import load_file

    trained = hub.pipeline(minilm, dtype=None)
    convert.export_third_party(trained.model, tmp_path / "out")
    before, after = load_file(minilm / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    before.pop("embeddings.position_ids", None)  # 0, 1, 2, …
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    print(f"\n{len(after)} tensors, {sum(tensor.numel() for tensor in after.values()):,} numbers, all equal")
