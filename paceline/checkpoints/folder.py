"""A Hugging Face folder: config.json and safetensors in, a `ModelConfig` and tensors with our names out.

The folder is hostile input. Nothing is unpickled or executed, every number is checked before it is used, shards stay
inside the folder, and all names and shapes are compared before the first tensor is read; what is wrong ends in a
ValueError that names the file. Knows nothing of tokenizers or generation settings. Importing this, and reading a
config, loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoints.names import (
    ACTIVATIONS,
    FAMILIES,
    HEADS,
    IGNORED,
    IGNORED_SUFFIX,
    MODULES,
    NEUTRAL,
    PREFIXES,
    TENSORS,
    WRAPPERS,
    Family,
)
from paceline.models.config import Layer, ModelConfig, Rope

if TYPE_CHECKING:
    import torch

JSON_LIMIT = 64 << 20
SIZE_LIMIT = 2**31 - 1
LAYER_LIMIT = 1024
DTYPES = {"F64", "F32", "F16", "BF16"}
KINDS = ("full_attention", "sliding_attention")
DRAFT = "paceline_draft"
"""The model_type of a draft that was trained for a target (drafts.py): no model by itself."""


class _NoDecoder(Exception):
    """The model may be sound, but it has a part that our decoder has not."""


def read_config(path: Path) -> ModelConfig | None:
    """None: an architecture, or an option of one, that our decoder has not (`models/adapter.py` may run it)."""
    try:
        return _ConfigReader(path).read()
    except _NoDecoder:
        return None


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the decoder once. All is checked before this returns; a tensor is read when asked for."""
    try:
        reader = _ConfigReader(path)
        config = reader.read()
    except _NoDecoder:
        raise ValueError(
            f"{path / 'config.json'} describes a model our decoder cannot run: load it otherwise"
        ) from None
    shards = shards_of(path)
    return _read(shards, _places(path, shards, reader.family, config), reader.family)


# config.json


