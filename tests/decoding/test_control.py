"""How many tokens are drafted: what the costs and the acceptance seen so far make of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.decoding.control import (
    FEW,
    LEAST_GAIN,
    MAX_DRAFT,
    NOTHING,
    PROBING,
    RECENT,
    UNKNOWN,
    Acceptance,
    Adaptive,
    Costs,
    Everything,
    Fixed,
    Pool,
    Seen,
    between,
    pool,
)
from paceline.decoding.round import Batch
from paceline.proposers.base import Prospect, Request
from paceline.proposers.ngram import NgramProposer
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import RULES, Sampler
from paceline.sampling.streams import Stream
from tests.fakes import Job, Table, TableModel, decode, ids

SAMPLER = Sampler(params=SamplingParams(), rule=RULES["token"], stream=Stream(0, 0), prompt_length=1)


def costs(row_s: float = 0.1, draft_s: float = 0.0, read_s: float = 0.0, context_s: float = 0.0) -> Costs:
    """A pass takes 1 s and `row_s` for each row but the first; drafting `draft_s` a token."""
    return Costs(
        rows=(1, 9),
        round_s=(1.0, 1.0 + 8 * row_s),
        context_s=(context_s, 9 * context_s),
        batches=(1,),
        draft_s=(tuple(draft_s * k for k in range(MAX_DRAFT + 1)),),
        read_s=read_s,
    )


class Ahead:
    """A proposer whose prospects are given."""

    features: tuple[int, ...] = ()

    def __init__(self, *prospects: Prospect | None) -> None:
        self.given = prospects

    def begin(self, slot: int) -> None:
        pass

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        return list(self.given)

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        raise AssertionError("not asked here")

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        pass


def requests(count: int = 1, *, k: int = 100, length: int = 10) -> list[Request]:
    return [Request(slot=n, tokens=[0] * length, k=k, sampler=SAMPLER) for n in range(count)]


def control(of: Costs, *rates: tuple[float, float], by_model: bool = False, unread: int = 0) -> Adaptive:
    """One sequence for each of `rates`, which are believed firmly."""
    kinds = [f"kind {n}" for n in range(len(rates))]
    made = Adaptive(
        Ahead(*(Prospect(kind, by_model=by_model, unread=unread) for kind in kinds)),
        of,
        pool(dict(zip(kinds, rates, strict=True))),
    )
    for slot in range(len(rates)):
        made.begin(slot)
    return made


def speed(of: Costs, rates: Sequence[tuple[float, float]], ks: Sequence[int], context: int = 10) -> float:
    tokens = sum(1 + sum(first * later**i for i in range(k)) for (first, later), k in zip(rates, ks, strict=True))
    return tokens / of.round(len(ks) + sum(ks), context)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """Against every allotment there is, of two sequences with acceptance of their own."""
    draw = random.Random(seed)
    rates = [(draw.random(), draw.random()) for _ in range(2)]
    of = costs(draw.uniform(0.02, 0.6))
    chosen = control(of, *rates).choose(requests(2))
    best = max(itertools.product(range(MAX_DRAFT + 1), repeat=2), key=lambda ks: speed(of, rates, ks))
    plain = speed(of, rates, (0, 0))
    if speed(of, rates, best) <= LEAST_GAIN * plain:
        assert chosen == [0, 0]
    else:
        assert speed(of, rates, chosen) == pytest.approx(speed(of, rates, best))


def test_a_step_in_the_costs_is_seen_beyond() -> None:
    """Four rows cost as much as six: two more tokens are free, though the fourth row alone does not pay."""
    stairs = Costs(
        rows=(1, 2, 3, 4, 5, 6, 7),
        round_s=(1.0, 1.6, 1.6, 1.6, 1.6, 1.6, 9.0),
        context_s=(0.0,) * 7,
        batches=(1,),
        draft_s=((0.0, 0.0),),
        read_s=0.0,
    )
    assert control(stairs, (0.5, 0.9)).choose(requests()) == [5]


def test_drafting_costs_count() -> None:
    rates = (0.5, 0.5)
    assert control(costs(0.1), rates, by_model=True).choose(requests())[0] > 0
    assert control(costs(0.1, draft_s=1.0), rates, by_model=True).choose(requests()) == [0]
    assert control(costs(0.1, draft_s=1.0), rates, by_model=False).choose(requests())[0] > 0, "lookup is free"
    unread = control(costs(0.1, read_s=0.01), rates, by_model=True, unread=500)
    assert unread.choose(requests(k=4)) == [0], "a prompt is not read for four tokens"
    assert unread.choose(requests(k=400))[0] > 0, "but for four hundred"
    assert control(costs(0.01, context_s=1e-3), rates).choose(requests(length=10))[0] > 0
    assert control(costs(0.01, context_s=1e-1), rates).choose(requests(length=5000)) == [0], "rows meet the context"


def test_no_more_than_there_is_room_for_and_nothing_where_nothing_is_ahead() -> None:
    assert control(costs(0.0), (0.9, 0.9)).choose(requests(k=3)) == [3]
    assert control(costs(0.0), (0.9, 0.9)).choose(requests()) == [MAX_DRAFT]
    made = Adaptive(Ahead(None), costs(0.0), pool())
    made.begin(0)
    assert [made.choose(requests()) for _ in range(500)] == [[0]] * 500
    assert Fixed(3).choose(requests(2, k=2)) == [2, 2]


def simulate(made: Adaptive, accept: float, rounds: int, draw: random.Random) -> tuple[list[int], float, int]:
    """K of every round, seconds and tokens, where a drafted token is accepted with this chance."""
    of, chosen, seconds, tokens = made.costs, list[int](), 0.0, 0
    for _ in range(rounds):
        (k,) = made.choose(requests())
        kept = 0
        while kept < k and draw.random() < accept:
            kept += 1
        made.learn(0, k, kept)
        chosen.append(k)
        seconds += of.round(1 + k, 10) + (of.draft(k, 1) if k else 0)
        tokens += 1 + kept
    return chosen, seconds, tokens


@pytest.mark.parametrize("row_s", [0.05, 0.25, 0.5])
def test_a_draft_that_is_never_right_costs_next_to_nothing(row_s: float) -> None:
    made = Adaptive(Ahead(Prospect("draft", by_model=True)), costs(row_s, draft_s=0.1), pool())
    made.begin(0)
    chosen, seconds, tokens = simulate(made, 0.0, 1000, random.Random(0))
    assert seconds / tokens < 1.02
    assert sum(chosen[500:]) >= 3, "it is asked now and then"
    assert Seen.nothing() == NOTHING, "what one sequence sees stays its own"
    made.begin(0)  # what one sequence taught, the next one need not learn again
    chosen, seconds, tokens = simulate(made, 0.0, 100, random.Random(1))
    assert seconds / tokens < 1 + 2 * PROBING


@pytest.mark.parametrize("seed", [None, 1])
def test_where_nothing_pays_it_is_not_thought_about_in_every_round(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a request with a seed: when it is probed must not depend on what runs beside it."""
    decided, decide = 0, Adaptive._choose

    def count(*args: Any) -> list[int]:
        nonlocal decided
        decided += 1
        return decide(*args)

    monkeypatch.setattr(Adaptive, "_choose", count)
    made = Adaptive(Ahead(Prospect("draft", by_model=True)), costs(0.25, draft_s=0.1), pool())
    made.begin(0)
    (asked,) = requests()
    asked = replace(asked, sampler=replace(asked.sampler, params=SamplingParams(seed=seed)))
    probes = 0
    for _ in range(1000):
        (k,) = made.choose([asked])
        made.learn(0, k, 0)
        probes += k
    assert probes >= 6
    assert decided == 1000 if seed is not None else decided < 200


