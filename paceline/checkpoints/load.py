"""Names in, models out: the weights in memory, their tokenizer, and what was done to them on the way.

Puts the parts of this package together; knows no format and no architecture itself. A folder whose architecture our
decoder has no part for runs through transformers' own class, never through code that the checkpoint brings along.
Importing this imports no torch, and `inspect` answers without it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoints import folder, gguf_file
from paceline.checkpoints.gguf_file import BLOCKS, PLAIN, GgufFile
from paceline.checkpoints.resolve import Source, resolve
from paceline.checkpoints.storage import DTYPES, Matrix, Storage, Wish, exact
from paceline.checkpoints.tokenizer import Tokenizer, eos_ids
from paceline.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from paceline.models.interface import LanguageModel
    from paceline.models.quant import Quantized

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What safetensors calls them; nothing here runs in float64."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model ready to run."""

    model: LanguageModel
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    source: Source
    notes: tuple[str, ...]
    """What was done to the weights, in sentences for people."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What the headers of a model tell, and how it is loaded."""

    source: Source
    architecture: str
    config: ModelConfig | None
    """None: transformers runs it."""
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    parameters: int
    context: int | None
    """Longest sequence, in tokens, where the configuration names it."""
    stored: Mapping[str, int]
    """Bytes of weights on disk, by type of tensor."""
    storage: Storage
    notes: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """What the matrices are in memory: one format or several, that of most bytes first."""
        sizes = self.storage.matrices
        return ", ".join(sorted(sizes, key=lambda format: -sizes[format]))

    @property
    def weight_memory(self) -> int:
        """Bytes of weights in memory."""
        return sum(self.storage.matrices.values()) + self.storage.vectors

    @property
    def cache_memory(self) -> int | None:
        """Bytes of keys and values for one token, where we know how they are kept."""
        if self.config is None:
            return None
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * DTYPES["float32"]


def load(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    activations: str = "auto",
    kv_cache_dtype: str = "auto",
    compile: bool = False,
) -> Checkpoint:
    """Load a model by path, built-in name or hub id, fetching it on first use.

    `dtype` "auto" keeps each matrix in the format it is stored in, as far as the device can multiply it: a CPU can for
    float32, bfloat16, float16 and the GGUF blocks Q8_0, Q4_0 and Q4_1. Other blocks, and all of them on other devices,
    become float32, which holds them exactly. Any other `dtype` converts every matrix to it.
    `device` "auto" takes a GPU where there is one (Apple's is not tested).
    `quantize` "q8_0" turns every matrix that is not in blocks yet into Q8_0 blocks, on a CPU. That approximates the
    checkpoint; "lossless" is then against the model as loaded.
    `activations` "int8" rounds what matrices in blocks multiply to 8 bits, 32 numbers with a scale, on a CPU. That is
    faster, and another target, as exactly kept.
    `kv_cache_dtype` "float16" halves the memory of keys and values, where the CPU kernels run the model.
    `compile` lets torch compile what is the same in every pass, with CUDA graphs; for CUDA, and not tested yet.

    Where the CPU kernels cannot be compiled, a CPU is as other devices are, and the notes say so.
    """
    _check(dtype, quantize)
    source = resolve(name)
    import torch

    import paceline.kernels as kernels

    place = _device(device)
    if quantize and place.type != "cpu":
        raise ValueError(
            f"quantize={quantize!r} is for CPUs and the device is {place}: give device='cpu', or drop quantize."
        )
    slow = kernels.notice() if place.type == "cpu" else None
    if quantize and slow:
        raise ValueError(f"quantize={quantize!r} needs the CPU kernels. {slow} Mend that, or drop quantize.")
    if kv_cache_dtype not in ("auto", "float32", "float16"):
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} is unknown: choose auto, float32 or float16.")
    if activations not in ("auto", "int8"):
        raise ValueError(f"activations {activations!r} is unknown: choose auto or int8.")
    if activations == "int8" and place.type != "cpu":
        raise ValueError(f"activations='int8' is for CPUs and the device is {place}: give device='cpu', or drop it.")
    if activations == "int8" and slow:
        raise ValueError(f"activations='int8' needs the CPU kernels. {slow} Mend that, or drop activations.")
    if compile and place.type != "cuda":
        raise ValueError(f"compile=True is for CUDA and the device is {place}: drop it.")
    wish = Wish(dtype=dtype, quantize=quantize, packed=place.type == "cpu" and not slow)
    if source.kind == "gguf":
        file = gguf_file.read_gguf(source.path)
        facts = _gguf_facts(source, file, wish)
    else:
        facts = _folder_facts(source, wish)
    model: LanguageModel
    if facts.config is None:
        if kv_cache_dtype != "auto" or activations != "auto" or compile:
            raise ValueError(
                f"{name} is run by transformers, in its own way: drop kv_cache_dtype, activations and compile."
            )
        model = _transformers_model(source.path, getattr(torch, facts.dtype), place)
    else:
        from paceline.models.decoder import Decoder

        tensors: Iterator[tuple[str, torch.Tensor | Quantized]]
        if source.kind == "gguf":
            tensors = gguf_file.read_tensors(file, facts.config)
        else:
            tensors = folder.read_tensors(source.path)
        if quantize:
            tensors = _quantized(tensors)
        decoder = model = Decoder.from_tensors(
            facts.config,
            tensors,
            dtype=None if wish.packed and dtype == "auto" else getattr(torch, facts.dtype),
            device=place,
            packed=wish.packed,
        )
        if kv_cache_dtype != "auto":
            decoder.set_cache_dtype(getattr(torch, kv_cache_dtype))
        if compile:
            decoder.compile_layers()
    notes = [*facts.notes]
    if slow and facts.config is not None:
        notes.append(slow)
    if activations == "int8":
        rounding = decoder.set_int8_activations()
        notes.append(
            f"What {rounding} matrices in blocks multiply is rounded to int8; 'lossless' means: against this."
            if rounding
            else "No matrix is in blocks here, so activations='int8' changes nothing: quantize='q8_0' makes blocks."
        )
    if kv_cache_dtype == "float16":
        notes.append("Keys and values are rounded to float16; 'lossless' means: against this.")
    return Checkpoint(model=model, tokenizer=facts.tokenizer, eos_ids=facts.eos_ids, source=source, notes=tuple(notes))


