"""How a draft is trained: everything that decides the loss curve beside the data, with its defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.training.losses import LOSSES

LEARNING_RATES = {"shallow": 5e-4, "eagle1": 2e-3, "eagle3": 2e-3, "heads": 2e-3}
"""By kind: layers that come from the target move slowly, new ones fast."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Raises ValueError, naming the value and the limit, for one that cannot be trained by."""

    steps: int | None = None
    tokens: int | None = None
    """How long: optimiser steps, or tokens read. One of the two."""
    loss: str = "forward-kl"
    lr: float = 2e-3
    warm_up: float = 0.03
    """Part of the run in which the learning rate grows; then it falls along a cosine, to 0 at the end."""
    weight_decay: float = 0.01
    """Of matrices; vectors have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of the vectors, which AdamW moves; matrices are moved by Muon (optimizer.py)."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    unroll: int = 3
    """Steps of drafting that are trained together; step j weighs 0.8^j."""
    single: float = 0.5
    """Part of the run, from its beginning, that trains the first step alone: it costs a fraction of all of them, and
    later steps learn little before the first is good."""
    tokens_per_batch: int = 2048
    batches_per_step: int = 1
    """Over all ranks: each accumulates its part of them."""
    seed: int = 0
    gradient_checkpointing: bool = False
    """Compute MLPs again on the way back instead of keeping what is inside them: less memory, the same gradients."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(f"steps is {self.steps} and tokens is {self.tokens}: give one of the two")
        if self.loss not in LOSSES:
            raise ValueError(f"loss is {self.loss!r}, it must be one of {', '.join(LOSSES)}")
        counts = ("steps", "tokens", "unroll", "tokens_per_batch", "batches_per_step")
        for name in (*counts, "lr", "clip"):
            value = getattr(self, name)
            if value is not None and not (value >= 1 if name in counts else 0 < value < math.inf):
                limit = "1 at least" if name in counts else "a finite number above 0"
                raise ValueError(f"{name} is {value}, it must be {limit}")

    def progress(self, steps: int, tokens: int) -> float:
        """How much of the run is done: 1 or more is all of it."""
        return steps / self.steps if self.steps is not None else tokens / (self.tokens or 1)

    def unrolled(self, progress: float) -> int:
        return 1 if progress < self.single else self.unroll

    def learning_rate(self, progress: float) -> float:
        if progress < self.warm_up:
            return self.lr * progress / self.warm_up
        falling = (min(progress, 1.0) - self.warm_up) / (1 - self.warm_up)
        return self.lr * 0.5 * (1 + math.cos(math.pi * falling))
