"""All model families, with a module per type of model.

A model is exported as the first family that can express it.
"""

from __future__ import annotations

from clearhead.hub.families.decoders import DECODERS
from clearhead.hub.families.encoder_decoders import ENCODER_DECODERS
from clearhead.hub.families.encoders import ENCODERS
from clearhead.hub.families.vision import VISION
from clearhead.hub.family import Family

_ALL = (*DECODERS, *ENCODERS, *ENCODER_DECODERS, *VISION)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
