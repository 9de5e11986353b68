"""OpenAI's Whisper as a Hugging Face folder: `python tools/whisper_folder.py tiny.en.pt gpt2.tiktoken FOLDER`.

The parameters are a pickle, which torch reads as data only (`weights_only`), and the tokenizer is a list of ranks. The
output can be loaded by clearhead and transformers. This tool is not part of the package, which never opens a pickle. It
supports the English-only models, whose ids differ from those of the multilingual ones.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import torch

from clearhead.data.tokenizers.library import byte_of_letter
from clearhead.hub.families.encoder_decoders import WHISPER
from clearhead.hub.family import ConfigReader

# Languages in the order of their ids, and symbols that are written but not spoken.
LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi "
    "ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu "
    "am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su"
)
SIGNS, GROUPS = '"#()*+/:;<=>@[\\]^_`{|}~「」『』', "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"
NOTES = "♩♪♫♬♭♮♯"
# OpenAI's names and those of transformers, in the order of replacement.
NAMES = {
    "blocks": "layers",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "cross_attn.": "encoder_attn.",
    "attn_ln": "self_attn_layer_norm",
    ".attn.": ".self_attn.",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "attn.out": "attn.out_proj",
    "mlp_ln": "final_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "ln_post": "layer_norm",
    "decoder.ln.": "decoder.layer_norm.",
    "token_embedding": "embed_tokens",
    "positional_embedding": "embed_positions.weight",
}


def convert(weights: Path, ranks: Path, folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and generation_config.json."""
    from safetensors.torch import save_file

    stored = torch.load(weights, map_location="cpu", weights_only=True)
    sizes = stored["dims"]
    if sizes["n_vocab"] != 51864:
        raise SystemExit(f"{weights} has a vocabulary of {sizes['n_vocab']}; expected 51864, as models of English have")
    config = _config(sizes)
    tensors = {f"model.{_rename(name)}": tensor.float() for name, tensor in stored["model_state_dict"].items()}
    # The sinusoids were stored in half precision; compute them again.
    tensors |= WHISPER.constants(WHISPER.config(ConfigReader(config, {})), torch.float32)
    inner, specials = tokenizer(ranks)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    settings = _generation(inner, specials) | {"max_length": sizes["n_text_ctx"]}
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "tokenizer.json").write_text(inner.to_str())
    end = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer", **end}, indent=1))


def _config(sizes: dict[str, int]) -> dict[str, Any]:
    """Return config.json."""
    width, heads = sizes["n_audio_state"], sizes["n_audio_head"]
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": sizes["n_vocab"],
        "num_mel_bins": sizes["n_mels"],
        "max_source_positions": sizes["n_audio_ctx"],
        "max_target_positions": sizes["n_text_ctx"],
        "d_model": width,
        "encoder_layers": sizes["n_audio_layer"],
        "decoder_layers": sizes["n_text_layer"],
        **{f"{stack}_attention_heads": heads for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": 4 * width for stack in ("encoder", "decoder")},
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "decoder_start_token_id": 50257,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 50256),
    }


def _rename(name: str) -> str:
    """Return the name of a tensor in transformers."""
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def tokenizer(file: Path) -> tuple[Any, dict[str, int]]:
    """Return a byte-level BPE tokenizer from a file of ranks, and the ids of its special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    lines = file.read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    letters = {byte: letter for letter, byte in byte_of_letter().items()}
    spellings = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges: Any = [
        tuple(spellings[part] for part in _parts(token, ranks))
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1
    ]
    inner: Any = Tokenizer(models.BPE({spellings[token]: rank for token, rank in ranks.items()}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = [
        *("<|endoftext|>", "<|startoftranscript|>"),
        *(f"<|{language}|>" for language in LANGUAGES.split()),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nocaptions|>", "<|notimestamps|>"),
    ]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    inner.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", normalized=False) for i in range(1501)])
    return inner, {name: inner.token_to_id(name) for name in names}


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two parts that a token is merged from, by applying all earlier merges to its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], len(ranks)) for i in range(len(parts) - 1)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _generation(inner: Any, specials: dict[str, int]) -> dict[str, Any]:
    """Return generation_config.json."""
    control_tokens = (
        "<|startoftranscript|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nocaptions|>",
    )
    return {
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), specials["<|endoftext|>"]),
        "decoder_start_token_id": specials["<|startoftranscript|>"],
        "no_timestamps_token_id": specials["<|notimestamps|>"],
        "is_multilingual": False,
        "max_initial_timestamp_index": 50,
        "begin_suppress_tokens": [inner.encode(" ", add_special_tokens=False).ids[0], specials["<|endoftext|>"]],
        "suppress_tokens": sorted({*non_speech_ids(inner), *(specials[name] for name in control_tokens)}),
    }


def non_speech_ids(inner: Any) -> set[int]:
    """Return the ids of tokens that are not speech (brackets, notes, …), by OpenAI's rule."""
    non_speech = {inner.encode(text, add_special_tokens=False).ids[0] for text in (" -", " '")}
    for symbol in (*SIGNS, *GROUPS.split(), *NOTES):
        for text in (symbol, f" {symbol}"):
            ids = inner.encode(text, add_special_tokens=False).ids
            if len(ids) == 1 or symbol in NOTES:
                non_speech.add(ids[0])
    return non_speech


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    convert(*map(Path, sys.argv[1:]))
