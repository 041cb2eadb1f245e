"""What rounds cost on this machine and how much of a draft is kept, measured once and kept in a file.

`measure` drives the decoding loop itself, with drafts that are wrong on purpose for what the target costs, and with
the real proposer for what drafting costs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoints.resolve import cache_folder
from paceline.decoding import sequence as decoding
from paceline.decoding.control import MAX_DRAFT, Costs, between
from paceline.decoding.round import Batch
from paceline.models.interface import LanguageModel
from paceline.proposers.base import Proposer, Request
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import RULES, Sampler
from paceline.sampling.streams import Stream

SHORT, LONG = 32, 512
"""Contexts that costs are measured behind."""
TIMES = 6
"""Rounds of each kind that are timed at most; the fastest counts, since whatever else runs only adds."""
SECONDS = 0.25
"""About what each of a handful of series of rounds may take; all kinds are timed twice in any case."""


@dataclass(frozen=True)
class Profile:
    costs: Costs
    acceptance: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Conditional acceptance at the first and at later positions, by kind of draft, where it was measured."""

    def save(self, file: Path) -> None:
        """Whoever reads it meanwhile finds the old one or this one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.part")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(file)

    @classmethod
    def load(cls, file: Path) -> Profile | None:
        """None where there is none, or none that can be used."""
        try:
            found = json.loads(file.read_text())
            costs = found["costs"]
            numbers = {name: tuple(costs[name]) for name in ("rows", "round_s", "context_s", "batches")}
            draft_s = tuple(tuple(by_k) for by_k in costs["draft_s"])
            rates = {str(kind): (float(first), float(later)) for kind, (first, later) in found["acceptance"].items()}
            return cls(Costs(**numbers, draft_s=draft_s, read_s=float(costs["read_s"])), rates)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def profile_file(setting: Mapping[str, Any]) -> Path:
    """`setting` is all that makes costs differ on one machine: models, formats, device, threads."""
    key = json.dumps({**setting, "machine": _machine()}, sort_keys=True)
    return cache_folder() / "profiles" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _machine() -> str:
    """A cache folder may be shared by several."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith(("model name", "Model")))
    except (OSError, StopIteration):
        model = platform.processor()
    return f"{platform.machine()} {model} {os.cpu_count()}"


class _Wrong:
    """Always drafts as many tokens as asked for, any tokens."""

    features: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def begin(self, slot: int) -> None:
        pass

    def prospects(self, requests: Sequence[Request]) -> list[Any]:
        raise NotImplementedError  # K is chosen here

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [Draft.certain([t % self.vocab_size for t in range(r.k)], self.vocab_size) for r in requests]

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: Any = None) -> None:
        pass


class _Given:
    """A control that is told K from outside."""

    def __init__(self) -> None:
        self.k = 0

    def begin(self, slot: int) -> None:
        pass

    def choose(self, requests: Sequence[Request]) -> list[int]:
        return [min(self.k, request.k) for request in requests]

    def learn(self, slot: int, drafted: int, accepted: int) -> None:
        pass


