"""Trained drafts as other engines load them: a draft folder and its target in, a checkpoint of theirs out.

Each format is one function that says what goes where; writing, reading back and comparing are the same for all. Layouts
were checked against vLLM 0.32.0 and SGLang 0.5.23. Matrices become bfloat16, what drafts are stored in, unless most of
the target is stored as float32 or float16, which they then become too.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoints import folder, gguf_file
from paceline.checkpoints.describe import describe
from paceline.checkpoints.drafts import find_draft, read_draft
from paceline.checkpoints.gguf_tokenizer import parts_of
from paceline.checkpoints.load import Checkpoint, inspect, load
from paceline.checkpoints.names import MODULES
from paceline.checkpoints.tokenizer import Tokenizer
from paceline.models.decoder import Decoder
from paceline.models.feature import plain_layer

MOST_STORED = {"F32": torch.float32, "F16": torch.float16}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
DRAFT_TOKENS = 4
"""What the printed commands ask for, where the draft does not say."""
ROWS = 8192
"""Rows of the target's embedding converted at once."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """A draft and its target: what every layout is made from."""

    own: Mapping[str, torch.Tensor]
    """The draft's tensors by our names, as they are stored."""
    ids_D: torch.Tensor | None
    """The draft vocabulary where it is smaller than the target's."""
    shape: Mapping[str, Any]
    """What the draft is built from."""
    checkpoint: Checkpoint
    target: Decoder
    dtype: torch.dtype

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def embedding(self) -> torch.Tensor:
        """[V, H]"""
        return self._rows(self.target.embedding, torch.arange(self.vocab_size))

    def head(self, ids_D: torch.Tensor | None = None) -> torch.Tensor:
        """[D, H] over these tokens, [V, H] over all."""
        return self._rows(self.target.head_rows, torch.arange(self.vocab_size) if ids_D is None else ids_D)

    def _rows(self, read: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([read(part).to(self.dtype) for part in ids.split(ROWS)])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A checkpoint of another engine."""

    config: Mapping[str, Any]
    own: Mapping[str, str]
    """Names there by our names: every tensor that the draft stores."""
    added: Mapping[str, torch.Tensor]
    """What the target gives, by names there."""
    whole: bool = False
    """A model by itself, as our own reader loads it."""
    norms_from_one: bool = False
    """It stores norm weights as their distance from 1."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    vllm: Mapping[str, Any]
    """Of its speculative config."""
    sglang: str | None
    """Its algorithm; None: it loads no such checkpoint."""
    notes: tuple[str, ...] = ()


# The formats


def _hf(given: Given) -> Layout:
    """A model by itself: its layers between the target's whole embedding and head, for transformers' `assistant_model`,
    vLLM's `draft_model` and SGLang's STANDALONE, which take a draft with exactly the target's vocabulary."""
    checkpoint, target = given.checkpoint, given.target
    layers = tuple(target.config.layers[index] for index in given.shape["layers"])
    described, family = describe(replace(target.config, layers=layers))
    modules = {ours: theirs for theirs, ours in (*MODULES.items(), *family.norms.items())}
    own = {"norm.weight": "model.norm.weight"}
    for name in given.own.keys() - own.keys():
        layer, index, rest = name.split(".", 2)
        module, _, leaf = rest.rpartition(".")
        own[name] = f"model.{layer}.{index}.{modules[module]}.{leaf}"
    added = {"model.embed_tokens.weight": given.embedding()}
    if not target.config.tied:
        added["lm_head.weight"] = given.head()
    ends = {"bos_token_id": checkpoint.tokenizer.bos_id, "eos_token_id": sorted(checkpoint.eos_ids)}
    return Layout(
        config={**described, **ends, "pad_token_id": None},  # some classes have a default, wherever that points
        own=own,
        added=added,
        whole=True,
        norms_from_one=family.norms_from_one,
        files={**_tokenizer_files(checkpoint), "generation_config.json": _json(ends)},
        vllm={"method": "draft_model", "num_speculative_tokens": DRAFT_TOKENS},
        sglang="STANDALONE",
        notes=_whole_vocabulary(given),
    )


def _eagle3(given: Given) -> Layout:
    """Both engines compute what `Eagle3` does: the embedding's norm, then the given state's, side by side into q, k and
    v; the residual is the given state before its norm, and so is what the next step is given.

    vLLM's index of a hidden state is ours (the input of that layer), SGLang's is that of the layer it comes out of.
    vLLM reads the one in the config itself first, SGLang only that under eagle_config. The last one is behind the last
    norm here and ahead of it there. `midlayer` is the name that every version of both knows.
    """
    features, count = given.shape["features"], given.target.config.num_layers
    if features != sorted(set(features)) or features[-1] >= count:
        raise ValueError(
            f"this draft reads the hidden states {features}, and vLLM has them in ascending order and from 0 to "
            f"{count - 1} (it has {count} ahead of the last norm): train one that reads others"
        )
    ids_D = given.ids_D
    added = {"embed_tokens.weight": given.embedding(), "lm_head.weight": given.head(ids_D)}
    if ids_D is not None:
        added["d2t"] = ids_D - torch.arange(len(ids_D))
        added["t2d"] = torch.zeros(given.vocab_size, dtype=torch.bool).index_fill(0, ids_D, True)
    return Layout(
        config={
            **_llama(given),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(added["lm_head.weight"]),
            "num_aux_hidden_states": len(features),
            "eagle_aux_hidden_state_layer_ids": features,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [index - 1 for index in features],
            },
        },
        own={
            "fc.weight": "fc.weight",
            "norm.weight": "norm.weight",
            "embedding_norm.weight": "midlayer.input_layernorm.weight",
            "given_norm.weight": "midlayer.hidden_norm.weight",
            **_block("midlayer"),
        },
        added=added,
        vllm={"method": "eagle3", "num_speculative_tokens": DRAFT_TOKENS},
        sglang="EAGLE3",
    )


