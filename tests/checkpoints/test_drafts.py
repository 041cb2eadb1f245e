"""Draft folders: hostile or of another target, they are refused with the reason before a tensor is used."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoints.drafts import SHIPPED, describe_draft, find_draft, is_draft, load_draft, shipped_draft
from paceline.checkpoints.load import load
from tests.training.test_learners import CONFIG, IDS, learner, target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    learner("eagle3", target()).save(tmp_path / "draft")
    return tmp_path / "draft"


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "other"}, "its kind is 'other'"),
        ({"kind": None}, "its kind is 'None'"),
        ({"kind": "heads"}, "its heads are"),
        ({"kind": "shallow", "layers": [0, 7]}, "from 0 to 6"),
        ({"kind": "shallow", "layers": [0, 1]}, "tensor .* it must be"),
        ({"kind": "eagle1"}, "3 features, an EAGLE-1 draft has 1"),
        ({"features": [0, 2, 9]}, "from 0 to 7"),
        ({"features": [0, 2]}, "tensor fc.weight"),
        ({"features": "012"}, "must be a list"),
        ({"features": [0, 2, 1.5]}, "must be a list"),
        ({"features": []}, "must be a list"),
        ({"draft_vocab_size": 97}, "from 1 to 96"),
        ({"draft_vocab_size": "43"}, "from 1 to 96"),
        ({"draft_vocab_size": None}, "draft_vocab"),
        ({"draft_vocab_size": 12}, "draft_vocab"),
        ({"target": None}, "hidden_size is None"),
        ({"target": {"hidden_size": 128}}, "hidden_size is 128"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    configure(folder, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_draft(folder, target())
    assert str(folder) in str(error.value)


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["fc.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["more"] = torch.zeros(3)


def _transpose(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()


def _poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][3] = math.nan


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int32)


def _unsorted(tensors: dict[str, torch.Tensor]) -> None:
    tensors["draft_vocab"] = tensors["draft_vocab"].flip(0)


def _twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors["draft_vocab"][1] = tensors["draft_vocab"][0]


def _beyond(tensors: dict[str, torch.Tensor]) -> None:
    tensors["draft_vocab"][-1] = CONFIG.vocab_size


def _below(tensors: dict[str, torch.Tensor]) -> None:
    tensors["draft_vocab"][0] = -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, "tensor fc.weight is missing"),
        (_add, r"tensor more is \(3,\), it must be absent"),
        (_transpose, "tensor fc.weight is"),
        (_poison, "norm.weight is not made of finite"),
        (_integers, "norm.weight is not made of finite floating-point"),
        (_unsorted, "ascending token ids below 96"),
        (_twice, "ascending token ids below 96"),
        (_beyond, "ascending token ids below 96"),
        (_below, "ascending token ids below 96"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        load_draft(folder, target())


def test_torn_and_missing_files_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="no sound safetensors file"):
        load_draft(folder, target())
    file.unlink()
    with pytest.raises(ValueError, match="no sound safetensors file"):
        load_draft(folder, target())


def test_a_draft_of_another_target_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size is 96, and this one's is 128: train one for it"):
        load_draft(folder, target(vocab_size=128))


def test_what_a_draft_is_can_be_told_without_its_target(folder: Path) -> None:
    kind, parameters, tokens = describe_draft(folder, CONFIG)
    own = [p for p in learner("eagle3", target()).module.parameters() if p.requires_grad]
    assert (kind, parameters, tokens) == ("eagle3", sum(p.numel() for p in own), len(IDS))


def test_a_folder_is_a_draft_or_not(folder: Path, tmp_path: Path) -> None:
    assert is_draft(folder)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not is_draft(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not is_draft(tmp_path)
    assert not is_draft(tmp_path / "nothing")


def test_others_may_read_what_was_saved(folder: Path) -> None:
    modes = {stat.S_IMODE((folder / name).stat().st_mode) for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_draft_is_no_model_by_itself(folder: Path) -> None:
    with pytest.raises(ValueError, match="give it as the draft, not as a model"):
        load(str(folder))


def test_a_draft_is_found_by_its_folder_or_by_the_name_it_comes_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = SHIPPED / "smollm2-135m-eagle3"
    assert find_draft("smollm2-135m-eagle3") == shipped
    assert find_draft(str(shipped)) == find_draft(shipped) == shipped
    assert find_draft(folder) == folder
    for name in ("smollm2-135m", "", ".", "..", "org/smollm2-135m-eagle3", str(folder.parent), str(folder / "none")):
        assert find_draft(name) is None
    for name in ("smollm2-135m-eagle", "SmolLM2-135m-Eagle3", "smollm2-eagle3"):
        with pytest.raises(ValueError, match=f"unknown draft '{name}'. Did you mean 'smollm2-135m-eagle3'"):
            find_draft(name)
    # A file or folder of that name goes ahead of it, as with models.
    monkeypatch.chdir(folder.parent)
    (folder.parent / "smollm2-135m-eagle3").mkdir()
    assert find_draft("smollm2-135m-eagle3") is None
    folder.replace(folder.parent / "smollm2-135m-eagle3")
    assert find_draft("smollm2-135m-eagle3") == Path("smollm2-135m-eagle3")


def test_a_built_in_model_knows_the_draft_that_comes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_draft("smollm2-135m") == shipped_draft(Path("smollm2-135m")) == "smollm2-135m-eagle3"
    assert [shipped_draft(name) for name in (None, "", "smollm2", "org/smollm2-135m")] == [None] * 4
    (tmp_path / "smollm2-135m").mkdir()  # another model, which goes ahead of the built-in one
    assert shipped_draft("smollm2-135m") is None


def test_drafts_that_come_with_a_model_are_small_and_described() -> None:
    folders = [*SHIPPED.iterdir()]
    assert folders
    for folder in folders:
        files = {file.name: file.stat().st_size for file in folder.iterdir()}
        assert files.keys() == {"README.md", "config.json", "model.safetensors"}
        assert sum(files.values()) <= 12 << 20
        values = json.loads((folder / "config.json").read_text())
        assert folder.name == f"{values['target']['name']}-{values['kind']}"
