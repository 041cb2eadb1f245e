"""The draft model behind its proposer, mostly over a vocabulary that is not the target's: what it reads and what its
cache holds, and that the one loop keeps the target's output whatever it drafts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.decoding.generate import generate
from paceline.decoding.round import Batch
from paceline.decoding.sequence import Sequence as Generated
from paceline.models.interface import Chunk
from paceline.proposers.base import Request
from paceline.proposers.draft_model import DraftModelProposer
from paceline.proposers.vocabulary import Token, Vocabulary, VocabularyMap
from paceline.sampling import rejection
from paceline.sampling.distribution import Distribution, distribution
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from paceline.sampling.rejection import Verdict
from paceline.sampling.sampler import RULES, Rule, Sampler
from paceline.sampling.streams import Stream
from tests.fakes import Job, Letters, Table, TableModel, TokenCache, Vector, decode, ids, text

TARGET = "abcd"
DRAFT = "xcya"
"""Shared: a and c. The draft has never heard of b, which it reads as xy, nor of d, for which it has no spelling."""
SHARED = {0: 3, 2: 1}


def letters(texts: str) -> list[Token]:
    return [(False, letter.encode()) for letter in texts]


def overlapping() -> VocabularyMap:
    spelled: dict[str, tuple[int, ...]] = {"b": (0, 2), "d": ()}
    return VocabularyMap(
        letters(TARGET), letters(DRAFT), spelled.__getitem__, target_size=len(TARGET), draft_size=len(DRAFT)
    )


def identical(size: int = 4) -> VocabularyMap:
    tokens = letters(TARGET[:size])
    return VocabularyMap(tokens, tokens, lambda _: (), target_size=size, draft_size=size)


def draft_model(seed: int = 5, context: int = 200) -> TableModel:
    return TableModel(Table(len(DRAFT), 3, seed), context)


def target_model() -> TableModel:
    return TableModel(Table(len(TARGET), 3, seed=1))


def spelled(vocabulary: Vocabulary, tokens: Sequence[int]) -> list[int]:
    return [i for token in tokens for i in vocabulary.spell(token)]


def sampler_of(job: Job, rule: Rule, **changes: Any) -> Sampler:
    stream = Stream(job.params.seed or 0, job.sample)
    return Sampler(params=job.params, rule=rule, stream=stream, prompt_length=len(job.prompt), **changes)


def run(
    target: TableModel,
    proposer: DraftModelProposer,
    jobs: Sequence[Job],
    *,
    k: int,
    rule: Rule = RULES["token"],
    slots: int = 8,
) -> list[Generated]:
    """What tests.fakes.decode does, with a proposer of any vocabulary."""
    sequences = [
        Generated(
            job.prompt,
            sampler_of(job, rule, end_ids=frozenset(job.params.stop_token_ids or ())),
            limit=len(job.prompt) + (job.params.max_tokens or 0),
            detokenizer=Letters(),
        )
        for job in jobs
    ]
    batch = Batch(target, proposer, draft_tokens=k, slots=slots, capacity=target.context - 1)
    for _ in generate(batch, sequences):
        pass
    return sequences


def drafting(model: TableModel | None = None, *, slots: int = 8, capacity: int = 63) -> DraftModelProposer:
    return DraftModelProposer(model or draft_model(), overlapping(), slots=slots, capacity=capacity)


def request(tokens: Sequence[int], k: int = 3, slot: int = 0, **params: Any) -> Request:
    job = Job(prompt=(0,), params=SamplingParams(**{"seed": 0, **params}))
    return Request(slot=slot, tokens=tokens, k=k, sampler=sampler_of(job, RULES["token"]))


def held(proposer: DraftModelProposer, slot: int = 0) -> list[int]:
    """The draft's cache, which in these models is the tokens themselves."""
    cache = proposer._cache
    assert isinstance(cache, TokenCache)
    return cache.rows[slot]


def fed(model: TableModel) -> list[list[list[int]]]:
    """The tokens of every chunk of every pass since the last look."""
    passes = [[list(chunk.tokens) for chunk in chunks] for chunks in model.passes]
    model.passes.clear()
    return passes


