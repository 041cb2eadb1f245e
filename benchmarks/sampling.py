"""What a round costs outside the models' passes: drafting, distributions, verification, text, bookkeeping.

`python benchmarks/sampling.py [--rounds 200] [--context 2000] [--threads 2] [--rule token]`

The decoding loop itself, with models that answer at once, from a table of logits as spread as a small language model's;
one token of each row is likely, so that drafts are mostly accepted. Time inside the models' calls is not counted, nor
are rounds in which the proposer found nothing. Cases take turns round by round, so that the machine's drift falls on
all of them alike. Ends in one JSON line.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.checkpoints.detokenizer import Detokenizer, Spelling, Vocabulary
from paceline.decoding.round import Batch
from paceline.decoding.sequence import Sequence as Completion
from paceline.models.interface import Cache, Chunk, Scores
from paceline.proposers.base import NoProposer, Proposer
from paceline.proposers.draft_model import DraftModelProposer
from paceline.proposers.ngram import NgramProposer
from paceline.proposers.vocabulary import VocabularyMap
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import RULES, Sampler
from paceline.sampling.streams import Stream

SIZES = (49_152, 262_144)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
}
DRAFTS = ("none", "n-gram", "model")
PERIOD = 40
"""Rows of the table, and length of the pattern that the text repeats."""
LIMIT = 100_000


class Lengths:
    """A cache that holds nothing but how much it would hold."""

    slots, capacity = 1, LIMIT

    def __init__(self) -> None:
        self.filled = 0

    def length(self, slot: int) -> int:
        return self.filled

    def truncate(self, slot: int, length: int) -> None:
        self.filled = length


class Instant:
    """A LanguageModel whose logits are rows of a table, by position. `seconds` were spent in its calls."""

    device, context = torch.device("cpu"), LIMIT

    def __init__(self, table_PV: torch.Tensor) -> None:
        self.vocab_size, self.seconds = table_PV.shape[1], 0.0
        self._twice = torch.cat([table_PV, table_PV])

    def new_cache(self, slots: int, capacity: int) -> Lengths:
        return Lengths()

    def __call__(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        start = time.perf_counter()
        assert isinstance(cache, Lengths)
        (chunk,) = chunks
        cache.filled += len(chunk.tokens)
        first = (cache.filled - chunk.outputs) % PERIOD
        logits_OV = self._twice[first : first + chunk.outputs].clone()  # in the processor's caches, as a pass leaves it
        self.seconds += time.perf_counter() - start
        return Scores([logits_OV])


class Case:
    """One sequence in the loop, a round at a time; `rounds` holds the milliseconds of each."""

    def __init__(
        self, target: Instant, draft: Instant, kind: str, params: dict[str, Any], rule: str, context: int, k: int
    ) -> None:
        size, self.target, self.draft, self.k = target.vocab_size, target, draft, k if kind != "none" else 0
        words = [(False, b"word ")] * size
        proposer: Proposer = NoProposer()
        if kind == "n-gram":
            proposer = NgramProposer(size)
        elif kind == "model":
            same = VocabularyMap(words, words, lambda text: [], target_size=size, draft_size=size)
            proposer = DraftModelProposer(draft, same, slots=1, capacity=LIMIT)
        self.batch = Batch(target, proposer, draft_tokens=k, slots=1, capacity=LIMIT)
        prompt = [i % PERIOD for i in range(context)]
        vocabulary = Vocabulary(Spelling(byte_level=True), words, frozenset(), lambda token: "")
        self.sequence = Completion(
            prompt,
            Sampler(
                params=SamplingParams(seed=1, max_tokens=None, **params),
                rule=RULES[rule],
                stream=Stream(1),
                prompt_length=context,
            ),
            limit=LIMIT,
            detokenizer=Detokenizer(vocabulary, prompt),
        )
        self.batch.admit(self.sequence)
        while not self.sequence.output:
            self.batch.round()
        self.rounds: list[dict[str, float]] = []

    def round(self) -> None:
        stats = self.sequence.stats
        before = (self.target.seconds, self.draft.seconds, stats.draft_s, stats.verify_s, stats.drafted)
        start = time.perf_counter()
        self.batch.round()
        self.sequence.take()
        wall = time.perf_counter() - start
        after = (self.target.seconds, self.draft.seconds, stats.draft_s, stats.verify_s, stats.drafted)
        scoring, passes, drafting, verifying, drafted = (b - a for a, b in zip(before, after, strict=True))
        if drafted != self.k:
            return
        parts = {"draft": drafting - passes, "verify": verifying}
        parts["other"] = wall - scoring - passes - sum(parts.values())
        self.rounds.append({name: 1000 * seconds for name, seconds in {"all": sum(parts.values()), **parts}.items()})


def models(size: int) -> tuple[Instant, Instant]:
    """A target and a draft that is often right. At position i the token i + 1 mod PERIOD is likely."""
    generator = torch.Generator().manual_seed(0)
    target_PV = 4 * torch.randn(PERIOD, size, generator=generator)
    target_PV[torch.arange(PERIOD), torch.arange(1, PERIOD + 1) % PERIOD] = target_PV.amax(-1) + 4
    return Instant(target_PV), Instant(target_PV + 0.5 * torch.randn(PERIOD, size, generator=generator))


def main(rounds: int = 200, context: int = 2000, draft_tokens: int = 4, threads: int = 2, rule: str = "token") -> None:
    torch.set_num_threads(threads)
    console, results = Console(stderr=True, width=120), []
    table = Table("vocabulary", "parameters", "draft", "ms a round", "draft", "verify", "other", "accepted")
    for size in SIZES:
        target, draft = models(size)
        cases = {
            (name, kind): Case(target, draft, kind, params, rule, context, draft_tokens)
            for name, params in PARAMS.items()
            for kind in DRAFTS
        }
        for _ in track(range(rounds), console=console, description=f"vocabulary {size:,}"):
            for case in cases.values():
                case.round()
        for (name, kind), case in cases.items():
            ms = {part: statistics.median(r[part] for r in case.rounds) for part in case.rounds[0]}
            accepted = case.sequence.stats.acceptance_rate
            results.append({"vocabulary": size, "parameters": name, "draft": kind, "accepted": accepted, "ms": ms})
            table.add_row(f"{size:,}", name, kind, *(f"{value:.3f}" for value in ms.values()), f"{accepted:.0%}")
    console.print(table)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    setting = {
        "command": " ".join(sys.argv),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", "numpy")},
        "python": platform.python_version(),
    }
    print(json.dumps({"benchmark": "sampling", **setting, "results": results}))


if __name__ == "__main__":
    typer.run(main)
