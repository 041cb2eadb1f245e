"""config.json and safetensors of a Hugging Face folder: what transformers means by them, and what must be refused."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.checkpoints.folder import read_config, read_tensors
from paceline.models.config import Layer, ModelConfig, Rope
from paceline.models.decoder import Decoder
from paceline.models.interface import Chunk

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path, config: dict[str, Any]) -> ModelConfig:
    read = read_config(write(folder, config))
    assert read is not None
    return read


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    config = read_config(folder)
    assert config is not None
    decoder = Decoder.from_tensors(config, read_tensors(folder), dtype=torch.float32)
    return decoder([Chunk(0, ids, len(ids))], decoder.new_cache(1, len(ids))).logits[0]


# config.json


@pytest.mark.parametrize(
    ("model_type", "config_class"),
    [
        ("llama", "LlamaConfig"),
        ("mistral", "MistralConfig"),
        ("qwen2", "Qwen2Config"),
        ("qwen3", "Qwen3Config"),
        ("smollm3", "SmolLM3Config"),
        ("gemma2", "Gemma2Config"),
        ("gemma3_text", "Gemma3TextConfig"),
    ],
)
def test_missing_keys_mean_what_transformers_makes_of_them(tmp_path: Path, model_type: str, config_class: str) -> None:
    ours = config_of(tmp_path, {"model_type": model_type})
    theirs = getattr(transformers, config_class)()
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.context == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    gemma = "gemma" in model_type
    assert (theirs.hidden_activation if gemma else theirs.hidden_act) == ("gelu_pytorch_tanh" if gemma else "silu")
    assert ours.activation == ("gelu_tanh" if gemma else "silu")
    assert ours.attention_softcap == (theirs.attn_logit_softcapping if model_type == "gemma2" else None)
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.query_scale == (theirs.query_pre_attn_scalar**-0.5 if gemma else None)
    assert ours.embedding_scale == (math.sqrt(theirs.hidden_size) if gemma else 1.0)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if model_type == "mistral" else "full"] * 32
    turned = getattr(theirs, "no_rope_layers", [1] * len(kinds))
    for layer, kind, rope in zip(ours.layers, kinds, turned, strict=True):
        assert layer.window == (theirs.sliding_window if kind == "sliding_attention" else None)
        parameters = theirs.rope_parameters
        assert layer.rope == (Rope(theta=parameters.get(kind, parameters)["rope_theta"]) if rope else None)
    # and what transformers writes itself is read the same
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == ours


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(kind="linear", factor=2.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, Rope(kind="dynamic", factor=2.0, original_context=64)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
            Rope(theta=5e5, kind="llama3", factor=8.0, original_context=32),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": None, "attention_factor": 0.9}},
            Rope(kind="yarn", factor=4.0, original_context=64, attention_factor=0.9),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn"}, "original_max_position_embeddings": 16},
            Rope(kind="yarn", factor=4.0, original_context=16),
        ),
    ],
)
def test_rope_in_the_words_of_old_and_new_versions(tmp_path: Path, changes: dict[str, Any], rope: Rope) -> None:
    config = config_of(tmp_path, LLAMA | changes)
    assert config.layers == (Layer(rope=rope),) * 2
    scaled = rope.kind in ("yarn", "dynamic") and rope.original_context == 64
    assert config.context == (64 * int(rope.factor) if scaled else 64)


def test_windows_and_layers_without_rope(tmp_path: Path) -> None:
    qwen = SIZES | {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 9, "max_window_layers": 3}

    def windows(config: dict[str, Any]) -> list[int | None]:
        return [layer.window for layer in config_of(tmp_path, config).layers]

    assert windows(qwen) == [None] * 4
    assert windows(qwen | {"use_sliding_window": True}) == [None, None, None, 9]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(qwen | {"use_sliding_window": True, "layer_types": kinds}) == [9, None, 9, None]
    assert windows(SIZES | {"model_type": "mistral", "sliding_window": None}) == [None] * 2
    smol = SIZES | {"model_type": "smollm3", "num_hidden_layers": 4}
    ropes = [layer.rope is not None for layer in config_of(tmp_path, smol | {"no_rope_layers": [0, 1, 1, 0]}).layers]
    assert ropes == [False, True, True, False]
    ropes = [layer.rope is not None for layer in config_of(tmp_path, smol | {"no_rope_layer_interval": 2}).layers]
    assert ropes == [True, False, True, False]


def test_gemma3_as_it_was_first_published(tmp_path: Path) -> None:
    """The 4B model's config.json: multimodal, and silent on whatever equals a default of that time."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = config_of(
        tmp_path,
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": text,
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
        },
    )
    assert (config.architecture, config.tied, config.head_dim, config.num_kv_heads) == ("gemma3", True, 256, 4)
    assert config.context == 131072
    everywhere = Layer(rope=Rope(theta=1e6, kind="linear", factor=8.0))
    local = Layer(window=1024, rope=Rope(theta=1e4))
    assert config.layers == tuple(everywhere if i % 6 == 5 else local for i in range(34))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"hidden_act": "relu"},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"model_type": "mistral", "architectures": [], "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "qwen2", "architectures": [], "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "gemma2", "architectures": [], "use_bidirectional_attention": True},
        {"model_type": "gemma3_text", "architectures": [], "attn_logit_softcapping": 50.0},
        {"model_type": "gemma3_text", "architectures": [], "rope_parameters": {"rope_type": "default"}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"is_causal": False},
    ],
)
def test_what_our_decoder_has_no_part_for_is_left_to_others(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_config(write(tmp_path, LLAMA | changes)) is None
    with pytest.raises(ValueError, match=r"config.json describes a model our decoder cannot run"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -1}, "hidden_size = -1, which must be an integer from 1"),
        ({"hidden_size": 48.0}, r"hidden_size = 48.0, which must be an integer"),
        ({"hidden_size": "48"}, "hidden_size = 48, which must be an integer"),
        ({"vocab_size": 2**40}, "vocab_size = 1099511627776"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, which must be an integer from 1 to 1024"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"head_dim": []}, r"head_dim = \[\]"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps = nan, which must be a positive number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = no, which must be true or false"),
        ({"rope_theta": 0.5}, r"rope_theta = 0.5, which must be a number of at least 1.0"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\], which must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor = None, which must be a positive number"),
        ({"rope_scaling": {"type": "dynamic", "factor": math.inf}}, "factor = inf"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 0}}, "original_max"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor = 4.0, which must be a number above low_freq_factor",
        ),
        ({"model_type": None}, "lacks a model_type"),
        ({"model_type": ["llama"]}, "lacks a model_type"),
        ({"architectures": "LlamaForCausalLM"}, "architectures are no list"),
        ({"model_type": "qwen2", "architectures": [], "layer_types": ["full_attention"]}, "for each of 2 layers"),
        ({"model_type": "smollm3", "architectures": [], "no_rope_layers": [1]}, "for each of 2 layers"),
        ({"model_type": "smollm3", "architectures": [], "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
        ({"model_type": "gemma3_text", "architectures": [], "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ({"model_type": "gemma3", "architectures": [], "text_config": [1]}, "text_config that is no object"),
        ({"model_type": "mistral", "architectures": [], "sliding_window": -5}, "sliding_window = -5"),
    ],
)
def test_damaged_values_end_in_an_error_that_names_file_and_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_config(write(tmp_path, LLAMA | changes))
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"llama"', "[" * 100_000, '{"a": "\xff"}'.encode("latin-1"), b"\x00" * 64]
)
def test_what_is_no_json_object_ends_in_an_error(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=r"config.json (is not JSON|holds no JSON object)"):
        read_config(tmp_path)


def test_a_folder_without_config_or_with_an_endless_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        read_config(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="1099511627776 bytes, more than"):
        read_config(tmp_path)


def test_reading_a_config_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    code = (
        "import sys, pathlib, paceline.checkpoints.folder as f; f.read_config(pathlib.Path(sys.argv[1]));"
        "sys.exit(bool({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


# Weights


def test_one_file_or_many_give_the_same_model(llama: Path, tmp_path: Path) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = logits(llama, ids)
    parts = tmp_path / "parts"
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    model.save_pretrained(parts, max_shard_size="20KB")
    assert len(list(parts.glob("*.safetensors"))) > 3
    assert torch.equal(logits(parts, ids), whole)
    assert (model(torch.tensor([ids])).logits[0] - whole).abs().max() < 1e-4


def test_tensors_of_the_file_come_under_our_names(llama: Path) -> None:
    theirs = load_file(llama / "model.safetensors")
    ours = dict(read_tensors(llama))
    assert len(ours) == len(theirs) == 2 * 9 + 3
    assert torch.equal(ours["layers.1.mlp_norm.weight"], theirs["model.layers.1.post_attention_layernorm.weight"])
    assert torch.equal(ours["layers.0.attention.output.weight"], theirs["model.layers.0.self_attn.o_proj.weight"])
    assert torch.equal(ours["head.weight"], theirs["lm_head.weight"])


def test_what_old_files_hold_besides_is_left_out(llama: Path) -> None:
    file = llama / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file(tensors, file)
    assert len(dict(read_tensors(llama))) == 21
    write(llama, json.loads((llama / "config.json").read_text()) | {"tie_word_embeddings": True})
    assert "head.weight" not in dict(read_tensors(llama)), "a tied model's head is its embedding, whatever is stored"


def test_gemma_norms_are_stored_as_their_distance_from_one(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=12)
    model = transformers.Gemma3ForCausalLM(config).to(torch.bfloat16)
    model.model.layers[0].self_attn.q_norm.weight.data.fill_(2**-9)
    model.save_pretrained(tmp_path)
    tensors = dict(read_tensors(tmp_path))
    weight = tensors["layers.0.attention.q_norm.weight"]
    assert weight.dtype == torch.float32, "bfloat16 cannot hold the sum"
    assert torch.equal(weight, torch.full((12,), 1 + 2**-9))
    assert torch.equal(tensors["layers.0.mlp.up.weight"], model.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize(
    "prefixes", [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]
)
def test_the_language_model_of_a_multimodal_checkpoint(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=12, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("lm_head.", prefixes[1]) if "lm_head" in name else name.replace("model.", prefixes[0], 1): tensor
        for name, tensor in plain.items()
    }
    renamed["vision_tower.vision_model.post_layernorm.weight"] = torch.zeros(3)
    renamed["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(3)
    save_file(renamed, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "tie_word_embeddings": False}
    write(tmp_path, outer | {"text_config": text})
    ids = [3, 1, 4, 1, 5]
    assert (logits(tmp_path, ids) - model(torch.tensor([ids])).logits[0]).abs().max() < 1e-4


def rename(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors of the llama model.*norm.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "holds model.extra, twice or without a place"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(80, 48)}), "without a place"),
        (lambda t: t.update({"model.layers.00.mlp.up_proj.weight": torch.zeros(80, 48)}), "without a place"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(47)}), r"shape \[47\], config.json needs \[48\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}), "as I8; weights must be"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(48).to(torch.float8_e4m3fn)}),
            "as F8_E4M3; weights must be",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused_before_any_is_read(
    llama: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    rename(llama, change)
    with pytest.raises(ValueError, match=message) as error:
        read_tensors(llama)
    assert str(llama) in str(error.value)


def header(text: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if size is None else size) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF" + bytes(60),
        header(b"{}", size=2**62),
        header(b"{}", size=99_000_000),
        header(b'{"a": '),
        header(b"[" * 10_000),
        header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}') + bytes(15),
        header(b'{"a": {"dtype": "F32", "shape": [1099511627776, 1099511627776], "data_offsets": [0, 16]}}')
        + bytes(16),
        header(b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}') + bytes(16),
        header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}') + bytes(16),
    ],
)
def test_broken_files_end_in_an_error_that_names_them(llama: Path, content: bytes) -> None:
    (llama / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is no sound safetensors file"):
        read_tensors(llama)


def test_truncated_weights(llama: Path) -> None:
    file = llama / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"model.safetensors is no sound safetensors file"):
        read_tensors(llama)


