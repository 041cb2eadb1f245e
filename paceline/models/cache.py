"""Keys and values of running sequences, preallocated: one slot for each sequence, a length of its own for each slot.

Layers with a sliding window keep every position too (their window is a mask), which is what makes `truncate` exact:
nothing is ever dropped, so rewinding is only forgetting. Knows no model, and not who owns a slot.

Shapes: S slots, K key/value heads, C capacity, D head size, T tokens of one chunk, L positions seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

import paceline.kernels as kernels
from paceline.models.interface import Chunk


class Slots:
    """How full each slot is: what every cache has in common, wherever it keeps its tensors."""

    def __init__(self, slots: int, capacity: int) -> None:
        if slots < 1 or capacity < 1:
            raise ValueError(f"a cache of {slots} slots of {capacity} tokens holds nothing: ask for 1 of each at least")
        self._capacity = capacity
        self._lengths = [0] * slots

    @property
    def slots(self) -> int:
        return len(self._lengths)

    @property
    def capacity(self) -> int:
        return self._capacity

    def length(self, slot: int) -> int:
        if not 0 <= slot < len(self._lengths):
            raise ValueError(f"slot {slot} does not exist: this cache has slots 0 to {len(self._lengths) - 1}")
        return self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        filled = self.length(slot)
        if not 0 <= length <= filled:
            raise ValueError(f"slot {slot} holds {filled} tokens and cannot be cut to {length}: give 0 to {filled}")
        self._lengths[slot] = length

    def place(self, chunks: Sequence[Chunk], vocab_size: int) -> tuple[list[int], dict[int, int]]:
        """First position of each chunk, and each slot's length after the pass; ValueError where one cannot run.

        Chunks of one slot follow each other. Nothing changes until `commit`.
        """
        starts: list[int] = []
        ends: dict[int, int] = {}
        for chunk in chunks:
            count = len(chunk.tokens)
            start = ends.get(chunk.slot, self.length(chunk.slot))
            if not 0 <= chunk.outputs <= count or not count:
                raise ValueError(
                    f"a chunk of {count} tokens cannot have {chunk.outputs} outputs: give at least one token, and ask "
                    "for 0 outputs up to one for each token"
                )
            if start + count > self._capacity:
                raise ValueError(
                    f"slot {chunk.slot} holds {start} tokens and cannot take {count} more: its capacity is "
                    f"{self._capacity}; send fewer, truncate it, or make a larger cache"
                )
            least, most = min(chunk.tokens), max(chunk.tokens)
            if least < 0 or most >= vocab_size:
                raise ValueError(
                    f"token id {least if least < 0 else most} is not one of the model's {vocab_size} (0 to "
                    f"{vocab_size - 1}): was the text encoded with another model's tokenizer?"
                )
            starts.append(start)
            ends[chunk.slot] = start + count
        return starts, ends

    def commit(self, ends: dict[int, int]) -> None:
        """Every layer has written these slots up to these lengths."""
        for slot, end in ends.items():
            self._lengths[slot] = end


class Keeper(Protocol):
    """What attention needs of a cache: somewhere to put a chunk's keys and values, and to get back all it sees."""

    def extend(
        self, layer: int, slot: int, start: int, begin: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Unrolled:
    """Keys and values of whole sequences, with their gradients, for training: nothing is ever written over.

    A slot's passes follow each other: the second sees the keys of the first and its own, and so on. What a row may see
    of them is what the mask says.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(
        self, layer: int, slot: int, start: int, begin: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = k_TKD.transpose(0, 1)[None], v_TKD.transpose(0, 1)[None]
        if (layer, slot) in self._held:
            before = self._held[layer, slot]
            keys, values = torch.cat((before[0], keys), dim=2), torch.cat((before[1], values), dim=2)
        self._held[layer, slot] = (keys, values)
        return keys, values


class KVCache(Slots):
    """`keys[layer]` and `values[layer]` are [S, K, C, D]; what lies beyond a slot's length is garbage, never read.

    Nothing else is remembered, so running the same passes again after `truncate` gives the same bits.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(slots, capacity)
        shape = (slots, kv_heads, capacity, head_dim)
        # Inference tensors could only be written in inference mode, wherever the cache is used.
        with torch.inference_mode(False):
            self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
            self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
            # [1, K, C, D] of each slot, made once: a pass would make them for every chunk in every layer.
            self._views = [
                list(zip(keys.split(1), values.split(1), strict=True))
                for keys, values in zip(self.keys, self.values, strict=True)
            ]

    @functools.cached_property
    def native(self) -> kernels.Caches:
        """The same memory as the CPU kernels write and read it; they do not move lengths either."""
        return kernels.Caches(self.keys, self.values)

    def fill(self, slot: int, length: int) -> None:
        """As if that many tokens had been read, with keys and values of 0: for measuring what a context costs."""
        assert length <= self._capacity, (length, self._capacity)
        for keys_SKCD, values_SKCD in zip(self.keys, self.values, strict=True):
            keys_SKCD[slot, :, :length] = 0
            values_SKCD[slot, :, :length] = 0
        self.commit({slot: length})

    def extend(
        self, layer: int, slot: int, start: int, begin: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a chunk at positions start..start+T-1 of one layer; return keys and values from `begin` to its end.

        They are [1, K, L, D]. The length does not move: a pass that fails in a later layer leaves the slot as it was.
        Gradients stop here.
        """
        keys_1KCD, values_1KCD = self._views[layer][slot]
        tokens = k_TKD.shape[0]
        keys_1KCD.narrow(2, start, tokens).copy_(k_TKD.detach().transpose(0, 1))
        values_1KCD.narrow(2, start, tokens).copy_(v_TKD.detach().transpose(0, 1))
        seen = start + tokens - begin
        return keys_1KCD.narrow(2, begin, seen), values_1KCD.narrow(2, begin, seen)