RAGGED = [
    Job(prompt=(1,)),
    Job(prompt=(3, 1, 2, 0, 1, 1)),
    Job(prompt=(2, 2), params=SamplingParams(max_tokens=5, seed=1)),
    Job(prompt=(3, 3, 2, 1)),
    Job(prompt=(1,) * 9, params=SamplingParams(max_tokens=25, seed=2)),
]


def with_params(jobs: list[Job], **changes: Any) -> list[Job]:
    return [replace(job, params=replace(job.params, **changes)) for job in jobs]


# ---- exactness over another vocabulary, through the loop ----


@pytest.mark.parametrize("verify", RULES)
def test_greedy_output_is_the_targets_for_every_k_and_batch(verify: str) -> None:
    jobs = with_params(RAGGED, temperature=0.0)
    expected = [ids(s) for s in decode(target_model(), jobs, k=0)]
    drafted = accepted = 0
    for k, slots in ((1, 8), (2, 1), (7, 3)):
        got = run(target_model(), drafting(slots=slots), jobs, k=k, rule=RULES[verify], slots=slots)
        assert [ids(s) for s in got] == expected, (k, slots)
        drafted += sum(s.stats.drafted for s in got)
        accepted += sum(s.stats.accepted for s in got)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"stop": ("ca", "dd")},
        {"min_tokens": 3, "stop_token_ids": (2, 3)},
        {"logit_bias": {0: 1.0, 3: -100.0}, "top_k": 2},
    ],
    ids=str,
)
def test_coupled_output_is_the_targets_whatever_k(changes: dict[str, Any]) -> None:
    jobs = with_params(RAGGED, seed=5, **changes)
    plain = decode(target_model(), jobs, k=0, verify="coupled")
    for k in (1, 4):
        got = run(target_model(), drafting(), jobs, k=k, rule=RULES["coupled"])
        for a, b in zip(plain, got, strict=True):
            assert (ids(a), text(a), a.finish_reason, a.stop_reason) == (
                ids(b),
                text(b),
                b.finish_reason,
                b.stop_reason,
            )


SEEN, RUNS = 2, 240  # the second and third token are looked at
# Weissman et al. 2003: the empirical distribution of m outcomes is farther than this in L1 with probability below 1e-9
BOUND = float(np.sqrt(2 * (len(TARGET) ** SEEN * np.log(2) + np.log(1e9)) / RUNS))


def measured_gap(rule: Rule, **params: Any) -> float:
    """L1 distance between the tokens of many runs and the target's own joint distribution."""
    table = Table(len(TARGET), 2, seed=3)
    # The first token is certain, so that all runs share it: b, which the draft has to spell.
    table.row([0])[:] = np.eye(len(TARGET))[1]
    jobs = [Job(params=SamplingParams(max_tokens=SEEN + 2, seed=seed, **params)) for seed in range(RUNS)]
    proposer = drafting(TableModel(Table(len(DRAFT), 2, seed=4)), slots=64)
    runs = run(TableModel(table), proposer, jobs, k=2, rule=rule, slots=64)
    assert sum(r.stats.accepted for r in runs) > RUNS / 4
    counts = Counter(tuple(ids(r)[: SEEN + 1]) for r in runs)
    gap = 0.0
    for tokens in itertools.product(range(len(TARGET)), repeat=SEEN):
        p = 1.0
        for i, token in enumerate(tokens):
            logits = np.log(table.row((0, 1, *tokens[:i])))
            p *= distribution(logits, jobs[0].params).of(token)
        gap += abs(counts[1, tokens[0], tokens[1]] / RUNS - p)
    return gap


@pytest.mark.parametrize(("verify", "params"), [("token", {"temperature": 0.7, "top_p": 0.9}), ("block", {})], ids=str)
def test_the_loop_samples_the_targets_distribution(verify: str, params: dict[str, Any]) -> None:
    assert measured_gap(RULES[verify], **params) < BOUND


def unnormalised_q(p_S: Sequence[Distribution], draft: Draft, stream: Stream, anchor: int) -> Verdict:
    """As if q had been restricted to the intersection and not renormalised: three quarters of it are missing."""
    quarter = tuple(replace(q, probs=q.probs / 4) for q in draft.probs)
    return rejection.verify(p_S, Draft(draft.tokens, quarter), stream, anchor)


def test_the_statistical_test_catches_a_q_that_was_not_renormalised() -> None:
    assert measured_gap(Rule(rejection.propose, unnormalised_q)) > BOUND


