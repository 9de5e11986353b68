"""The properties that `check` tests, in the order of a report.

One class is one property; to add one, write it and put it into the list.
"""

from __future__ import annotations

from clearhead.check.properties.base import Property, Seen
from clearhead.check.properties.batch import BatchInvariance, Determinism, PermutationEquivariance
from clearhead.check.properties.cache import CacheConsistency
from clearhead.check.properties.causality import FutureLeak, PastReach
from clearhead.check.properties.learning import GradientsReach, TrainIsEval
from clearhead.check.properties.numbers import DtypeAgreement, Finiteness
from clearhead.check.properties.padding import MaskPolarity, PaddingInvariance
from clearhead.check.properties.scale import ScoreScale

PROPERTIES: tuple[Property, ...] = (
    Determinism(),
    FutureLeak(),
    PastReach(),
    PaddingInvariance(),
    MaskPolarity(),
    BatchInvariance(),
    CacheConsistency(),
    PermutationEquivariance(),
    DtypeAgreement(),
    Finiteness(),
    GradientsReach(),
    TrainIsEval(),
    ScoreScale(),
)

__all__ = ["PROPERTIES", "Property", "Seen"]
