"""The families that can be read and written, a file for those that are akin. The first that can hold a model of ours is
its export."""

from __future__ import annotations

from clearhead.interop.families.bart import BART, MARIAN, T5, WHISPER
from clearhead.interop.families.bert import ALBERT, BERT, MODERNBERT, ROBERTA
from clearhead.interop.families.clip import CLIP
from clearhead.interop.families.gpt import GPT2, GPT_NEOX
from clearhead.interop.families.llama import GEMMA, GEMMA2, LLAMA, MISTRAL, MIXTRAL, PHI3, QWEN2, QWEN3
from clearhead.interop.families.vit import DEIT, DINOV2, DINOV2_REGISTERS, TIMM_VIT, VIT
from clearhead.interop.family import Family

_DECODERS = (GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, GPT_NEOX, GEMMA, GEMMA2, PHI3)
_ENCODERS = (BERT, ROBERTA, ALBERT, MODERNBERT)
_ENCODER_DECODERS = (BART, MARIAN, T5, WHISPER)
_VISION = (VIT, DEIT, TIMM_VIT, DINOV2, DINOV2_REGISTERS)
_ALL = (*_DECODERS, *_ENCODERS, *_ENCODER_DECODERS, *_VISION, CLIP)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
