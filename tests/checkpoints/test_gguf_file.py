"""GGUF files against the gguf package (values, block formats) and transformers (what the tensors mean)."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from paceline.checkpoints import gguf_file
from paceline.checkpoints.gguf_file import BLOCKS, ignored_keys, read_config, read_gguf, read_tensors
from paceline.models.config import ModelConfig, Rope
from paceline.models.quant import Quantized

Array = np.ndarray[Any, np.dtype[Any]]


def can_dequantize(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


QUANTIZED = [kind for kind in GGMLQuantizationType if kind.name not in ("F32", "F16", "BF16")]
READABLE = [kind for kind in QUANTIZED if can_dequantize(kind)]
UNREADABLE = [kind for kind in QUANTIZED if not can_dequantize(kind)]
"""Types the package knows and has no code for; no file of weights should have them."""


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> Array:
    """Valid blocks of a type, as bytes [rows, ...]: real ones where the package can quantize, else any bytes."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    try:
        return quantize(rng.standard_normal((rows, columns), dtype=np.float32), kind)
    except NotImplementedError:
        return rng.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)


def write_llama(
    path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Array | None] | None = None,
    types: dict[str, GGMLQuantizationType] | None = None,
    architecture: str = "llama",
    layers: int = 1,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    mlp: int = 48,
    vocab: int = 24,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """A small random model; `metadata` and `tensors` add to what is written or replace it (None: leave out)."""
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (hidden,),
            f"blk.{i}.attn_q.weight": (heads * head_dim, hidden),
            f"blk.{i}.attn_k.weight": (kv_heads * head_dim, hidden),
            f"blk.{i}.attn_v.weight": (kv_heads * head_dim, hidden),
            f"blk.{i}.attn_output.weight": (hidden, heads * head_dim),
            f"blk.{i}.ffn_norm.weight": (hidden,),
            f"blk.{i}.ffn_gate.weight": (mlp, hidden),
            f"blk.{i}.ffn_up.weight": (mlp, hidden),
            f"blk.{i}.ffn_down.weight": (hidden, mlp),
        }
    arrays: dict[str, Array | None] = {
        name: rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1) for name, shape in shapes.items()
    }
    arrays |= tensors or {}
    values: dict[str, Any] = {
        "block_count": layers,
        "context_length": 256,
        "embedding_length": hidden,
        "feed_forward_length": mlp,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if head_dim * heads != hidden:
        values["attention.key_length"] = head_dim
    values |= metadata or {}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if value is not None:
            add(writer, key if key.startswith(("general.", "split.")) else f"{architecture}.{key}", value)
    if tokenizer is not None:
        tokenizer(writer)
    for name, array in arrays.items():
        if array is not None:
            writer.add_tensor(name, array, raw_dtype=(types or {}).get(name))
    return finish(writer, path)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kind = next(k for t, k in WRITERS.items() if type(value) is t)
    getattr(writer, f"add_{kind}")(key, value)


WRITERS = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor | Quantized]:
    file = read_gguf(path)
    return dict(read_tensors(file, read_config(file)))


def tensor_of(path: Path, name: str = "embedding.weight") -> torch.Tensor:
    found = tensors_of(path)[name]
    assert isinstance(found, torch.Tensor)
    return found


def config_of(path: Path) -> ModelConfig:
    return read_config(read_gguf(path))


# Metadata and tensors


def test_the_usual_types_are_readable() -> None:
    usual = (
        "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
    )
    assert set(usual.split()) <= {kind.name for kind in READABLE}


def test_metadata_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    expected: dict[str, Any] = {"general.architecture": "llama"}
    cases: dict[str, Any] = {
        "uint8": 200,
        "int8": -3,
        "uint16": 60_000,
        "int16": -300,
        "uint32": 1 << 31,
        "int32": -(1 << 31),
        "uint64": 1 << 63,
        "int64": -(1 << 63),
        "float32": 0.5,
        "float64": math.pi,
        "bool": True,
        "string": "naïve 🦙 \0 text",
    }
    for kind, value in cases.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
        expected[f"a.{kind}"] = value
    for name, values in {
        "ints": [1, -2, 3],
        "floats": [0.5, -1.25],
        "bools": [True, False],
        "texts": ["", "é", "x" * 300],
    }.items():
        writer.add_array(f"b.{name}", values)
        expected[f"b.{name}"] = values
    file = read_gguf(finish(writer, tmp_path / "x.gguf"))
    assert file.metadata == expected
    assert {key: type(value) for key, value in file.metadata.items()} == {k: type(v) for k, v in expected.items()}
    assert type(file.metadata["b.bools"][0]) is bool
    assert file.tensors == {}


