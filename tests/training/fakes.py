"""A learner and texts whose target is a fixed random function, small enough to train in a second."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from paceline.training.data import Batch

V, H = 23, 8


class FakeSource:
    """Texts of random tokens. Hidden states are random; the target is softmax(head @ hidden)."""

    def __init__(self, texts: int = 12, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.head_VH = torch.randn(V, H, generator=rng)
        self.texts = []
        for length in torch.randint(4, 14, (texts,), generator=rng).tolist():
            tokens = torch.randint(V, (length + 1,), generator=rng)
            trained = torch.arange(length) >= 2
            self.texts.append((tokens, trained, torch.randn(length, H, generator=rng)))
        self.read: list[list[int]] = []

    def plan(self, seed: int, epoch: int, tokens_per_batch: int) -> list[list[int]]:
        order = np.random.default_rng([seed, epoch]).permutation(len(self.texts)).tolist()
        return [order[i : i + 2] for i in range(0, len(order), 2)]

    def batch(self, indices: Sequence[int]) -> Batch:
        self.read.append(list(indices))
        tokens, trained, hidden = zip(*(self.texts[i] for i in indices), strict=True)
        hidden_NH = torch.cat(hidden)
        return Batch(
            lengths=[len(t) - 1 for t in tokens],
            tokens_N=torch.cat([t[:-1] for t in tokens]),
            next_N=torch.cat([t[1:] for t in tokens]),
            trained_N=torch.cat(trained),
            features_NFH=torch.zeros(len(hidden_NH), 0, H),
            hidden_NH=hidden_NH,
            lse_N=(hidden_NH @ self.head_VH.T).logsumexp(-1),
        )

    def target_logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH @ self.head_VH.T


class FakeLearner:
    """An embedding and a linear layer on the target's hidden state; step j reads its own state of j - 1 before."""

    kind = "fake"
    features: tuple[int, ...] = ()
    steps: int | None = None
    reach: int | None = None

    def __init__(
        self, source: FakeSource, ids_D: torch.Tensor | None = None, *, seed: int = 1, noise: float = 0.01
    ) -> None:
        torch.manual_seed(seed)
        self.module: nn.Module = nn.ModuleDict({"embedding": nn.Embedding(V, H), "mix": nn.Linear(2 * H, H)})
        self.ids_D, self.noise = ids_D, noise
        self.head_DH = source.head_VH if ids_D is None else source.head_VH[ids_D]

    def unroll(self, batch: Batch, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x_NH = self.module.get_submodule("embedding")(batch.tokens_N)
        state_NH = batch.hidden_NH
        age_N = torch.cat([torch.arange(length) for length in batch.lengths])
        for j in range(steps):
            state_NH = self.module.get_submodule("mix")(torch.cat([state_NH, x_NH], dim=-1))
            rows = (batch.trained_N & (age_N >= j)).nonzero()[:, 0]
            noise_RH = self.noise * torch.randn(len(rows), H) if self.module.training else 0
            yield (state_NH[rows] + noise_RH) @ self.head_DH.T, rows
            state_NH = torch.cat([state_NH[:1], state_NH[:-1]])

    def start(self, folder: Path) -> None:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("config.json").write_text(json.dumps({"kind": self.kind}))