class Renamed(Table):
    """Another table's distributions over other ids: `ids[i]` stands for the other table's token i."""

    def __init__(self, other: Table, ids: Sequence[int]) -> None:
        super().__init__(other.vocab_size, other.order, other.seed)
        self.other, self.ids = other, list(ids)

    def row(self, tokens: Sequence[int]) -> Vector:
        return self.other.row([self.ids.index(token) for token in tokens])[np.argsort(self.ids)]


@pytest.mark.parametrize("verify", RULES)
def test_the_target_itself_under_other_ids_is_always_accepted(verify: str) -> None:
    """A draft fed wrongly, or read out in the wrong order, would only show in its acceptance."""
    names = "cdba"
    vocabulary = VocabularyMap(letters(TARGET), letters(names), lambda _: (), target_size=4, draft_size=4)
    draft = TableModel(Renamed(Table(4, 3, seed=1), [names.index(letter) for letter in TARGET]))
    proposer = DraftModelProposer(draft, vocabulary, slots=8, capacity=63)
    assert not vocabulary.identical
    for done in run(target_model(), proposer, RAGGED, k=3, rule=RULES[verify]):
        assert done.stats.accepted == done.stats.drafted > 0


# ---- what the draft's cache holds, and what it is fed ----


class Watched(DraftModelProposer):
    """Checks after every round what the draft's cache holds; `rounds` counts them by what became of the draft."""

    def __init__(self, slots: int) -> None:
        super().__init__(draft_model(), overlapping(), slots=slots, capacity=63)
        self.drafted: dict[int, tuple[int, int]] = {}
        self.kept: Counter[int] = Counter()
        self.rounds: Counter[str] = Counter()

    def begin(self, slot: int) -> None:
        super().begin(slot)
        self.kept[slot] = 0
        assert held(self, slot) == []

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        drafts = super().propose(requests)
        for r, draft in zip(requests, drafts, strict=True):
            assert len(draft) == r.k
            self.drafted[r.slot] = len(r.tokens), len(draft)
            assert held(self, r.slot) == spelled(self.vocabulary, [*r.tokens, *draft.tokens[:-1]])
        return drafts

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        super().observe(slot, tokens, features_TFH)
        if slot in self.drafted:
            anchor, k = self.drafted.pop(slot)
            whole = len(tokens) == anchor + k + 1
            # The last drafted token was never read, the last committed one always waits for the next draft.
            self.kept[slot] = len(tokens) - (2 if whole else 1)
            self.rounds["whole" if whole else "cut"] += 1
        # A round that drafted nothing leaves the cache as it was.
        assert held(self, slot) == spelled(self.vocabulary, tokens[: self.kept[slot]])


@pytest.mark.parametrize(("k", "slots"), [(1, 8), (2, 3), (4, 1), (7, 8)])
def test_the_cache_holds_the_spelled_committed_tokens_after_every_round(k: int, slots: int) -> None:
    jobs = [job for seed in range(3) for job in with_params(RAGGED, seed=seed)]
    proposer = Watched(slots)
    run(target_model(), proposer, jobs, k=k, slots=slots)
    assert proposer.rounds["cut"] > 10
    assert k > 4 or proposer.rounds["whole"] > 1


def test_after_a_full_acceptance_the_last_drafted_token_and_the_bonus_are_read() -> None:
    model = draft_model()
    proposer = drafting(model)
    proposer.begin(0)
    (draft,) = proposer.propose([request([0, 1], k=3)])
    first, second, third = draft.tokens
    assert fed(model) == [[[3, 0, 2]], [[SHARED[first]]], [[SHARED[second]]]], "k tokens cost k passes"
    bonus = 1
    proposer.observe(0, [0, 1, *draft.tokens, bonus])
    proposer.propose([request([0, 1, *draft.tokens, bonus], k=1)])
    assert fed(model) == [[[SHARED[third], 0, 2]]]
    assert held(proposer) == [3, 0, 2, SHARED[first], SHARED[second], SHARED[third], 0, 2]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_after_a_rejection_only_the_recovered_token_is_read(accepted: int) -> None:
    model = draft_model()
    proposer = drafting(model)
    proposer.begin(0)
    (draft,) = proposer.propose([request([0, 1], k=3)])
    fed(model)
    committed = [0, 1, *draft.tokens[:accepted], 1]
    proposer.observe(0, committed)
    assert held(proposer) == spelled(proposer.vocabulary, committed[:-1])
    proposer.propose([request(committed, k=1)])
    assert fed(model) == [[[0, 2]]]


