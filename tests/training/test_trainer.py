"""The loop on a fake learner: what a step does, and that no interruption changes the loss curve."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.sampling.params import SamplingParams
from paceline.training import trainer
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.learners import begin
from paceline.training.losses import forward_kl, lk_lambda
from paceline.training.recipes import Recipe
from paceline.training.reporting import Report
from paceline.training.trainer import Counters, Trainer, backward
from paceline.training.world import World
from tests.training.fakes import FakeLearner, FakeSource
from tests.training.test_learners import batch, target

RECIPE = Recipe(steps=30, lr=0.02, unroll=3)
TIMES = ("seconds", "tokens_per_s")


def make(folder: Path, recipe: Recipe = RECIPE, *, noise: float = 0.01, world: World | None = None) -> Trainer:
    """A trainer as a new process would make it."""
    world = world or World()
    source = FakeSource()
    learner = FakeLearner(source, noise=noise)

    def measure(asked: Callable[[], bool]) -> torch.Tensor:
        batches = [source.batch([0, 1]), source.batch([2])][world.rank :: world.size]
        return evaluate(learner, batches, source.target_logits, SamplingParams(), 3)

    return Trainer(
        learner,
        source,
        recipe,
        folder,
        evaluate=measure,
        saved=lambda: learner.save(folder),
        observer=Report(folder) if world.first else None,
        world=world,
    )


def curve(folder: Path) -> list[dict[str, Any]]:
    """The log without the times in it."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    make(folder).run()
    return folder


# ---- what a step does ----


@pytest.mark.parametrize("ids_D", [None, torch.tensor([1, 4, 5, 9, 20])], ids=["whole", "reduced"])
def test_gradients_are_those_of_the_weighted_sum_of_losses(
    ids_D: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "ROWS", 3)
    source = FakeSource()
    learner = FakeLearner(source, ids_D, noise=0)
    batch = source.batch([0, 1, 2])
    total, weight = backward(learner, batch, 3, lk_lambda)
    found = {name: p.grad.clone() for name, p in learner.module.named_parameters() if p.grad is not None}

    p_ND = (batch.hidden_NH @ source.head_VH.T).softmax(-1)
    p_ND = p_ND if ids_D is None else p_ND[:, ids_D]
    expected = torch.zeros(())
    rows = 0.0
    for j, (logits_RD, rows_R) in enumerate(learner.unroll(batch, 3)):
        expected = expected + 0.8**j * lk_lambda(p_ND[rows_R], logits_RD).sum()
        rows += 0.8**j * len(rows_R)
    learner.module.zero_grad()
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-5)
    assert weight == pytest.approx(rows)
    for name, parameter in learner.module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_the_target_distribution_has_the_targets_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource()
    learner = FakeLearner(source)
    batch = source.batch([0, 1])
    logits_NV = 2.0 * torch.tanh(source.target_logits(batch.hidden_NH) / 2.0)
    capped = replace(batch, lse_N=logits_NV.logsumexp(-1))
    seen = []

    def loss(p_RD: torch.Tensor, logits_RD: torch.Tensor) -> torch.Tensor:
        seen.append(p_RD)
        return forward_kl(p_RD, logits_RD)

    backward(learner, capped, 1, loss, 2.0)
    torch.testing.assert_close(seen[0], logits_NV[batch.trained_N].softmax(-1))


def test_gradient_checkpointing_keeps_less_and_gives_the_same_gradients(tmp_path: Path) -> None:
    """Of real layers: a fake learner has none that could be computed again."""
    of = target()
    kept, gradients = [], []
    for checkpointing in (False, True):
        learner = begin("eagle3", of, "tiny", None)
        data = batch(of, learner.features)
        recipe = Recipe(steps=1, gradient_checkpointing=checkpointing)
        made = Trainer(learner, FakeSource(), recipe, tmp_path, evaluate=lambda _: torch.zeros(0), saved=lambda: None)
        size = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal size
            size += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            backward(learner, data, 3, forward_kl)
        kept.append(size)
        gradients.append([p.grad for p in made.parameters.values()])
    assert kept[1] < 0.8 * kept[0]
    for plain, again in zip(*gradients, strict=True):
        assert plain is not None
        assert again is not None
        assert torch.equal(plain, again)


