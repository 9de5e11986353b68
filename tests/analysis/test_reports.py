"""Translation reports contain the generated ids, even if the tokenizer would encode the output text differently."""

from __future__ import annotations

import functools

import pytest
import torch

from clearhead import analysis, hub
from clearhead.errors import DataError
from clearhead.generation import BeamSearch, Greedy, generate
from clearhead.hub.translate import DEFAULT_STRATEGY

RARE = [
    "Zbigniew Brzezinski visited Kyrgyzstan.",
    "The ophthalmologist examined my eyes.",
    "She plays the glockenspiel.",
]


@functools.cache
def translator():
    return hub.pipeline("en-es")


def generate_ids(source: str, strategy) -> tuple[list[int], list[int]]:
    """Return source and target ids of a translation, generated without the tested code."""
    trained = translator()
    tokenizer = trained.tokenizer
    ids = [*tokenizer.encode(source), tokenizer.eos_id]
    generated = generate(
        trained.model,
        [torch.tensor(ids)],
        strategy=strategy,
        max_new_tokens=2 * len(ids) + 8,
        decoder_start_ids=tokenizer.bos_id,
        stop_ids=tokenizer.eos_id,
    )
    return ids, generated.sequence(with_stop=True).tolist()


@pytest.mark.parametrize("source", RARE)
def test_attention_report_labels_are_generated_tokens(source):
    trained = translator()
    source_ids, target_ids = generate_ids(source, DEFAULT_STRATEGY)
    report = analysis.attention_report(trained, source)
    names = trained.tokenizer.tokens
    reencoded = [*trained.tokenizer.encode(trained.tokenizer.decode(target_ids[:-1])), trained.tokenizer.eos_id]
    assert reencoded != target_ids, "encoding the text returns the same ids, so this sentence tests nothing"
    for attention_map in report.maps:
        if "cross" in attention_map.path:
            assert (list(attention_map.rows), list(attention_map.columns)) == (names(target_ids), names(source_ids))
        elif attention_map.path.startswith("decoder"):
            assert list(attention_map.rows) == names([trained.tokenizer.bos_id, *target_ids[:-1]])


@pytest.mark.parametrize("source", RARE)
def test_attention_report_weights_equal_traced_generation(source):
    """Greedy decoding is deterministic, so the generation itself can be traced step by step with its cache."""
    trained = translator()
    report = analysis.attention_report(trained, source, strategy=Greedy())
    with torch.no_grad(), analysis.trace(trained.model) as t:
        generate_ids(source, Greedy())
    for attention_map in report.maps:
        expected = t.weights(attention_map.path)[0]
        torch.testing.assert_close(attention_map.all_heads(), expected, rtol=0, atol=1e-5)


def test_translations_equal_translate_and_contain_ids():
    trained = translator()
    texts = [RARE[2], "  ", "Thank you."]
    results = hub.translations(trained, texts, strategy=BeamSearch(2))
    assert [result.target for result in results] == hub.translate(trained, texts, strategy=BeamSearch(2))
    assert [result.source for result in results] == texts
    assert results[1].source_ids == results[1].target_ids == ()
    with pytest.raises(DataError, match="pass a sentence to translate"):
        analysis.translation_report(trained, results[1])
    assert (list(results[2].source_ids), list(results[2].target_ids)) == generate_ids("Thank you.", BeamSearch(2))
