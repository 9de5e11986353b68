"""Proofs in letters whose steps are verified when they are shown: `print(proofs.prove("weights-sum-to-one"))`.

The steps hold for any number of tokens, heads and layers: sums keep a symbolic length, and every step is verified by
bringing both sides to a normal form.
"""

from clearhead.course.proofs.language import ProofError
from clearhead.course.proofs.proof import Proof, ProofLine, ProofPart, bundled_proofs, prove, verify
from clearhead.course.proofs.render import html, latex, markdown, terminal, to_dict, verification

__all__ = [
    "Proof",
    "ProofError",
    "ProofLine",
    "ProofPart",
    "bundled_proofs",
    "html",
    "latex",
    "markdown",
    "prove",
    "terminal",
    "to_dict",
    "verification",
    "verify",
]