def test_accumulated_batches_count_as_one(tmp_path: Path) -> None:
    """Two batches of different sizes in a step give the gradient of both together, not the mean of two means."""
    source = FakeSource()
    learner = FakeLearner(source, noise=0)
    sums = [backward(learner, source.batch(indices), 3, forward_kl) for indices in ([0, 1, 2, 3], [4])]
    apart = [p.grad.clone() for p in learner.module.parameters() if p.grad is not None]
    learner.module.zero_grad()
    total, weight = backward(learner, source.batch([0, 1, 2, 3, 4]), 3, forward_kl)
    assert sum(loss for loss, _ in sums) == pytest.approx(total, rel=1e-5)
    assert sum(each for _, each in sums) == pytest.approx(weight)
    for parameter, gradient in zip(learner.module.parameters(), apart, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_every_text_is_read_once_an_epoch_however_batches_are_accumulated(tmp_path: Path) -> None:
    made = make(tmp_path, Recipe(steps=9, batches_per_step=4))  # 6 batches an epoch: steps cross its end
    assert isinstance(made.source, FakeSource)
    read = [made._next() for _ in range(36)]
    for epoch in range(6):
        texts = sorted(text for batch in read[6 * epoch : 6 * epoch + 6] for text in batch)
        assert texts == list(range(12))
    assert read[:6] != read[6:12]


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    recipe = Recipe(tokens=1000, lr=0.5, warm_up=0.2)
    assert [recipe.learning_rate(x) for x in (0.0, 0.1, 0.2, 0.6, 1.0, 1.3)] == pytest.approx(
        [0, 0.25, 0.5, 0.25, 0, 0]
    )
    assert recipe.progress(7, 250) == 0.25
    assert Recipe(steps=14).progress(7, 250) == 0.5


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "give one of the two"),
        ({"steps": 1, "tokens": 1}, "give one of the two"),
        ({"steps": 0}, "steps is 0, it must be 1 at least"),
        ({"tokens": 9, "lr": -1.0}, "lr is -1.0, it must be a finite number above 0"),
        ({"tokens": 9, "lr": math.nan}, "lr is nan"),
        ({"tokens": 9, "loss": "best"}, "one of forward-kl, total-variation, lk-alpha, lk-lambda"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Recipe(**wrong)


def test_training_helps(whole: Path) -> None:
    lines = curve(whole)
    evaluations = [line for line in lines if "alpha" in line]
    assert evaluations[0]["step"] == 0
    assert evaluations[-1]["step"] == 30
    assert len(evaluations) == trainer.EVALUATIONS + 1
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 31))
    assert evaluations[-1]["alpha"][0] > evaluations[0]["alpha"][0] + 0.1
    assert evaluations[-1]["acceptance_lengths"][3] > evaluations[0]["acceptance_lengths"][3]
    last = Evaluation(alpha=evaluations[-1]["alpha"], greedy=[], rows=0)
    assert last.lengths == evaluations[-1]["acceptance_lengths"]


def test_tokens_end_a_run_too(tmp_path: Path) -> None:
    made = make(tmp_path, Recipe(tokens=60))
    made.run()
    *_, before, last = [line for line in curve(tmp_path) if "loss" in line]
    assert before["tokens"] < 60 <= last["tokens"]


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_kept(tmp_path: Path) -> None:
    made = make(tmp_path)
    backwards = made.source.batch

    def spoiled(indices: Any) -> Any:
        batch = backwards(indices)
        if made.counters.step == 7:
            batch.hidden_NH[:] = math.nan
        return batch

    made.source.batch = spoiled  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="step 8 has a loss of nan"):
        made.run()
    again = make(tmp_path)
    again.run()
    assert again.counters.step == 30


# ---- checkpoints ----


class Crash(Exception):
    """A process that ends here, whatever it was doing."""


