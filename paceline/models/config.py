"""What a decoder is made of: one frozen description for every architecture we run ourselves.

Knows no checkpoint: the tables that turn a config.json or GGUF metadata into a `ModelConfig` live in
`paceline.checkpoints`. Differences between architectures are properties here (a bias, a norm, a window), never
the name of an architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of a layer, rotating the two halves of a head (the Hugging Face layout).

    `kind` names the scaling of the frequencies, with Hugging Face's meaning of each field; `factors` overrides it
    with explicit divisors, one per frequency (GGUF files carry Llama 3's scaling that way).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What may differ from layer to layer.

    `window`: how many positions a query sees, itself included; None sees all.
    `rope`: None leaves queries and keys unrotated (SmolLM3's layers without rope).
    """

    window: int | None = None
    rope: Rope | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: pre-norm, RMS norms, gated MLP, grouped-query attention."""

    architecture: str
    """For people to read (`paceline info`); no code branches on it."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    context: int
    """Longest sequence, in tokens."""
    norm_eps: float = 1e-6
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    tied: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMS norm over each head of q and k, before rope (Qwen3, Gemma 3)."""
    post_norms: bool = False
    """A second norm after attention and after the MLP, before each residual sum (Gemma 2 and 3)."""
    query_scale: float | None = None
    """What scores are multiplied by; None is 1/sqrt(head_dim)."""
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    """cap * tanh(scores / cap) before the mask (Gemma 2)."""
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of the decoder, a tied head counted once."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = h * q + 2 * h * kv + q * h
        attention += self.qkv_bias * (q + 2 * kv) + self.output_bias * h + self.qk_norm * 2 * self.head_dim
        mlp = 3 * h * self.intermediate_size + self.mlp_bias * (2 * self.intermediate_size + h)
        norms = h * (4 if self.post_norms else 2)
        embeddings = self.vocab_size * h * (1 if self.tied else 2)
        return embeddings + self.num_layers * (attention + mlp + norms) + h
