"""GGUF files: a header that is believed only where it is checked, a configuration, and tensors one at a time.

The header parser is our own because the file is hostile input: every count and size is held against what the file
really holds before anything is allocated or looped over, so a bad file ends in a ValueError. Matrices of the block
formats that `models/quant.py` knows stay as the file has them; the others are the `gguf` package's business, which
dequantizes them, exactly, into float32. What the names mean is in `gguf_names.py`. Tensors are read one at a time and
never mapped, so that loading holds one copy of the weights.
"""

from __future__ import annotations

import math
import mmap
import reprlib
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from paceline.checkpoints.gguf_names import FAMILIES, KEYS, NEUTRAL, ROPE_FACTORS, Family, entries, sizes
from paceline.models.config import Layer, ModelConfig, Rope

if TYPE_CHECKING:
    import torch

    from paceline.models.quant import Quantized

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Far above any real file (a vocabulary of 262,144 tokens takes 6 MB and 0.8 million elements).
MAX_HEADER = 128 << 20
MAX_ELEMENTS = 1 << 22
MAX_RECORDS = 1 << 16
MAX_CONTEXT = 1 << 24
SLAB = 1 << 17
"""Elements dequantized at once: 0.5 MB, what a core's own cache holds."""

SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
PLAIN = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
"""Tensor types that are not quantized, and the torch type that holds them as they are."""
BLOCKS = {
    GGMLQuantizationType.Q8_0: "q8_0",
    GGMLQuantizationType.Q4_0: "q4_0",
    GGMLQuantizationType.Q4_1: "q4_1",
}
"""Tensor types whose blocks `models/quant.py` knows, and what it calls them."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it (GGUF writes the innermost first)."""
    type: GGMLQuantizationType
    offset: int
    """From the start of the file."""
    size: int
    """Bytes in the file."""


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    """Plain Python values: int, float, bool, str and lists of them."""
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def sizes(self) -> Counter[str]:
        """How many bytes the tensors of each type take."""
        total: Counter[str] = Counter()
        for tensor in self.tensors.values():
            total[tensor.type.name] += tensor.size
        return total


# The header


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header; no tensor is read. Raises ValueError where the file is not a sound GGUF file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    if path.stat().st_size < 24:
        raise ValueError(f"{path} is not a GGUF file: it is shorter than a header.")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        metadata, tensors = _Header(path, data).read()
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


