"""Exports against what other engines compute from them: transformers, and twins of vLLM's drafts in plain torch."""

from __future__ import annotations

import copy
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from paceline import LLM, SamplingParams
from paceline.checkpoints import export as exporting
from paceline.checkpoints import folder as folders
from paceline.checkpoints.describe import describe
from paceline.checkpoints.drafts import load_draft
from paceline.checkpoints.export import FORMATS, export
from paceline.checkpoints.load import load
from paceline.checkpoints.tokenizer import Tokenizer
from paceline.cli import app
from paceline.decoding.stats import Stats
from paceline.models.config import Layer, ModelConfig, Rope
from paceline.models.decoder import Decoder
from paceline.models.feature import FeatureDraft
from paceline.models.heads import Heads
from paceline.models.interface import Chunk
from paceline.training.learners import begin
from tests import tiny as tinies
from tests.checkpoints.test_gguf_file import tiny, write_transformers
from tests.checkpoints.test_load import byte_tokenizer

IDS = [3, 5, 8, *range(20, 260)]
TOKENS = [7, 9, 30, 31, 2, 40, 41, 44, 3, 250, 11, 6]
LAYERS = [0, 3, 5]


def write_target(path: Path, architecture: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A folder whose weights are bfloat16 numbers, so that no step rounds them, and the transformers model in it."""
    model = tiny(
        architecture, **({"attention_bias": False, "mlp_bias": False} if architecture == "llama" else {}) | changes
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((3 * parameter if parameter.dim() > 1 else parameter).to(torch.bfloat16))
    model.to(dtype).save_pretrained(path)
    made = tinies.tokenizer(290)
    made.save_pretrained(path)
    return model.float()


def decoder(path: Path) -> Decoder:
    """As plain torch runs it, in float32."""
    config = folders.read_config(path)
    assert config is not None
    return Decoder.from_tensors(config, folders.read_tensors(path), dtype=torch.float32)


def write_draft(path: Path, target: Path, kind: str, ids: list[int] | None = IDS, *, trained: bool = True) -> Path:
    made = begin(kind, decoder(target), str(target), ids, layers=LAYERS, heads=3)
    torch.manual_seed(2)
    for parameter in made.module.parameters():
        if parameter.requires_grad and trained:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    made.save(path)
    return path


def exported(tmp_path: Path, kind: str, ids: list[int] | None = IDS, **changes: Any) -> tuple[Path, Path, Path, Any]:
    """(target, draft, what was exported, the target in transformers)"""
    model = write_target(tmp_path / "target", **changes)
    draft = write_draft(tmp_path / "draft", tmp_path / "target", kind, ids)
    (format,) = (name for name, format in FORMATS.items() if format.kind == kind)
    export(draft, format, tmp_path / "out")
    return tmp_path / "target", draft, tmp_path / "out", model


def config_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "config.json").read_text())
    return found


BLOCK = {
    "block.attention.q.weight": "self_attn.q_proj.weight",
    "block.attention.k.weight": "self_attn.k_proj.weight",
    "block.attention.v.weight": "self_attn.v_proj.weight",
    "block.attention.output.weight": "self_attn.o_proj.weight",
    "block.mlp.gate.weight": "mlp.gate_proj.weight",
    "block.mlp.up.weight": "mlp.up_proj.weight",
    "block.mlp.down.weight": "mlp.down_proj.weight",
    "block.mlp_norm.weight": "post_attention_layernorm.weight",
}


# Key by key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("ids", [None, IDS])
def test_eagle3_key_by_key(tmp_path: Path, ids: list[int] | None, dtype: torch.dtype) -> None:
    _, draft, out, model = exported(tmp_path, "eagle3", ids, dtype=dtype)
    own, found, config = load_file(draft / "model.safetensors"), load_file(out / "model.safetensors"), config_of(out)
    names = {ours: f"midlayer.{theirs}" for ours, theirs in BLOCK.items()}
    names |= {"embedding_norm.weight": "midlayer.input_layernorm.weight"}
    names |= {
        "given_norm.weight": "midlayer.hidden_norm.weight",
        "fc.weight": "fc.weight",
        "norm.weight": "norm.weight",
    }
    for ours, theirs in names.items():
        assert found[theirs].dtype == dtype
        assert torch.equal(found[theirs], own[ours].to(dtype))
    rest = found.keys() - names.values()
    head = model.lm_head.weight.to(dtype)
    assert torch.equal(found["embed_tokens.weight"], model.model.embed_tokens.weight.to(dtype))
    if ids is None:
        assert rest == {"embed_tokens.weight", "lm_head.weight"}
        assert torch.equal(found["lm_head.weight"], head)
    else:
        assert rest == {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
        assert torch.equal(found["lm_head.weight"], head[ids])
        assert found["d2t"].dtype == torch.int64
        assert [draft_id + offset for draft_id, offset in enumerate(found["d2t"].tolist())] == ids
        assert found["t2d"].dtype == torch.bool
        assert found["t2d"].nonzero()[:, 0].tolist() == ids
        assert found["t2d"].shape == (300,)
    assert found["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert found["midlayer.self_attn.k_proj.weight"].shape == (16, 64)
    assert found["midlayer.self_attn.o_proj.weight"].shape == (32, 32)
    assert found["midlayer.mlp.down_proj.weight"].shape == (32, 48)
    assert found["fc.weight"].shape == (32, 64)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["model_type"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("llama", 1, False)
    assert (config["vocab_size"], config["draft_vocab_size"]) == (300, 300 if ids is None else len(IDS))
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")
    # A target of six layers: min(2, 6), 6 // 2 and 6 - 3, which is the same.
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["num_aux_hidden_states"] == 2


@pytest.mark.parametrize("ids", [None, IDS])
def test_eagle1_key_by_key(tmp_path: Path, ids: list[int] | None) -> None:
    _, draft, out, model = exported(tmp_path, "eagle1", ids)
    own, found, config = load_file(draft / "model.safetensors"), load_file(out / "model.safetensors"), config_of(out)
    names = {ours: f"layers.0.{theirs}" for ours, theirs in BLOCK.items()} | {"fc.weight": "fc.weight"}
    assert found.keys() == {*names.values(), "embed_tokens.weight"}
    assert all(torch.equal(found[theirs], own[ours].float()) for ours, theirs in names.items())
    assert torch.equal(found["embed_tokens.weight"], model.model.embed_tokens.weight)
    assert found["fc.weight"].shape == (32, 64)
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLM"], 1)


@pytest.mark.parametrize("ids", [None, IDS])
def test_medusa_key_by_key(tmp_path: Path, ids: list[int] | None) -> None:
    _, draft, out, model = exported(tmp_path, "heads", ids)
    own, found, config = load_file(draft / "model.safetensors"), load_file(out / "model.safetensors"), config_of(out)
    names = {f"layers.{n}.{leaf}": f"blocks.{n}.layers.0.{leaf}" for n in range(3) for leaf in ("weight", "bias")}
    assert found.keys() == {*names.values(), "lm_heads.0.weight"}  # no token_map: vLLM 0.32.0 refuses it
    assert all(torch.equal(found[theirs], own[ours].float()) for ours, theirs in names.items())
    assert torch.equal(found["lm_heads.0.weight"], model.lm_head.weight)
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 300,
        "truncated_vocab_size": 300,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize("tied", [False, True])
def test_hf_key_by_key(tmp_path: Path, tied: bool) -> None:
    target, draft, out, model = exported(tmp_path, "shallow", architecture="qwen2", tie_word_embeddings=tied)
    own, found, config = load_file(draft / "model.safetensors"), load_file(out / "model.safetensors"), config_of(out)
    leaves = {
        "attention_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        **{ours.removeprefix("block."): theirs for ours, theirs in BLOCK.items() if "norm" not in ours},
        **{f"attention.{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
    }
    names = {f"layers.{n}.{o}": f"model.layers.{n}.{t}" for n in range(3) for o, t in leaves.items()}
    names["norm.weight"] = "model.norm.weight"
    assert own.keys() == {*names, "draft_vocab"}
    assert found.keys() == {*names.values(), "model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])}
    assert all(torch.equal(found[theirs], own[ours].float()) for ours, theirs in names.items())
    assert torch.equal(found["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    if not tied:
        assert torch.equal(found["lm_head.weight"], model.lm_head.weight)
    theirs = config_of(target)
    for key in ("architectures", "model_type", "vocab_size", "hidden_size", "max_position_embeddings", "rms_norm_eps"):
        assert config[key] == theirs[key]
    assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (3, tied)
    assert (out / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()


# hf, in transformers


def cut(model: Any) -> Any:
    """The target's layers LAYERS, by transformers' own means."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(LAYERS)
    for key in ("layer_types", "no_rope_layers"):
        if getattr(config, key, None):
            setattr(config, key, [getattr(config, key)[layer] for layer in LAYERS])
    state = model.state_dict()
    for name in list(state):
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            tensor = state.pop(name)
            if int(layer) in LAYERS:
                state[f"model.layers.{LAYERS.index(int(layer))}.{rest}"] = tensor
    made = type(model)(config)
    made.load_state_dict(state)
    return made.eval()


def logits(model: Any, tokens: list[int] = TOKENS) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return found


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("qwen3", {"rope_parameters": YARN}),
        ("smollm3", {}),
        ("gemma2", {}),
        ("gemma3", {}),
    ],
)
def test_an_untrained_cut_is_that_of_transformers(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    model = write_target(tmp_path / "target", architecture, **changes)
    write_draft(tmp_path / "draft", tmp_path / "target", "shallow", trained=False)
    export(tmp_path / "draft", "hf", tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(found) is type(model)
    expected, full = logits(cut(model)), logits(model)
    assert (expected - full).abs().max() > 0.1
    # Gemma's norms are 1 + w here, and as bfloat16 that is not w.
    close = 0.15 if architecture.startswith("gemma") else 2e-5
    torch.testing.assert_close(logits(found), expected, atol=close, rtol=close)
    assert folders.read_config(tmp_path / "out") is not None


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_draft_assists_in_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    target, draft, out, model = exported(tmp_path, "shallow", architecture=architecture, tie_word_embeddings=tied)
    assistant = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    of = decoder(target)
    trained = load_draft(draft, of).module
    assert isinstance(trained, Decoder)
    with torch.inference_mode():
        ours = trained([Chunk(0, TOKENS, outputs=len(TOKENS))], trained.new_cache(1, 32)).logits[0]
    torch.testing.assert_close(logits(assistant)[:, IDS], ours, atol=1e-4, rtol=1e-4)
    prompt = torch.tensor([TOKENS])
    how = {"do_sample": False, "max_new_tokens": 20, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    assert assistant.generation_config.eos_token_id == sorted(load(str(target)).eos_ids)
    plain = model.generate(prompt, **how)
    assert torch.equal(model.generate(prompt, assistant_model=assistant, **how), plain)
    words = transformers.AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "one two"}]
    assert words.apply_chat_template(chat, tokenize=False) == "<|user|>one two<|end|>"


def test_as_many_drafted_tokens_are_accepted_in_transformers_as_here(tmp_path: Path) -> None:
    model = write_target(tmp_path / "target")
    with torch.no_grad():  # layers outside of the cut say little, so that it is often right
        for index in set(range(6)) - set(LAYERS):
            for parameter in (
                model.model.layers[index].self_attn.o_proj.weight,
                model.model.layers[index].mlp.down_proj.weight,
            ):
                parameter.copy_((0.1 * parameter).to(torch.bfloat16))
    model.save_pretrained(tmp_path / "target")
    write_draft(tmp_path / "draft", tmp_path / "target", "shallow", None, trained=False)
    assistant = transformers.AutoModelForCausalLM.from_pretrained(
        exported_to(tmp_path / "draft", "hf", tmp_path / "out")
    )
    assistant.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    of, words = decoder(tmp_path / "target"), Tokenizer.from_folder(tmp_path / "target")
    llm = LLM(of, tmp_path / "draft", tokenizer=words, draft_tokens=4)
    prompts = [[first, *TOKENS[1:6]] for first in range(20, 26)]
    told = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    ours = sum((completion.stats for completion in told), Stats())
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    handle = model.register_forward_pre_hook(count)
    model.generation_config.eos_token_id = assistant.generation_config.eos_token_id = None
    for prompt, completion in zip(prompts, told, strict=True):
        asked = torch.tensor([prompt])
        text = model.generate(
            asked, attention_mask=torch.ones_like(asked), assistant_model=assistant, do_sample=False, max_new_tokens=80
        )
        assert text[0, 6:].tolist() == completion.token_ids
    handle.remove()
    theirs = 480 / passes
    assert 1.5 < ours.acceptance_length < 4.5
    assert abs(theirs - ours.acceptance_length) < 0.05 * theirs


def test_a_gguf_target_gives_a_folder_with_rows_in_halves_and_a_tokenizer(tmp_path: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    target = write_transformers(tmp_path / "target.gguf", "llama", model, byte_tokenizer)
    checkpoint = load(str(target))
    assert isinstance(checkpoint.model, Decoder)
    made = begin("shallow", checkpoint.model, str(target), None, layers=LAYERS)
    made.save(tmp_path / "draft")
    told = export(tmp_path / "draft", "hf", tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(found), logits(cut(model)), atol=2e-5, rtol=1e-4)
    assert config_of(tmp_path / "out")["eos_token_id"] == [2]
    ours, theirs = checkpoint.tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("a line\nof Größe", "def f(x):  return 12345", "</s>"):
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text), skip_special_tokens=False)
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
    assert any("Hugging Face folder" in line for line in told)


