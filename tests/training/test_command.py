"""`paceline train` as a person with a model of their own runs it: random tiny models, made by transformers."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.decoding.control import Costs
from paceline.options import size
from paceline.training import command as measuring
from paceline.training import trainer
from paceline.training.data import Texts
from paceline.training.learners import KINDS
from paceline.training.recipes import LEARNING_RATES
from paceline.training.trainer import Trainer
from tests import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=32)
ASKED = ["--max-tokens", "20", "--steps", "12", "--lr", "0.003", "--tokens-per-batch", "256"]
TIMES = ("seconds", "tokens_per_s", "speedups")


def qwen(folder: Path) -> Path:
    made = tiny.tokenizer()
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=len(made),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=0.4,
        eos_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"llama": tiny.save(folder / "llama", layers=4), "qwen2": qwen(folder / "qwen2")}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = [{"prompt": f"{what} {number}"} for number in range(8) for what in ("one two", "the riders", "exact")]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": "Größe, naïve, 速度"}]))
    return file


COSTS = Costs(rows=(1, 9), round_s=(0.01, 0.01), context_s=(0.0, 0.0), batches=(1,), draft_s=((0.0, 0.0),), read_s=0.0)


@pytest.fixture(autouse=True)
def costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes longer than all else here."""
    if "measured" not in request.node.name:
        monkeypatch.setattr(measuring, "measured", lambda llm, folder: COSTS)


def command(model: Path, prompts: Path, out: Path, *more: str, code: int = 0) -> str:
    asked = ["train", str(model), "--prompts", str(prompts), "--out", str(out), *ASKED, *more]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


def curve(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


# ---- every kind, to the end ----


@pytest.mark.parametrize(
    ("model", "kind", "vocabulary"),
    [
        ("llama", "eagle3", "100"),
        ("llama", "eagle1", "8192"),
        ("llama", "heads", "100"),
        ("qwen2", "eagle3", "8192"),
        ("qwen2", "shallow", "100"),
    ],
)
def test_a_model_of_ones_own_gets_a_draft_that_loads_and_keeps_its_output(
    models: dict[str, Path], prompts: Path, tmp_path: Path, model: str, kind: str, vocabulary: str
) -> None:
    began = time.monotonic()
    said = command(models[model], prompts, tmp_path, "--kind", kind, "--draft-vocab", vocabulary, "--layers", "2")
    assert time.monotonic() - began < 120
    assert f"use it with --draft {tmp_path}" in said
    assert "25 texts to make, 24 of them answers" in said
    lines = curve(tmp_path)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 12
    assert all(map(math.isfinite, losses))
    asked = ["one two 3", "the riders 5", "exact 1", "something else"]
    plain = LLM(models[model], draft=None).generate(asked, GREEDY)
    drafted = LLM(models[model], draft=tmp_path, draft_tokens=4).generate(asked, GREEDY)
    assert [c.outputs[0].token_ids for c in drafted] == [c.outputs[0].token_ids for c in plain]
    assert all(completion.stats.drafted for completion in drafted)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["kind"] == kind
    assert config["draft_vocab_size"] == (100 if vocabulary == "100" else None)


def test_a_draft_that_learned_is_accepted(models: dict[str, Path], tmp_path: Path) -> None:
    """On texts that it knows by heart: everything between training and serving fits."""
    trained = [f"one two {number}" for number in range(4)]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in trained))
    more = ("--kind", "eagle1", "--steps", "200", "--answer-temperature", "0", "--lr", "0.01", "--draft-vocab", "0")
    command(models["llama"], file, tmp_path, *more)
    llm = LLM(models["llama"], draft=tmp_path, draft_tokens=4)
    texts = [[{"role": "user", "content": text}] for text in trained[1:]]
    found = llm.chat(texts, SamplingParams(temperature=0, max_tokens=20))
    accepted = sum(c.stats.accepted for c in found) / sum(c.stats.drafted for c in found)
    assert accepted > 0.6


def test_the_layers_of_a_shallow_draft_are_tried_first(models: dict[str, Path], prompts: Path, tmp_path: Path) -> None:
    said = command(models["qwen2"], prompts, tmp_path, "--kind", "shallow", "--layers", "2")
    assert "without training: first [0, 1] alpha 0." in said
    tried = {how: said[said.index(how) :].split("alpha ")[1][:5] for how in ("first", "last", "even", "ends")}
    best = max(tried, key=lambda how: float(tried[how]))
    layers = {"first": [0, 1], "last": [1, 2], "even": [0, 2], "ends": [0, 2]}[best]
    assert json.loads((tmp_path / "config.json").read_text())["layers"] == layers


