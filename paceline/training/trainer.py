"""The training loop: batches in, a draft out, and after any interruption the same loss curve.

Everything random is addressed, not consumed: batches by (seed, epoch, number), whatever a draft draws by (seed, step,
rank). So parameters, the optimiser's moments and a few counters are the whole state, and a checkpoint is one file that
holds them. Where float32 is computed in, going on from it repeats what an uninterrupted run computes, bit by bit.

Shapes: N positions of a batch, R rows of a loss, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from paceline.models.decoder import MLP
from paceline.training.losses import LOSSES, Loss
from paceline.training.optimizer import Optimizer
from paceline.training.recipes import Recipe
from paceline.training.world import World

if TYPE_CHECKING:
    from paceline.training.data import Batch
    from paceline.training.learners import Learner

STEP_WEIGHT = 0.8
"""Of each unrolled step, against the one before."""
ROWS = 256
"""Rows of a loss that are computed at once: what it needs beside logits and gradient stays small."""
EVALUATIONS = 20
"""Over a run, beside the one before it."""
CHECKPOINT_S = 300.0
"""Between checkpoints, in seconds; every evaluation writes one too."""
KEPT = 2
"""Checkpoints that stay."""


class Source(Protocol):
    """Where batches come from (`data.Texts`)."""

    def plan(self, seed: int, epoch: int, tokens_per_batch: int) -> list[list[int]]:
        """The texts of each batch of an epoch, the same for the same arguments."""
        ...

    def batch(self, indices: Sequence[int]) -> Batch: ...


class Observer(Protocol):
    """Who is told how it goes (`reporting.Report`)."""

    def begin(self, counters: Counters) -> None:
        """The run starts, or goes on, from here: what was told of later steps is void."""
        ...

    def step(self, counters: Counters, progress: float, measured: Mapping[str, float]) -> None: ...

    def evaluation(self, counters: Counters, progress: float, sums_J3: torch.Tensor) -> None: ...


@dataclass
class Counters:
    step: int = 0
    """Optimiser steps done."""
    tokens: int = 0
    epoch: int = 0
    batch: int = 0
    """The next batch of this epoch."""
    evaluations: int = 0
    """Parts of the run, of EVALUATIONS, before which the draft was evaluated."""
    seconds: float = 0.0
    """Spent on steps."""


class Trainer:
    """Trains a learner by a recipe; its checkpoints are in `folder`, and the run goes on from the newest there.

    evaluate: gives the sums of `evaluation.evaluate` over this rank's held-out batches, early where it is told to stop.
    saved: called on rank 0 whenever the draft was evaluated, to keep the draft as it is.
    softcap: of the target's logits, where it has one (`ModelConfig.logit_softcap`).
    origin: what else the run depends on, as JSON; kept with the recipe, and compared when going on.

    Raises ValueError where the checkpoint is of another recipe, and where the loss is no longer finite.
    """

    def __init__(
        self,
        learner: Learner,
        source: Source,
        recipe: Recipe,
        folder: Path,
        *,
        evaluate: Callable[[Callable[[], bool]], torch.Tensor],
        saved: Callable[[], None],
        observer: Observer | None = None,
        world: World | None = None,
        softcap: float | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self.learner, self.source, self.recipe, self.folder = learner, source, recipe, folder
        self.world = world or World()
        self.counters = Counters()
        self._evaluate, self._saved, self._observer, self._softcap = evaluate, saved, observer, softcap
        self._identity = json.loads(json.dumps({**(origin or {}), **asdict(recipe)}))
        self._loss = LOSSES[recipe.loss]
        self._plan: tuple[int, list[list[int]]] = (-1, [])
        if recipe.batches_per_step % self.world.size:
            raise ValueError(
                f"{recipe.batches_per_step} batches a step cannot be shared by {self.world.size} processes evenly: "
                f"give a multiple of {self.world.size}"
            )
        if recipe.gradient_checkpointing:
            for part in learner.module.modules():
                if isinstance(part, MLP):
                    part.forward = partial(checkpoint, part.forward, use_reentrant=False)  # type: ignore[method-assign]
        named = learner.module.named_parameters()
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        for parameter in self.parameters.values():
            self.world.share(parameter.data)
        self._optimizer = Optimizer(
            self.parameters.values(), lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
        )

    @property
    def progress(self) -> float:
        return self.recipe.progress(self.counters.step, self.counters.tokens)

    def run(self) -> None:
        """To the end of the recipe. Ctrl-C lets the present step finish, writes a checkpoint and raises
        KeyboardInterrupt; a second one stops at once."""
        self._restore()
        if self._observer is not None:
            self._observer.begin(self.counters)
        written = time.monotonic()
        with _interruption() as asked:
            while True:
                due = self.counters.evaluations <= EVALUATIONS * min(self.progress, 1.0)
                if not due and self.progress >= 1:
                    return
                stop = self._evaluation(asked) if due else self._step(asked)
                if due or stop or time.monotonic() - written > CHECKPOINT_S:
                    self._write()
                    written = time.monotonic()
                if stop:
                    raise KeyboardInterrupt

    def _evaluation(self, asked: Callable[[], bool]) -> bool:
        self.learner.module.eval()
        sums_J3 = self._evaluate(asked).cpu()
        self.learner.module.train()
        told = torch.cat([sums_J3.flatten(), torch.tensor([float(asked())], dtype=torch.float64)])
        *sums, stop = self._sum(told).tolist()
        if stop:  # it may have ended early, and comes again
            return True
        self.counters.evaluations = int(EVALUATIONS * min(self.progress, 1.0)) + 1
        if self.world.first:
            self._saved()
        if self._observer is not None:
            sums_J3 = torch.tensor(sums, dtype=torch.float64).view(-1, 3)
            self._observer.evaluation(self.counters, self.progress, sums_J3)
        return False

    def _step(self, asked: Callable[[], bool]) -> bool:
        began, recipe, counters = time.perf_counter(), self.recipe, self.counters
        device = self.learner.head_DH.device
        torch.manual_seed(hash((recipe.seed, counters.step, self.world.rank)))
        batches = [self._next() for _ in range(recipe.batches_per_step)]
        for parameter in self.parameters.values():
            parameter.grad = None
        sums = torch.zeros(4, dtype=torch.float64)
        for indices in batches[self.world.rank :: self.world.size]:
            batch = self.source.batch(indices).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device)):
                loss, weight = backward(self.learner, batch, recipe.unrolled(self.progress), self._loss, self._softcap)
            sums += torch.tensor([loss, weight, len(batch.tokens_N), 0.0], dtype=torch.float64)
        sums[3] = asked()
        loss, weight, tokens, stop = self._sum(sums).tolist()
        loss /= max(weight, 1.0)

        for parameter in self.parameters.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.world.sum(gradient).div_(max(weight, 1.0))
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), recipe.clip))
        if not norm < float("inf"):
            raise ValueError(
                f"step {counters.step + 1} has a loss of {loss:.4g} with a gradient of norm {norm}: start again with "
                f"a learning rate below {recipe.lr:g}, in another folder"
            )
        before = self.progress
        counters.step += 1
        counters.tokens += int(tokens)
        lr = recipe.learning_rate((before + self.progress) / 2)
        self._optimizer.step(lr)

        took = time.perf_counter() - began
        counters.seconds += took
        if self._observer is not None:
            measured = {"loss": loss, "lr": lr, "grad_norm": norm, "tokens_per_s": tokens / took}
            self._observer.step(counters, self.progress, measured)
        return bool(stop)

    def _next(self) -> list[int]:
        counters = self.counters
        if self._plan[0] != counters.epoch:
            self._plan = self._planned()
        if counters.batch == len(self._plan[1]):
            counters.epoch, counters.batch = counters.epoch + 1, 0
            self._plan = self._planned()
        counters.batch += 1
        return self._plan[1][counters.batch - 1]

    def _planned(self) -> tuple[int, list[list[int]]]:
        epoch = self.counters.epoch
        plan = self.source.plan(self.recipe.seed, epoch, self.recipe.tokens_per_batch)
        if not plan:
            raise ValueError("there are 0 texts to train on: give at least one prompt")
        return epoch, plan

    def _sum(self, sums: torch.Tensor) -> torch.Tensor:
        return self.world.sum(sums.to(self.learner.head_DH.device))

    # Checkpoints

    def _files(self) -> list[Path]:
        """The newest first."""
        return sorted(self.folder.glob("step-*.safetensors"), reverse=True)

    def _write(self) -> None:
        if not self.world.first:
            return
        tensors = {f"parameters.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self._optimizer.state(parameter).items():
                tensors[f"optimizer.{name}.{key}"] = value
        metadata = {"counters": json.dumps(asdict(self.counters)), "recipe": json.dumps(self._identity)}
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / "unfinished"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, self.folder / f"step-{self.counters.step:09d}.safetensors")
        for old in self._files()[KEPT:]:
            old.unlink()

    def _restore(self) -> None:
        broken: SafetensorError | None = None
        for file in self._files():
            try:
                with safe_open(file, "pt") as opened:
                    metadata = opened.metadata()
                    tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            except SafetensorError as error:  # a disk may lose what it promised to keep: the one before is there
                broken = error
                continue
            self._require_same(json.loads(metadata["recipe"]), file)
            self.counters = Counters(**json.loads(metadata["counters"]))
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(tensors.pop(f"parameters.{name}"))
            for name, parameter in self.parameters.items():
                prefix = f"optimizer.{name}."
                for full in [full for full in tensors if full.startswith(prefix)]:
                    value, key = tensors.pop(full), full.removeprefix(prefix)
                    # The count of steps stays on the host, where AdamW keeps it.
                    self._optimizer.state(parameter)[key] = value if value.ndim == 0 else value.to(parameter.device)
            return
        if broken is not None:
            raise ValueError(f"no checkpoint in {self.folder} can be read ({broken}): remove it to start again")

    def _require_same(self, found: Mapping[str, Any], file: Path) -> None:
        for name in {**found, **self._identity}:
            there, here = found.get(name), self._identity.get(name)
            if there != here:
                raise ValueError(
                    f"{file.parent} holds a run with {name} = {json.dumps(there)}, this one has {json.dumps(here)}: "
                    "give the same to go on with it, or another folder to start anew"
                )


def backward(
    learner: Learner, batch: Batch, steps: int, loss: Loss, softcap: float | None = None
) -> tuple[float, float]:
    """Add the gradients of one batch to the parameters'. Returns the sum over rows of weight * loss, and the sum of
    the weights."""
    trained = batch.trained_N.nonzero()[:, 0]
    place_N = torch.zeros_like(batch.tokens_N)
    place_N[trained] = torch.arange(len(trained), device=trained.device)
    with torch.no_grad(), torch.autocast(trained.device.type, enabled=False):
        p_TD = batch.hidden_NH[trained] @ learner.head_DH.T
        if softcap is not None:
            p_TD.div_(softcap).tanh_().mul_(softcap)
        p_TD.sub_(batch.lse_N[trained, None]).exp_()
    total = weights = 0.0
    outputs, gradients = [], []
    for j, (logits_RD, rows_R) in enumerate(learner.unroll(batch, steps)):
        # The gradient of the logits is computed at once, part by part: nothing else of a loss is kept for later.
        weight, gradient_RD = STEP_WEIGHT**j, torch.empty_like(logits_RD)
        for start in range(0, len(rows_R), ROWS):
            part = slice(start, start + ROWS)
            leaf_RD = logits_RD[part].detach().requires_grad_()
            part_loss = weight * loss(p_TD[place_N[rows_R[part]]], leaf_RD).sum()
            (gradient_RD[part],) = torch.autograd.grad(part_loss, leaf_RD)
            total += part_loss.item()
        weights += weight * len(rows_R)
        outputs.append(logits_RD)
        gradients.append(gradient_RD)
    torch.autograd.backward(outputs, gradients)
    return total, weights


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is faster here than float32, and not only emulated."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C (or SIGTERM) only makes what is yielded true; the second raises KeyboardInterrupt."""
    came = threading.Event()

    def ask(number: int, frame: object) -> None:
        if came.is_set():
            raise KeyboardInterrupt
        came.set()

    if threading.current_thread() is not threading.main_thread():  # signals are not ours there
        yield came.is_set
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
