"""Folders of drafts that were trained for a target: what is in them, and how they are read and written.

`config.json` names the kind and the target's sizes, `model.safetensors` holds what was trained, in bfloat16 or
float32, and the draft vocabulary. Embedding and head are the target's own and are not stored. The folder is hostile
input: every name, shape and id is compared with what the target says it must be before a tensor is used.
"""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

import paceline.kernels as kernels
from paceline.checkpoints.folder import DRAFT, read_json
from paceline.checkpoints.resolve import BUILTINS
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Embedding, Linear, pack
from paceline.models.feature import Eagle1, Eagle3, FeatureDraft, plain_layer
from paceline.models.heads import Heads

SIZES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "num_layers", "vocab_size")
"""Of the target. A draft made for other sizes cannot read its states or stand for its layers."""
MOST_HEADS = 16
SHIPPED = Path(__file__).parents[1] / "drafts"
"""The drafts that come with built-in models, each in a folder of its own name."""
Module = FeatureDraft | Heads | Decoder
"""What a draft is, by its kind."""


@dataclass(frozen=True, kw_only=True)
class TrainedDraft:
    """A draft ready to run beside its target."""

    kind: str
    module: Module
    ids: npt.NDArray[np.int64] | None
    """The draft vocabulary, ascending ids of the target's tokens; None: all of them."""
    shape: Mapping[str, Any]
    """What its kind is built from."""


def is_draft(path: Path) -> bool:
    """Whether this is such a folder."""
    try:
        return read_json(path / "config.json").get("model_type") == DRAFT
    except (OSError, ValueError):
        return False


def find_draft(name: str | Path) -> Path | None:
    """The folder of a trained draft: a path, or the name of one that comes with a built-in model; None for neither.

    Raises ValueError for what is nearly such a name.
    """
    known = {folder.name: folder for folder in SHIPPED.glob("*")}
    folder = Path(name) if os.path.exists(name) else known.get(str(name), Path(name))
    if is_draft(folder):
        return folder
    if "/" not in str(name) and not os.path.exists(name):
        near = difflib.get_close_matches(str(name).lower(), [*BUILTINS, *known], n=1)
        if near and near[0] in known:
            raise ValueError(f"unknown draft {str(name)!r}. Did you mean {near[0]!r}?")
    return None


def shipped_draft(model: str | Path | None) -> str | None:
    """The name of the draft that comes with the built-in model of this name; None for all others."""
    if model is None or os.path.exists(model):  # a file or folder of that name goes ahead
        return None
    made_for = {read_json(folder / "config.json")["target"]["name"]: folder.name for folder in SHIPPED.glob("*")}
    return made_for.get(str(model))


# The kinds


def _feature(made: type[Eagle1] | type[Eagle3]) -> Callable[[ModelConfig, Mapping[str, Any]], Module]:
    def build(target: ModelConfig, shape: Mapping[str, Any]) -> Module:
        features = _numbers(shape, "features", least=0, most=target.num_layers)
        if made is Eagle1 and len(features) != 1:
            raise ValueError(f"it has {len(features)} features, an EAGLE-1 draft has 1")
        return made(plain_layer(target), features)

    return build


def _heads(target: ModelConfig, shape: Mapping[str, Any]) -> Module:
    (count,) = _numbers({"heads": [shape.get("heads")]}, "heads", least=1, most=MOST_HEADS)
    return Heads(target, count)


def _shallow(target: ModelConfig, shape: Mapping[str, Any]) -> Module:
    layers = _numbers(shape, "layers", least=0, most=target.num_layers - 1)
    return Decoder(replace(target, layers=tuple(target.layers[index] for index in layers), tied=True))


KINDS: dict[str, Callable[[ModelConfig, Mapping[str, Any]], Module]] = {
    "eagle1": _feature(Eagle1),
    "eagle3": _feature(Eagle3),
    "heads": _heads,
    "shallow": _shallow,
}


def _numbers(shape: Mapping[str, Any], name: str, *, least: int, most: int) -> list[int]:
    found = shape.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= 1024 or not all(isinstance(n, int) for n in found):
        raise ValueError(f"its {name} are {found!r}, they must be a list of integers")
    if not all(least <= n <= most for n in found):
        raise ValueError(f"its {name} are {found}, they must be from {least} to {most}")
    return found


def build(kind: str, target: ModelConfig, shape: Mapping[str, Any]) -> Module:
    """The module of a draft, with torch's own initial numbers. `shape`: `features` (eagle1, eagle3), `heads` (how many)
    or `layers` (shallow: which of the target's). ValueError for a shape that the target cannot have."""
    if kind not in KINDS:
        raise ValueError(f"its kind is {kind!r}, it must be one of {', '.join(KINDS)}")
    return KINDS[kind](target, shape)


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What is stored of a draft: everything but the target's embedding and head, which a shallow draft shares."""
    return {
        name: tensor for name, tensor in module.state_dict().items() if name not in ("embedding.weight", "head.weight")
    }


def attach(module: Module, embedding: Embedding, head: Linear | None) -> None:
    """Give a draft the embedding of its target and a head over the draft vocabulary; None: that of a tied target."""
    if isinstance(module, FeatureDraft):
        module.attach(embedding, head)
    elif isinstance(module, Heads):
        module.attach(head or embedding.head)
    else:
        module.embedding, module.head = embedding, head


def _head(target: Decoder, ids: npt.NDArray[np.int64] | None, *, packed: bool) -> Linear | None:
    """The target's own head, or a new one of its rows for these tokens, in Q8_0 blocks if `packed`."""
    if ids is None:
        return target.head
    rows_DH = target.head_rows(torch.as_tensor(ids, device=target.device))
    head = Linear(rows_DH.shape[1], rows_DH.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rows_DH.to(target.dtype), requires_grad=False)
    if packed:
        pack(nn.ModuleList([head]))
    return head


