"""Tiny random reference models of the families of encoders, encoder-decoders, vision and speech models.

`HEADS` are encoders with heads of further tasks, for which fewer properties are tested.
"""

from __future__ import annotations

from tests.support.reference_models import (
    MAX_LEN,
    Answering,
    Choosing,
    Classified,
    F,
    H,
    L,
    M,
    Peer,
    Pooled,
    TokenClassified,
    TokenPredicted,
    V,
    words,
)

TOKENS = {"inputs": words, "output": "last_hidden_state"}
POOLED = TOKENS | {"output": "pooler_output", "comparable": Pooled}
CLASSES = {"inputs": words, "comparable": Classified}
TOKEN_CLASSES = {"inputs": words, "comparable": TokenClassified}
MASKED = {"inputs": words, "comparable": TokenPredicted}

BERT = {
    "vocab_size": V,
    "max_position_embeddings": MAX_LEN,
    "hidden_size": M,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "intermediate_size": F,
    "type_vocab_size": 3,
}
ROBERTA = BERT | {"type_vocab_size": 1, "max_position_embeddings": MAX_LEN + 2, "layer_norm_eps": 1e-5}
ELECTRA = BERT | {"embedding_size": 14}
MPNET = {key: value for key, value in ROBERTA.items() if key != "type_vocab_size"}
DEBERTA = BERT | {
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 6,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}
DISTILBERT = {
    "vocab_size": V,
    "max_position_embeddings": MAX_LEN,
    "dim": M,
    "n_layers": L,
    "n_heads": H,
    "hidden_dim": F,
}

ENCODERS: dict[str, Peer] = {
    "xlm-roberta": Peer("XLMRobertaForMaskedLM", "XLMRobertaConfig", ROBERTA, **MASKED),
    "camembert": Peer("CamembertForMaskedLM", "CamembertConfig", ROBERTA, **MASKED),
    "electra": Peer("ElectraModel", "ElectraConfig", ELECTRA, **TOKENS),
    "electra masked": Peer(
        "ElectraForMaskedLM", "ElectraConfig", ELECTRA | {"embedding_size": M, "tie_word_embeddings": True}, **MASKED
    ),
    "distilbert": Peer("DistilBertModel", "DistilBertConfig", DISTILBERT | {"activation": "relu"}, **TOKENS),
    "distilbert classes": Peer(
        "DistilBertForSequenceClassification", "DistilBertConfig", DISTILBERT | {"num_labels": 5}, **CLASSES
    ),
    "deberta-v2": Peer("DebertaV2Model", "DebertaV2Config", DEBERTA, **TOKENS, in_float32=True),
    "deberta-v2 classes": Peer(
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        DEBERTA | {"num_labels": 5, "type_vocab_size": 3, "max_relative_positions": 9, "hidden_act": "relu"},
        **CLASSES,
        in_float32=True,
    ),
    "deberta-v2 masked": Peer(
        "DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA | {"position_buckets": 3}, **MASKED, in_float32=True
    ),
    "mpnet": Peer("MPNetModel", "MPNetConfig", MPNET, **TOKENS, options={"add_pooling_layer": False}),
    "mpnet pooled": Peer("MPNetModel", "MPNetConfig", MPNET, **POOLED),
}


def _heads(prefix: str, sizes: dict[str, object], *tasks: str) -> dict[str, Peer]:
    """Return models of one family by the names of their tasks."""
    kinds = {
        "SequenceClassification": (Peer, CLASSES),
        "TokenClassification": (Peer, TOKEN_CLASSES),
        "QuestionAnswering": (Answering, TOKEN_CLASSES),
        "MultipleChoice": (Choosing, CLASSES),
        "MaskedLM": (Peer, MASKED),
    }
    models = {}
    for task in tasks or kinds:
        kind, options = kinds[task]
        n = {"num_labels": 5} if task.endswith("Classification") else {}
        models[f"{prefix}For{task}"] = kind(f"{prefix}For{task}", f"{prefix}Config", sizes | n, **options)
    return models


HEADS: dict[str, Peer] = {
    **_heads("XLMRoberta", ROBERTA, "SequenceClassification", "MultipleChoice"),
    **_heads("Camembert", ROBERTA, "TokenClassification", "QuestionAnswering"),
    **_heads("Electra", ELECTRA),
    **_heads("DistilBert", DISTILBERT),
    **_heads("MPNet", MPNET),
}
