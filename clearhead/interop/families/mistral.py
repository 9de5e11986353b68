"""Mistral 7B (Jiang et al., 2023): Llama's blocks, and keys no further back than a window."""

from __future__ import annotations

import dataclasses

from clearhead.interop.families.llama import LLAMA, read_blocks, write_blocks
from clearhead.masks import Mask, causal, window
from clearhead.models import DecoderConfig


def read_window(width: int | None) -> Mask:
    """`sliding_window` counts the query itself; None is no window."""
    return causal() if width is None else causal() & window(width - 1, 0)


def write_window(config: DecoderConfig) -> int | None:
    """The width whose mask is the model's for a text of its longest length; None where it is plain causal."""
    longest = config.max_len
    return None if config.mask == causal() else int(config.mask.dense(1, longest, offset=longest - 1).sum())


MISTRAL = dataclasses.replace(
    LLAMA,
    name="mistral",
    architecture="MistralForCausalLM",
    read=lambda keys: read_blocks(keys) | {"mask": read_window(keys("sliding_window", 4096))},
    write=lambda config: write_blocks(config) | {"sliding_window": write_window(config)},
    harmless=(),
)