@pytest.mark.parametrize("accept", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("row_s", [0.05, 0.25])
def test_it_comes_close_to_the_best_fixed_k(accept: float, row_s: float) -> None:
    of = costs(row_s, draft_s=0.05)
    best = max(
        (1 + sum(accept**i for i in range(1, k + 1))) / (of.round(1 + k, 10) + of.draft(k, 1) * (k > 0))
        for k in range(MAX_DRAFT + 1)
    )
    made = Adaptive(Ahead(Prospect("draft", by_model=True)), of, pool())
    made.begin(0)
    _, seconds, tokens = simulate(made, accept, 4000, random.Random(0))
    assert tokens / seconds > 0.97 * best


def test_a_sequence_that_turns_better_is_found_out() -> None:
    made = Adaptive(Ahead(Prospect("draft")), costs(0.3), pool())
    made.begin(0)
    off, *_ = simulate(made, 0.0, 300, random.Random(0))
    assert sum(off[-50:]) <= 3
    on, *_ = simulate(made, 0.95, 1500, random.Random(1))
    assert sum(on[-50:]) / 50 > 3


@pytest.mark.parametrize("by_model", [True, False])
def test_what_a_model_leaves_out_of_its_drafts_was_not_kept_either(by_model: bool) -> None:
    """A model that ends its drafts early is paid for what it was asked; lookups that come out short cost nothing."""
    made = control(costs(0.1, draft_s=0.2), (0.9, 0.9), by_model=by_model)
    (asked,) = made.choose(requests())
    assert asked > 1
    for _ in range(300):
        made.choose(requests())
        made.learn(0, drafted=0, accepted=0)
    assert (made.choose(requests()) == [0]) is by_model


@pytest.mark.parametrize("row_s", [0.05, 0.3])
@pytest.mark.parametrize(("there", "right"), [(0.5, 0.9), (0.3, 0.9), (0.15, 0.6), (0.9, 0.7)])
def test_a_draft_that_ends_early_is_asked_for_as_much_as_pays(there: float, right: float, row_s: float) -> None:
    """A model is sure of a first token so often, of each further one as a rule; what it ends before costs a step."""
    of = costs(row_s, draft_s=0.08)

    def round_of(k: int, draw: random.Random) -> tuple[int, int, float]:
        drafted = 0
        while drafted < k and draw.random() < (0.8 if drafted else there):
            drafted += 1
        kept = 0
        while kept < drafted and draw.random() < right:
            kept += 1
        steps = min(drafted + 1, k)
        return drafted, kept, of.round(1 + drafted, 10) + (of.draft(steps, 1) if k else 0)

    def fixed(k: int) -> float:
        rounds = [round_of(k, draw) for draw in [random.Random(0)] for _ in range(4000)]
        return sum(1 + kept for _, kept, _ in rounds) / sum(seconds for *_, seconds in rounds)

    made, draw, tokens, seconds = Adaptive(Ahead(Prospect("d", by_model=True)), of, pool()), random.Random(1), 0, 0.0
    made.begin(0)
    for _ in range(4000):
        (k,) = made.choose(requests())
        drafted, kept, took = round_of(k, draw)
        made.learn(0, drafted, kept)
        tokens, seconds = tokens + 1 + kept, seconds + took
    assert tokens / seconds > 0.97 * max(map(fixed, range(MAX_DRAFT + 1)))


def test_no_more_is_asked_for_than_there_are_heads() -> None:
    made = control(costs(0.01), (1.0, 1.0))
    assert made.choose(requests()) == [MAX_DRAFT]
    made.proposer = Ahead(Prospect("kind 0", by_model=True, most=3))
    assert made.choose(requests()) == [3]


def test_finding_out_what_is_accepted_counts_what_a_model_left_out() -> None:
    """It is asked for all it can draft, whatever that costs; a draft that came out empty was wrong at once."""
    seen: Pool = {}
    made = Everything(Ahead(Prospect("draft", by_model=True, most=4), None), costs(9.0), seen)
    made.begin(0)
    made.begin(1)
    assert made.choose(requests(2)) == [4, 0]
    made.learn(0, drafted=0, accepted=0)
    made.learn(1, drafted=0, accepted=0)
    believed = Acceptance.believed(UNKNOWN, FEW)
    believed.learn(4, 0)
    assert seen.keys() == {"draft"}
    assert seen["draft"].kept.rates() == believed.rates()


def test_what_was_asked_for_counts_once() -> None:
    made = control(costs(0.1), (0.9, 0.9), by_model=True)
    (asked,) = made.choose(requests())
    made.learn(0, drafted=1, accepted=1)
    seen = made._slots[0].seen["kind 0"].kept
    assert (seen.accepted, seen.reached) == ([1, 0], [1, 1])
    made.learn(0, drafted=0, accepted=0)  # a round that had no room to draft
    assert (seen.accepted, seen.reached) == ([1, 0], [1, 1])
    assert asked > 1


def test_a_new_sequence_is_tried_whatever_others_were_like() -> None:
    """What was drafted for others was never right: where it always is, drafting is turned on within a few rounds."""
    made = Adaptive(Ahead(Prospect("draft", by_model=True)), costs(0.25, draft_s=0.1), pool())
    for seed in range(20):
        made.begin(0)
        simulate(made, 0.0, 60, random.Random(seed))
    made.begin(0)
    chosen, *_ = simulate(made, 1.0, 60, random.Random(0))
    assert sum(k > 0 for k in chosen) > 40


def test_kinds_are_told_apart() -> None:
    """Of two kinds, one is right and one wrong: each has its own K, in one sequence."""
    proposer = Ahead(Prospect("good"))
    made = Adaptive(proposer, costs(0.3), pool())
    made.begin(0)
    for turn in range(100):
        proposer.given = (Prospect("good" if turn % 2 else "bad"),)
        (k,) = made.choose(requests())
        made.learn(0, k, k if turn % 2 else 0)
    proposer.given = (Prospect("good"),)
    assert made.choose(requests()) == [MAX_DRAFT]
    proposer.given = (Prospect("bad"),)
    assert made.choose(requests()) == [0]


def test_acceptance_counts_what_was_reached() -> None:
    seen = Acceptance(1.0)
    seen.learn(4, 2)  # reached positions 1, 2, 3
    assert (seen.accepted, seen.reached) == ([1, 1], [1, 2])
    seen.learn(4, 4)
    assert (seen.accepted, seen.reached) == ([2, 4], [2, 5])
    seen.learn(1, 0)
    assert (seen.accepted, seen.reached) == ([2, 4], [3, 5])
    assert seen.rates() == (2 / 3, 4 / 5)
    assert Acceptance(RECENT).rates((0.3, 0.4)) == (0.3, 0.4)


def test_costs_between_and_beyond_what_was_measured() -> None:
    assert [between((1, 3), (10.0, 20.0), x) for x in (1, 2, 3, 5)] == [10, 15, 20, 30]
    assert between((1,), (4.0,), 3) == 12
    assert between((1, 8, 9), (4.0, 21.0, 20.0), 17) == 36, "noise between the last two does not make more rows cheaper"
    of = Costs(
        rows=(1, 9), round_s=(1.0, 2.0), context_s=(0.0, 0.0), batches=(1, 4), draft_s=((0, 1), (0, 3)), read_s=0
    )
    assert of.draft(2, 1) == 2
    assert of.draft(1, 4) == 3
    assert of.draft(1, 2) == pytest.approx(1 + 2 / 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": (2, 9)}, "ascend from 1"),
        ({"rows": (1, 9, 5), "round_s": (1, 1, 1), "context_s": (0, 0, 0)}, "ascend from 1"),
        ({"round_s": (1.0,)}, "equally long"),
        ({"batches": (1, 2)}, "one row for each"),
        ({"draft_s": ((0.0,),)}, "one row for each"),
        ({"batches": ()}, "ascend from 1"),
    ],
)
def test_costs_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    given = vars(costs()) | changes
    with pytest.raises(ValueError, match=message):
        Costs(**given)