@pytest.mark.parametrize("kind", [kind for kind in READABLE if kind not in BLOCKS], ids=lambda kind: kind.name)
def test_every_other_quantized_type_is_dequantized_exactly(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    blocks = random_blocks(kind, 6, 512)
    path = write_llama(
        tmp_path / "x.gguf",
        vocab=6,
        hidden=512,
        head_dim=128,
        tensors={"token_embd.weight": blocks},
        types={"token_embd.weight": kind},
    )
    read = tensor_of(path)
    assert read.dtype == torch.float32
    assert read_gguf(path).sizes[kind.name] == blocks.nbytes
    with np.errstate(all="ignore"):
        expected = dequantize(blocks, kind)
    assert np.array_equal(read.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_that_we_know_stay_as_they_are(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (6, 16 * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    path = write_llama(
        tmp_path / "x.gguf",
        vocab=6,
        hidden=512,
        head_dim=128,
        tensors={"token_embd.weight": blocks},
        types={"token_embd.weight": kind},
    )
    read = tensors_of(path)["embedding.weight"]
    assert isinstance(read, Quantized)
    assert (read.format, read.shape) == (kind.name.lower(), (6, 512))
    assert read.blocks.numpy().tobytes() == blocks.tobytes()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_stand_for_what_a_file_of_floats_holds(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """Names, shapes and the order of rotated rows too."""
    shapes = {"token_embd": (24, 64), "blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64)}
    shapes |= {"blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64)}
    shapes |= {"blk.0.ffn_down": (64, 96)}
    blocks = {f"{name}.weight": random_blocks(kind, *shape, seed=len(name)) for name, shape in shapes.items()}
    floats = {name: dequantize(raw, kind) for name, raw in blocks.items()}
    sizes = {"hidden": 64, "head_dim": 16, "mlp": 96}
    packed = write_llama(tmp_path / "b.gguf", tensors=dict(blocks), types=dict.fromkeys(blocks, kind), **sizes)  # type: ignore[arg-type]
    plain = tensors_of(write_llama(tmp_path / "f.gguf", tensors=dict(floats), **sizes))  # type: ignore[arg-type]
    found = tensors_of(packed)
    assert found.keys() == plain.keys()
    assert sum(isinstance(tensor, Quantized) for tensor in found.values()) == len(shapes)
    for name, tensor in found.items():
        expected = plain[name]
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(tensor.dequantize() if isinstance(tensor, Quantized) else tensor, expected), name
    q = plain["layers.0.attention.q.weight"]
    assert isinstance(q, torch.Tensor)
    assert not np.array_equal(q.numpy(), floats["blk.0.attn_q.weight"]), "rotated rows are put back"


def test_vectors_in_blocks_become_float32(tmp_path: Path) -> None:
    norm = random_blocks(GGMLQuantizationType.Q8_0, 1, 32)[0]
    path = write_llama(
        tmp_path / "x.gguf",
        tensors={"output_norm.weight": norm},
        types={"output_norm.weight": GGMLQuantizationType.Q8_0},
    )
    expected = dequantize(norm[None], GGMLQuantizationType.Q8_0)[0]
    assert np.array_equal(tensor_of(path, "norm.weight").numpy(), expected)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_floats_stay_as_they_are(name: str, tmp_path: Path) -> None:
    values = torch.randn(24, 32).to(getattr(torch, name))
    raw = values.view(torch.int16).numpy().view(np.uint8) if name == "bfloat16" else values.numpy()
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[name]
    path = write_llama(
        tmp_path / "x.gguf",
        tensors={"token_embd.weight": raw},
        types={"token_embd.weight": GGMLQuantizationType[kind]},
    )
    read = tensor_of(path)
    assert read.dtype == values.dtype
    assert torch.equal(read, values)


@pytest.mark.parametrize("kind", UNREADABLE, ids=lambda kind: kind.name)
def test_types_nothing_dequantizes_are_refused(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    path = write_llama(
        tmp_path / "x.gguf",
        hidden=256,
        head_dim=64,
        tensors={"token_embd.weight": np.zeros((24, 256 // block * size), np.uint8)},
        types={"token_embd.weight": kind},
    )
    file = read_gguf(path)
    with pytest.raises(ValueError, match=f"token_embd.weight is of type {kind.name}"):
        dict(read_tensors(file, read_config(file)))


@pytest.mark.parametrize("slab", [32, 96, 4096])
def test_slabs_do_not_show(slab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "SLAB", slab)
    blocks = random_blocks(GGMLQuantizationType.Q5_1, 50, 64)
    path = write_llama(
        tmp_path / "x.gguf",
        vocab=50,
        hidden=64,
        head_dim=16,
        tensors={"token_embd.weight": blocks},
        types={"token_embd.weight": GGMLQuantizationType.Q5_1},
    )
    assert np.array_equal(tensor_of(path).numpy(), dequantize(blocks, GGMLQuantizationType.Q5_1))


def test_header_is_read_without_torch(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    code = f"""
import sys
from paceline.checkpoints.gguf_file import *
read_config(read_gguf({str(path)!r}))
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# What the tensors and keys mean: files written from transformers models, by llama.cpp's conversion rules


def tiny(architecture: str, **changes: Any) -> Any:
    """A tiny random transformers model of a GGUF architecture."""
    common: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    own: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "mistral": {"head_dim": 12, "sliding_window": 5},
        "qwen2": {"tie_word_embeddings": False},
        "qwen3": {"head_dim": 16, "tie_word_embeddings": False},
        "smollm3": {},
        "gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
        "gemma3": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
    }
    model_type = "gemma3_text" if architecture == "gemma3" else architecture
    config = transformers.AutoConfig.for_model(model_type, **(common | own[architecture] | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # norms and biases are constants otherwise
    return model.eval()


def write_transformers(
    path: Path, architecture: str, model: Any, tokenizer: Callable[[gguf.GGUFWriter], None] | None = None
) -> Path:
    """What llama.cpp's converter writes for a model: names by the gguf package's own table."""
    config = model.config
    written = "llama" if architecture == "mistral" else architecture
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == written)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if getattr(config, "sliding_window", None):
        values["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        values["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        values["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    writer = gguf.GGUFWriter(path, written)
    for key, value in values.items():
        add(writer, f"{written}.{key}", value)
    if tokenizer is not None:
        tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        array = tensor.numpy()
        if written in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        if written.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(new, array)
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    return finish(writer, path)


def theta(config: Any) -> float:
    rope = config.rope_parameters
    return rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"]


HF_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
GEMMA_NAMES = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3"])
def test_tensors_and_config_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = tiny(architecture)
    file = read_gguf(write_transformers(tmp_path / "x.gguf", architecture, model))
    config = read_config(file)
    state = model.state_dict()
    gemma = architecture.startswith("gemma")
    names = HF_NAMES | (GEMMA_NAMES if gemma else {})

    tensors = dict(read_tensors(file, config))
    for name, tensor in tensors.items():
        if name in names:
            hf_name = names[name]
        else:
            _, index, rest = name.split(".", 2)
            part, leaf = rest.rsplit(".", 1)
            hf_name = f"model.layers.{index}.{names[part]}.{leaf}"
        expected = state[hf_name] + 1 if gemma and "norm" in name else state[hf_name]
        assert isinstance(tensor, torch.Tensor)
        assert torch.equal(tensor, expected), name
    assert len(tensors) == len(state) - model.config.tie_word_embeddings

    hf = model.config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (300, 32, 48)
    assert (config.num_heads, config.num_kv_heads, config.num_layers, config.context) == (4, 2, 6, 128)
    assert config.norm_eps == pytest.approx(hf.rms_norm_eps)
    assert config.tied == hf.tie_word_embeddings
    assert config.qkv_bias == any(name.endswith("q_proj.bias") for name in state)
    assert config.output_bias == config.mlp_bias == (architecture == "llama")
    assert config.qk_norm == (architecture in ("qwen3", "gemma3"))
    assert config.post_norms == gemma
    assert config.embedding_scale == (pytest.approx(math.sqrt(32)) if gemma else 1.0)
    assert config.activation == ("gelu_tanh" if gemma else "silu")
    assert config.attention_softcap == (50.0 if architecture == "gemma2" else None)
    assert config.logit_softcap == (30.0 if architecture == "gemma2" else None)
    assert config.num_parameters == sum(math.prod(tensor.shape) for tensor in tensors.values())

    if architecture == "mistral":
        assert [layer.window for layer in config.layers] == [5] * 6
    else:
        kinds = getattr(hf, "layer_types", ["full_attention"] * 6)
        assert [layer.window for layer in config.layers] == [5 if k == "sliding_attention" else None for k in kinds]
    for i, layer in enumerate(config.layers):
        if architecture == "smollm3" and not hf.no_rope_layers[i]:
            assert layer.rope is None
        elif architecture == "gemma3":
            assert layer.rope == Rope(theta=hf.rope_parameters[hf.layer_types[i]]["rope_theta"])
        else:
            assert layer.rope == Rope(theta=theta(hf))


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, Rope(theta=10_000.0)),
        ({"rope.freq_base": 5e5}, Rope(theta=5e5)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, Rope()),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, Rope(kind="linear", factor=4.0)),
        ({"rope.scaling.factor": 4.0}, Rope(kind="linear", factor=4.0)),
        ({"rope.scale_linear": 2.0}, Rope(kind="linear", factor=2.0)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            Rope(kind="yarn", factor=4.0, original_context=64, attention_factor=1 + 0.1 * math.log(4)),
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 2.0,
                "rope.scaling.yarn_attn_factor": 1.5,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
            Rope(kind="yarn", factor=2.0, original_context=256, attention_factor=1.5, beta_fast=16.0, beta_slow=2.0),
        ),
    ],
)
def test_rope_scaling(metadata: dict[str, Any], rope: Rope, tmp_path: Path) -> None:
    config = config_of(write_llama(tmp_path / "x.gguf", metadata=metadata))
    assert [layer.rope for layer in config.layers] == [rope]


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama3_scaling_comes_as_factors(tmp_path: Path) -> None:
    """The divisors of a file give the frequencies that transformers computes."""
    model = tiny("llama", rope_parameters=LLAMA3)
    rope = config_of(write_transformers(tmp_path / "x.gguf", "llama", model)).layers[0].rope
    assert rope is not None
    assert rope.factors is not None
    plain = 5e5 ** (-torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    scaled = model.model.rotary_emb.inv_freq
    assert not torch.allclose(plain, scaled)
    assert torch.allclose(plain / torch.tensor(rope.factors), scaled, rtol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "metadata", "windows"),
    [
        ("gemma2", {}, [4096, None, 4096, None, 4096, None, 4096]),
        ("gemma2", {"attention.sliding_window": 9}, [9, None, 9, None, 9, None, 9]),
        ("gemma3", {}, [None] * 7),
        ("gemma3", {"attention.sliding_window": 9}, [9, 9, 9, 9, 9, None, 9]),
        (
            "gemma3",
            {"attention.sliding_window": 9, "attention.sliding_window_pattern": 3},
            [9, 9, None, 9, 9, None, 9],
        ),
        (
            "qwen3",
            {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True] + [False] * 6},
            [9] + [None] * 6,
        ),
        ("llama", {"attention.sliding_window": 9}, [9] * 7),
        ("llama", {"attention.sliding_window": 0}, [None] * 7),
    ],
)
def test_windows(architecture: str, metadata: dict[str, Any], windows: list[int | None], tmp_path: Path) -> None:
    config = config_of(write_family(tmp_path / "x.gguf", architecture, 7, metadata))
    assert [layer.window for layer in config.layers] == windows


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_queries_by_width(architecture: str, layers: int, tmp_path: Path) -> None:
    assert config_of(write_family(tmp_path / "wide.gguf", architecture, layers)).query_scale == (32 / 4) ** -0.5
    assert config_of(write_family(tmp_path / "other.gguf", architecture, layers - 1)).query_scale is None


def write_family(path: Path, architecture: str, layers: int, metadata: dict[str, Any] | None = None) -> Path:
    """A file with the tensors that the architecture needs, in heads that are not hidden_size / heads."""
    norms: dict[str, Array | None] = {}
    for i in range(layers):
        if architecture.startswith("gemma"):
            norms[f"blk.{i}.post_attention_norm.weight"] = np.ones(32, np.float32)
            norms[f"blk.{i}.post_ffw_norm.weight"] = np.ones(32, np.float32)
        if architecture in ("gemma3", "qwen3"):
            norms[f"blk.{i}.attn_q_norm.weight"] = np.ones(16, np.float32)
            norms[f"blk.{i}.attn_k_norm.weight"] = np.ones(16, np.float32)
    return write_llama(path, architecture=architecture, layers=layers, head_dim=16, metadata=metadata, tensors=norms)


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'; supported GGUF architectures: llama, qwen2"),
        ({"metadata": {"general.type": "adapter"}}, "part of a model"),
        ({"metadata": {"split.count": 3}}, "one of 3 shards. Merge them"),
        ({"metadata": {"expert_count": 8}}, "llama.expert_count is 8"),
        ({"metadata": {"attention.causal": False}}, "attention.causal is False"),
        ({"metadata": {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}}, "'longrope' is not supported"),
        ({"metadata": {"rope.dimension_count": 4}}, "rope.dimension_count is 4 and a head has 8"),
        ({"metadata": {"attention.value_length": 4}}, "attention.value_length is 4"),
        ({"metadata": {"block_count": None}}, "no key llama.block_count"),
        ({"metadata": {"block_count": "one"}}, "llama.block_count is 'one', not one positive number"),
        ({"metadata": {"block_count": True}}, "llama.block_count is True"),
        ({"metadata": {"attention.head_count_kv": [2, 1]}}, "one for each layer"),
        ({"metadata": {"attention.head_count_kv": 3}}, "do not fit together"),
        ({"metadata": {"attention.layer_norm_rms_epsilon": math.nan}}, "is nan"),
        ({"metadata": {"rope.freq_base": -1.0}}, "is -1.0"),
        ({"metadata": {"rope.freq_base": 1.0}}, "rope.freq_base is 1.0"),
        ({"metadata": {"block_count": 1 << 31}}, "2,147,483,648 layers"),
        ({"metadata": {"context_length": (1 << 32) - 1}}, "4,294,967,295 tokens"),
        ({"metadata": {"feed_forward_length": 64}}, "ffn_gate.weight has shape"),
        ({"metadata": {"block_count": 2}}, "lacks 9 tensors, among them blk.1.attn_norm.weight"),
        ({"tensors": {"output_norm.weight": None}}, "lacks 1 tensors"),
        ({"tensors": {"token_embd.weight": None}}, "no tensor token_embd.weight"),
        ({"tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((1, 32), np.float32)}}, "has no place for"),
        ({"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}}, r"F32 \[3\], not F32 \[4\]"),
        ({"tensors": {"rope_freqs.weight": np.zeros(4, np.float32)}}, "not a positive number"),
        ({"architecture": "qwen3"}, "lacks 2 tensors, among them blk.0.attn_q_norm.weight"),
        ({"architecture": "qwen2", "metadata": {"attention.sliding_window": 8}}, "does not say which"),
        (
            {"metadata": {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]}},
            "does not say which of the 1 layers",
        ),
    ],
)
def test_what_the_decoder_has_no_part_for_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", **changes)
    with pytest.raises(ValueError, match=message):
        config_of(path)


def test_unknown_keys_are_told(tmp_path: Path) -> None:
    file = read_gguf(write_llama(tmp_path / "x.gguf", metadata={"vocab_size": 24, "novel_trick": 3}))
    read_config(file)
    assert ignored_keys(file) == ["llama.novel_trick"]


def test_one_value_for_each_layer_is_fine_where_all_are_alike(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", layers=2, metadata={"attention.head_count_kv": [2, 2]})
    assert config_of(path).num_kv_heads == 2
