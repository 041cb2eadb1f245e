"""Names in, models out: the weights in memory, their tokenizer, and what was done to them on the way.

Puts the parts of this package together; knows no format and no architecture itself. A folder whose architecture our
decoder has no part for runs through transformers' own class, never through code that the checkpoint brings along.
Importing this imports no torch, and `inspect` answers without it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoints import folder, gguf_file
from paceline.checkpoints.gguf_file import PLAIN, GgufFile
from paceline.checkpoints.resolve import Source, resolve
from paceline.checkpoints.tokenizer import Tokenizer, eos_ids
from paceline.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from paceline.models.interface import LanguageModel

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What a model can run in, with the bytes of one number."""
FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
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
    """What the headers of a model tell, and how it would be loaded."""

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
    dtype: str
    notes: tuple[str, ...]

    @property
    def weight_memory(self) -> int:
        """Bytes of weights in memory, as `dtype`."""
        return self.parameters * DTYPES[self.dtype]

    @property
    def cache_memory(self) -> int | None:
        """Bytes of keys and values for one token, where we know how they are kept."""
        if self.config is None:
            return None
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * DTYPES[self.dtype]


def load(name: str, *, dtype: str = "auto", device: str = "auto") -> Checkpoint:
    """Load a model by path, built-in name or hub id, fetching it on first use.

    `dtype` "auto" keeps what the weights are stored as; quantized tensors become float32, which holds them exactly.
    `device` "auto" takes a GPU where there is one (Apple's is not tested).
    """
    _check_dtype(dtype)
    source = resolve(name)
    import torch

    place = _device(device)
    if source.kind == "gguf":
        file = gguf_file.read_gguf(source.path)
        facts = _gguf_facts(source, file, dtype)
    else:
        facts = _folder_facts(source, dtype)
    model: LanguageModel
    if facts.config is None:
        model = _transformers_model(source.path, getattr(torch, facts.dtype), place)
    else:
        from paceline.models.decoder import Decoder

        if source.kind == "gguf":
            tensors = gguf_file.read_tensors(file, facts.config)
        else:
            tensors = folder.read_tensors(source.path)
        model = Decoder.from_tensors(facts.config, tensors, dtype=getattr(torch, facts.dtype), device=place)
    return Checkpoint(model=model, tokenizer=facts.tokenizer, eos_ids=facts.eos_ids, source=source, notes=facts.notes)


def inspect(name: str, *, dtype: str = "auto") -> Inspection:
    """Everything but the weights, which are not read. Fetches the model if it is not on this machine yet."""
    _check_dtype(dtype)
    source = resolve(name)
    if source.kind == "gguf":
        return _gguf_facts(source, gguf_file.read_gguf(source.path), dtype)
    return _folder_facts(source, dtype)


def _check_dtype(dtype: str) -> None:
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype {dtype!r} is unknown: choose auto, {', '.join(DTYPES)}.")


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


def _gguf_facts(source: Source, file: GgufFile, dtype: str) -> Inspection:
    config, tokenizer = gguf_file.read_config(file), Tokenizer.from_gguf(file.metadata)
    stored = _exact(PLAIN.get(tensor.type, "float32") for tensor in file.tensors.values() if len(tensor.shape) > 1)
    dtype = stored if dtype == "auto" else dtype
    notes = []
    if quantized := Counter(tensor.type.name for tensor in file.tensors.values() if tensor.type not in PLAIN):
        tensors = ", ".join(f"{count} {name}" for name, count in quantized.most_common())
        rounded = "" if dtype == "float32" else f", then rounded to {dtype}"
        notes.append(f"{tensors} tensors dequantized exactly to float32{rounded}.")
    elif dtype != stored:
        notes.append(f"Weights converted from {stored} to {dtype}.")
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
        dtype=dtype,
        notes=(*notes, *tokenizer.notes),
    )


def _folder_facts(source: Source, dtype: str) -> Inspection:
    config, tokenizer = folder.read_config(source.path), Tokenizer.from_folder(source.path)
    values, generation = folder.read_json(source.path / "config.json"), source.path / "generation_config.json"
    nested = values.get("text_config")
    language = {**nested, **values} if isinstance(nested, dict) else values
    tensors = _safetensors(source.path)
    sizes: Counter[str] = Counter()
    for kind, shape in tensors:
        bits = re.search(r"\d+", kind)
        sizes[kind] += math.prod(shape) * (int(bits.group()) if bits else 8) // 8
    stored = _exact(FLOATS[kind] for kind, shape in tensors if kind in FLOATS and len(shape) > 1)
    dtype = stored if dtype == "auto" else dtype
    notes = []
    if dtype != stored:
        notes.append(f"Weights converted from {stored} to {dtype}.")
    if config is None:
        notes.append("Run by transformers: our own decoder has no part for this architecture, or for an option of it.")
    context = language.get("max_position_embeddings") if config is None else config.context
    return Inspection(
        source=source,
        architecture=str(values.get("model_type")) if config is None else config.architecture,
        config=config,
        tokenizer=tokenizer,
        eos_ids=eos_ids(tokenizer, language, folder.read_json(generation) if generation.is_file() else {}),
        parameters=sum(math.prod(shape) for _, shape in tensors) if config is None else config.num_parameters,
        context=context if isinstance(context, int) else None,
        stored=sizes,
        dtype=dtype,
        notes=(*notes, *tokenizer.notes),
    )


def _safetensors(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor in the folder, from the headers of its shards."""
    from safetensors import SafetensorError, safe_open

    tensors = []
    for shard in folder.shards_of(path):
        try:
            with safe_open(shard, framework="np") as file:
                parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
                tensors += [(str(part.get_dtype()), tuple(part.get_shape())) for part in parts]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{shard} is no sound safetensors file ({error}): fetch it again.") from error
    return tensors


def _exact(types: Iterable[str]) -> str:
    """The type that holds the numbers of all these exactly."""
    kinds = set(types)
    return kinds.pop() if len(kinds) == 1 else "float32"


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
