"""Pretrained models with their tokenizers: bundled models, training runs and third-party checkpoints.

`pipeline` loads a model together with its tokenizer, `load` the model alone:

    import clearhead as ch

    translator = ch.pipeline("en-es")  # or the folder of a run, a Hugging Face folder, hf:org/name, a .gguf file
    translator.translate(["Hello world"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead._core.lazy import lazy

if TYPE_CHECKING:
    from clearhead.hub.bundled import BUNDLED_FOLDER, cards, names
    from clearhead.hub.encoder_tasks import Answer, TaggedSpan, TokenCandidate, nearest_pairs
    from clearhead.hub.evaluate import Evaluation, evaluate
    from clearhead.hub.export_folder import export
    from clearhead.hub.families import register_family
    from clearhead.hub.family import Converter, Family, Field
    from clearhead.hub.generation_settings import GenerationSettings
    from clearhead.hub.gguf_writer import export_gguf
    from clearhead.hub.load_model import load
    from clearhead.hub.pickles import Conversion, convert_pickle
    from clearhead.hub.pipelines import Pipeline, pipeline
    from clearhead.hub.speech import RecognizedSymbol, Segment, StreamingRecognizer, Transcript, transcribe
    from clearhead.hub.text_generation import encode_chat
    from clearhead.hub.translate import Translation, translate, translations
    from clearhead.hub.weight_map import WeightMap, block

lazy(__name__)

__all__ = [
    "BUNDLED_FOLDER", "Answer", "Conversion", "Converter", "Evaluation", "Family", "Field", "GenerationSettings",
    "Pipeline", "RecognizedSymbol", "Segment", "StreamingRecognizer", "TaggedSpan", "TokenCandidate", "Transcript",
    "Translation", "WeightMap", "block", "cards", "convert_pickle", "encode_chat", "evaluate", "export", "export_gguf",
    "load", "names", "nearest_pairs", "pipeline", "register_family", "transcribe", "translate", "translations",
]  # fmt: skip