# Reading and writing


def load_draft(path: Path, target: Decoder) -> TrainedDraft:
    """A draft for `target`, on its device: in Q8_0 blocks where the CPU kernels run, in the target's type elsewhere.

    Raises ValueError, naming the file, where it is damaged or was made for another target.
    """
    with _naming(path):
        module, values = _described(path, target.config)
        tensors, ids = _read(path / "model.safetensors", module, values.get("draft_vocab_size"), target.vocab_size)
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        norm = leaf == "weight" and tensor.dim() == 1
        setattr(
            module.get_submodule(owner),
            leaf,
            nn.Parameter(tensor.to(target.device, torch.float32 if norm else target.dtype), requires_grad=False),
        )
    packed = target.embedding.packed is not None and kernels.available()
    if packed:
        pack(module)
    attach(module, target.embedding, _head(target, ids, packed=packed))
    return TrainedDraft(kind=str(values["kind"]), module=module.eval(), ids=ids, shape=_shape(values))


def read_draft(
    path: Path, target: Decoder, kind: str
) -> tuple[dict[str, torch.Tensor], npt.NDArray[np.int64] | None, dict[str, Any]]:
    """What is in the folder of a draft of this kind: its tensors, its vocabulary, its shape (as `build` takes it)."""
    with _naming(path):
        module, values = _described(path, target.config)
        if values["kind"] != kind:
            raise ValueError(f"its kind is {values['kind']}, wanted is {kind}")
        tensors, ids = _read(path / "model.safetensors", module, values.get("draft_vocab_size"), target.vocab_size)
    return tensors, ids, _shape(values)


def describe_draft(path: Path, target: ModelConfig) -> tuple[str, int, int | None]:
    """(kind, parameters of its own, tokens it can propose or None for all) of a draft for this target; all of it is
    checked. ValueError as `load_draft`."""
    with _naming(path):
        module, values = _described(path, target)
        tensors, ids = _read(path / "model.safetensors", module, values.get("draft_vocab_size"), target.vocab_size)
    return str(values["kind"]), sum(tensor.numel() for tensor in tensors.values()), None if ids is None else len(ids)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} is no draft that can be used: {error}") from error


def _shape(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ("features", "heads", "layers")}


def _described(path: Path, target: ModelConfig) -> tuple[Module, dict[str, Any]]:
    """A draft as config.json tells it, without its tensors."""
    values = read_json(path / "config.json")
    sizes = values.get("target")
    sizes = sizes if isinstance(sizes, dict) else {}
    for name in SIZES:
        if sizes.get(name) != getattr(target, name):
            raise ValueError(
                f"it was made for a target whose {name} is {sizes.get(name)!r}, and this one's is "
                f"{getattr(target, name)}: train one for it with `paceline train`"
            )
    with torch.device("meta"):
        return build(str(values.get("kind")), target, values), values


def _read(
    file: Path, module: nn.Module, draft_vocab_size: object, vocab_size: int
) -> tuple[dict[str, torch.Tensor], npt.NDArray[np.int64] | None]:
    wanted = {name: tuple(tensor.shape) for name, tensor in own_tensors(module).items()}
    if draft_vocab_size is not None:
        if not isinstance(draft_vocab_size, int) or not 0 < draft_vocab_size <= vocab_size:
            raise ValueError(
                f"its draft_vocab_size is {draft_vocab_size!r}, it must be from 1 to {vocab_size}, or null"
            )
        wanted["draft_vocab"] = (draft_vocab_size,)
    try:
        with safe_open(file, framework="pt") as opened:
            found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            if found != wanted:
                name = min(found.keys() ^ wanted.keys() or {n for n in wanted if found[n] != wanted[n]})
                raise ValueError(
                    f"tensor {name} is {found.get(name, 'missing')}, it must be {wanted.get(name, 'absent')}"
                )
            tensors = {name: opened.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file.name} is no sound safetensors file ({error})") from error
    ids = None
    if draft_vocab_size is not None:
        ids = tensors.pop("draft_vocab").to(torch.int64).numpy()
        if ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
            raise ValueError(f"draft_vocab is not made of ascending token ids below {vocab_size}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"tensor {name} is not made of finite floating-point numbers")
    return tensors, ids


def save_draft(
    folder: Path,
    module: nn.Module,
    *,
    kind: str,
    shape: Mapping[str, Any],
    target: ModelConfig,
    target_name: str,
    ids: Sequence[int] | None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a draft, each of its two files whole or not at all. `shape` as for `build`.

    Between one file and the other a reader may find the numbers of the new draft under the description of the old one:
    the same, while one draft is trained, and refused, where its kind or its sizes changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous().clone() for name, tensor in own_tensors(module).items()
    }
    if ids is not None:
        tensors["draft_vocab"] = torch.tensor(sorted(ids))
    values = {
        "model_type": DRAFT,
        "kind": kind,
        **shape,
        "draft_vocab_size": None if ids is None else len(ids),
        "target": {"name": target_name, **{name: getattr(target, name) for name in SIZES}},
    }
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=folder) as beside:
        save_file(tensors, Path(beside) / "model.safetensors")
        (Path(beside) / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        # safetensors writes for the owner alone.
        (Path(beside) / "model.safetensors").chmod((Path(beside) / "config.json").stat().st_mode)
        for name in ("model.safetensors", "config.json"):
            os.replace(Path(beside) / name, folder / name)