@pytest.mark.parametrize("verify", ["token", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding_where_they_must_be(verify: str, temperature: float) -> None:
    """In the real loop, with sequences of several lengths coming and going."""
    target = TableModel(Table(5, 2, seed=3, one_hot=0.5))
    jobs = [
        Job(prompt=(0, 1, 2, 0, 1), params=SamplingParams(temperature=temperature, max_tokens=8 + 5 * n, seed=n))
        for n in range(6)
    ]

    def run() -> list[list[int]]:
        proposer = NgramProposer(target.vocab_size, shortest=1)
        adaptive = Adaptive(proposer, costs(0.05), pool())
        return [ids(s) for s in decode(target, jobs, draft=proposer, k=adaptive, verify=verify, slots=3)]

    found = run()
    assert len({len(chunk.tokens) for chunks in target.passes for chunk in chunks}) > 3, "K varies"
    assert found == run(), "no clock decides"
    if temperature == 0 or verify == "coupled":
        assert found == [ids(s) for s in decode(target, jobs, draft=None, verify=verify)]


@pytest.mark.parametrize("verify", ["token", "block"])
def test_a_request_with_a_seed_gives_the_same_text_alone_and_beside_others(verify: str) -> None:
    target = TableModel(Table(5, 2, seed=3, one_hot=0.5))
    seen = pool({"ngram 1": (0.9, 0.9)})
    jobs = [
        Job(prompt=(0, 1, 2, 0, 1), params=SamplingParams(max_tokens=24 + n, seed=n if n < 2 else None))
        for n in range(5)
    ]

    def run(some: Sequence[Job], slots: int) -> list[list[int]]:
        proposer = NgramProposer(target.vocab_size, shortest=1)
        adaptive = Adaptive(proposer, costs(0.1), seen, {"ngram 2": (0.7, 0.7)})
        return [ids(s) for s in decode(target, some, draft=proposer, k=adaptive, verify=verify, slots=slots)]

    alone = [run([job], 1)[0] for job in jobs[:2]]
    assert run(jobs, 5)[:2] == alone
    assert run(jobs[::-1], 2)[::-1][:2] == alone


def test_a_batch_takes_a_number_or_a_control() -> None:
    target = TableModel(Table(5, 2, seed=3))
    batch = Batch(target, NgramProposer(5), draft_tokens=3, slots=1, capacity=20)
    assert batch.control == Fixed(3)