class _NoText:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def measure(
    target: LanguageModel,
    new_proposer: Callable[[int, int], Proposer],
    *,
    slots: int = 1,
    contexts: tuple[int, int] = (SHORT, LONG),
    seconds: float = SECONDS,
    advance: Callable[[], None] = lambda: None,
) -> Costs:
    """Costs for up to `slots` sequences at once. `advance` hears of every series that is done (`series(slots)` in all).

    Long contexts are cut to what the model takes.
    """
    room = (MAX_DRAFT + 1) * (TIMES + 2)
    most = max(4, target.context - room - 1)
    short, long = min(contexts[0], most // 2), min(contexts[1], most)
    every = range(MAX_DRAFT + 1)
    wrong = lambda slots, capacity: _Wrong(target.vocab_size)  # noqa: E731

    def series(new: Callable[[int, int], Proposer], sequences: int, context: int, ks: Sequence[int]) -> _Rounds:
        found = _rounds(target, new, sequences, context, ks, seconds)
        advance()
        return found

    alone = series(wrong, 1, short, every)
    behind = series(wrong, 1, long, (0, MAX_DRAFT))
    together = series(wrong, slots, short, (0, 1, 3, MAX_DRAFT)) if slots > 1 else {}

    def context(start: int, timed: _Rounds) -> float:
        """The mean one of a series, which goes on from its start by a token a round."""
        return start + TIMES * len(timed) / 2

    further = context(long, behind) - context(short, alone)
    slopes = [max(0.0, timed.rest_s - alone[k].rest_s) / max(further, 1.0) for k, timed in behind.items()]
    # What a few rows cost is known best from one sequence alone.
    measured = {slots * (k + 1): (timed.rest_s, context(short, together)) for k, timed in together.items()}
    measured |= {k + 1: (timed.rest_s, context(short, alone)) for k, timed in alone.items()}
    rows = tuple(sorted(measured))
    context_s = [between((1, MAX_DRAFT + 1), slopes, m) for m in rows]
    # Noise in the slope shall not eat up the rest.
    round_s = [
        max(measured[m][0] - of_m * measured[m][1], measured[m][0] / 2) for m, of_m in zip(rows, context_s, strict=True)
    ]
    drafting = series(new_proposer, 1, short, every)
    reading = series(new_proposer, 1, long, (1,))
    drafts = {1: tuple(drafting[k].draft_s for k in every)}
    if slots > 1:
        found = series(new_proposer, slots, short, (0, 1, MAX_DRAFT))
        drafts[slots] = tuple(np.interp(every, sorted(found), [found[k].draft_s for k in sorted(found)]).tolist())
    return Costs(
        rows=rows,
        round_s=tuple(round_s),
        context_s=tuple(context_s),
        batches=tuple(sorted(drafts)),
        draft_s=tuple(drafts[n] for n in sorted(drafts)),
        read_s=max(0.0, reading[1].first_s - drafts[1][1]) / long,
    )


def series(slots: int) -> int:
    """How many series of rounds `measure` times."""
    return 4 if slots == 1 else 6


@dataclass
class _Timed:
    draft_s: float = float("inf")
    rest_s: float = float("inf")
    first_s: float = 0.0
    """Of the very first draft, which may have to read the prompt."""


_Rounds = dict[int, _Timed]


def _rounds(
    target: LanguageModel,
    new_proposer: Callable[[int, int], Proposer],
    sequences: int,
    context: int,
    ks: Sequence[int],
    seconds: float,
) -> _Rounds:
    """The fastest round of each k, over rounds with every k in turn, so that the machine's drift falls on all."""
    capacity = min(target.context - 1, context + TIMES * (MAX_DRAFT + 1))
    control = _Given()

    def begin() -> Batch:
        proposer = new_proposer(sequences, capacity)
        batch = Batch(target, proposer, draft_tokens=control, slots=sequences, capacity=capacity)
        random = np.random.default_rng(0)
        for _ in range(sequences):
            prompt = random.integers(0, target.vocab_size, context).tolist()
            sampler = Sampler(
                params=SamplingParams(temperature=0), rule=RULES["token"], stream=Stream(0, 0), prompt_length=context
            )
            batch.admit(decoding.Sequence(prompt, sampler, limit=capacity + 1, detokenizer=_NoText()))
        while not batch.running[0].output:
            batch.round()
        return batch

    found: _Rounds = {k: _Timed() for k in ks}
    batch, began = begin(), time.perf_counter()
    for turn in range(TIMES + 1):
        if turn > 2 and time.perf_counter() - began > seconds:
            break
        for k in ks:
            if len(batch.running) < sequences or any(s.limit - len(s.tokens) - 1 < k for s in batch.running):
                batch = begin()  # they have grown to where the context ends
            stats, control.k = batch.running[0].stats, k
            draft_s, decode_s = stats.draft_s, stats.decode_s
            batch.round()
            draft_s = stats.draft_s - draft_s
            rest_s = stats.decode_s - decode_s - draft_s
            if turn == 0:  # for caches and clocks
                found[k].first_s = draft_s
            else:
                found[k].draft_s, found[k].rest_s = min(found[k].draft_s, draft_s), min(found[k].rest_s, rest_s)
    return found
