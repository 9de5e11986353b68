"""Heads of text encoders: reading them from configurations, and their weight maps."""

from __future__ import annotations

from clearhead._core.validation import short_repr
from clearhead.errors import StorageError
from clearhead.hub.families.common import classes, labels
from clearhead.hub.family import ConfigReader, KeyValues
from clearhead.hub.weight_map import WeightMap
from clearhead.models import EncoderConfig

CLASSIFICATION = "classification"  # purpose of a head, in warnings

# Heads by the ends of the names of transformers' classes, and the tensors that show that a head is stored.
_HEADS = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "span",
    "ForMultipleChoice": "choice",
    "ForMaskedLM": "masked_lm",
    "ForPreTraining": "masked_lm",
}
_EXPORTED_AS = {head: suffix for suffix, head in reversed(_HEADS.items())}
_CLASSIFIERS = ("classifier.weight", "classifier.out_proj.weight", "qa_outputs.weight")
_MASKED_LM = (
    *("cls.predictions.transform.dense.weight", "lm_head.dense.weight", "predictions.dense.weight"),
    *("generator_predictions.dense.weight", "vocab_transform.weight"),
)
# In transformers the pooler is a constructor argument, so only the tensors show whether the model has one.
_POOLERS = (
    *("pooler.dense.weight", "pooler.weight", "classifier.dense.weight"),
    *("sequence_summary.summary.weight", "pre_classifier.weight"),
)


def read_head(keys: ConfigReader) -> KeyValues:
    """Return the head that `architectures` names, if its tensors are stored, and whether the model has a pooler."""
    pooler = {"pooler": any(name.endswith(_POOLERS) for name in keys.shapes)}
    names = keys("architectures", None)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = []
    heads = [head for name in names for suffix, head in _HEADS.items() if name.endswith(suffix)]
    has_classifier = any(name in keys.shapes for name in _CLASSIFIERS)
    has_masked_lm = any(name in keys.shapes for name in _MASKED_LM)
    is_bare = all(name.endswith("Model") for name in names)
    if not heads and names and not is_bare and (has_classifier or has_masked_lm):
        raise StorageError(
            f"architectures is {short_repr(names)}, whose head is not supported; expected a class that ends in Model, "
            f"{', '.join(_HEADS)}"
        )
    if heads and heads[0] == "masked_lm":
        if not has_masked_lm:
            return pooler
        keys.only("tie_word_embeddings", True)
        return pooler | {"head": "masked_lm"}
    if not has_classifier or (names and is_bare):
        return pooler
    head = heads[0] if heads else "span" if "qa_outputs.weight" in keys.shapes else "sequence"
    return pooler | {"head": head, "n_classes": {"span": 2, "choice": 1}.get(head) or classes(keys)}


def read_head_with_gelu(keys: ConfigReader) -> KeyValues:
    """Return the head of a family whose head for masked tokens always uses GELU."""
    fields = read_head(keys)
    if fields.get("head") == "masked_lm":
        keys.only("hidden_act", "gelu")
    return fields


def write_head(config: EncoderConfig) -> KeyValues:
    """Return names of the classes, if the head has any."""
    return labels(config.n_classes) if config.n_classes and config.head in ("sequence", "token") else {}


def architecture(config: EncoderConfig, *, prefix: str) -> str:
    """Return the class that transformers loads an export into."""
    has_head = config.n_classes or config.head == "masked_lm"
    return prefix + (_EXPORTED_AS[config.head] if has_head else "Model")


def head_rows(
    config: EncoderConfig, dense: str, norm: str, bias: str, *, deep_classifier: bool = False
) -> tuple[WeightMap, ...]:
    """Return the weight maps of the head.

    Args:
        config: The configuration.
        dense: Stored name of the layer of the head for masked tokens.
        norm: Stored name of its norm.
        bias: Stored name of its bias.
        deep_classifier: Whether the pooler is a part of the classifier of texts.
    """
    if config.head == "masked_lm":
        return (
            WeightMap(f"{dense}.*", "head.dense.*"),
            WeightMap(f"{norm}.*", "head.norm.*"),
            WeightMap(bias, "head.bias"),
        )
    if deep_classifier and config.head == "sequence" and config.n_classes:
        return (WeightMap("classifier.dense.*", "pooler.*"), WeightMap("classifier.out_proj.*", "head.*"))
    return (WeightMap("qa_outputs.*" if config.head == "span" else "classifier.*", "head.*"),)
