"""A tiny Whisper with random parameters and a tokenizer of letters."""

from __future__ import annotations

import json

import torch

from tests.support.reference_models import WhisperPeer
from tests.support.third_party_models import PEERS

TEXT, FRAMES, FEATURES = 19, 17, 80
END, START, LANGUAGE_IDS, TASK, NO_TIMESTAMPS = (
    TEXT,
    TEXT + 1,
    {"<|en|>": TEXT + 2, "<|fr|>": TEXT + 3},
    TEXT + 4,
    TEXT + 5,
)
V = NO_TIMESTAMPS + 1 + FRAMES + 1
GENERATION = {
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": START,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "max_initial_timestamp_index": 5,
    "is_multilingual": False,
    "suppress_tokens": [3, START, TASK, *LANGUAGE_IDS.values()],
    "begin_suppress_tokens": [4, END],
    "max_length": 13,
}


def save_whisper(path, seed, generation=GENERATION):
    """Save a tiny Whisper of transformers with a tokenizer of letters; return the model and the folder."""
    from tokenizers import Tokenizer, decoders, models

    sizes = PEERS["whisper"].sizes | {
        "vocab_size": V,
        "num_mel_bins": FEATURES,
        "max_source_positions": FRAMES,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END),
        "decoder_start_token_id": START,
    }
    torch.manual_seed(seed)
    reference = WhisperPeer("WhisperForConditionalGeneration", "WhisperConfig", sizes).build()
    reference.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(generation))
    names = [chr(ord("a") + i) for i in range(TEXT)] + [f"<|{i}|>" for i in range(TEXT, V)]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    inner.decoder = decoders.Fuse()
    inner.save(str(path / "tokenizer.json"))
    return reference, path
