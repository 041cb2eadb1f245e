"""Counts add up, and rates divide by what they say they divide by."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.decoding.stats import Stats
from paceline.sampling.params import SamplingParams
from tests.fakes import Job, Table, TableModel, decode


def counted(*rounds: tuple[int, int]) -> Stats:
    """Stats of rounds given as (drafted, accepted)."""
    stats = Stats()
    for drafted, accepted in rounds:
        stats.count_round(drafted, accepted)
    return stats


def test_conditional_and_marginal_rates_of_a_hand_made_example() -> None:
    stats = counted((4, 4), (4, 2), (4, 0), (2, 2), (0, 0), (3, 1))
    assert (stats.rounds, stats.drafts, stats.drafted, stats.accepted) == (6, 5, 17, 9)
    # Position 1 was reached in every draft but the one rejected at once; position 2 was not drafted by (2, 2) and not
    # reached by (3, 1); position 3 was reached by (4, 4) alone.
    assert stats.reached_at == [5, 4, 2, 1]
    assert stats.accepted_at == [4, 3, 1, 1]
    assert stats.conditional_acceptance == [4 / 5, 3 / 4, 1 / 2, 1]
    assert stats.marginal_acceptance == [4 / 5, 3 / 5, 1 / 5, 1 / 5]
    assert stats.acceptance_rate == 9 / 17
    assert stats.acceptance_length == 1 + 9 / 5
    assert stats.drafts_of == [0, 1, 1, 3]
    assert sum(stats.drafts_of) == stats.drafts
    assert sum(stats.accepted_at) == stats.accepted
    assert 1 + sum(stats.marginal_acceptance) == pytest.approx(stats.acceptance_length)


def test_rounds_without_a_draft_are_rounds_and_no_drafts() -> None:
    plain = counted((0, 0), (0, 0), (0, 0))
    assert (plain.rounds, plain.drafts, plain.drafted, plain.accepted) == (3, 0, 0, 0)
    assert (plain.reached_at, plain.accepted_at) == ([], [])
    assert (plain.acceptance_length, plain.acceptance_rate) == (1, 0)
    assert (plain.conditional_acceptance, plain.marginal_acceptance) == ([], [])
    drafting = counted((3, 1), (3, 3))
    mixed = counted((0, 0), (3, 1), (0, 0), (3, 3))
    assert dataclasses.replace(mixed, rounds=2) == drafting, "plain rounds change nothing but their own number"


def test_a_draft_that_was_rejected_at_once_was_reached_in_its_first_position_alone() -> None:
    stats = counted((3, 0), (3, 0))
    assert stats.reached_at == [2, 0, 0]
    assert stats.accepted_at == [0, 0, 0]
    assert stats.conditional_acceptance == [0, 0, 0], "nothing is divided by 0"
    assert stats.marginal_acceptance == [0, 0, 0]
    assert stats.acceptance_length == 1


def test_positions_grow_with_the_longest_draft_in_either_order() -> None:
    for rounds in ([(1, 1), (3, 2)], [(3, 2), (1, 1)]):
        stats = counted(*rounds)
        assert stats.reached_at == [2, 1, 1]
        assert stats.accepted_at == [2, 1, 0]
    stats = counted((2, 1))
    assert stats.reached_at is not stats.accepted_at


def test_addition_adds_every_count_and_leaves_its_operands_alone() -> None:
    rounds_a, rounds_b = [(4, 4), (4, 0), (0, 0)], [(2, 1), (1, 1)]
    a, b = counted(*rounds_a), counted(*rounds_b)
    kept_a, kept_b = dataclasses.replace(a, reached_at=[*a.reached_at]), dataclasses.replace(b)
    both = counted(*rounds_a, *rounds_b)
    assert a + b == both
    assert b + a == both
    assert sum([a, b], Stats()) == both
    assert a + Stats() == a
    assert (a, b) == (kept_a, kept_b)
    total = a + b
    total.count_round(6, 6)
    assert (a, b) == (kept_a, kept_b), "nothing is shared with the sum"


def test_addition_forgets_no_field() -> None:
    """Distinct numbers in every field, whatever fields there are."""
    numbers = {
        item.name: [i, 2 * i] if item.name in ("reached_at", "accepted_at") else i
        for i, item in enumerate(dataclasses.fields(Stats), start=1)
    }
    one = Stats(**numbers)  # type: ignore[arg-type]
    doubled = one + one
    for name, value in numbers.items():
        assert getattr(doubled, name) == ([2 * v for v in value] if isinstance(value, list) else 2 * value), name


def test_seconds_of_decoding_leave_the_prompt_out() -> None:
    (run,) = decode(TableModel(Table(5, 2, seed=1)), [Job(params=SamplingParams(max_tokens=12, seed=0))], k=0)
    stats = run.stats
    assert stats.prefill_s > 0
    assert stats.decode_s == stats.draft_s + stats.score_s + stats.verify_s + stats.other_s > 0
    assert stats.tokens_per_second == pytest.approx(11 / stats.decode_s), "the first token ended the prompt"
    assert Stats().tokens_per_second == 0


def test_a_completion_of_one_token_has_no_decoding_speed() -> None:
    (run,) = decode(TableModel(Table(5, 2, seed=1)), [Job(params=SamplingParams(max_tokens=1, seed=0))])
    assert (run.stats.rounds, run.stats.decode_s, run.stats.tokens_per_second) == (0, 0, 0)


def test_the_speed_of_several_completions_leaves_out_the_first_token_of_each() -> None:
    jobs = [Job(params=SamplingParams(max_tokens=3, seed=seed)) for seed in range(5)]
    runs = decode(TableModel(Table(5, 2, seed=1)), jobs, draft=TableModel(Table(5, 2, seed=1)), k=2)
    total = sum((run.stats for run in runs), Stats())
    assert total.output_tokens == 15
    assert total.tokens_per_second == pytest.approx(10 / total.decode_s)
