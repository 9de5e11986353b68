"""The documents whose statements are tried, by course."""

from __future__ import annotations

EXAM = "CENG 403 (Transformers and Attention), exam"
ANSWERED = "CENG 403 (Self-Attention and Transformers), answered exam"
HOMEWORK = "CSCI-GA 2572 (Deep Learning), Transformer homework"
EXERCISES = "Transformer exercises (scaled dot product, multi-head, layer norm), with solutions"
FINAL = "Deep learning final exam of January 2025 (version A), with solutions"

DOCUMENTS = (EXAM, ANSWERED, HOMEWORK, EXERCISES, FINAL)
