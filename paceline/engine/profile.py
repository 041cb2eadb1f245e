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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoints.resolve import cache_folder
from paceline.decoding import sequence as decoding
from paceline.decoding.control import MAX_DRAFT, Costs, Fixed, between
from paceline.decoding.round import Batch
from paceline.models.cache import KVCache
from paceline.models.interface import Cache, Chunk, InFront, LanguageModel, Scores
from paceline.proposers.base import Proposer, Request
from paceline.proposers.first import FirstOf
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import RULES, Sampler
from paceline.sampling.streams import Stream

SHORT, LONG = 32, 1024
"""Contexts that costs are measured behind: far enough apart for what a token more costs to stand out from noise."""
READ = 256
"""Tokens of a prompt at most that are really read for a measurement."""
VERSION = 3
"""Raised where costs come to be measured in another way: older profiles are not found then."""
TIMES = 6
"""Rounds of each kind that are timed at most; the fastest counts, since whatever else runs only adds."""
SECONDS = 1.0
"""About what each of two series of rounds may take; every kind is timed once in any case."""


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
    key = json.dumps({**setting, "machine": _machine(), "version": VERSION}, sort_keys=True)
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


class _Skimming(InFront):
    """The target, but where its cache can be filled it reads of a prompt only the last token: what a pass costs depends
    on how far it looks back, and not on what is there."""

    def __call__(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        if isinstance(cache, KVCache):
            chunks = [self._last(chunk, cache) if len(chunk.tokens) > MAX_DRAFT + 1 else chunk for chunk in chunks]
        return super().__call__(chunks, cache, features)

    def _last(self, chunk: Chunk, cache: KVCache) -> Chunk:
        cache.fill(chunk.slot, cache.length(chunk.slot) + len(chunk.tokens) - 1)
        return replace(chunk, tokens=chunk.tokens[-1:], outputs=min(chunk.outputs, 1))


def _at_length(proposer: Proposer) -> Proposer:
    """This one where a draft takes longest: its model, if lookup goes ahead of it, and all tokens asked for."""
    if isinstance(proposer, FirstOf):
        proposer = proposer.proposers[-1]
    if hasattr(proposer, "p_min"):
        proposer.p_min = 0.0
    return proposer


class _NoText:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def measure(
    target: LanguageModel,
    new_proposer: Callable[[int, int], Proposer],
    *,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] | None = None,
    seconds: float = SECONDS,
    advance: Callable[[], None] = lambda: None,
) -> Costs:
    """Costs for these numbers of sequences at once, one always being among them, and these contexts, two at least.
    `advance` hears of each of the SERIES of rounds that is done.

    Long contexts are cut to what the model takes. Without `contexts` they are SHORT and LONG, or READ where the target
    has to read them.
    """
    if contexts is None:
        contexts = (SHORT, LONG if isinstance(target.new_cache(1, 1), KVCache) else READ)
    room = (MAX_DRAFT + 1) * (TIMES + 2)
    most = max(4, target.context - room - 1)
    short, *longer = sorted({min(context, most) for context in contexts})
    short, longer = (short, longer) if longer else (short // 2, [short])
    every, several = range(MAX_DRAFT + 1), sorted({*batches} - {1})
    alone, behind = _Rounds(1, short, every), [_Rounds(1, context, (0, MAX_DRAFT)) for context in longer]
    together = {n: _Rounds(n, short, (0, 1, 3, MAX_DRAFT)) for n in several}
    skimming = _Skimming(target)
    _time([alone, *behind, *together.values()], skimming, lambda slots, capacity: _Wrong(target.vocab_size), seconds)
    advance()
    # Without rounds that draft nothing: behind one a draft has more to read, and its code is out of the caches.
    drafting, reading = {1: _Rounds(1, short, every[1:])}, _Rounds(1, min(longer[-1], READ), (1,))
    drafting |= {n: _Rounds(n, short, (1, MAX_DRAFT)) for n in several}
    _time([*drafting.values(), reading], target, new_proposer, seconds)
    advance()

    first, last = (_slope([(r.mean_context, r.timed[k].rest_s) for r in (alone, *behind)]) for k in (0, MAX_DRAFT))
    slopes = (max(0.0, first), max(0.0, first, last))  # a row more never makes the context cheaper
    measured: dict[int, tuple[float, float]] = {}
    for n in reversed(several):  # what a few rows cost is known best from few sequences
        measured |= {n * (k + 1): (t.rest_s, together[n].mean_context) for k, t in together[n].timed.items()}
    measured |= {k + 1: (timed.rest_s, alone.mean_context) for k, timed in alone.timed.items()}
    rows = tuple(sorted(measured))
    context_s = [between((1, MAX_DRAFT + 1), slopes, m) for m in rows]
    round_s = []
    for m, of_context in zip(rows, context_s, strict=True):
        rest_s, met = measured[m]
        round_s.append(max(rest_s - of_context * met, rest_s / 2))  # noise in the slope shall not eat up the rest
    # Noise only adds, and fewer rows never take longer.
    round_s = np.minimum.accumulate(round_s[::-1])[::-1].tolist()
    return Costs(
        rows=rows,
        round_s=tuple(round_s),
        context_s=tuple(context_s),
        batches=tuple(sorted(drafting)),
        draft_s=tuple(drafting[n].draft_s for n in sorted(drafting)),
        read_s=max(0.0, reading.timed[1].first_s - drafting[1].timed[1].draft_s) / reading.context,
    )


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line that comes nearest to them."""
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1)[0]) if np.ptp(x) else 0.0


SERIES = 2
"""Series of rounds that `measure` times."""


@dataclass
class _Timed:
    draft_s: float = float("inf")
    rest_s: float = float("inf")
    first_s: float = 0.0
    """Of the very first draft, which may have to read the prompt."""


class _Rounds:
    """Rounds of so many sequences behind a context, with each of `ks` in turn; the fastest of each k."""

    def __init__(self, sequences: int, context: int, ks: Sequence[int]) -> None:
        self.sequences, self.context, self.ks = sequences, context, ks
        self.timed = {k: _Timed() for k in ks}

    @property
    def mean_context(self) -> float:
        """A sequence goes on from its context by about a token a round."""
        return self.context + TIMES * len(self.ks) / 2

    @property
    def draft_s(self) -> tuple[float, ...]:
        """Of 0, 1, 2, ... tokens."""
        found = [0.0, *(self.timed[k].draft_s for k in self.ks)]
        return tuple(np.interp(range(MAX_DRAFT + 1), (0, *self.ks), found).tolist())

    def begin(self, target: LanguageModel, new_proposer: Callable[[int, int], Proposer]) -> None:
        self._begin = lambda: self.begin(target, new_proposer)
        capacity = min(target.context - 1, self.context + TIMES * (MAX_DRAFT + 1))
        proposer = _at_length(new_proposer(self.sequences, capacity))
        self._batch = Batch(target, proposer, draft_tokens=0, slots=self.sequences, capacity=capacity)
        random = np.random.default_rng(0)
        for _ in range(self.sequences):
            prompt = random.integers(0, target.vocab_size, self.context).tolist()
            sampler = Sampler(
                params=SamplingParams(temperature=0),
                rule=RULES["token"],
                stream=Stream(0, 0),
                prompt_length=self.context,
            )
            self._batch.admit(decoding.Sequence(prompt, sampler, limit=capacity + 1, detokenizer=_NoText()))
        while not self._batch.running[0].output:
            self._batch.round()

    def run(self, *, counts: bool) -> None:
        """A round with each k; the first ones are for caches and clocks."""
        for k in self.ks:
            running = self._batch.running
            if len(running) < self.sequences or any(s.limit - len(s.tokens) - 1 < k for s in running):
                self._begin()  # they have grown to where the context ends
            stats, timed, self._batch.control = self._batch.running[0].stats, self.timed[k], Fixed(k)
            draft_s, decode_s = stats.draft_s, stats.decode_s
            self._batch.round()
            draft_s = stats.draft_s - draft_s
            rest_s = stats.decode_s - decode_s - draft_s
            if counts:
                timed.draft_s, timed.rest_s = min(timed.draft_s, draft_s), min(timed.rest_s, rest_s)
            else:
                timed.first_s = draft_s


def _time(
    all_rounds: Sequence[_Rounds],
    target: LanguageModel,
    new_proposer: Callable[[int, int], Proposer],
    seconds: float,
) -> None:
    """All of them in turn, so that the machine's drift falls on all alike."""
    for rounds in all_rounds:
        rounds.begin(target, new_proposer)
    began = time.perf_counter()
    for turn in range(TIMES + 1):
        if turn > 1 and time.perf_counter() - began > seconds:
            break
        for rounds in all_rounds:
            rounds.run(counts=turn > 0)
