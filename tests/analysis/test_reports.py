"""What is shown of a translation is what happened: the ids that were generated, also where the tokenizer would cut the
written text otherwise."""

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


def searched(source: str, how) -> tuple[list[int], list[int]]:
    """The ids that the search itself reads and writes, without a line of what is tested."""
    trained = translator()
    tokenizer = trained.tokenizer
    ids = [*tokenizer.encode(source), tokenizer.eos_id]
    made = generate(
        trained.model,
        [torch.tensor(ids)],
        strategy=how,
        max_new_tokens=2 * len(ids) + 8,
        decoder_start_ids=tokenizer.bos_id,
        stop_ids=tokenizer.eos_id,
    )
    return ids, made.sequence(with_stop=True).tolist()


@pytest.mark.parametrize("source", RARE)
def test_what_is_shown_is_what_was_written(source):
    trained = translator()
    read, written = searched(source, DEFAULT_STRATEGY)
    report = analysis.attention_report(trained, source)
    names = trained.tokenizer.tokens
    again = [*trained.tokenizer.encode(trained.tokenizer.decode(written[:-1])), trained.tokenizer.eos_id]
    assert again != written, "encoding the text gives the same ids: this sentence tests nothing"
    for attention_map in report.maps:
        if "cross" in attention_map.path:
            assert (list(attention_map.rows), list(attention_map.columns)) == (names(written), names(read))
        elif attention_map.path.startswith("decoder"):
            assert list(attention_map.rows) == names([trained.tokenizer.bos_id, *written[:-1]])


@pytest.mark.parametrize("source", RARE)
def test_the_weights_are_those_of_the_run_itself(source):
    """Greedily, the run can be watched as it happens, step by step over its cache."""
    trained = translator()
    report = analysis.attention_report(trained, source, strategy=Greedy())
    with torch.no_grad(), analysis.trace(trained.model) as t:
        searched(source, Greedy())
    for attention_map in report.maps:
        seen = t.weights(attention_map.path)[0]
        torch.testing.assert_close(attention_map.all_heads(), seen, rtol=0, atol=1e-5)


def test_translations_are_translate_with_ids():
    trained = translator()
    texts = [RARE[2], "  ", "Thank you."]
    made = hub.translations(trained, texts, strategy=BeamSearch(2))
    assert [one.target for one in made] == hub.translate(trained, texts, strategy=BeamSearch(2))
    assert [one.source for one in made] == texts
    assert made[1].source_ids == made[1].target_ids == ()
    with pytest.raises(DataError, match="pass a sentence to translate"):
        analysis.translation_report(trained, made[1])
    assert (list(made[2].source_ids), list(made[2].target_ids)) == searched("Thank you.", BeamSearch(2))