def inspect(name: str, *, dtype: str = "auto", quantize: str | None = None) -> Inspection:
    """Everything but the weights, which are not read: what `load` would make of them on a CPU. Fetches the model if it
    is not on this machine yet."""
    _check(dtype, quantize)
    source = resolve(name)
    wish = Wish(dtype=dtype, quantize=quantize, packed=True)
    if source.kind == "gguf":
        return _gguf_facts(source, gguf_file.read_gguf(source.path), wish)
    return _folder_facts(source, wish)


def _check(dtype: str, quantize: str | None) -> None:
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype {dtype!r} is unknown: choose auto, {', '.join(DTYPES)}.")
    if quantize not in (None, "q8_0"):
        raise ValueError(f"quantize {quantize!r} is unknown: choose q8_0, or leave it out to keep what is stored.")
    if quantize and dtype != "auto":
        raise ValueError(
            f"quantize={quantize!r} and dtype={dtype!r} ask for two formats of the same matrices: leave dtype at auto,"
            " or drop quantize."
        )


def _device(device: str) -> torch.device:
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not to be had here: {error}. Choose auto, cpu, cuda or mps.") from error
    return place


def _gguf_facts(source: Source, file: GgufFile, wish: Wish) -> Inspection:
    config, tokenizer = gguf_file.read_config(file), Tokenizer.from_gguf(file.metadata)
    names = PLAIN | BLOCKS
    matrices = [
        Matrix(names.get(tensor.type, tensor.type.name), tensor.shape)
        for tensor in file.tensors.values()
        if len(tensor.shape) > 1
    ]
    storage, notes = wish.storage(matrices, config.num_parameters), []
    if keys := gguf_file.ignored_keys(file):
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        notes.append(
            f"Metadata that Paceline does not know and left alone: {', '.join(key[:60] for key in keys[:5])}{more}."
        )
    return Inspection(
        source=source,
        architecture=config.architecture,
        config=config,
        tokenizer=tokenizer,
        eos_ids=eos_ids(tokenizer, {}, {}),
        parameters=config.num_parameters,
        context=config.context,
        stored=file.sizes,
        storage=storage,
        notes=(*storage.notes, *notes, *tokenizer.notes),
    )


