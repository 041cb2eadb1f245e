"""A `ModelConfig` as the config.json of a Hugging Face folder: the inverse of `folder.read_config`, which checks it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints import folder
from paceline.checkpoints.names import ACTIVATIONS, FAMILIES, Family
from paceline.models.config import ModelConfig, Rope
from paceline.models.rope import rotation


def describe(config: ModelConfig) -> tuple[dict[str, Any], Family]:
    """The config.json of a model and its family. What it means is read back: ValueError where it cannot say all."""
    layers = [replace(layer, rope=_named(layer.rope, config.head_dim)) for layer in config.layers]
    # Read back, it is never None.
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    config = replace(config, layers=tuple(layers))
    name, family = next(f for f in FAMILIES.items() if f[0].removesuffix("_text") == config.architecture)
    full = next((layer.rope for layer in layers if layer.rope and layer.window is None), None)
    local = next((layer.rope for layer in layers if layer.rope and layer.window is not None), None)
    rope = full or local or Rope()
    windows = {layer.window for layer in layers if layer.window is not None}
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": rope.original_context if rope.kind == "dynamic" else config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": activation,
        "hidden_activation": activation,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows, default=None),
        "max_window_layers": config.num_layers,
        "layer_types": [folder.KINDS[layer.window is not None] for layer in layers],
        "no_rope_layers": [int(layer.rope is not None) for layer in layers],
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }
    described = {
        "architectures": [min(family.classes, key=len)],
        "model_type": name,
        **{key: values[key] for key in family.defaults if key in values},
        "rope_scaling": _scaling(rope),
    }
    if family.local_theta is not None and local is not None:
        described["rope_local_base_freq"] = local.theta
    with tempfile.TemporaryDirectory() as beside:
        (Path(beside) / "config.json").write_text(json.dumps(described))
        meant = folder.read_config(Path(beside))
    if meant is not None and meant.query_scale is not None:
        config = replace(config, query_scale=scale)
    if meant != config:
        unlike = " and ".join(key for key, value in vars(config).items() if getattr(meant, key, value) != value)
        raise ValueError(
            f"a config.json of type {name} cannot say what this model's {unlike or 'parts'} are, so no other engine "
            "would compute the same"
        )
    return described, family


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    keys = ["factor"]
    if rope.kind == "llama3":
        keys += ["low_freq_factor", "high_freq_factor"]
    if rope.kind == "yarn":
        keys += ["attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"]
    found = {key: getattr(rope, key) for key in keys if getattr(rope, key) is not None}
    original = {"original_max_position_embeddings": rope.original_context} if rope.kind in ("llama3", "yarn") else {}
    return {"rope_type": rope.kind, **found, **original}


def _named(rope: Rope | None, head_dim: int) -> Rope | None:
    """A rope that a config.json can tell. GGUF files carry Llama 3's as its factors: those of its published models."""
    if rope is None or rope.factors is None:
        return rope
    named = Rope(theta=rope.theta, kind="llama3", factor=round(max(rope.factors), 3), original_context=8192)
    position_1 = torch.ones(1)
    told, meant = (torch.cat(rotation(r, head_dim, position_1, torch.float32)) for r in (named, rope))
    if not torch.allclose(told, meant, rtol=1e-4, atol=1e-9):
        raise ValueError(
            "the model's rope has factors of its own, which no config.json can tell: give the Hugging Face folder it "
            "was converted from"
        )
    return named
