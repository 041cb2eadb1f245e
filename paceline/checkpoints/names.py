"""What Hugging Face folders call things: tables only, for `folder.py` to read with.

`defaults` are transformers' own for keys that a config.json leaves out. A key that a family does not list is one its
transformers class does not read; neither do we.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
SANDWICH_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What an architecture means beyond the keys of its config.json."""

    classes: frozenset[str]
    """The transformers classes whose weights we read."""
    defaults: Mapping[str, Any]
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    norms_from_one: bool = False
    """Files hold norm weights as their distance from 1."""
    qk_norm: bool = False
    qkv_bias: bool = False
    """q, k and v have biases (and nothing else), whatever the config says."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    slides: Callable[[Mapping[str, Any], int], bool] = lambda values, layer: False
    """Does this layer use the window, where no `layer_types` says so?"""
    local_theta: float | None = None
    """Rope base of the layers with a window, which have a rope of their own."""


def _late(values: Mapping[str, Any], layer: int) -> bool:
    return values["sliding_window"] is not None and layer >= values["max_window_layers"]


COMMON = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "head_dim": None,
}
QWEN = COMMON | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        classes=frozenset({"LlamaForCausalLM"}),
        defaults=COMMON
        | {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "mistral": Family(
        classes=frozenset({"MistralForCausalLM"}),
        defaults=COMMON
        | {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        slides=lambda values, layer: values["sliding_window"] is not None,
    ),
    "qwen2": Family(
        classes=frozenset({"Qwen2ForCausalLM"}),
        defaults=QWEN,
        qkv_bias=True,
        slides=_late,
    ),
    "qwen3": Family(
        classes=frozenset({"Qwen3ForCausalLM"}),
        defaults=QWEN | {"head_dim": 128, "attention_bias": False},
        qk_norm=True,
        slides=_late,
    ),
    "smollm3": Family(
        classes=frozenset({"SmolLM3ForCausalLM"}),
        defaults=COMMON
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
        },
        slides=lambda values, layer: values["sliding_window"] is not None and not values["no_rope_layers"][layer],
    ),
    "gemma2": Family(
        classes=frozenset({"Gemma2ForCausalLM"}),
        defaults=GEMMA
        | {
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "rope_theta": 10_000.0,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        norms=SANDWICH_NORMS,
        norms_from_one=True,
        scaled_embedding=True,
        slides=lambda values, layer: layer % 2 == 0,
    ),
    "gemma3_text": Family(
        classes=frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"}),
        defaults=GEMMA
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        norms=SANDWICH_NORMS,
        norms_from_one=True,
        qk_norm=True,
        scaled_embedding=True,
        slides=lambda values, layer: (layer + 1) % values["sliding_window_pattern"] != 0,
        local_theta=10_000.0,
    ),
}

WRAPPERS = {"gemma3": "gemma3_text"}
"""Multimodal models whose language model is one of ours: its keys are under `text_config`."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),  # where a family does not read it: Gemma 3's class accepts and ignores it
    "is_causal": (None, True),
    "partial_rotary_factor": (None, 1.0),
    "per_layer_config": (None, {}),
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
}
"""Keys that change what a model computes in ways our decoder has no part for, with the values that change nothing."""

ACTIVATIONS: Mapping[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

PREFIXES = ("language_model.model.", "model.language_model.", "model.")
TENSORS = {"embed_tokens.weight": "embedding.weight", "norm.weight": "norm.weight"}
HEADS = {"lm_head.weight", "language_model.lm_head.weight"}
MODULES = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.output",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # old Llama files store what follows from the config
IGNORED = (
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)
