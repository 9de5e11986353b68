"""Convert a checkpoint of OpenAI's Whisper to a Hugging Face folder.

    python tools/whisper_folder.py tiny.en.pt gpt2.tiktoken FOLDER

The parameters are read from a pickle with `weights_only=True`, and the tokenizer from a list of ranks. clearhead and
transformers can load the output. This tool is not part of the package, because the package never opens a pickle. Only
English-only models are supported; the token ids of multilingual models differ.
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
SYMBOLS, SYMBOL_GROUPS = (
    '"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪",
)
NOTES = "♩♪♫♬♭♮♯"
# Parameter names of OpenAI and of transformers, in the order of replacement.
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


def convert(checkpoint_file: Path, ranks_file: Path, folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and generation_config.json."""
    from safetensors.torch import save_file

    checkpoint = torch.load(checkpoint_file, map_location="cpu", weights_only=True)
    sizes = checkpoint["dims"]
    if sizes["n_vocab"] != 51864:
        raise SystemExit(
            f"{checkpoint_file} has {sizes['n_vocab']} token ids; expected an English-only model with 51864"
        )
    config = _config(sizes)
    tensors = {f"model.{_rename(name)}": tensor.float() for name, tensor in checkpoint["model_state_dict"].items()}
    # The sinusoids were stored in half precision; compute them again.
    tensors |= WHISPER.constants(WHISPER.config(ConfigReader(config, {})), torch.float32)
    tokenizer, special_ids = build_tokenizer(ranks_file)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation_config = _generation_config(tokenizer, special_ids) | {"max_length": sizes["n_text_ctx"]}
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=1))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    special_tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "WhisperTokenizer", **special_tokens}, indent=1)
    )


def _config(sizes: dict[str, int]) -> dict[str, Any]:
    """Return config.json."""
    d_model, n_heads = sizes["n_audio_state"], sizes["n_audio_head"]
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": sizes["n_vocab"],
        "num_mel_bins": sizes["n_mels"],
        "max_source_positions": sizes["n_audio_ctx"],
        "max_target_positions": sizes["n_text_ctx"],
        "d_model": d_model,
        "encoder_layers": sizes["n_audio_layer"],
        "decoder_layers": sizes["n_text_layer"],
        **{f"{stack}_attention_heads": n_heads for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": 4 * d_model for stack in ("encoder", "decoder")},
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


def build_tokenizer(ranks_file: Path) -> tuple[Any, dict[str, int]]:
    """Return a byte-level BPE tokenizer from a file of ranks, and the ids of its special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    lines = ranks_file.read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    letters = {byte: letter for letter, byte in byte_of_letter().items()}
    spellings = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges: Any = [
        tuple(spellings[part] for part in _parts(token, ranks))
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1
    ]
    tokenizer: Any = Tokenizer(models.BPE({spellings[token]: rank for token, rank in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [
        *("<|endoftext|>", "<|startoftranscript|>"),
        *(f"<|{language}|>" for language in LANGUAGES.split()),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nocaptions|>", "<|notimestamps|>"),
    ]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", normalized=False) for i in range(1501)])
    return tokenizer, {name: tokenizer.token_to_id(name) for name in names}


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two parts that a token is merged from, by applying all earlier merges to its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], len(ranks)) for i in range(len(parts) - 1)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _generation_config(tokenizer: Any, special_ids: dict[str, int]) -> dict[str, Any]:
    """Return generation_config.json."""
    control_tokens = (
        "<|startoftranscript|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nocaptions|>",
    )
    return {
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), special_ids["<|endoftext|>"]),
        "decoder_start_token_id": special_ids["<|startoftranscript|>"],
        "no_timestamps_token_id": special_ids["<|notimestamps|>"],
        "is_multilingual": False,
        "max_initial_timestamp_index": 50,
        "begin_suppress_tokens": [tokenizer.encode(" ", add_special_tokens=False).ids[0], special_ids["<|endoftext|>"]],
        "suppress_tokens": sorted({*non_speech_ids(tokenizer), *(special_ids[name] for name in control_tokens)}),
    }


def non_speech_ids(tokenizer: Any) -> set[int]:
    """Return the ids of tokens that are not speech (brackets, notes, …), by OpenAI's rule."""
    non_speech = {tokenizer.encode(text, add_special_tokens=False).ids[0] for text in (" -", " '")}
    for symbol in (*SYMBOLS, *SYMBOL_GROUPS.split(), *NOTES):
        for text in (symbol, f" {symbol}"):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == 1 or symbol in NOTES:
                non_speech.add(ids[0])
    return non_speech


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    convert(*map(Path, sys.argv[1:]))
