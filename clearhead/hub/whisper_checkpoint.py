"""Folders of transformers from the checkpoints of OpenAI's Whisper, whose tensors have other names.

The tokenizer is built from OpenAI's list of ranks (gpt2.tiktoken for English-only models, multilingual.tiktoken for the
others), which a checkpoint does not contain.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from clearhead._core.atomic_io import save_tensors
from clearhead.data.tokenizers.base import TOKENIZERS_MISSING
from clearhead.data.tokenizers.library import byte_of_letter
from clearhead.errors import StorageError, optional_dependency
from clearhead.hub.families.encoder_decoders import WHISPER
from clearhead.hub.family import ConfigReader
from clearhead.hub.formats import CONFIG, GENERATION, WEIGHTS
from clearhead.models import storage

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Json: TypeAlias = dict[str, object]

# Languages in the order of their ids, of which models before large-v3 lack the last.
LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi "
    "ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu "
    "am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
# Symbols that are written but not spoken.
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
_END = "<|endoftext|>"
_CONTROL = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nocaptions|>", "<|notimestamps|>")
_N_TIMESTAMPS = 1501  # 0.00 to 30.00 seconds
_N_OTHERS = len(_CONTROL) + _N_TIMESTAMPS + 2  # with the end of a text and the start of a transcript
_ENGLISH_ONLY = 51864  # token ids
_SIZES = (
    "n_mels",
    "n_audio_ctx",
    "n_audio_state",
    "n_audio_head",
    "n_audio_layer",
    "n_vocab",
    "n_text_ctx",
    "n_text_layer",
)


def write_folder(folder: Path, sizes: Mapping[str, int], vocabulary: Path | None) -> tuple[str, ...]:
    """Rewrite a folder with the tensors of an OpenAI checkpoint as a folder of transformers.

    Args:
        folder: Contains the tensors under OpenAI's names.
        sizes: The sizes in the checkpoint.
        vocabulary: The list of ranks; without it the folder has no tokenizer.

    Returns:
        Sentences that name missing files.

    Raises:
        StorageError: If the sizes, the tensors or the list of ranks do not fit a Whisper model.
    """
    if missing := [name for name in _SIZES if name not in sizes]:
        raise StorageError(f"the checkpoint has sizes without {missing[0]}; expected those of OpenAI's Whisper")
    n_vocab = sizes["n_vocab"]
    # In multilingual models one more text token precedes the control tokens.
    end = 50256 if n_vocab == _ENGLISH_ONLY else 50257
    config = _config(sizes, end)
    file = folder / WEIGHTS
    tensors: dict[str, Tensor] = {}
    with storage.open_safetensors(file, "cpu") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dictionary)
            tensors[f"model.{_rename(name)}"] = opened.get_tensor(name).float()
    # The sinusoids were stored in half precision; compute them again.
    tensors |= WHISPER.constants(WHISPER.config(ConfigReader(config, {})), torch.float32)
    save_tensors(file, tensors, {"format": "pt"})
    _write_json(folder / CONFIG, config)
    if vocabulary is None:
        name = "gpt2.tiktoken" if n_vocab == _ENGLISH_ONLY else "multilingual.tiktoken"
        command = f"convert again to a new folder with --vocabulary {name}, a file of OpenAI's Whisper"
        return (f"the folder has no tokenizer: {command}",)
    tokenizer, special_ids = build_tokenizer(vocabulary, n_vocab)
    _write_json(folder / GENERATION, _generation_config(tokenizer, special_ids, sizes))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    special_tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _END)
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "WhisperTokenizer", **special_tokens})
    return ()


def _write_json(path: Path, data: Json) -> None:
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def _config(sizes: Mapping[str, int], end: int) -> Json:
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
        "decoder_start_token_id": end + 1,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    }


def _rename(name: str) -> str:
    """Return the name of a tensor in transformers."""
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def build_tokenizer(ranks_file: Path, n_vocab: int) -> tuple[Tokenizer, dict[str, int]]:
    """Return a byte-level BPE tokenizer from a list of ranks, and the ids of its special tokens.

    Args:
        ranks_file: Lines with a token in base 64 and its rank.
        n_vocab: Number of token ids of the model.

    Raises:
        StorageError: If the file is not a list of ranks, or does not fit the model.
    """
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    try:
        lines = ranks_file.read_text(encoding="ascii").splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    except (OSError, ValueError) as error:
        raise StorageError(f"{ranks_file} is not a list of tokens and ranks: {error}") from error
    known_languages = LANGUAGES.split()
    n_languages = n_vocab - len(ranks) - _N_OTHERS
    if not len(known_languages) - 1 <= n_languages <= len(known_languages):
        raise StorageError(
            f"{ranks_file} has {len(ranks):,} tokens, which do not fit the {n_vocab:,} ids of the model; expected "
            "gpt2.tiktoken for an English-only model, multilingual.tiktoken for others"
        )
    letters = {byte: letter for letter, byte in byte_of_letter().items()}
    spellings = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            first, second = (spellings[part] for part in _parts(token, ranks))
            merges.append((first, second))
    tokenizer = Tokenizer(models.BPE({spellings[token]: rank for token, rank in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    languages = [f"<|{language}|>" for language in known_languages[:n_languages]]
    names = [_END, "<|startoftranscript|>", *languages, *_CONTROL]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", normalized=False) for i in range(_N_TIMESTAMPS)])
    ids = {name: tokenizer.token_to_id(name) for name in names}
    return tokenizer, {name: id_ for name, id_ in ids.items() if id_ is not None}


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Return the two parts that a token is merged from, by applying all earlier merges to its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], len(ranks)) for i in range(len(parts) - 1)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _generation_config(tokenizer: Tokenizer, special_ids: Mapping[str, int], sizes: Mapping[str, int]) -> Json:
    """Return generation_config.json."""
    is_multilingual = sizes["n_vocab"] != _ENGLISH_ONLY
    never_generated = ["<|startoftranscript|>", "<|startoflm|>", "<|startofprev|>", "<|nocaptions|>"]
    config: Json = {
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), special_ids[_END]),
        "decoder_start_token_id": special_ids["<|startoftranscript|>"],
        "no_timestamps_token_id": special_ids["<|notimestamps|>"],
        "is_multilingual": is_multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": sizes["n_text_ctx"],
        "begin_suppress_tokens": [tokenizer.encode(" ", add_special_tokens=False).ids[0], special_ids[_END]],
    }
    if is_multilingual:
        names = [f"<|{language}|>" for language in LANGUAGES.split()]
        config["lang_to_id"] = {name: special_ids[name] for name in names if name in special_ids}
        config["task_to_id"] = {task: special_ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
        never_generated += ["<|transcribe|>", "<|translate|>"]
    suppressed = {*non_speech_ids(tokenizer), *(special_ids[name] for name in never_generated)}
    config["suppress_tokens"] = sorted(suppressed)
    return config


def non_speech_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of tokens that are not speech (brackets, notes, …), by OpenAI's rule."""
    non_speech = {tokenizer.encode(text, add_special_tokens=False).ids[0] for text in (" -", " '")}
    for symbol in (*SYMBOLS, *SYMBOL_GROUPS.split(), *NOTES):
        for text in (symbol, f" {symbol}"):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == 1 or symbol in NOTES:
                non_speech.add(ids[0])
    return non_speech