def test_drafted_tokens_are_forgotten_however_many_others_were_committed_instead() -> None:
    proposer = drafting()
    proposer.begin(0)
    (draft,) = proposer.propose([request([0, 1], k=3)])
    other = (draft.tokens[1] + 1) % 4
    proposer.observe(0, [0, 1, draft.tokens[0], other, other, other])
    assert held(proposer) == spelled(proposer.vocabulary, [0, 1, draft.tokens[0]])


def test_a_round_that_drafts_nothing_leaves_all_to_be_read_later() -> None:
    model = draft_model()
    proposer = drafting(model)
    proposer.begin(0)
    for tokens in ([0], [0, 1], [0, 1, 2]):
        proposer.observe(0, tokens)
    assert fed(model) == []
    proposer.propose([request([0, 1, 2, 2], k=1)])
    assert fed(model) == [[[3, 0, 2, 1, 1]]]


def test_each_q_is_the_one_path_behind_the_tokens_drafted_so_far() -> None:
    params: dict[str, Any] = {"temperature": 0.7, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "top_p": 0.95}
    model, tokens = draft_model(), [0, 1, 3, 2]
    proposer = drafting(model)
    proposer.begin(0)
    (draft,) = proposer.propose([request(tokens, k=6, **params)])
    assert [q.size for q in draft.probs] == [len(TARGET)] * 6
    stream = Stream(0)
    for i, token in enumerate(draft.tokens):
        row_D = np.log(model.table.row(spelled(proposer.vocabulary, [*tokens, *draft.tokens[:i]])))
        logits_V = np.full(len(TARGET), -np.inf)
        for ours, theirs in SHARED.items():
            logits_V[ours] = row_D[theirs]
        q = distribution(logits_V, SamplingParams(**params), prompt=[0], output=[1, 3, 2, *draft.tokens[:i]])
        assert (draft.probs[i].dense() == q.dense()).all()
        assert token == rejection.propose(q, stream, len(tokens) + i, len(tokens))


def test_requests_of_unequal_k_share_passes_and_draft_what_they_would_alone() -> None:
    wanted = [request([0, 1], k=2, slot=2), request([2], k=4, slot=0), request([3, 3, 1], k=1, slot=1)]
    model = draft_model()
    proposer = drafting(model, slots=3)
    for slot in range(3):
        proposer.begin(slot)
    together = proposer.propose(wanted)
    assert [[chunk.slot for chunk in chunks] for chunks in model.passes] == [[2, 0, 1], [2, 0], [0], [0]]
    for r, draft in zip(wanted, together, strict=True):
        alone = drafting(slots=3)
        alone.begin(r.slot)
        (expected,) = alone.propose([r])
        assert draft.tokens == expected.tokens
        for ours, theirs in zip(draft.probs, expected.probs, strict=True):
            assert (ours.dense() == theirs.dense()).all()


