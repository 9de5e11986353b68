"""A study that needs a GPU: a vision Transformer against a convolutional network as the data grow.

    python -m clearhead.claims.study --data svhn --out vit-against-cnn.json

The committed outcome is `clearhead/claims/results/vit-against-cnn.json`; the claims about data and inductive bias are
judged from it (`clearhead/claims/data_efficiency.py`), and the command above makes it again.
"""

from __future__ import annotations

from clearhead.claims.study.plan import Settings
from clearhead.claims.study.results import Row, Study
from clearhead.claims.study.run import run

__all__ = ["Row", "Settings", "Study", "run"]