def _eagle(given: Given) -> Layout:
    """vLLM computes what `Eagle1` does: fc (no bias) of the embedding, then the target's state behind its last norm;
    no norm ahead of attention and none at the end; the target's own head, over all tokens, reads the result, and the
    next step is given it. SGLang asks for another architecture and a bias of fc."""
    if given.shape["features"] != [given.target.config.num_layers]:
        raise ValueError(
            f"this draft reads the hidden state {given.shape['features']}, and vLLM gives an EAGLE-1 draft the "
            f"last one, {given.target.config.num_layers}: train one that reads it"
        )
    return Layout(
        config=_llama(given),
        own={"fc.weight": "fc.weight", **_block("layers.0")},
        added={"embed_tokens.weight": given.embedding()},
        vllm={"method": "eagle", "num_speculative_tokens": DRAFT_TOKENS},
        sglang=None,
        notes=_whole_vocabulary(given),
    )


def _medusa(given: Given) -> Layout:
    """`original_lm_head` gives all heads one matrix, as here. The format has a place for a draft vocabulary
    (`token_map`), but vLLM 0.32.0 refuses to start with one: it reads it and then misses it among its weights."""
    count = given.shape["heads"]
    return Layout(
        config={
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": given.target.config.hidden_size,
            "vocab_size": given.vocab_size,
            "truncated_vocab_size": given.vocab_size,
            "num_heads": count,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        },
        own={f"layers.{n}.{leaf}": f"blocks.{n}.layers.0.{leaf}" for n in range(count) for leaf in ("weight", "bias")},
        added={"lm_heads.0.weight": given.head()},
        vllm={"method": "medusa", "num_speculative_tokens": count},
        sglang=None,
        notes=_whole_vocabulary(given),
    )


@dataclass(frozen=True)
class Format:
    kind: str
    """Of the drafts it fits."""
    layout: Callable[[Given], Layout]


