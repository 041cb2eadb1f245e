"""Writes the built-in model in every format that `speed.py` compares: `python benchmarks/weights.py FOLDER`.

GGUF files and Hugging Face folders of the exactly dequantized weights; given a Python that has optimum-intel, an
OpenVINO folder too; and all but that of a draft, which is four of the layers, untrained. What is there already stays.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import gguf
import torch
import typer
from gguf.quants import dequantize, quantize
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from paceline.checkpoints.resolve import resolve

FORMATS = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (gguf.GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LAYERS = {"target": range(30), "draft": (0, 1, 28, 29)}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""What Hugging Face calls the parts of a Llama."""


def main(folder: Path, openvino: Annotated[str, typer.Option(help="A Python that has optimum-intel.")] = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = resolve("smollm2-135m").path
    source = gguf.GGUFReader(path)
    console = Console(stderr=True)
    for model, layers in LAYERS.items():
        for name in FORMATS:
            if not (file := folder / f"{model}-{name}.gguf").exists():
                console.print(f"writing {file}")
                write_gguf(file, source, layers, name)
        for name in DTYPES:
            if not (variant := folder / f"{model}-{name}").exists():
                console.print(f"writing {variant}")
                write_folder(variant, source, layers, name)
                AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(variant)
    if openvino and not (variant := folder / "target-int8").exists():
        console.print(f"writing {variant}")
        export = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--weight-format", "int8"]
        where = ["--task", "text-generation-with-past", "--model", str(folder / "target-f32"), str(variant)]
        subprocess.run([openvino, *export, *where], check=True)


def tensors(source: gguf.GGUFReader, layers: Sequence[int]) -> Iterator[tuple[str, gguf.ReaderTensor]]:
    """The tensors of a model that has these layers of the source, by their names there."""
    for tensor in source.tensors:
        name = tensor.name
        if block := re.match(r"blk\.(\d+)\.", name):
            if int(block[1]) not in layers:
                continue
            name = f"blk.{layers.index(int(block[1]))}.{name[block.end() :]}"
        yield name, tensor


def write_gguf(path: Path, source: gguf.GGUFReader, layers: Sequence[int], name: str) -> None:
    """With the source's metadata. As in the source, vectors stay F32 and a 4-bit file has its embedding in Q8_0."""
    kind, file_type = FORMATS[name]
    writer = gguf.GGUFWriter(path, "llama")
    changed = {"llama.block_count": len(layers), "general.file_type": int(file_type)}
    for key, entry in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            element = entry.types[-1] if entry.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, changed.get(key, entry.contents()), entry.types[0], element)
    for part, tensor in tensors(source, layers):
        to = gguf.GGMLQuantizationType.F32 if len(tensor.shape) == 1 else kind
        if part == "token_embd.weight" and name.startswith("q4"):
            to = gguf.GGMLQuantizationType.Q8_0
        kept = to is tensor.tensor_type
        values = tensor.data if kept else quantize(dequantize(tensor.data, tensor.tensor_type), to)
        writer.add_tensor(part, values, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(path: Path, source: gguf.GGUFReader, layers: Sequence[int], dtype: str) -> None:
    """What transformers loads, without the tokenizer."""
    read = {key.removeprefix("llama."): entry.contents() for key, entry in source.fields.items()}
    heads = {"attn_q": read["attention.head_count"], "attn_k": read["attention.head_count_kv"]}
    weights = {}
    for name, tensor in tensors(source, layers):
        part, values = name.split(".")[-2], dequantize(tensor.data, tensor.tensor_type)
        if part in heads:  # GGUF has their rows in pairs, Hugging Face in halves
            values = values.reshape(heads[part], -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        prefix = f"model.layers.{name.split('.')[1]}." if name.startswith("blk.") else ""
        weights[f"{prefix}{NAMES[part]}.weight"] = torch.from_numpy(values.copy()).to(DTYPES[dtype])
    config = LlamaConfig(
        vocab_size=read["vocab_size"],
        hidden_size=read["embedding_length"],
        intermediate_size=read["feed_forward_length"],
        num_hidden_layers=len(layers),
        num_attention_heads=read["attention.head_count"],
        num_key_value_heads=read["attention.head_count_kv"],
        max_position_embeddings=read["context_length"],
        rms_norm_eps=read["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": read["rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=read["tokenizer.ggml.bos_token_id"],
        eos_token_id=read["tokenizer.ggml.eos_token_id"],
        architectures=["LlamaForCausalLM"],
        dtype=str(DTYPES[dtype]).removeprefix("torch."),
    )
    path.mkdir()
    config.save_pretrained(path)
    GenerationConfig.from_model_config(config).save_pretrained(path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    typer.run(main)
