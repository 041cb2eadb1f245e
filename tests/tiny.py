"""Tiny random models and tokenizers that are real ones of their kind: made in a moment, saved as people save theirs."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = [
    "The quick brown fox jumps over the lazy dog. def add(a, b): return a + b",
    "Speculative sampling keeps the distribution. Größe, naïve, 速度, 🚀🚀, one two three",
] * 20
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def tokenizer(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXT, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made


def llama(vocab_size: int, *, layers: int = 2, seed: int = 0, context: int = 128) -> LlamaForCausalLM:
    """Random weights, large enough that the distributions are not flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.4,
        eos_token_id=0,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def save(folder: Path, *, vocab_size: int = 400, layers: int = 2, seed: int = 0, padding: int = 0) -> Path:
    """A Hugging Face folder. `padding` adds rows to the embedding that no token uses."""
    made = tokenizer(vocab_size)
    llama(len(made) + padding, layers=layers, seed=seed).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder
