"""Models with their tokenizers: those in the box, any that `clearhead train` has written, and those of other people.

from clearhead import pretrained

model = pretrained.load("en-es")          # in the box, a run's folder, a Hugging Face folder, hf:org/name, a .gguf file
pretrained.translate(model, ["Hello world"])"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead._core.lazy import lazy

if TYPE_CHECKING:
    from clearhead.hub.bundled import BUNDLED_FOLDER, cards, names
    from clearhead.hub.evaluate import Evaluation, evaluate
    from clearhead.hub.pipeline import Pipeline, export, load, load_model
    from clearhead.hub.speech import RecognizedSymbol, Segment, StreamingRecognizer, Transcript, transcribe
    from clearhead.hub.text_generation import conversation, nearest
    from clearhead.hub.translate import Translation, translate, translations

lazy(__name__)

__all__ = [
    "BUNDLED_FOLDER", "Evaluation", "Pipeline", "RecognizedSymbol", "Segment", "StreamingRecognizer", "Transcript",
    "Translation", "cards", "conversation", "evaluate", "export", "load", "load_model", "names", "nearest",
    "transcribe", "translate", "translations",
]  # fmt: skip
