"""Small random models in Hugging Face folders, for pages that show what works with any downloaded model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def llama_folder() -> Path:
    """Write a random Llama with a tokenizer and a chat template, and return its folder."""
    config = transformers.LlamaConfig(
        vocab_size=len(_tokenizer()), num_key_value_heads=2, bos_token_id=0, eos_token_id=1, **SIZES
    )
    torch.manual_seed(0)
    return _save(transformers.LlamaForCausalLM(config))


def bert_folder() -> Path:
    """Write a random BERT with a tokenizer, and return its folder."""
    torch.manual_seed(0)
    return _save(transformers.BertModel(transformers.BertConfig(vocab_size=len(_tokenizer()), **SIZES)))


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["Hello there. The cat sat on the mat."] * 3, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _save(model: transformers.PreTrainedModel) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="clearhead-docs-"))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder
