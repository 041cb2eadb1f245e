"""What GGUF files call things: tables only, for `gguf_file.py` to read with.

What a file does not say, because llama.cpp has it in its code (Gemma's window pattern, SmolLM3's layers without rope,
whose q and k rows are interleaved), is said here, once for each architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paceline.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """What an architecture name means beyond the keys of the file."""

    activation: Literal["silu", "gelu_tanh"] = "silu"
    interleaved: bool = False
    """Rows of q and k come in pairs (2i, 2i + 1) for rope, not in halves."""
    qk_norm: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    window: int | None = None
    """The window where the file has no key for it."""
    full_every: int | None = None
    """Of the layers with a window, every n-th sees everything (0: none does). None: the file has to say."""
    local_theta: float | None = None
    """Rope base of the layers with a window; they are not scaled either. None: as the others."""
    no_rope_every: int = 0
    """Every n-th layer has no rope (0: all have)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    wide_query_layers: int = 0
    """The size, told by its number of layers, whose queries are scaled by hidden_size / heads, not by head_dim."""


FAMILIES = {
    "llama": Family(interleaved=True, full_every=0),  # Mistral too, whose window is on every layer
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
    "smollm3": Family(interleaved=True, no_rope_every=4),
    "gemma2": Family(
        activation="gelu_tanh",
        post_norms=True,
        scaled_embedding=True,
        window=4096,
        full_every=2,
        attention_softcap=50.0,
        logit_softcap=30.0,
        wide_query_layers=46,
    ),
    "gemma3": Family(
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        scaled_embedding=True,
        full_every=6,
        local_theta=10_000.0,
        wide_query_layers=62,
    ),
}

# Keys below "<architecture>.", with the type of their value. Numbers are positive and finite.
KEYS: dict[str, type] = {
    "block_count": int,
    "context_length": int,
    "embedding_length": int,
    "feed_forward_length": int,
    "vocab_size": int,
    "attention.head_count": int,
    "attention.head_count_kv": int,
    "attention.key_length": int,
    "attention.value_length": int,
    "attention.layer_norm_rms_epsilon": float,
    "attention.sliding_window": int,
    "attention.sliding_window_pattern": object,
    "attn_logit_softcapping": float,
    "final_logit_softcapping": float,
    "rope.dimension_count": int,
    "rope.freq_base": float,
    "rope.freq_base_swa": float,
    "rope.scale_linear": float,
    "rope.scaling.type": str,
    "rope.scaling.factor": float,
    "rope.scaling.original_context_length": int,
    "rope.scaling.finetuned": bool,
    "rope.scaling.attn_factor": float,
    "rope.scaling.yarn_attn_factor": float,
    "rope.scaling.yarn_beta_fast": float,
    "rope.scaling.yarn_beta_slow": float,
}

# Keys that change what a model computes in ways our decoder has no part for, with the value that changes nothing.
NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.shared_kv_layers": 0,
    "attention.temperature_scale": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "nextn_predict_layers": 0,
    "residual_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}

ROPE_FACTORS = "rope_freqs.weight"


class Entry(NamedTuple):
    """One tensor: its name here, its shape in names of sizes (`sizes` below), and what it takes to be there."""

    name: str
    shape: tuple[str, ...]
    when: str = ""
    """A boolean field of ModelConfig."""
    rotated: str = ""
    """The field that counts its heads, if rope acts on its rows."""


MODEL = {
    "token_embd.weight": Entry("embedding.weight", ("vocab", "hidden")),
    "output_norm.weight": Entry("norm.weight", ("hidden",)),
}
HEAD = {"output.weight": Entry("head.weight", ("vocab", "hidden"))}
LAYER = {
    "attn_norm.weight": Entry("attention_norm.weight", ("hidden",)),
    "attn_q.weight": Entry("attention.q.weight", ("q", "hidden"), rotated="num_heads"),
    "attn_k.weight": Entry("attention.k.weight", ("kv", "hidden"), rotated="num_kv_heads"),
    "attn_v.weight": Entry("attention.v.weight", ("kv", "hidden")),
    "attn_output.weight": Entry("attention.output.weight", ("hidden", "q")),
    "attn_q.bias": Entry("attention.q.bias", ("q",), "qkv_bias", rotated="num_heads"),
    "attn_k.bias": Entry("attention.k.bias", ("kv",), "qkv_bias", rotated="num_kv_heads"),
    "attn_v.bias": Entry("attention.v.bias", ("kv",), "qkv_bias"),
    "attn_output.bias": Entry("attention.output.bias", ("hidden",), "output_bias"),
    "attn_q_norm.weight": Entry("attention.q_norm.weight", ("head",), "qk_norm"),
    "attn_k_norm.weight": Entry("attention.k_norm.weight", ("head",), "qk_norm"),
    "post_attention_norm.weight": Entry("attention_post_norm.weight", ("hidden",), "post_norms"),
    "ffn_norm.weight": Entry("mlp_norm.weight", ("hidden",)),
    "ffn_gate.weight": Entry("mlp.gate.weight", ("mlp", "hidden")),
    "ffn_up.weight": Entry("mlp.up.weight", ("mlp", "hidden")),
    "ffn_down.weight": Entry("mlp.down.weight", ("hidden", "mlp")),
    "ffn_gate.bias": Entry("mlp.gate.bias", ("mlp",), "mlp_bias"),
    "ffn_up.bias": Entry("mlp.up.bias", ("mlp",), "mlp_bias"),
    "ffn_down.bias": Entry("mlp.down.bias", ("hidden",), "mlp_bias"),
    "post_ffw_norm.weight": Entry("mlp_post_norm.weight", ("hidden",), "post_norms"),
}


def sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "mlp": config.intermediate_size,
        "head": config.head_dim,
        "q": config.num_heads * config.head_dim,
        "kv": config.num_kv_heads * config.head_dim,
    }


def entries(config: ModelConfig) -> dict[str, Entry]:
    """Every tensor a file of this configuration holds, by its name there."""
    present = {name: entry for name, entry in LAYER.items() if not entry.when or getattr(config, entry.when)}
    return {
        **MODEL,
        **({} if config.tied else HEAD),
        **{
            f"blk.{i}.{name}": entry._replace(name=f"layers.{i}.{entry.name}")
            for i in range(config.num_layers)
            for name, entry in present.items()
        },
    }