def crash_after(calls: int, made: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the process at the `calls`-th of its reads, losses, writes and renames, before or in the middle of them."""
    left = calls

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash
            return function(*args, **kwargs)

        return run

    def torn(tensors: Any, file: Path, metadata: Any) -> None:
        save_file(tensors, file, metadata)
        nonlocal left
        left -= 1
        if left == 0:
            file.write_bytes(file.read_bytes()[:100])
            raise Crash

    made.source.batch = counted(made.source.batch)  # type: ignore[method-assign]
    made.learner.save = counted(made.learner.save)  # type: ignore[method-assign]
    made._optimizer.step = counted(made._optimizer.step)  # type: ignore[method-assign]
    assert isinstance(made._observer, Report)
    made._observer._write = counted(made._observer._write)  # type: ignore[method-assign]
    monkeypatch.setattr(trainer, "save_file", torn)
    monkeypatch.setattr(os, "replace", counted(os.replace))


def test_ten_crashes_at_random_points_leave_the_loss_curve_as_it_is(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = random.Random(4)
    crashes, steps = 0, set()
    while crashes < 10:
        made = make(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "CHECKPOINT_S", math.inf if points.random() < 0.5 else 0.0)
            crash_after(points.randrange(2, 30), made, patch)
            with pytest.raises(Crash):
                made.run()
        crashes += 1
        steps.add(made.counters.step)
    assert len(steps) > 4, "they came at different points"
    make(tmp_path).run()
    assert curve(tmp_path) == curve(whole)


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)

    def torn(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half of it")
        raise Crash

    monkeypatch.setattr(trainer, "save_file", torn)
    with pytest.raises(Crash):
        made.run()
    assert not list(tmp_path.glob("step-*"))


def test_ctrl_c_finishes_the_step_and_the_run_goes_on_from_there(whole: Path, tmp_path: Path) -> None:
    points = random.Random(5)
    for _ in range(10):
        made = make(tmp_path)
        at, batch = points.randrange(1, 8), made.source.batch

        def interrupting(indices: Any, batch: Any = batch, left: list[int] = [at]) -> Any:  # noqa: B006
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
            return batch(indices)

        made.source.batch = interrupting  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            made.run()
        done = made.counters.step
        assert (tmp_path / f"step-{done:09d}.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    make(tmp_path).run()
    assert curve(tmp_path) == curve(whole)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    made = make(tmp_path)
    evaluation = made._evaluate

    def slow(asked: Callable[[], bool]) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        assert asked()
        signal.raise_signal(signal.SIGINT)
        return evaluation(asked)

    made._evaluate = slow
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert not list(tmp_path.glob("step-*"))


def test_an_interrupted_evaluation_is_made_again(whole: Path, tmp_path: Path) -> None:
    made = make(tmp_path)

    def cut_short(asked: Callable[[], bool]) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return torch.zeros(3, 3, dtype=torch.float64)

    made._evaluate = cut_short
    with pytest.raises(KeyboardInterrupt):
        made.run()
    make(tmp_path).run()
    assert curve(tmp_path) == curve(whole)


def test_a_finished_run_is_left_as_it_is(whole: Path) -> None:
    before = (whole / "log.jsonl").read_text()
    made = make(whole)
    made.run()
    assert made.counters.step == 30
    assert (whole / "log.jsonl").read_text() == before


def test_two_checkpoints_stay_and_the_older_serves_where_the_newest_is_broken(whole: Path, tmp_path: Path) -> None:
    assert len(list(whole.glob("step-*"))) == 2
    made = make(tmp_path)
    made._restore()
    made._write()
    made.counters = Counters(step=5)
    made._write()
    newest = tmp_path / "step-000000005.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    make(tmp_path).run()
    assert curve(tmp_path) == curve(whole)
    for file in tmp_path.glob("step-*"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint .* can be read"):
        make(tmp_path).run()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"lr": 0.01}, "lr = 0.02, this one has 0.01"), ({"steps": None, "tokens": 99}, "steps = 30, this one has null")],
)
def test_another_recipe_is_an_error_that_names_the_difference(whole: Path, change: dict[str, Any], says: str) -> None:
    recipe = Recipe(**{**vars(RECIPE), **change})
    with pytest.raises(ValueError, match=says):
        make(whole, recipe).run()


# ---- several processes (test_command.py runs them) ----


def test_processes_that_cannot_share_a_step_evenly_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a multiple of 2"):
        make(tmp_path, Recipe(steps=6, batches_per_step=3), world=World(0, 2))


def test_parameters_without_a_gradient_count_as_zero(tmp_path: Path) -> None:
    made = make(tmp_path, Recipe(steps=1))
    unused = nn.Parameter(torch.ones(3))
    made.parameters["unused"] = unused
    made.run()
    assert unused.grad is not None
    assert not unused.grad.any()