class _ConfigReader:
    """One config.json over the defaults of its family. What is not as it must be is a ValueError naming the file."""

    def __init__(self, path: Path) -> None:
        self.file = path / "config.json"
        outer = read_json(self.file)
        name, classes = outer.get("model_type"), outer.get("architectures") or []
        if not isinstance(name, str) or not isinstance(classes, list):
            raise ValueError(f"{self.file} lacks a model_type, or its architectures are no list: is it a model's?")
        if name == DRAFT:
            raise ValueError(
                f"{path} holds a draft, which runs beside its target: give it as the draft, not as a model"
            )
        self.name = WRAPPERS.get(name, name)
        family = FAMILIES.get(self.name)
        if family is None or (classes and classes[0] not in family.classes):
            raise _NoDecoder
        self.family = family
        self.config = outer
        if name in WRAPPERS:
            self.config = outer.get("text_config") or {}
            if not isinstance(self.config, dict):
                raise ValueError(f"{self.file} has a text_config that is no object: is the file damaged?")
            if self.config.get("model_type", self.name) != self.name:
                raise _NoDecoder
            # What is said of the whole goes for its language model.
            self.config = self.config | {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}
        for key, allowed in NEUTRAL.items():
            if key not in family.defaults and any(c.get(key) not in allowed for c in (outer, self.config)):
                raise _NoDecoder
        self.values = {key: self.config.get(key, default) for key, default in family.defaults.items()}

    def read(self) -> ModelConfig:
        values, family = self.values, self.family
        hidden_size, num_heads = self.size("hidden_size"), self.size("num_attention_heads")
        if values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = num_heads
        if values["head_dim"] is None:
            values["head_dim"] = hidden_size // num_heads
        activation = ACTIVATIONS.get(str(values.get("hidden_act", values.get("hidden_activation"))))
        if activation is None:
            raise _NoDecoder
        ropes = self.ropes()
        bias = self.flag("attention_bias")
        query_scalar = self.optional(values, "query_pre_attn_scalar")
        return ModelConfig(
            architecture=self.name.removesuffix("_text"),
            vocab_size=self.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.size("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=self.size("num_key_value_heads"),
            head_dim=self.size("head_dim"),
            layers=self.layers(ropes),
            context=max(self.reach(rope) for rope in ropes.values()),
            norm_eps=self.number(values, "rms_norm_eps"),
            activation=activation,
            tied=self.flag("tie_word_embeddings"),
            qkv_bias=bias or family.qkv_bias,
            output_bias=bias,
            mlp_bias=self.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            post_norms="attention_post_norm" in family.norms.values(),
            query_scale=None if query_scalar is None else query_scalar**-0.5,
            embedding_scale=math.sqrt(hidden_size) if family.scaled_embedding else 1.0,
            attention_softcap=self.optional(values, "attn_logit_softcapping"),
            logit_softcap=self.optional(values, "final_logit_softcapping"),
        )

    def layers(self, ropes: Mapping[str, Rope]) -> tuple[Layer, ...]:
        values = self.values
        count = self.size("num_hidden_layers", limit=LAYER_LIMIT)
        if not self.flag("use_sliding_window", default=True):
            values["sliding_window"] = None
        window = self.size("sliding_window") if values.get("sliding_window") is not None else None
        for key in ("no_rope_layer_interval", "sliding_window_pattern"):
            if key in values:
                self.size(key)
        if "max_window_layers" in values:
            self.size("max_window_layers", least=0)
        turned = [True] * count
        if "no_rope_layers" in values:
            every = values["no_rope_layer_interval"]
            if values["no_rope_layers"] is None:
                values["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in range(count)]
            turned = [bool(flag) for flag in self.items("no_rope_layers", values, count)]
        kinds = [KINDS[self.family.slides(values, layer)] for layer in range(count)]
        if self.config.get("layer_types") is not None:
            given = self.items("layer_types", self.config, count)
            # A family that does not read the key is run by transformers as if it were not there.
            if any(kind not in KINDS for kind in given) or ("layer_types" not in values and given != kinds):
                raise _NoDecoder
            kinds = given
        if window is None and "sliding_attention" in kinds:
            raise _NoDecoder
        return tuple(
            Layer(window=window if kind == "sliding_attention" else None, rope=ropes[kind] if rope else None)
            for kind, rope in zip(kinds, turned, strict=True)
        )

    def ropes(self) -> dict[str, Rope]:
        """By kind of layer. transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling."""
        new, old = self.mapping(self.config, "rope_parameters"), self.mapping(self.config, "rope_scaling")
        theta = self.number(self.values, "rope_theta")
        if self.family.local_theta is None:
            rope = self.rope(old or new, theta)
            return dict.fromkeys(KINDS, rope)
        if not new.keys() <= set(KINDS):
            raise _NoDecoder
        local = self.config.get("rope_local_base_freq", self.family.local_theta)
        return {
            "full_attention": self.rope(self.mapping(new, "full_attention") | old, theta),
            "sliding_attention": self.rope(self.mapping(new, "sliding_attention"), local),
        }

    def rope(self, given: Mapping[str, Any], theta: Any) -> Rope:
        given = {"rope_theta": theta} | {key: value for key, value in given.items() if value is not None}
        kind = given.get("rope_type", given.get("type", "default"))
        if given.get("partial_rotary_factor", 1.0) != 1.0 or any(key in given for key in KINDS):
            raise _NoDecoder
        base = self.number(given, "rope_theta", least=1.0)
        context = self.size("max_position_embeddings")
        if kind == "default":
            return Rope(theta=base)
        if kind == "linear":
            return Rope(theta=base, kind="linear", factor=self.number(given, "factor"))
        if kind == "dynamic":
            factor = self.number(given, "factor", least=1.0)
            return Rope(theta=base, kind="dynamic", factor=factor, original_context=context)
        outer = self.config.get("original_max_position_embeddings")
        original = given.get("original_max_position_embeddings", context) if outer is None else outer
        self.check_size("original_max_position_embeddings", original)
        if kind == "llama3":
            low, high = self.number(given, "low_freq_factor"), self.number(given, "high_freq_factor")
            if high <= low:
                raise self.error("high_freq_factor", high, f"a number above low_freq_factor ({low})")
            return Rope(
                theta=base,
                kind="llama3",
                factor=self.number(given, "factor"),
                original_context=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        if kind == "yarn":
            return Rope(
                theta=base,
                kind="yarn",
                factor=self.number({"factor": context / original} | given, "factor"),
                original_context=original,
                attention_factor=self.optional(given, "attention_factor"),
                mscale=self.optional(given, "mscale"),
                mscale_all_dim=self.optional(given, "mscale_all_dim"),
                beta_fast=self.optional(given, "beta_fast") or 32.0,
                beta_slow=self.optional(given, "beta_slow") or 1.0,
                truncate=given.get("truncate", True) is not False,
            )
        raise _NoDecoder

    def reach(self, rope: Rope) -> int:
        """Longest sequence: what the config says, or what its rope was scaled for where that is written elsewhere."""
        context = self.size("max_position_embeddings")
        if rope.kind in ("dynamic", "yarn") and rope.original_context is not None:
            context = max(context, int(rope.original_context * rope.factor))
        return min(context, SIZE_LIMIT)

    # The checks

    def error(self, key: str, value: Any, wanted: str) -> ValueError:
        return ValueError(
            f"{self.file} has {key} = {str(value)[:80]!s}, which must be {wanted}: the file is damaged, or its "
            "download was cut short"
        )

    def check_size(self, key: str, value: Any, least: int = 1, limit: int = SIZE_LIMIT) -> int:
        if type(value) is not int or not least <= value <= limit:
            raise self.error(key, value, f"an integer from {least} to {limit}")
        return value

    def size(self, key: str, least: int = 1, limit: int = SIZE_LIMIT) -> int:
        return self.check_size(key, self.values[key], least, limit)

    def number(self, values: Mapping[str, Any], key: str, least: float = 0.0) -> float:
        """A finite number: positive, or (`least` > 0) not below it."""
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30 or value < least:
            raise self.error(key, value, f"a number of at least {least}" if least else "a positive number")
        return float(value)

    def optional(self, values: Mapping[str, Any], key: str) -> float | None:
        return None if values.get(key) is None else self.number(values, key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def items(self, key: str, values: Mapping[str, Any], count: int) -> list[Any]:
        value = values[key]
        if not isinstance(value, list) or len(value) < count:
            raise self.error(key, value, f"a list with an entry for each of {count} layers")
        return value[:count]

    def mapping(self, values: Mapping[str, Any], key: str) -> dict[str, Any]:
        value = values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, value, "an object")
        return value or {}


def read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} does not exist: is {file.parent} the folder of a Hugging Face model?")
    if file.stat().st_size > JSON_LIMIT:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, more than the {JSON_LIMIT} such a file may have")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}): the file is damaged, fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object: the file is damaged, fetch it again")
    return value


# Weights


def shards_of(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists() or single.is_symlink():
        return [_inside(path, single.name, "the folder")]
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files: it is damaged, fetch it again")
        return [_inside(path, name, str(index)) for name in sorted(set(names.values()))]
    if any(path.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{path} has only pytorch_model.bin weights, which are pickled Python that could run anything on loading: "
            "get the model's safetensors, or convert it where you trust it (load with transformers, save_pretrained)"
        )
    raise ValueError(f"{path} has neither model.safetensors nor model.safetensors.index.json: no weights to read")


def _inside(path: Path, name: str, named_by: str) -> Path:
    """The file of that name in the folder itself. Links may only lead to the blobs of the hub cache it belongs to."""
    if Path(name).name != name or "\\" in name or not name.isprintable() or not name.endswith(".safetensors"):
        raise ValueError(
            f"{named_by} names the shard {name!r}: shards are .safetensors files beside it, without folders"
        )
    folder, file = path.resolve(), (path / name).resolve()
    homes = {folder}
    if folder.parent.name == "snapshots":
        homes.add(folder.parent.parent / "blobs")
    if file.parent not in homes:
        raise ValueError(f"{path / name} is a link to {file}, outside the model's folder: put the file itself there")
    if not file.is_file():
        raise ValueError(f"{path / name}, named by {named_by}, does not exist: fetch the model again, completely")
    return path / name


def _places(path: Path, shards: list[Path], family: Family, config: ModelConfig) -> dict[tuple[Path, str], str]:
    """(shard, name there) -> our name, for exactly the parameters of the decoder, all of the right shape."""
    import torch
    from safetensors import SafetensorError, safe_open

    from paceline.models.decoder import Decoder

    try:
        with torch.device("meta"):
            missing = {name: list(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error
    places = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                headers = {name: (part.get_shape(), part.get_dtype()) for name, part in headers.items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{shard} is no sound safetensors file ({error}): fetch it again") from error
        for theirs, (shape, dtype) in headers.items():
            if is_beside(theirs, config):
                continue
            name = _our_name(theirs, family)
            wanted = missing.pop(name, None) if name is not None else None
            if name is None or wanted is None:
                raise ValueError(
                    f"{shard} holds {theirs}, twice or without a place in the {config.architecture} model that "
                    "config.json describes: do the two belong together?"
                )
            if shape != wanted:
                raise ValueError(f"{shard} holds {theirs} with shape {shape}, config.json needs {wanted}")
            if dtype not in DTYPES:
                raise ValueError(
                    f"{shard} holds {theirs} as {dtype}; weights must be float64, float32, float16 or bfloat16: get "
                    "an unquantized copy of the model, or a GGUF file"
                )
            places[shard, theirs] = name
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} tensors of the {config.architecture} model that config.json describes, "
            f"{next(iter(missing))} (as we call it) first: fetch it again, completely"
        )
    return places


def is_beside(theirs: str, config: ModelConfig) -> bool:
    """Is this a tensor that a folder may hold and the decoder has no use for?"""
    return theirs.startswith(IGNORED) or theirs.endswith(IGNORED_SUFFIX) or (config.tied and theirs in HEADS)


def _our_name(theirs: str, family: Family) -> str | None:
    if theirs in HEADS:
        return "head.weight"
    prefix = next((prefix for prefix in PREFIXES if theirs.startswith(prefix)), None)
    if prefix is None:
        return None
    rest = theirs.removeprefix(prefix)
    if rest in TENSORS:
        return TENSORS[rest]
    folder, _, inner = rest.partition(".")
    layer, _, inner = inner.partition(".")
    module, _, leaf = inner.rpartition(".")
    ours = MODULES.get(module) or family.norms.get(module)
    return f"layers.{layer}.{ours}.{leaf}" if folder == "layers" and ours is not None else None


def _read(
    shards: list[Path], places: Mapping[tuple[Path, str], str], family: Family
) -> Iterator[tuple[str, torch.Tensor]]:
    import torch
    from safetensors import safe_open

    for shard in shards:
        for (holder, theirs), name in places.items():
            if holder != shard:
                continue
            # Opened for each tensor anew, because what was read of a mapped file counts as memory until it is closed.
            with safe_open(shard, framework="pt") as file:
                stored = file.get_tensor(theirs)
                # A copy of its own: the file maps tensors at odd addresses, where products are slower and round
                # differently, and pulls the rug away when it is replaced.
                tensor = stored.float() if stored.dtype == torch.float64 else stored.clone()
                del stored
            is_norm = name.endswith("norm.weight")
            yield name, tensor.float() + 1.0 if is_norm and family.norms_from_one else tensor