def _folder_facts(source: Source, wish: Wish) -> Inspection:
    config, tokenizer = folder.read_config(source.path), Tokenizer.from_folder(source.path)
    values, generation = folder.read_json(source.path / "config.json"), source.path / "generation_config.json"
    nested = values.get("text_config")
    language = {**nested, **values} if isinstance(nested, dict) else values
    tensors = _safetensors(source.path)
    sizes: Counter[str] = Counter()
    for _, kind, shape in tensors:
        bits = re.search(r"\d+", kind)
        sizes[kind] += math.prod(shape) * (int(bits.group()) if bits else 8) // 8
    if config is None:
        if wish.quantize:
            raise ValueError(
                f"{source.path} is run by transformers, as our own decoder has no part for this architecture or for an"
                " option of it; only our own quantizes: drop quantize."
            )
        parameters = sum(math.prod(shape) for _, _, shape in tensors)
        stored = exact(FLOATS[kind] for _, kind, shape in tensors if kind in FLOATS and len(shape) > 1)
        dtype = stored if wish.dtype == "auto" else wish.dtype
        notes = [] if dtype == stored else [f"Weights converted from {stored} to {dtype}."]
        notes.append("Run by transformers: our own decoder has no part for this architecture, or for an option of it.")
        storage = Storage(matrices={dtype: parameters * DTYPES[dtype]}, vectors=0, notes=notes)
        context = language.get("max_position_embeddings")
    else:
        parameters, context = config.num_parameters, config.context
        matrices = [
            Matrix(FLOATS[kind], shape)
            for name, kind, shape in tensors
            if kind in FLOATS and len(shape) > 1 and not folder.is_beside(name, config)
        ]
        storage = wish.storage(matrices, parameters)
    return Inspection(
        source=source,
        architecture=str(values.get("model_type")) if config is None else config.architecture,
        config=config,
        tokenizer=tokenizer,
        eos_ids=eos_ids(tokenizer, language, folder.read_json(generation) if generation.is_file() else {}),
        parameters=parameters,
        context=context if isinstance(context, int) else None,
        stored=sizes,
        storage=storage,
        notes=(*storage.notes, *tokenizer.notes),
    )


def _safetensors(path: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of every tensor in the folder, from the headers of its shards."""
    from safetensors import SafetensorError, safe_open

    tensors = []
    for shard in folder.shards_of(path):
        try:
            with safe_open(shard, framework="np") as file:
                parts = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
                tensors += [(name, str(part.get_dtype()), tuple(part.get_shape())) for name, part in parts]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{shard} is no sound safetensors file ({error}): fetch it again.") from error
    return tensors


def _quantized(
    tensors: Iterable[tuple[str, torch.Tensor | Quantized]],
) -> Iterator[tuple[str, torch.Tensor | Quantized]]:
    """The tensors with every matrix that can be in Q8_0, unless it is in blocks already."""
    from paceline.models.quant import BLOCK, Quantized, quantize

    for name, tensor in tensors:
        if not isinstance(tensor, Quantized) and tensor.dim() == 2 and tensor.shape[1] % BLOCK == 0:
            yield name, quantize(tensor)
        else:
            yield name, tensor


def _transformers_model(path: Path, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from paceline.models.adapter import TransformersModel

    values = folder.read_json(path / "config.json")
    if values.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        own = (
            "brings code of its own, which Paceline never runs" if "auto_map" in values else "has nothing else to go by"
        )
        raise ValueError(
            f"{path}: neither Paceline nor the installed transformers has a causal language model of type"
            f" {values.get('model_type')!r}, and the checkpoint {own}. A newer transformers may know it; a model you"
            " have loaded yourself can be passed to LLM(model=..., tokenizer=...)."
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, use_safetensors=True, local_files_only=True
        )
    except (OSError, ImportError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(f"transformers could not load {path}: {error}") from error
    return TransformersModel(model.to(device).eval())