def test_costs_are_measured_and_become_predicted_speedups(
    models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    assert "measuring what a round costs here" in command(models["llama"], prompts, tmp_path, "--steps", "1")
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert len(last["speedups"]) == 8
    assert all(0.01 < speedup < 10 for speedup in last["speedups"])


def test_measuring_leaves_a_draft_that_is_trained_alone(
    models: dict[str, Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(models["llama"], prompts, tmp_path)
    trained = (tmp_path / "model.safetensors").read_bytes()

    def measure(llm: LLM, folder: Path) -> Costs:
        LLM(models["llama"], draft=folder)  # one that loads
        assert (tmp_path / "model.safetensors").read_bytes() == trained
        return COSTS

    monkeypatch.setattr(measuring, "measured", measure)
    command(models["llama"], prompts, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == trained


# ---- what can go wrong ----


def test_another_recipe_in_the_same_folder_is_an_error_that_names_the_difference(
    models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    command(models["llama"], prompts, tmp_path)
    before = (tmp_path / "log.jsonl").read_text()
    for more, says in (
        (("--lr", "0.01"), "lr = 0.003, this one has 0.01"),
        (("--draft-vocab", "90"), "draft_vocab = null, this one has 90"),
        (("--loss", "lk-alpha"), 'loss = "forward-kl", this one has "lk-alpha"'),
        (("--kind", "eagle1"), "was begun with"),
        (("--max-tokens", "21"), "was begun with max_tokens 20"),
    ):
        assert says in command(models["llama"], prompts, tmp_path, *more, code=2)
    assert (tmp_path / "log.jsonl").read_text() == before
    command(models["llama"], prompts, tmp_path)  # and the same goes on, to where it already is
    assert (tmp_path / "log.jsonl").read_text() == before


def test_two_lengths_are_one_too_many(models: dict[str, Path], prompts: Path, tmp_path: Path) -> None:
    assert "give one of them" in command(models["llama"], prompts, tmp_path, "--epochs", "2", code=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tokens", "0"), "tokens is 0, it must be 1 at least"),
        (("--lr", "-1"), "lr is -1.0"),
        (("--epochs", "-1"), "epochs is -1.0"),
        (("--draft-vocab", "-5"), "draft_vocab is -5"),
        (("--batches-per-step", "0"), "batches_per_step is 0"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_answered(
    models: dict[str, Path], prompts: Path, tmp_path: Path, flags: tuple[str, str], message: str
) -> None:
    asked = ["train", str(models["llama"]), "--prompts", str(prompts), "--out", str(tmp_path / "out"), *flags]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", 0), ("4GB", 4 * 10**9), ("1.5 MB", 1500000), ("7kB", 7000), ("12", 12), ("3T", 3 * 10**12)],
)
def test_sizes(text: str, found: int) -> None:
    assert size(text) == found


@pytest.mark.parametrize("text", ["", "GB", "-1", "4 apples", "1e9"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: write 4GB"):
        size(text)


def test_every_kind_has_a_learning_rate() -> None:

    assert set(KINDS) == set(LEARNING_RATES)


# ---- interruptions ----


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    """interrupt(n, hard): at the n-th text that is written, batch that is read, evaluation or checkpoint, Ctrl-C comes,
    or everything ends."""
    left, hard = 0, False

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and hard:
                raise SystemError("the power is gone")
            if left == 0:
                signal.raise_signal(signal.SIGINT)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    counted(Texts, "_append")
    counted(Texts, "batch")
    counted(Trainer, "_write")
    counted(Trainer, "_evaluation")
    monkeypatch.setattr(trainer, "CHECKPOINT_S", 0.0)

    def arm(calls: int, cut: bool) -> None:
        nonlocal left, hard
        left, hard = calls, cut

    return arm


@pytest.mark.parametrize(
    ("model", "kind", "cache"), [("llama", "eagle3", "1GB"), ("llama", "eagle3", "0"), ("qwen2", "shallow", "0")]
)
def test_ten_interruptions_at_random_points_change_nothing(
    models: dict[str, Path],
    prompts: Path,
    tmp_path: Path,
    model: str,
    kind: str,
    cache: str,
    interrupt: Callable[[int, bool], None],
) -> None:
    more = ("--kind", kind, "--draft-vocab", "120", "--layers", "2", "--cache-features", cache, "--threads", "1")
    command(models[model], prompts, tmp_path / "whole", *more)
    points = random.Random(kind)
    asked = ["train", str(models[model]), "--prompts", str(prompts), "--out", str(tmp_path / "cut"), *ASKED, *more]
    steps = set()
    for number in range(10):
        hard = number % 2 == 1
        interrupt(points.randrange(2, 12), hard)
        result = CliRunner().invoke(app, asked)
        if hard:
            assert isinstance(result.exception, SystemError)
        else:
            assert result.exit_code == 130, (result.output, result.exception)
            assert "interrupted" in result.output
            assert "the same command goes on" in result.output
        checkpoints = sorted((tmp_path / "cut" / "checkpoints").glob("step-*"))
        steps.add(checkpoints[-1].name if checkpoints else None)
    interrupt(0, False)
    assert len(steps) > 3, "they came at different points, data among them"
    command(models[model], prompts, tmp_path / "cut", *more)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    cut, whole = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("cut", "whole"))
    assert cut == whole


def test_ctrl_c_from_outside_exits_130_and_the_run_goes_on(
    models: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    asked = [
        "train",
        str(models["llama"]),
        "--prompts",
        str(prompts),
        "--out",
        str(tmp_path),
        *ASKED,
        "--steps",
        "4000",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *asked],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "log.jsonl"
    deadline = time.monotonic() + 100
    while not (log.exists() and log.read_text().count('"loss"') > 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr is not None
    last = json.loads(log.read_text().splitlines()[-1])
    assert f"interrupted after step {last['step']}: the same command goes on from there" in process.stderr.read()
    assert (tmp_path / "checkpoints" / f"step-{last['step']:09d}.safetensors").exists()


def test_torchrun_needs_no_other_code(models: dict[str, Path], prompts: Path, tmp_path: Path) -> None:
    """Two processes that take turns with batches compute what one does that accumulates them."""
    more = ["--batches-per-step", "2", "--steps", "4", "--threads", "1"]
    asked = ["train", str(models["llama"]), "--prompts", str(prompts), "--out", str(tmp_path / "two"), *ASKED, *more]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline"]
    done = subprocess.run(
        [sys.executable, *torchrun, *asked],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the draft is in") == 1
    command(models["llama"], prompts, tmp_path / "one", *more)
    assert curve(tmp_path / "two") == curve(tmp_path / "one")
