"""Costs are measured by the decoding loop and kept; what is kept and broken is measured again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.decoding.control import MAX_DRAFT, Costs
from paceline.engine import llm as engine
from paceline.engine.llm import LLM
from paceline.engine.profile import LONG, READ, SERIES, Profile, measure, profile_file
from paceline.models.config import Layer, ModelConfig, Rope
from paceline.models.decoder import Decoder
from paceline.models.interface import Cache, Chunk, Scores
from paceline.proposers.base import Prospect, Request
from paceline.proposers.ngram import NgramProposer
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from tests import tiny
from tests.fakes import Table, TableModel

ROW_S, CONTEXT_S, STEP_S, READ_S = 2e-3, 2e-5, 1e-3, 1e-4


class Clock:
    """Shows the time that was waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


class Slow(TableModel):
    """A pass takes 5 ms, each row 2 ms, and 20 microseconds for each token of context that it meets."""

    def __call__(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        scores = super().__call__(chunks, cache, features)
        if all(chunk.outputs for chunk in chunks) and all(len(chunk.tokens) <= MAX_DRAFT + 1 for chunk in chunks):
            rows = sum(len(chunk.tokens) for chunk in chunks)
            met = sum(len(chunk.tokens) * cache.length(chunk.slot) for chunk in chunks)
            CLOCK.wait(5e-3 + ROW_S * rows + CONTEXT_S * met)
        return scores


class SlowDraft(NgramProposer):
    """1 ms for every step, all sequences together, and 0.1 ms for every token of a prompt that it has not read."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.read: dict[int, int] = {}

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        unread = sum(len(r.tokens) - self.read.get(r.slot, 0) for r in requests)
        self.read |= {r.slot: len(r.tokens) for r in requests}
        CLOCK.wait(READ_S * unread * (unread > 60) + STEP_S * max(r.k for r in requests))
        return [Draft.certain([0] * r.k, self.vocab_size) for r in requests]

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        return [Prospect("slow", by_model=True) for _ in requests]


def test_measured_costs_are_the_true_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: CLOCK.now)
    target = Slow(Table(8, 1, seed=0), context=512)
    ticks: list[None] = []
    costs = measure(
        target,
        lambda slots, capacity: SlowDraft(8),
        batches=(2, 4),
        contexts=(20, 60, 120),
        advance=lambda: ticks.append(None),
    )
    assert len(ticks) == SERIES
    assert costs.rows == (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 18, 36)
    assert costs.batches == (1, 2, 4)
    for rows in (1, 5, 9, 24, 36):
        assert costs.round(rows, 0) == pytest.approx(5e-3 + ROW_S * rows, rel=0.1)
    assert costs.round(9, 300) - costs.round(9, 0) == pytest.approx(300 * 9 * CONTEXT_S, rel=0.15)
    for k in (1, 4, 8):
        assert costs.draft(k, 1) == pytest.approx(STEP_S * k, rel=0.01)
        assert costs.draft(k, 4) == pytest.approx(STEP_S * k, rel=0.01)
    assert costs.read_s == pytest.approx(READ_S, rel=0.1)


def test_a_short_context_is_measured_as_far_as_it_goes() -> None:
    costs = measure(TableModel(Table(4, 1, seed=0), context=24), lambda slots, capacity: NgramProposer(4), batches=(2,))
    assert len(costs.rows) == len(costs.round_s) == len(costs.context_s)
    assert all(0 < s < 1 for s in costs.round_s)


class Watched(Decoder):
    """Notes how long chunks are, and how far back a pass looks."""

    longest = furthest = 0

    def forward(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        Watched.longest = max(Watched.longest, *(len(chunk.tokens) for chunk in chunks))
        scores = super().forward(chunks, cache, features)
        Watched.furthest = max(Watched.furthest, *(cache.length(chunk.slot) for chunk in chunks))
        assert all(logits_OV.isfinite().all() for logits_OV in scores.logits)
        return scores


def test_a_context_that_can_be_filled_is_not_read() -> None:
    config = ModelConfig(
        architecture="test",
        vocab_size=11,
        hidden_size=16,
        intermediate_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        layers=(Layer(rope=Rope()),),
        context=2048,
    )
    target = Watched(config).eval()
    torch.nn.init.normal_(target.embedding.weight)  # which a decoder leaves to what is loaded
    costs = measure(target, lambda slots, capacity: NgramProposer(11), batches=(2,))
    assert Watched.longest == READ
    assert LONG < Watched.furthest < LONG + 200
    assert all(0 < s < 1 for s in costs.round_s)


COSTS = Costs(rows=(1, 9), round_s=(1, 2), context_s=(0, 0), batches=(1,), draft_s=((0.0, 0.5),), read_s=0.25)


def test_a_profile_is_kept_as_it_is(tmp_path: Path) -> None:
    profile = Profile(COSTS, {"draft": (0.5, 0.25)})
    profile.save(tmp_path / "a" / "p.json")
    assert Profile.load(tmp_path / "a" / "p.json") == profile
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"costs": 3, "acceptance": {}}',
        json.dumps({"costs": {**vars(COSTS), "rows": [2, 9]}, "acceptance": {}}),
        json.dumps({"costs": vars(COSTS), "acceptance": {"draft": 1}}),
        "\udcff",
    ],
)
def test_a_broken_profile_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert Profile.load(tmp_path / "p.json") is None
    assert Profile.load(tmp_path / "missing.json") is None


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots of every measurement that is made, none of which is made in earnest."""
    found: list[int] = []

    def pretend(target: object, new_proposer: object, *, batches: tuple[int, int]) -> Costs:
        found.append(batches[-1])
        return replace(COSTS, batches=batches, draft_s=COSTS.draft_s * len(batches))

    monkeypatch.setattr(engine, "measure", pretend)
    return found


def test_costs_are_measured_once_for_each_setting(tmp_path: Path, measured: list[int]) -> None:
    words = tiny.tokenizer()
    folder = tmp_path / "model"
    tiny.llama(len(words)).save_pretrained(folder)
    words.save_pretrained(folder)
    params = SamplingParams(temperature=0, max_tokens=4)
    assert not measured
    said: list[str] = []
    llm = LLM(folder, "ngram", max_num_seqs=3)
    llm.generate("The quick", params)
    llm.generate("The quick", params)
    assert measured == [3]
    LLM(folder, "ngram", max_num_seqs=3).profile(said.append)
    assert measured == [3]
    assert not said
    LLM(folder, "ngram", kv_cache_dtype="float16").profile(said.append)
    assert measured == [3, 8]
    assert len(said) == 1
    LLM(folder, "ngram", max_num_seqs=2).profile(said.append)
    assert measured == [3, 8], "what is known of three sequences is enough for two"
    LLM(folder, None).generate("The quick", params)
    LLM(folder, "ngram", draft_tokens=2).generate("The quick", params)
    assert measured == [3, 8], "nothing is measured where nothing depends on it"


def test_costs_are_measured_again_for_more_sequences(tmp_path: Path, measured: list[int]) -> None:
    words = tiny.tokenizer()
    folder = tmp_path / "model"
    tiny.llama(len(words)).save_pretrained(folder)
    words.save_pretrained(folder)
    few = LLM(folder, "ngram", max_num_seqs=2)
    few.profile()
    assert few.profile_file
    Profile(few.profile().costs, {"ngram 4": (0.5, 0.25)}).save(few.profile_file)
    many = LLM(folder, "ngram", max_num_seqs=9)
    assert many.profile().costs.batches == (1, 9)
    assert many.profile().acceptance == {"ngram 4": (0.5, 0.25)}, "what was accepted still holds"
    assert LLM(folder, "ngram", max_num_seqs=9).profile() == many.profile()
    assert measured == [2, 9]


def test_models_in_memory_are_measured_for_themselves(measured: list[int]) -> None:
    words = tiny.tokenizer()
    for _ in range(2):
        llm = LLM(tiny.llama(len(words)), "ngram", tokenizer=words)
        llm.profile()
        llm.profile()
    assert measured == [8, 8]
    with_other = llm.with_draft(lambda slots, capacity: NgramProposer(len(words)))
    with_other.profile()
    assert measured == [8, 8, 8], "another draft costs something else"


def test_a_setting_is_a_file_of_its_own() -> None:
    assert profile_file({"a": 1, "b": 2}) == profile_file({"b": 2, "a": 1})
    assert profile_file({"a": 1}) != profile_file({"a": 2})