FORMATS = {
    "hf": Format("shallow", _hf),
    "vllm-eagle3": Format("eagle3", _eagle3),
    "vllm-eagle": Format("eagle1", _eagle),
    "vllm-medusa": Format("heads", _medusa),
}


def _block(prefix: str) -> dict[str, str]:
    """Of the one layer of a feature draft."""
    matrices = {theirs: ours for theirs, ours in MODULES.items() if "norm" not in ours}
    modules = {**matrices, "post_attention_layernorm": "mlp_norm"}
    return {f"block.{ours}.weight": f"{prefix}.{theirs}.weight" for theirs, ours in modules.items()}


def _llama(given: Given) -> dict[str, Any]:
    """The config of a feature draft: one layer in Llama's form."""
    config = given.target.config
    for name, value, plain in (
        ("embedding is scaled by", config.embedding_scale, 1.0),
        ("logits are capped at", config.logit_softcap, None),
    ):
        if value != plain:
            raise ValueError(f"the target's {name} {value:g}, and a draft in Llama's form has no place for that")
    return describe(plain_layer(config))[0]


def _whole_vocabulary(given: Given) -> tuple[str, ...]:
    if given.ids_D is None:
        return ()
    return (f"it was trained to propose {len(given.ids_D):,} tokens, and here it can propose all {given.vocab_size:,}",)


# Files beside


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    source = checkpoint.source
    if source.kind == "folder":
        return {
            name: _own_file(source.path / name).read_bytes()
            for name in TOKENIZER_FILES
            if (source.path / name).is_file()
        }
    parts = parts_of(gguf_file.read_gguf(source.path).metadata)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.model.context,
        "clean_up_tokenization_spaces": False,
        **parts["named"],
    }
    if parts["chat_template"] is not None:
        config["chat_template"] = parts["chat_template"]
    return {"tokenizer.json": parts["backend"].to_str().encode(), "tokenizer_config.json": _json(config)}


def _own_file(file: Path) -> Path:
    """Not a link out of the model: what is exported is often published."""
    home = file.parent.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if file.resolve().parent not in homes:
        raise ValueError(f"{file} is a link to {file.resolve()}, outside the model's folder: put the file itself there")
    return file


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


# Writing and checking


