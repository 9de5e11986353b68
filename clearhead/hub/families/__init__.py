"""All model families, with a module per type of model.

A model is exported as the first family that can express it.
"""

from __future__ import annotations

from clearhead.errors import DtypeError, StorageError
from clearhead.hub.families.audio import AUDIO
from clearhead.hub.families.decoders import DECODERS
from clearhead.hub.families.dense import DENSE
from clearhead.hub.families.dual_encoders import DUAL_ENCODERS
from clearhead.hub.families.encoder_decoders import ENCODER_DECODERS
from clearhead.hub.families.encoders import ENCODERS
from clearhead.hub.families.experts import EXPERTS
from clearhead.hub.families.t5 import T5_FAMILIES
from clearhead.hub.families.vision import VISION
from clearhead.hub.family import Family

_ALL = (*DECODERS, *DENSE, *EXPERTS, *ENCODERS, *ENCODER_DECODERS, *T5_FAMILIES, *VISION, *DUAL_ENCODERS, *AUDIO)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def register_family(family: Family, *, replace: bool = False) -> None:
    """Make models of a family loadable and exportable under its `name`, the `model_type` of their configurations.

    Args:
        family: Its keys, fields and table of tensor names; the guide "Load and export" defines one.
        replace: Whether to replace a family of this name.

    Raises:
        StorageError: If there is a family of this name.
    """
    if not isinstance(family, Family):
        raise DtypeError(f"register_family: got {type(family).__name__}; expected a clearhead.hub.Family")
    if family.name in FAMILIES and not replace:
        raise StorageError(f"there is a family {family.name!r}; give another name, or replace=True")
    FAMILIES[family.name] = family
