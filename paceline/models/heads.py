"""Heads on the target: each tells one of the tokens ahead from the target's last hidden state alone (Medusa, Cai et al.
2024, arXiv 2401.10774).

A head is one residual layer ahead of the target's own head, which is not part of the state dict. What a head says does
not depend on what the others proposed.

Shapes: N hidden states, K heads, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.config import ModelConfig
from paceline.models.decoder import Linear

Head = Callable[[torch.Tensor], torch.Tensor]
"""[N, H] -> [N, D], by rows of the target's own head."""


class Heads(nn.Module):
    """Behind position t, where the target itself tells the token t + 1, head k tells the token t + 2 + k."""

    def __init__(self, config: ModelConfig, count: int) -> None:
        super().__init__()
        self.config = config
        self.features = (config.num_layers,)
        self.layers = nn.ModuleList(Linear(config.hidden_size, config.hidden_size, bias=True) for _ in range(count))
        self._of_target: tuple[Head] | None = None

    def attach(self, head: Head) -> None:
        """Take over a head over the draft vocabulary."""
        self._of_target = (head,)  # a tuple, so that it is no submodule

    def forward(self, hidden_NH: torch.Tensor, count: int) -> torch.Tensor:
        """[N, K, D] the logits of the first `count` heads."""
        assert self._of_target is not None
        states = [hidden_NH + F.silu(layer(hidden_NH)) for layer in self.layers[:count]]
        logits_ND = self._of_target[0](torch.cat(states)).float()
        if (cap := self.config.logit_softcap) is not None:
            logits_ND = cap * torch.tanh(logits_ND / cap)
        return logits_ND.unflatten(0, (len(states), -1)).transpose(0, 1)