class _Header:
    """A cursor over the file that raises instead of running past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self.file_size = len(data)
        self.end = min(self.file_size, MAX_HEADER)
        self.elements = 0

    def fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.path} is not a sound GGUF file: {problem} (at byte {self.at:,}).")

    def take(self, count: int) -> int:
        """Move past `count` bytes and return where they begin."""
        begin = self.at
        if count > self.end - begin:
            if self.end < self.file_size:
                self.fail(f"its header exceeds {MAX_HEADER:,} bytes")
            self.fail(f"{count:,} bytes are announced and {self.end - begin:,} are left: it is truncated or damaged")
        self.at = begin + count
        return begin

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        length = self.scalar("Q")
        begin = self.take(length)
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError as error:
            self.fail(f"a string is not UTF-8: {error.reason}")

    def kind(self) -> GGUFValueType:
        number = self.scalar("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"{number} is not a type of metadata")

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is GGUFValueType.ARRAY:
            return self.array()
        return self.scalar(SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.kind(), self.scalar("Q")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            self.fail(f"its arrays announce {self.elements:,} elements, over the limit of {MAX_ELEMENTS:,}")
        if kind is GGUFValueType.ARRAY:
            self.fail("an array holds arrays")
        if kind is GGUFValueType.STRING:
            return [self.text() for _ in range(count)]
        layout = struct.Struct(f"<{count}{SCALARS[kind]}")
        return list(layout.unpack_from(self.data, self.take(layout.size)))

    def count(self, what: str, smallest: int) -> int:
        """A number of records, each at least `smallest` bytes long."""
        count: int = self.scalar("Q")
        if count > MAX_RECORDS or count * smallest > self.end - self.at:
            self.fail(f"{count:,} {what} do not fit into it, or exceed the limit of {MAX_RECORDS:,}")
        return count

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self.data[self.take(4) : self.at] != b"GGUF":
            self.fail("it does not begin with 'GGUF'")
        version = self.scalar("I")
        if version & 0xFFFF == 0:
            self.fail("it is written for big-endian machines; convert it again for little-endian ones")
        if version not in (2, 3):
            self.fail(f"its version is {version}, and 2 and 3 are known; convert the model again")
        tensor_count = self.count("tensors", 32)
        key_count = self.count("metadata keys", 13)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.text()
            if key in metadata:
                self.fail(f"the key {_shown(key)} is there twice")
            metadata[key] = self.value(self.kind())
        alignment = metadata.get("general.alignment", 32)
        if not _is_number(alignment, int) or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {_shown(alignment)}, not a power of two up to 65,536")
        found: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int, int]] = {}
        for _ in range(tensor_count):
            name = self.text()
            if name in found:
                self.fail(f"the tensor {_shown(name)} is there twice")
            found[name] = self.tensor(name)
        start = -(-self.at // alignment) * alignment
        tensors = {
            name: GgufTensor(name=name, shape=shape, type=kind, offset=start + offset, size=size)
            for name, (shape, kind, offset, size) in found.items()
        }
        self.check_places(tensors, alignment)
        return metadata, tensors

    def tensor(self, name: str) -> tuple[tuple[int, ...], GGMLQuantizationType, int, int]:
        dimensions = self.scalar("I")
        if not 1 <= dimensions <= 4:
            self.fail(f"the tensor {_shown(name)} has {dimensions} dimensions, not 1 to 4")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        number, offset = self.scalar("I"), self.scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            self.fail(f"the tensor {_shown(name)} is of type {number}, which the installed gguf package does not know")
        block, block_size = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            self.fail(f"the tensor {_shown(name)} has shape {list(shape)}, whose rows are not blocks of {block}")
        return shape, kind, offset, math.prod(shape) // block * block_size

    def check_places(self, tensors: dict[str, GgufTensor], alignment: int) -> None:
        """Inside the file, aligned, and apart: so that all of them together are no larger than the file."""
        end = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset + tensor.size > self.file_size:
                self.fail(
                    f"the tensor {_shown(tensor.name)} ends at byte {tensor.offset + tensor.size:,} of"
                    f" {self.file_size:,}: it is truncated or damaged"
                )
            if tensor.offset % alignment:
                self.fail(f"the tensor {_shown(tensor.name)} is not aligned to {alignment} bytes")
            if tensor.offset < end:
                self.fail(f"the tensor {_shown(tensor.name)} lies over another")
            end = tensor.offset + tensor.size


_excerpt = reprlib.Repr()
_excerpt.maxstring = _excerpt.maxother = 100


def _shown(value: Any) -> str:
    """What a file says, for a message: it may be megabytes long."""
    return _excerpt.repr(value)


def _is_number(value: Any, kind: type) -> bool:
    """bool is an int to Python and not to us; an int is good where a float is asked for."""
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


# The configuration


def read_config(file: GgufFile) -> ModelConfig:
    """What the file holds, as far as its header tells; every tensor's name and shape is checked against it.

    Raises ValueError for an architecture, a key or a tensor that our decoder has no part for.
    """
    family, values = _family(file), _values(file)

    def need(key: str) -> Any:
        if key not in values:
            raise ValueError(f"{file.path} has no key {file.architecture}.{key}: it is damaged or holds no model.")
        return values[key]

    num_layers, hidden, heads = need("block_count"), need("embedding_length"), need("attention.head_count")
    kv_heads, context = values.get("attention.head_count_kv", heads), need("context_length")
    if "attention.key_length" not in values and hidden % heads:
        raise ValueError(f"{file.path}: embedding_length {hidden} is not a multiple of head_count {heads}.")
    head_dim = values.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, head_dim) != head_dim:
            raise ValueError(
                f"{file.path}: {key} is {values[key]} and a head has {head_dim}; only equal sizes are supported."
            )
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"{file.path}: {heads} heads, {kv_heads} of k and v, of size {head_dim} do not fit together.")
    if num_layers > len(file.tensors) or context > MAX_CONTEXT:
        raise ValueError(
            f"{file.path}: {num_layers:,} layers with a context of {context:,} tokens are not in this file (it has"
            f" {len(file.tensors):,} tensors; at most {MAX_CONTEXT:,} tokens are supported)."
        )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor token_embd.weight: it is damaged or holds no language model.")
    wide = num_layers == family.wide_query_layers
    config = ModelConfig(
        architecture=file.architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=_layers(file, family, values, num_layers, _rope(file, values, head_dim)),
        context=context,
        norm_eps=need("attention.layer_norm_rms_epsilon"),
        activation=family.activation,
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        query_scale=(hidden / heads) ** -0.5 if wide else None,
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else 1.0,
        attention_softcap=values.get("attn_logit_softcapping", family.attention_softcap),
        logit_softcap=values.get("final_logit_softcapping", family.logit_softcap),
    )
    _check_tensors(file, config)
    return config


def ignored_keys(file: GgufFile) -> list[str]:
    """Keys of the architecture that nothing here understands."""
    prefix = file.architecture + "."
    known = {prefix + key for key in (*KEYS, *NEUTRAL)}
    return [key for key in file.metadata if key.startswith(prefix) and key not in known]


def _family(file: GgufFile) -> Family:
    kind, shards = file.metadata.get("general.type", "model"), file.metadata.get("split.count", 1)
    if kind != "model":
        raise ValueError(f"{file.path} holds a part of a model ({_shown(kind)}), not a model.")
    if shards not in (0, 1):
        raise ValueError(
            f"{file.path} is one of {_shown(shards)} shards. Merge them first: `llama-gguf-split --merge FIRST OUTPUT`."
        )
    if file.architecture not in FAMILIES:
        raise ValueError(
            f"{file.path} is of architecture {_shown(file.architecture)}; supported GGUF architectures:"
            f" {', '.join(FAMILIES)}. The original Hugging Face folder of the model may load instead."
        )
    return FAMILIES[file.architecture]


def _values(file: GgufFile) -> dict[str, Any]:
    """The keys below "<architecture>.", each of the type that KEYS gives it."""
    prefix = file.architecture + "."
    values: dict[str, Any] = {}
    for name, value in file.metadata.items():
        key = name.removeprefix(prefix)
        if key == name:
            continue
        if key in NEUTRAL and value != NEUTRAL[key]:
            raise ValueError(f"{file.path}: {name} is {_shown(value)}, which our decoder has no part for.")
        if key not in KEYS:
            continue
        kind = KEYS[key]
        if kind is int and isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # one for each layer, all alike
        if kind in (int, float):
            if value == 0:
                continue  # how some converters write "none"
            if not _is_number(value, kind) or not math.isfinite(value) or value <= 0:
                shown = "one for each layer" if isinstance(value, list) else _shown(value)
                raise ValueError(f"{file.path}: {name} is {shown}, not one positive number.")
        elif not isinstance(value, kind):
            raise ValueError(f"{file.path}: {name} is {_shown(value)}, not {kind.__name__}.")
        values[key] = value
    return values


def _rope(file: GgufFile, values: dict[str, Any], head_dim: int) -> Rope:
    theta = float(values.get("rope.freq_base", 10_000.0))
    factor = float(values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0)))
    kind = values.get("rope.scaling.type", "linear")
    if theta <= 1.0:
        raise ValueError(f"{file.path}: {file.architecture}.rope.freq_base is {theta}; it must be above 1.")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{file.path}: rope scaling {_shown(kind)} is not supported; none, linear and yarn are.")
    scaled = kind != "none" and factor != 1.0
    if ROPE_FACTORS in file.tensors:
        if scaled:
            raise ValueError(
                f"{file.path} has both {ROPE_FACTORS} and rope scaling {kind!r}; one of them is supported."
            )
        return Rope(theta=theta, factors=_rope_factors(file, head_dim))
    if not scaled:
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    # The converter writes Hugging Face's attention_factor as yarn_attn_factor. attn_factor is llama.cpp's own and
    # multiplies YaRN's usual one.
    usual = 1.0 + 0.1 * math.log(max(factor, 1.0))
    attention_factor = values.get("rope.scaling.yarn_attn_factor", usual * values.get("rope.scaling.attn_factor", 1.0))
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=values.get("rope.scaling.original_context_length", values["context_length"]),
        attention_factor=float(attention_factor),
        beta_fast=float(values.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(values.get("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _rope_factors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.type is not GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise ValueError(
            f"{file.path}: {ROPE_FACTORS} is {tensor.type.name} {list(tensor.shape)}, not F32 [{head_dim // 2}]."
        )
    with file.path.open("rb") as stream:
        factors = _raw(stream, tensor).view("<f4")
    if not np.all(np.isfinite(factors)) or np.any(factors <= 0):
        raise ValueError(f"{file.path}: {ROPE_FACTORS} holds a factor that is not a positive number.")
    return tuple(factors.tolist())


def _layers(file: GgufFile, family: Family, values: dict[str, Any], num_layers: int, rope: Rope) -> tuple[Layer, ...]:
    window = values.get("attention.sliding_window", family.window)
    pattern = values.get("attention.sliding_window_pattern", family.full_every)
    if window is None:
        local = [False] * num_layers
    elif isinstance(pattern, list) and len(pattern) == num_layers:
        local = [bool(value) for value in pattern]
    elif isinstance(pattern, int) and pattern >= 0:
        local = [not pattern or (i + 1) % pattern != 0 for i in range(num_layers)]
    else:
        raise ValueError(
            f"{file.path} has a sliding window of {window} tokens and"
            f" {file.architecture}.attention.sliding_window_pattern does not say which of the {num_layers} layers"
            " have it."
        )
    theta = values.get("rope.freq_base_swa", family.local_theta)
    local_rope = rope if theta is None else Rope(theta=float(theta))
    rotated = [not family.no_rope_every or (i + 1) % family.no_rope_every != 0 for i in range(num_layers)]
    return tuple(
        Layer(
            window=window if is_local else None,
            rope=(local_rope if is_local else rope) if is_rotated else None,
        )
        for is_local, is_rotated in zip(local, rotated, strict=True)
    )


def _check_tensors(file: GgufFile, config: ModelConfig) -> None:
    expected, size = entries(config), sizes(config)
    if missing := [name for name in expected if name not in file.tensors]:
        raise ValueError(f"{file.path} lacks {len(missing)} tensors, among them {missing[0]}: it is damaged.")
    if unknown := [name for name in file.tensors if name not in expected and name != ROPE_FACTORS]:
        raise ValueError(
            f"{file.path} has {len(unknown)} tensors that a {file.architecture} decoder has no place for, among them"
            f" {_shown(unknown[0])}."
        )
    for name, entry in expected.items():
        shape = tuple(size[dimension] for dimension in entry.shape)
        if file.tensors[name].shape != shape:
            raise ValueError(
                f"{file.path}: {name} has shape {list(file.tensors[name].shape)}, and the metadata ask for"
                f" {list(shape)}."
            )


# The tensors


def read_tensors(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor | Quantized]]:
    """Each tensor by our name: F32, F16, BF16 and matrices of BLOCKS as they are, others exactly as float32."""
    import torch

    from paceline.models.quant import Quantized

    interleaved = _family(file).interleaved
    expected = entries(config)
    with file.path.open("rb") as stream:
        for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.name not in expected:
                continue
            entry = expected[tensor.name]
            raw = _raw(stream, tensor)
            if interleaved and entry.rotated:
                pairs = raw.reshape(getattr(config, entry.rotated), config.head_dim // 2, 2, -1)
                raw = pairs.swapaxes(1, 2).ravel()  # rows of blocks: whatever their type, they move as they are
            if tensor.type in BLOCKS and len(tensor.shape) == 2:
                block, block_size = GGML_QUANT_SIZES[tensor.type]
                blocks = torch.from_numpy(raw).view(tensor.shape[0], tensor.shape[1] // block, block_size)
                yield entry.name, Quantized(format=BLOCKS[tensor.type], blocks=blocks)
            elif tensor.type in PLAIN:
                values = torch.from_numpy(raw).view(getattr(torch, PLAIN[tensor.type]))
                yield entry.name, values.view(tensor.shape)
            else:
                yield entry.name, torch.from_numpy(_dequantize(raw, tensor)).view(tensor.shape)


def _raw(stream: BinaryIO, tensor: GgufTensor) -> Bytes:
    stream.seek(tensor.offset)
    raw = np.fromfile(stream, np.uint8, tensor.size)
    if raw.size != tensor.size:
        raise ValueError(f"{tensor.name} ends early: the file was truncated after it was opened.")
    return raw


def _dequantize(raw: Bytes, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    block, block_size = GGML_QUANT_SIZES[tensor.type]
    out = np.empty(raw.size // block_size * block, np.float32)
    blocks = raw.reshape(-1, block_size)
    step = SLAB // block
    try:
        # Hostile or merely odd scales may overflow into infinities; that is the block's value, not an error.
        with np.errstate(all="ignore"):
            for begin in range(0, len(blocks), step):
                slab = blocks[begin : begin + step].reshape(1, -1)
                out[begin * block : (begin + step) * block] = dequantize(slab, tensor.type)[0]
    except NotImplementedError as error:
        raise ValueError(f"{tensor.name} is of type {tensor.type.name}: {error}.") from error
    return out