def test_long_prompts_are_read_in_chunks_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [(3 * i + i // 4) % 4 for i in range(40)]
    whole = drafting()
    whole.begin(0)
    (expected,) = whole.propose([request(tokens)])
    monkeypatch.setattr("paceline.proposers.draft_model.READ_CHUNK", 7)
    model = draft_model()
    proposer = drafting(model)
    proposer.begin(0)
    (draft,) = proposer.propose([request(tokens)])
    assert (draft.tokens, held(proposer)) == (expected.tokens, held(whole))
    chunks: list[Chunk] = [chunk for (chunk,) in model.passes]
    reading = chunks[:-2]
    assert {len(chunk.tokens) for chunk in reading[:-1]} == {7}
    assert [chunk.outputs for chunk in reading] == [0] * (len(reading) - 1) + [1]


def test_begin_clears_its_slot_and_no_other() -> None:
    model = draft_model()
    proposer = drafting(model, slots=2)
    for slot in range(2):
        proposer.begin(slot)
    before = proposer.propose([request([0, 1, 2], slot=0), request([1, 1], slot=1)])
    proposer.begin(0)
    assert held(proposer, 0) == []
    assert held(proposer, 1) == spelled(proposer.vocabulary, [1, 1, *before[1].tokens[:-1]])
    fed(model)
    # The same beginning as before: nothing of it may be taken for read.
    (again,) = proposer.propose([request([0, 1, 2], slot=0)])
    assert fed(model)[0] == [[3, 0, 2, 1]]
    assert again.tokens == before[0].tokens
    proposer.observe(1, [1, 1, before[1].tokens[0], 3])
    proposer.propose([request([1, 1, before[1].tokens[0], 3], k=1, slot=1)])
    assert len(fed(model)[0][0]) == 1, "slot 1 still holds what it read"


# ---- limits ----


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_the_drafts_context_limit_shortens_drafts_and_then_empties_them(k: int) -> None:
    """A draft of n tokens fills n - 1 positions behind what was read; the model refuses any position too many."""
    for vocabulary, tokens in ((identical(), [0, 1, 2, 3] * 5), (overlapping(), [1, 0, 1, 1, 2] * 4)):
        for length in range(1, 20):
            model = TableModel(Table(4, 3, seed=5), context=12)
            proposer = DraftModelProposer(model, vocabulary, slots=1, capacity=63)
            proposer.begin(0)
            (draft,) = proposer.propose([request(tokens[:length], k=k)])
            width = len(spelled(vocabulary, tokens[:length]))
            assert len(draft) == max(0, min(k, 12 - width + 1))
            assert len(draft.probs) == len(draft)


def test_a_sequence_that_grows_past_the_drafts_context_falls_back_without_failing() -> None:
    proposer = drafting(TableModel(Table(4, 3, seed=5), context=10))
    proposer.begin(0)
    tokens, lengths = [1, 1], []
    while len(tokens) < 15:
        (draft,) = proposer.propose([request(tokens)])
        lengths.append(len(draft))
        tokens = [*tokens, *draft.tokens[:1], 2]
        proposer.observe(0, tokens)
        assert held(proposer) == spelled(proposer.vocabulary, tokens)[: len(held(proposer))]
    # 4, 6, 8 and 10 positions are to be read, one drafted token and one of the target's a round.
    assert lengths[:4] == [3, 3, 3, 1]
    assert set(lengths[4:]) == {0}


@pytest.mark.parametrize("context", [3, 6, 9, 14])
def test_output_is_the_targets_with_a_draft_of_short_context(context: int) -> None:
    jobs = with_params(RAGGED, temperature=0.0)
    expected = [ids(s) for s in decode(target_model(), jobs, k=0)]
    proposer = drafting(draft_model(context=context))
    assert [ids(s) for s in run(target_model(), proposer, jobs, k=4)] == expected


def test_respelled_tokens_get_room_of_their_own() -> None:
    """The cache is as long as the target's where ids are the same, and longer where a token may take several."""
    every_b = [1] * 8  # 16 positions
    proposer = drafting(capacity=10)
    proposer.begin(0)
    assert len(proposer.propose([request(every_b, k=4)])[0]) == 4
    same = DraftModelProposer(TableModel(Table(4, 3, seed=5)), identical(), slots=1, capacity=10)
    same.begin(0)
    assert len(same.propose([request(every_b, k=4)])[0]) == 3


def test_the_padding_of_the_embeddings_may_differ_either_way() -> None:
    """Ids beyond the smaller model cannot be proposed; ids beyond the draft's rows, if committed, can be read."""
    tokens = letters(TARGET[:3])
    jobs = with_params(RAGGED, seed=3, max_tokens=15)
    for target_size, draft_size in ((4, 6), (6, 4)):
        target = TableModel(Table(target_size, 3, seed=1))
        vocabulary = VocabularyMap(tokens, list(tokens), lambda _: (), target_size=target_size, draft_size=draft_size)
        draft = TableModel(Table(draft_size, 3, seed=2))
        proposer = DraftModelProposer(draft, vocabulary, slots=8, capacity=63)
        plain = decode(target, jobs, k=0, verify="coupled")
        got = run(target, proposer, jobs, k=4, rule=RULES["coupled"])
        assert [ids(s) for s in got] == [ids(s) for s in plain]
        assert sum(s.stats.accepted for s in got) > 0