def export(draft: str | Path, format: str, out: Path, *, target: str | None = None) -> list[str]:
    """Write the draft to the new folder `out`, whole and checked, and say in lines of text how it is run there.

    `draft` is a folder, or the name of one that comes with a built-in model. `target` is the model it was trained for,
    by default as the draft names it. ValueError for a draft that the format does not fit or that the target does not.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}, it must be one of {', '.join(FORMATS)}")
    if (path := find_draft(draft)) is None:
        raise ValueError(f"{draft} holds no draft: name a folder that `paceline train` made")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already: name a new folder")
    made, kind = FORMATS[format], folder.read_json(path / "config.json").get("kind")
    if kind != made.kind:
        fits = "".join(f": use {name}" for name, other in FORMATS.items() if other.kind == kind)
        raise ValueError(f"{format} is for drafts of kind {made.kind}, and this is one of kind {kind}{fits}")
    given = _given(path, made.kind, target)
    layout = made.layout(given)
    config = {**layout.config, "torch_dtype": str(given.dtype).removeprefix("torch.")}
    method, taken = layout.vllm["method"], ("eagle-", "eagle3", "dflash", "dspark")
    if method not in ("eagle", "eagle3") and any(part in str(out.absolute()).lower() for part in taken):
        raise ValueError(
            f"vLLM goes by the name of a folder: call {out.absolute()} something without {', '.join(taken)}"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as beside:
        there = Path(beside) / "export"
        there.mkdir()
        tensors = {theirs: _stored(ours, given.own[ours], layout, given) for ours, theirs in layout.own.items()}
        save_file({**tensors, **layout.added}, there / "model.safetensors", metadata={"format": "pt"})
        for name, data in {**layout.files, "config.json": _json(config)}.items():
            (there / name).write_bytes(data)
        # safetensors makes files for their owner alone, and engines often run as somebody else.
        (there / "model.safetensors").chmod((there / "config.json").stat().st_mode)
        _check(there, path, layout, config, given)
        if out.exists():
            out.rmdir()
        os.replace(there, out)
    return _told(out.absolute(), layout, given)


def _given(path: Path, kind: str, target: str | None) -> Given:
    if target is None:
        named = folder.read_json(path / "config.json").get("target")
        target = named.get("name") if isinstance(named, dict) else None
        if not isinstance(target, str) or not target:
            raise ValueError(f"{path} does not say what model it was trained for: give the target")
    checkpoint = load(target, device="cpu")
    if not isinstance(checkpoint.model, Decoder):
        raise ValueError(f"{target} is run by transformers here, and no draft can have been trained for it")
    own, ids, shape = read_draft(path, checkpoint.model, kind)
    ids_D = None if ids is None or len(ids) == checkpoint.model.vocab_size else torch.from_numpy(ids)
    stored = inspect(target).stored
    dtype = MOST_STORED.get(max(stored, key=lambda form: stored[form] or 0), torch.bfloat16)
    return Given(own=own, ids_D=ids_D, shape=shape, checkpoint=checkpoint, target=checkpoint.model, dtype=dtype)


def _stored(ours: str, tensor: torch.Tensor, layout: Layout, given: Given) -> torch.Tensor:
    if layout.norms_from_one and ours.endswith("norm.weight"):
        tensor = tensor.float() - 1.0
    return tensor.to(given.dtype).contiguous()


def _check(there: Path, draft: Path, layout: Layout, config: Mapping[str, Any], given: Given) -> None:
    """Every key of what was written against the draft's own file and the target."""
    stored, found = load_file(draft / "model.safetensors"), load_file(there / "model.safetensors")
    wanted = {theirs: _stored(ours, stored[ours], layout, given) for ours, theirs in layout.own.items()}
    wanted |= layout.added
    if stored.keys() - {"draft_vocab"} != layout.own.keys() or found.keys() != wanted.keys():
        raise ValueError(f"the export has {sorted(found)}, it must have {sorted(wanted)}")
    for name, tensor in wanted.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            raise ValueError(f"{name} of the export is not what the draft and its target have")
        if not tensor.isfinite().all():
            raise ValueError(
                f"{name} has numbers that {given.dtype} cannot hold: name a target that is stored otherwise"
            )
    if folder.read_json(there / "config.json") != config:
        raise ValueError("config.json of the export is not what was written")
    if layout.whole:
        dict(folder.read_tensors(there))
        if Tokenizer.from_folder(there).tokens() != given.checkpoint.tokenizer.tokens():
            raise ValueError("the tokenizer of the export is not the target's")


def _told(out: Path, layout: Layout, given: Given) -> list[str]:
    source, count = given.checkpoint.source, layout.vllm["num_speculative_tokens"]
    lines = [f"{out}: {len(layout.own) + len(layout.added)} tensors, {given.dtype}, read back and compared"]
    lines += [f"note: {note}" for note in layout.notes]
    if source.kind == "gguf":
        lines.append(
            f"note: where it says {source.name}, name the Hugging Face folder or id of the same model; with that as "
            "--target, embedding and head are its own and not the GGUF file's"
        )
    speculative = shlex.quote(json.dumps({"model": str(out), **layout.vllm}))
    model, draft = shlex.quote(source.name), shlex.quote(str(out))
    lines.append(f"vllm serve {model} --speculative-config {speculative}")
    if layout.sglang is None:
        return [*lines, "note: SGLang loads no such checkpoint"]
    return [
        *lines,
        f"python -m sglang.launch_server --model-path {model} --speculative-algorithm {layout.sglang} "
        f"--speculative-draft-model-path {draft} --speculative-num-steps {count} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {count + 1}",
    ]