def test_the_rope_of_a_published_llama_3_has_a_name_again(tmp_path: Path) -> None:
    named = ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        layers=(Layer(rope=Rope(theta=5e5, kind="llama3", factor=32.0, original_context=8192)),),
        context=131072,
    )
    theirs = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        transformers.LlamaConfig(
            hidden_size=64,
            num_attention_heads=1,
            rope_parameters=LLAMA3 | {"factor": 32.0},
            max_position_embeddings=131072,
        ),
        "cpu",
    )[0]
    plain = 5e5 ** (-torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    factors = tuple((plain / theirs).tolist())
    by_factors = replace_rope(named, Rope(theta=5e5, factors=factors))
    assert describe(by_factors)[0] == describe(named)[0]
    with pytest.raises(ValueError, match="factors of its own"):
        describe(replace_rope(named, Rope(theta=5e5, factors=(1.0,) * 31 + (3.0,))))


def replace_rope(config: ModelConfig, rope: Rope) -> ModelConfig:
    return replace(config, layers=(Layer(rope=rope),))


# Twins of what vLLM computes, from the exported tensors and the target in transformers


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def attention(x: torch.Tensor, w: dict[str, torch.Tensor], prefix: str, config: dict[str, Any]) -> torch.Tensor:
    """Causal, over all positions from 0, with rope on the halves of each head."""
    n, size = len(x), config["head_dim"]
    q, k, v = ((x @ w[f"{prefix}.self_attn.{p}_proj.weight"].T).view(n, -1, size).transpose(0, 1) for p in "qkv")
    angles = torch.arange(n)[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)

    def turned(t: torch.Tensor) -> torch.Tensor:
        a, b = t.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = turned(q) @ turned(k).transpose(1, 2) * size**-0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    return (scores @ v).transpose(0, 1).reshape(n, -1) @ w[f"{prefix}.self_attn.o_proj.weight"].T


def layer(
    inputs: torch.Tensor, residual: torch.Tensor, w: dict[str, torch.Tensor], prefix: str, config: dict[str, Any]
) -> torch.Tensor:
    x = residual + attention(inputs, w, prefix, config)
    y = rms(x, w[f"{prefix}.post_attention_layernorm.weight"], config["rms_norm_eps"])
    gate, up, down = (w[f"{prefix}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
    return x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T


def eagle3_pass(
    w: dict[str, torch.Tensor], config: dict[str, Any], tokens: list[int], given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    eps = config["rms_norm_eps"]
    embeds = rms(w["embed_tokens.weight"][tokens], w["midlayer.input_layernorm.weight"], eps)
    normed = rms(given, w["midlayer.hidden_norm.weight"], eps)
    hidden = layer(torch.cat((embeds, normed), dim=-1), given, w, "midlayer", config)
    drafted = rms(hidden, w["norm.weight"], eps) @ w["lm_head.weight"].T
    if "d2t" not in w:
        return drafted, hidden
    scattered = torch.full((len(drafted), config["vocab_size"]), -torch.inf)
    scattered[:, torch.arange(config["draft_vocab_size"]) + w["d2t"]] = drafted
    return scattered, hidden


def eagle_pass(
    w: dict[str, torch.Tensor], config: dict[str, Any], tokens: list[int], given: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.cat((w["embed_tokens.weight"][tokens], given), dim=-1) @ w["fc.weight"].T
    hidden = layer(x, x, w, "layers.0", config)
    return hidden @ head.T, hidden


def hidden_states(model: Any) -> tuple[torch.Tensor, ...]:
    """Index k: the input of layer k, and the last one behind the last norm; what vLLM captures as k, and returns."""
    with torch.inference_mode():
        found = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    return tuple(state[0].float() for state in found)


def follow(of: Decoder, module: FeatureDraft, steps: int) -> list[torch.Tensor]:
    """[D] what our draft says behind all of TOKENS but the last, then behind what it says itself (as draft ids)."""
    with torch.inference_mode():
        (features,) = of([Chunk(0, TOKENS[:-1])], of.new_cache(1, 32), module.features).features
        given, cache, chunk, found = module.project(features), module.new_cache(1, 32), Chunk(0, TOKENS[1:]), []
        for _ in range(steps):
            logits_1D, given = module([chunk], given, cache)
            found.append(logits_1D[0])
            chunk = Chunk(0, [IDS[int(logits_1D[0].argmax())]])
    return found


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_twin_of_vllm_drafts_what_ours_does(tmp_path: Path, kind: str, architecture: str) -> None:
    target, draft, out, model = exported(tmp_path, kind, architecture=architecture)
    of = decoder(target)
    module = load_draft(draft, of).module
    assert isinstance(module, FeatureDraft)
    w, config, states = load_file(out / "model.safetensors"), config_of(out), hidden_states(model)
    head = model.lm_head.weight.detach()
    if kind == "eagle3":
        captured = config["eagle_aux_hidden_state_layer_ids"]
        assert [index + 1 for index in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]] == captured
        given = torch.cat([states[index] for index in captured], dim=-1) @ w["fc.weight"].T
    else:
        given = states[-1]
    tokens, given = TOKENS[1:], given[:-1]
    for ours in follow(of, module, 4):
        if kind == "eagle3":
            theirs, hidden = eagle3_pass(w, config, tokens, given)
            assert theirs[-1].isfinite().nonzero()[:, 0].tolist() == IDS
        else:
            theirs, hidden = eagle_pass(w, config, tokens, given, head)
        torch.testing.assert_close(theirs[-1][IDS], ours, atol=2e-5 * float(ours.abs().max()), rtol=1e-4)
        # The draft's own state stands where the target's would; what was read before stays as it was.
        tokens, given = [*tokens, IDS[int(ours.argmax())]], torch.cat((given, hidden[-1:]))


def test_a_twin_of_vllm_heads_says_what_ours_do(tmp_path: Path) -> None:
    target, draft, out, model = exported(tmp_path, "heads")
    module = load_draft(draft, decoder(target)).module
    assert isinstance(module, Heads)
    w, last = load_file(out / "model.safetensors"), hidden_states(model)[-1]
    with torch.inference_mode():
        ours_NKD = module(last, 3)
    for n in range(3):
        block = {leaf: w[f"blocks.{n}.layers.0.{leaf}"] for leaf in ("weight", "bias")}
        drafted = (last + F.silu(F.linear(last, block["weight"], block["bias"]))) @ w["lm_heads.0.weight"].T
        torch.testing.assert_close(drafted[:, IDS], ours_NKD[:, n], atol=1e-4, rtol=1e-4)


# The command


def test_the_command_prints_what_to_run(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_draft(tmp_path / "draft", tmp_path / "target", "eagle3")
    out = tmp_path / "a folder"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "draft"), "--format", "vllm-eagle3", "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    vllm, sglang = [shlex.split(line) for line in done.stdout.splitlines()][-2:]
    assert vllm[:4] == ["vllm", "serve", str(tmp_path / "target"), "--speculative-config"]
    assert json.loads(vllm[4]) == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 4}
    assert sglang[:5] == ["python", "-m", "sglang.launch_server", "--model-path", str(tmp_path / "target")]
    options = dict(zip(sglang[5::2], sglang[6::2], strict=True))
    assert options == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(out),
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
    }
    again = CliRunner().invoke(app, ["export", str(tmp_path / "draft"), "--format", "vllm-eagle3", "--out", str(out)])
    assert again.exit_code == 2
    assert "is there already" in again.output


@pytest.mark.parametrize(("kind", "format"), [("eagle1", "vllm-eagle"), ("heads", "vllm-medusa")])
def test_a_draft_that_speaks_for_fewer_tokens_says_what_becomes_of_that(tmp_path: Path, kind: str, format: str) -> None:
    write_target(tmp_path / "target")
    write_draft(tmp_path / "draft", tmp_path / "target", kind)
    told = export(tmp_path / "draft", format, tmp_path / "out")
    assert any("243 tokens" in line and "all 300" in line for line in told)
    assert told[-1] == "note: SGLang loads no such checkpoint"


# What is refused


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft of every kind."""
    path = tmp_path_factory.mktemp("made")
    write_target(path / "target")
    for kind in ("shallow", "eagle3", "eagle1", "heads"):
        write_draft(path / kind, path / "target", kind)
    return path


@pytest.mark.parametrize("kind", ["shallow", "eagle3", "eagle1", "heads"])
def test_a_format_for_another_kind_names_the_one_that_fits(made: Path, tmp_path: Path, kind: str) -> None:
    fits = next(name for name, format in FORMATS.items() if format.kind == kind)
    for name in FORMATS.keys() - {fits}:
        with pytest.raises(ValueError, match=rf"one of kind {kind}: use {fits}$"):
            export(made / kind, name, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_what_is_no_draft_no_target_or_no_new_folder_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one of hf, vllm-eagle3, vllm-eagle, vllm-medusa"):
        export(made / "eagle3", "onnx", tmp_path / "out")
    with pytest.raises(ValueError, match="holds no draft"):
        export(made / "target", "hf", tmp_path / "out")
    write_target(tmp_path / "other", hidden_size=64)
    with pytest.raises(ValueError, match="hidden_size is 32"):
        export(made / "eagle3", "vllm-eagle3", tmp_path / "out", target=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="no model at"):
        export(made / "eagle3", "vllm-eagle3", tmp_path / "out", target=str(tmp_path / "gone"))
    before = sorted(tmp_path.rglob("*"))
    for out in (tmp_path / "other", tmp_path / "other" / "config.json"):
        with pytest.raises(ValueError, match="is there already"):
            export(made / "eagle3", "vllm-eagle3", out)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("target", [None, {"hidden_size": 32}, {"name": 3}, {"name": ""}])
def test_a_draft_that_names_no_target_asks_for_one(made: Path, tmp_path: Path, target: Any) -> None:
    copied(made / "eagle3", tmp_path / "draft", target=target)
    with pytest.raises(ValueError, match="give the target"):
        export(tmp_path / "draft", "vllm-eagle3", tmp_path / "out")


def copied(draft: Path, path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
    (path / "config.json").write_text(json.dumps(config_of(draft) | changes))
    return path


@pytest.mark.parametrize(
    ("kind", "features", "message"),
    [
        ("eagle3", [3, 2], "ascending"),
        ("eagle3", [3, 3], "ascending"),
        ("eagle3", [2, 6], "from 0 to 5"),
        ("eagle1", [5], "the last one, 6"),
    ],
)
def test_hidden_states_that_vllm_would_not_give_are_refused(
    made: Path, tmp_path: Path, kind: str, features: list[int], message: str
) -> None:
    copied(made / kind, tmp_path / "draft", features=features)
    fits = next(name for name, format in FORMATS.items() if format.kind == kind)
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "draft", fits, tmp_path / "out")


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_target_with_more_than_llama_has_gets_no_feature_draft(tmp_path: Path, architecture: str) -> None:
    write_target(tmp_path / "target", architecture)
    write_draft(tmp_path / "draft", tmp_path / "target", "eagle3")
    with pytest.raises(ValueError, match="embedding is scaled by"):
        export(tmp_path / "draft", "vllm-eagle3", tmp_path / "out")


def test_a_config_that_cannot_say_it_is_refused() -> None:
    config = ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        layers=(Layer(rope=Rope(), window=5),),
        context=16,
        qk_norm=True,
    )
    with pytest.raises(ValueError, match="type llama cannot say what this model's layers and qk_norm are"):
        describe(config)


def test_vllm_would_take_a_folder_of_such_a_name_for_another_method(made: Path, tmp_path: Path) -> None:
    for name in ("my-Eagle-draft", "dflash"):
        with pytest.raises(ValueError, match="vLLM goes by the name of a folder"):
            export(made / "heads", "vllm-medusa", tmp_path / name)
    export(made / "eagle3", "vllm-eagle3", tmp_path / "my-eagle3-draft")


def test_a_link_out_of_the_targets_folder_is_not_followed(made: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    (tmp_path / "secret").write_text("a key")
    (tmp_path / "target" / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "target" / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="outside the model's folder"):
        export(made / "shallow", "hf", tmp_path / "out", target=str(tmp_path / "target"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["shallow", "eagle3", "eagle1", "heads"])
def test_what_was_not_written_as_meant_is_found_and_leaves_nothing(
    made: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = next(name for name, format in FORMATS.items() if format.kind == kind)
    names = sorted(load_file(exported_to(made / kind, fits, tmp_path / "good") / "model.safetensors"))
    for name in names:
        for spoil in (lambda t: t.roll(1, 0) if t.dim() > 1 else ~t if t.dtype == torch.bool else t + 1, None):

            def save(tensors: dict[str, torch.Tensor], file: Path, metadata: Any) -> None:
                spoiled = {n: t for n, t in tensors.items() if n != name or spoil is not None}  # noqa: B023
                if spoil is not None:  # noqa: B023
                    spoiled[name] = spoil(tensors[name])  # noqa: B023
                save_file(spoiled, file, metadata=metadata)

            monkeypatch.setattr(exporting, "save_file", save)
            with pytest.raises(ValueError, match=r"of the export is not what|the export has"):
                export(made / kind, fits, tmp_path / "out")
    assert os.listdir(tmp_path) == ["good"]


def exported_to(draft: Path, format: str, out: Path) -> Path:
    export(draft, format, out)
    return out


def test_numbers_that_the_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    write_target(tmp_path / "target", dtype=torch.float16)
    draft = write_draft(tmp_path / "draft", tmp_path / "target", "heads")
    tensors = load_file(draft / "model.safetensors")
    tensors["layers.0.bias"][0] = 1e6
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(ValueError, match=r"blocks.0.layers.0.bias has numbers that torch.float16 cannot hold"):
        export(draft, "vllm-medusa", tmp_path / "out")


def test_the_folder_is_as_readable_as_any_other(made: Path, tmp_path: Path) -> None:
    out = exported_to(made / "eagle3", "vllm-eagle3", tmp_path / "out")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").write_text("")
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert {file.stat().st_mode for file in out.iterdir()} == {(tmp_path / "plain" / "file").stat().st_mode}
    assert Tokenizer.from_folder(exported_to(made / "shallow", "hf", tmp_path / "hf")).vocab_size > 0
