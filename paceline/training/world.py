"""The processes that train together, as torchrun starts them: one is enough, and then nothing is exchanged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=7)
"""How long a process waits for the others: rank 0 may be answering prompts meanwhile."""


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    device: str = "auto"
    """For this process, as `load` understands it."""

    @classmethod
    def from_environment(cls, device: str = "auto") -> World:
        """Joins the group that WORLD_SIZE, RANK and LOCAL_RANK describe, if there is one."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(device=device)
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        if on_gpu:
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
        return cls(dist.get_rank(), size, device)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all processes, added in the order of their ranks: the same bits everywhere and every time."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def share(self, tensor: torch.Tensor) -> None:
        """Everybody's becomes rank 0's."""
        if self.size > 1:
            dist.broadcast(tensor, 0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
