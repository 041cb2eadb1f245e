"""Prompt lookup: which earlier occurrence is continued, and what its index may hold."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.proposers.base import Request
from paceline.proposers.ngram import NgramProposer
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import RULES, Sampler
from paceline.sampling.streams import Stream

V = 100
SAMPLER = Sampler(params=SamplingParams(), rule=RULES["token"], stream=Stream(0), prompt_length=1)


def proposer(**changes: int) -> NgramProposer:
    made = NgramProposer(V, **changes)
    made.begin(0)
    return made


def ask(made: NgramProposer, tokens: Sequence[int], k: int = 4, slot: int = 0) -> Draft:
    (draft,) = made.propose([Request(slot=slot, tokens=tokens, k=k, sampler=SAMPLER)])
    return draft


def look_up(tokens: Sequence[int], k: int = 4, **changes: int) -> list[int]:
    return list(ask(proposer(**changes), tokens, k).tokens)


def plain_lookup(tokens: Sequence[int], k: int, shortest: int, longest: int) -> list[int]:
    """The definition, without an index: every earlier place, its agreement counted, the best continued."""
    best, found = (shortest - 1, 0), False
    for end in range(1, len(tokens)):
        agreed = 0
        while agreed < min(longest, end) and tokens[end - 1 - agreed] == tokens[-1 - agreed]:
            agreed += 1
        if (agreed, end) >= best and agreed >= shortest:
            best, found = (agreed, end), True
    if not found:
        return []
    continued = list(tokens)
    for i in range(k):
        continued.append(continued[best[1] + i])
    return continued[len(tokens) :]


def test_what_followed_the_longest_agreement_is_proposed() -> None:
    longer, shorter, suffix = [9, 1, 2, 3, 50, 51], [8, 1, 2, 3, 60, 61], [9, 1, 2, 3]
    assert look_up([*longer, *shorter, *suffix], k=2) == [50, 51]
    assert look_up([*shorter, *longer, *suffix], k=2) == [50, 51]


def test_the_latest_of_equally_long_agreements_is_proposed() -> None:
    assert look_up([1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3], k=1) == [60]
    assert look_up([7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3], k=1) == [60]


def test_agreement_beyond_the_longest_that_is_compared_decides_nothing() -> None:
    far, near, suffix = [9, 1, 2, 3, 4, 50], [8, 1, 2, 3, 4, 60], [9, 1, 2, 3, 4]
    assert look_up([*far, *near, *suffix], k=1, longest=5) == [50]
    assert look_up([*far, *near, *suffix], k=1, longest=4) == [60]


def test_agreement_stops_at_the_first_difference_and_at_the_beginning() -> None:
    # Behind the difference at 8 the first occurrence agrees again, which must not count.
    assert look_up([5, 6, 7, 8, 1, 2, 3, 50, 0, 9, 1, 2, 3, 60, 5, 6, 7, 9, 1, 2, 3], k=1) == [60]
    assert look_up([1, 2, 3, 1, 2, 3], k=1) == [1], "the occurrence at the very beginning, with nothing before it"


def test_only_the_latest_candidates_are_compared() -> None:
    tokens = [9, 1, 2, 3, 50, *([8, 1, 2, 3, 60] * 3), 9, 1, 2, 3]
    assert look_up(tokens, k=1, candidates=4) == [50]
    assert look_up(tokens, k=1, candidates=3) == [60]


def test_a_repeated_pattern_goes_on_repeating_past_the_last_token() -> None:
    assert look_up([1, 2, 1, 2], k=5, shortest=1) == [1, 2, 1, 2, 1]
    assert look_up([1, 2, 1, 2, 1, 2], k=5) == [1, 2, 1, 2, 1], "the default needs three tokens again"
    assert look_up([7, 7, 7, 7], k=6) == [7] * 6
    assert look_up([5, 7, 7], k=3, shortest=1) == [7, 7, 7]
    assert look_up([0, 1, 2, 3, 4] * 2, k=12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_the_suffix_itself_is_not_found() -> None:
    assert look_up([1, 2, 3]) == []
    assert look_up([4, 5, 6, 1, 2, 3]) == []
    made = proposer()
    for end in range(1, 50):
        assert len(ask(made, range(end))) == 0, "no token comes twice"


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2, 3, 1, 2], [1, 2, 3, 4, 2, 3, 1], [1, 2, 3, 9, 2, 3]])
def test_nothing_found_is_an_empty_draft(tokens: list[int]) -> None:
    draft = ask(proposer(), tokens)
    assert (draft.tokens, len(draft), draft.probs) == ((), 0, ())


@pytest.mark.parametrize("k", [1, 2, 3, 7, 30])
def test_exactly_k_tokens_are_proposed_each_with_certainty(k: int) -> None:
    tokens = [*range(20), 0, 1, 2]
    draft = ask(proposer(), tokens, k)
    expected = [*range(3, 20), 0, 1, 2, *range(3, 20)][:k]
    assert list(draft.tokens) == expected
    assert (np.stack([q.dense() for q in draft.probs]) == np.eye(V)[expected]).all()


@pytest.mark.parametrize("shortest", [1, 2, 3])
def test_random_texts_agree_with_the_definition_while_they_grow(shortest: int) -> None:
    rng = random.Random(shortest)
    found = 0
    for _ in range(20):
        made, tokens = proposer(shortest=shortest, longest=6, candidates=10**6), [0]
        while len(tokens) < 90:
            k = rng.randint(1, 6)
            drafted = list(ask(made, tokens, k).tokens)
            assert drafted == plain_lookup(tokens, k, shortest, 6), tokens
            found += bool(drafted)
            # A round commits part of the draft and a token of its own, or something else altogether.
            tokens += [*drafted[: rng.randint(0, len(drafted))], rng.randrange(4)]
            if rng.random() < 0.7:
                made.observe(0, tokens)
    assert found > 100


def test_several_requests_are_answered_in_order_each_from_its_own_slot() -> None:
    made = proposer()
    made.begin(5)
    requests = [
        Request(slot=5, tokens=[1, 2, 3, 50, 1, 2, 3], k=2, sampler=SAMPLER),
        Request(slot=0, tokens=[1, 2, 3], k=2, sampler=SAMPLER),
    ]
    assert [draft.tokens for draft in made.propose(requests)] == [(50, 1), ()], "slot 0 sees nothing of slot 5"
    assert ask(made, [1, 2, 3, 60, 1, 2, 3], 1).tokens == (60,)
    assert ask(made, [1, 2, 3, 50, 1, 2, 3, 9, 1, 2, 3], 1, slot=5).tokens == (9,)


def test_a_new_sequence_finds_nothing_of_the_one_before_it() -> None:
    made = proposer()
    assert ask(made, [0, 0, 0, 1, 2, 3, 50, 51, 1, 2, 3], 1).tokens == (50,)
    made.begin(0)
    # Stale ends would lie within the new tokens and propose from them.
    assert ask(made, [9, 8, 7, 6, 5, 4, 9, 1, 2, 3], 1).tokens == ()
    assert ask(made, [9, 8, 7, 6, 5, 4, 9, 1, 2, 3, 70, 1, 2, 3], 1).tokens == (70,)


def test_nothing_drafted_ever_enters_the_index() -> None:
    made, tokens = proposer(shortest=2), [1, 2, 3, 4, 1, 2]
    assert ask(made, tokens, 4).tokens == (3, 4, 1, 2)
    tokens += [9]  # all of it was rejected
    made.observe(0, tokens)
    assert ask(made, [*tokens, 3], 1).tokens == ()
    assert ask(made, [*tokens, 3, 4], 1).tokens == (1,), "3 4 came once, in the prompt"
    index = made._indices[0]
    committed = [*tokens, 3, 4]
    assert all(tuple(committed[end - 2 : end]) == gram for gram, ends in index.ends.items() for end in ends)


def test_asking_and_observing_again_changes_nothing() -> None:
    made, tokens = proposer(), [1, 2, 3, 50, 1, 2, 3]
    for _ in range(3):
        assert ask(made, tokens, 2).tokens == (50, 1)
        made.observe(0, tokens)
    ends = [end for ends in made._indices[0].ends.values() for end in ends]
    assert sorted(ends) == [3, 4, 5, 6], "each place once, but the suffix"


@pytest.mark.parametrize("period", [1, 50, 10_000])
def test_long_inputs_stay_fast(period: int) -> None:
    """A thousand proposals while a text of 10,000 tokens grows; the period is what the index may suffer from."""
    rng = random.Random(0)
    pattern = [rng.randrange(V) for _ in range(period)]
    tokens = (pattern * (10_000 // period))[:10_000]
    made = proposer()
    start = time.process_time()
    for _ in range(1000):
        ask(made, tokens)
        tokens.append(pattern[len(tokens) % period])
        made.observe(0, tokens)
    assert time.process_time() - start < 1.5, "a scan of the whole text each time takes several times as long"
