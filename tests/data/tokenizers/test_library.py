"""Third-party tokenizers, trained with the `tokenizers` library and loaded by clearhead."""

from __future__ import annotations

import json
import pickle
import threading
import time

import pytest

from clearhead.data.tokenizers.library import HFTokenizer, load_hf_tokenizer, train_bpe
from clearhead.errors import ConfigError, DataError, StorageError
from tests.support.tokenizers import TEXTS, byte_pairs, unigram, word_piece


@pytest.fixture(params=[word_piece, unigram, byte_pairs], ids=lambda make: make.__name__)
def saved_tokenizer(request, tmp_path):
    inner, specials = request.param()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(specials))
    return inner, specials, tmp_path


def test_encode_and_decode_equal_the_library(saved_tokenizer):
    inner, _, folder = saved_tokenizer
    pieces = load_hf_tokenizer(folder)
    assert pieces.vocab_size == inner.get_vocab_size()
    for text in TEXTS:
        assert pieces.encode(text) == inner.encode(text, add_special_tokens=False).ids
        assert pieces.prompt(text) == inner.encode(text).ids
        assert pieces.decode(pieces.prompt(text)) == inner.decode(inner.encode(text).ids)
    assert pieces.encode_batch(TEXTS) == [pieces.encode(text) for text in TEXTS]
    again = pickle.loads(pickle.dumps(pieces))
    assert again.prompt(TEXTS[0]) == pieces.prompt(TEXTS[0])
    assert again.specials == pieces.specials


def test_special_tokens_are_read_from_the_folder(saved_tokenizer):
    inner, specials, folder = saved_tokenizer
    pieces = load_hf_tokenizer(folder)
    for role, name in (("bos_token", "bos_id"), ("eos_token", "eos_id"), ("pad_token", "pad_id")):
        if role in specials:
            token = specials[role]
            content = token["content"] if isinstance(token, dict) else token
            assert getattr(pieces, name) == inner.token_to_id(content)
        else:
            with pytest.raises(DataError, match=f"its files define no {role}"):
                getattr(pieces, name)


def test_prompt_truncates_inside_special_tokens(saved_tokenizer):
    pieces = load_hf_tokenizer(saved_tokenizer[2])
    prompt, plain = pieces.prompt(TEXTS[1]), pieces.encode(TEXTS[1])
    around = len(prompt) - len(plain)
    cut = pieces.prompt(TEXTS[1], around + 3)
    before = prompt.index(plain[0])
    assert cut == [*prompt[:before], *plain[:3], *prompt[before + len(plain) :]]
    assert pieces.prompt(TEXTS[1]) == prompt  # truncation is not kept for later calls


def test_tokens_are_readable():
    inner, _ = byte_pairs()
    from clearhead.data.tokenizers.library import HFTokenizer

    pieces = HFTokenizer(inner, {})
    ids = pieces.encode("the ü\n")
    assert "".join(pieces.tokens(ids[:1])) == "the"
    assert pieces.tokens(ids)[-1] == "⏎"
    assert pieces.tokens([inner.token_to_id("<|end|>")]) == ["<|end|>"]


@pytest.mark.bad_input
@pytest.mark.parametrize("text", ["", "{}", '{"model": {"type": "Riddle"}}', "[1, 2]"])
def test_load_hf_tokenizer_invalid_file_raises_storage_error(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(StorageError, match="not a tokenizer"):
        load_hf_tokenizer(tmp_path)


@pytest.mark.bad_input
def test_load_hf_tokenizer_invalid_settings_raise_storage_error(saved_tokenizer):
    folder = saved_tokenizer[2]
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(StorageError, match=r"tokenizer_config\.json is not an object"):
        load_hf_tokenizer(folder)


@pytest.mark.bad_input
@pytest.mark.parametrize("vocab_size", [99999999999999999999, 1 << 31, 10**40, (1 << 20) + 1])
def test_train_bpe_huge_vocab_size_raises(vocab_size):
    with pytest.raises(ConfigError, match=r"vocab_size is \d+…?; expected a whole number of at most 1048576"):
        train_bpe(["a text"], vocab_size)


class RecordingTokenizer:
    """Records which thread sets, uses and resets the truncation of a tokenizer of the library."""

    def __init__(self, inner, events):
        self._inner = inner
        self._events = events

    def __getattr__(self, name):
        if name in ("enable_truncation", "no_truncation", "encode_batch_fast"):
            self._events.append((threading.get_ident(), name))
            time.sleep(0)  # lets another thread run
        return getattr(self._inner, name)


def test_truncation_of_one_thread_does_not_reach_texts_of_another():
    events = []
    tokenizer = HFTokenizer(RecordingTokenizer(byte_pairs()[0], events), {})
    text = " ".join(TEXTS)
    expected = {longest: tokenizer.prompt(text, longest) for longest in (5, 7, None)}
    events.clear()
    results = []

    def encode(longest):
        results.extend((longest, tokenizer.prompt(text, longest)) for _ in range(50))

    threads = [threading.Thread(target=encode, args=(longest,)) for longest in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 150
    assert all(ids == expected[longest] for longest, ids in results)
    # Between setting and resetting the truncation, only one thread uses the tokenizer.
    owner = None
    for thread, name in events:
        assert owner in (None, thread)
        owner = None if name == "no_truncation" else thread
