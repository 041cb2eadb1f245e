"""Runs many sequences to their ends: as many at once as the batch has slots, the next one in as soon as one leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from paceline.decoding.round import Batch
from paceline.decoding.sequence import Sequence


def generate(batch: Batch, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    """After every round, each sequence that took part in it; a sequence whose `finish_reason` is set comes no more.

    Closing the iterator early abandons the batch, which holds no state that anything else sees.
    """
    waiting = deque(sequences)
    while waiting or batch.running:
        while waiting and not batch.full:
            batch.admit(waiting.popleft())
        yield from batch.round()