def shard(folder: Path, name: str) -> None:
    """Move the weights to `name` (unless it leads elsewhere) and let an index point there."""
    weights = folder / "model.safetensors"
    names = list(load_file(weights))
    weights.rename(folder / "held.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))


@pytest.mark.parametrize(
    "name",
    [
        "../held.safetensors",
        "/etc/held.safetensors",
        "sub/held.safetensors",
        "..\\held.safetensors",
        "..",
        "",
        "held.bin",
    ],
)
def test_shards_outside_the_folder_are_refused(llama: Path, name: str) -> None:
    shard(llama, name)
    with pytest.raises(ValueError, match=r"index.json names the shard .*: shards are .safetensors files beside it"):
        read_tensors(llama)


def test_missing_shards_and_empty_indexes(llama: Path) -> None:
    shard(llama, "gone.safetensors")
    with pytest.raises(ValueError, match=r"gone.safetensors, named by .*index.json, does not exist"):
        read_tensors(llama)
    indexes: list[dict[str, Any]] = [
        {},
        {"weight_map": {}},
        {"weight_map": ["a.safetensors"]},
        {"weight_map": {"a": 3}},
    ]
    for index in indexes:
        (llama / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"index.json has no weight_map"):
            read_tensors(llama)


def test_links_lead_only_to_the_blobs_of_the_hub_cache(llama: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--tiny--llama"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (llama / name).rename(blobs / f"hash-{name}")
        (snapshot / name).symlink_to(Path("..", "..", "blobs", f"hash-{name}"))
    assert len(dict(read_tensors(snapshot))) == 21
    (tmp_path / "alias").symlink_to(snapshot)
    assert len(dict(read_tensors(tmp_path / "alias"))) == 21, "a link to the folder is the user's own"
    outside = tmp_path / "elsewhere.safetensors"
    (blobs / "hash-model.safetensors").rename(outside)
    for target in (outside, tmp_path / "nowhere"):
        (snapshot / "model.safetensors").unlink()
        (snapshot / "model.safetensors").symlink_to(target)
        with pytest.raises(ValueError, match=r"is a link to .*, outside the model's folder"):
            read_tensors(snapshot)


def test_pickled_weights_are_refused_with_the_cure(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor"):
        read_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match=r"pickled Python that could run anything.*convert it"):
        read_tensors(tmp_path)


def test_heads_that_do_not_divide_name_the_config(tmp_path: Path) -> None:
    write(tmp_path, LLAMA | {"num_key_value_heads": 3})
    (tmp_path / "model.safetensors").write_bytes(header(b"{}"))
    with pytest.raises(ValueError, match=r"config.json: 4 query heads over 3"):
        read_tensors(tmp_path)
