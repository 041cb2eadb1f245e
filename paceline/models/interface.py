"""What the rest of Paceline needs of a language model: chunks of tokens in, logits out, over a cache of slots.

Everything that runs (our decoder, any transformers model behind the adapter, the table-driven fakes of the tests)
implements `LanguageModel`. It knows nothing of speculation: scoring K drafted tokens is a chunk of K + 1 tokens.

Shapes: V vocabulary, T tokens of one chunk, O outputs of one chunk, F captured features, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: they take the positions from the slot's present length on."""

    slot: int
    tokens: Sequence[int]
    outputs: int = 1
    """Logits are returned for the last `outputs` tokens of the chunk (0 while a prompt is only being read)."""


@dataclass
class Scores:
    """What one pass computed, chunk by chunk in the order given."""

    logits: list[torch.Tensor]
    """[O, V] each: row i holds the logits of the token after the i-th of the chunk's last O tokens."""
    features: list[torch.Tensor] = field(default_factory=list)
    """[T, F, H] each, when features were asked for."""


class Cache(Protocol):
    """Keys and values of `slots` sequences, each with a length of its own. Positions are absolute.

    A slot is one running sequence; who hands slots out and takes them back is the caller.
    """

    @property
    def slots(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Positions each slot can hold."""
        ...

    def length(self, slot: int) -> int:
        """Positions of this slot that are filled."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget every position from `length` on. Raises ValueError where `length` exceeds what is filled."""
        ...


@runtime_checkable
class LanguageModel(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int:
        """Longest sequence the model can hold, in tokens."""
        ...

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, slots: int, capacity: int) -> Cache:
        """An empty cache; `capacity` in tokens, at most `context` (ValueError otherwise)."""
        ...

    def __call__(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        """Run the chunks, append their keys and values to the cache, return logits (and features).

        A feature index k in 0..L names the input of layer k, which is the output of layer k - 1; L (the number of
        layers) names the final hidden state, after the last norm. Raises ValueError where a chunk does not fit its
        slot.
        """
        ...


class InFront:
    """A `LanguageModel` in front of another one, to which it passes everything on: for what changes a part of it."""

    def __init__(self, inner: LanguageModel) -> None:
        self.inner = inner
        self.vocab_size, self.context, self.device = inner.vocab_size, inner.context, inner.device

    def new_cache(self, slots: int, capacity: int) -> Cache:
        return self.inner.new_cache(slots, capacity)

    def __call__(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        return self.inner(chunks, cache, features)
