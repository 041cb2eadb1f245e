"""The one loop keeps the target's output: exactly where that can be compared, statistically where it cannot."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.decoding.sequence import Provenance
from paceline.sampling import rejection
from paceline.sampling.distribution import Distribution, distribution
from paceline.sampling.draft import Draft
from paceline.sampling.draw import inverse_cdf
from paceline.sampling.params import SamplingParams
from paceline.sampling.rejection import Verdict
from paceline.sampling.sampler import RULES, Rows, Rule, Sampler
from paceline.sampling.streams import Purpose, Stream
from tests.fakes import Job, Table, TableModel, decode, ids, text

V = 5


def target(context: int = 64) -> TableModel:
    return TableModel(Table(V, 3, seed=1), context)


def drafts(context: int = 64) -> dict[str, TableModel | str]:
    return {
        "alike": TableModel(Table(V, 2, seed=1), context),
        "the target itself": target(context),
        "bad": TableModel(Table(V, 2, seed=9, zeros=0.5), context),
        "ngram": "ngram",
    }


RAGGED = [
    Job(prompt=(0,)),
    Job(prompt=(1, 2, 3, 4, 0, 1)),
    Job(prompt=(2, 2), params=SamplingParams(max_tokens=5, seed=1)),
    Job(prompt=(4, 3, 2, 1)),
    Job(prompt=(3,) * 9, params=SamplingParams(max_tokens=20, seed=2)),
]


def with_params(jobs: list[Job], **changes: object) -> list[Job]:
    return [replace(job, params=replace(job.params, **changes)) for job in jobs]  # type: ignore[arg-type]


@pytest.mark.fault(8)
@pytest.mark.parametrize("draft", drafts())
@pytest.mark.parametrize("verify", RULES)
def test_greedy_output_is_the_targets_for_every_draft_k_rule_and_batch(draft: str, verify: str) -> None:
    jobs = with_params(RAGGED, temperature=0.0)
    expected = [ids(s) for s in decode(target(), jobs, k=0)]
    for k, slots in itertools.product((1, 2, 4, 7), (1, 3, 8)):
        got = decode(target(), jobs, draft=drafts()[draft], k=k, verify=verify, slots=slots)
        assert [ids(s) for s in got] == expected, (k, slots)


@pytest.mark.parametrize("draft", drafts())
def test_coupled_output_at_any_temperature_does_not_depend_on_the_draft(draft: str) -> None:
    jobs = with_params(RAGGED, temperature=0.9, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
    expected = [ids(s) for s in decode(target(), jobs, verify="coupled", k=0)]
    for k, slots in itertools.product((1, 4), (1, 8)):
        got = decode(target(), jobs, draft=drafts()[draft], k=k, verify="coupled", slots=slots)
        assert [ids(s) for s in got] == expected


@pytest.mark.fault(6, 8)
@pytest.mark.parametrize("verify", RULES)
def test_a_request_gives_the_same_tokens_alone_and_among_others(verify: str) -> None:
    jobs = RAGGED + with_params(RAGGED, seed=7)
    together = decode(target(), jobs, draft=drafts()["alike"], verify=verify, slots=8)
    for job, among in zip(jobs, together, strict=True):
        (alone,) = decode(target(), [job], draft=drafts()["alike"], verify=verify, slots=1)
        assert ids(alone) == ids(among)
        assert [t.provenance for t in alone.output] == [t.provenance for t in among.output]


# ---- the distribution of several rounds, through the loop itself ----

SMALL, SEEN = 3, 3  # vocabulary, and the tokens that are looked at: the second to the fourth
RUNS = 1500
# Weissman et al. 2003: the empirical distribution of m outcomes is farther than this in L1 with probability below 1e-9
BOUND = float(np.sqrt(2 * (SMALL**SEEN * np.log(2) + np.log(1e9)) / RUNS))


def measured_gap(verify: str, rule: Rule | None = None, **params: float) -> float:
    """L1 distance between the tokens of many runs and the target's own joint distribution."""
    table = Table(SMALL, 2, seed=3)
    # The first token is certain, so that all runs share it; six tokens leave room for drafts of three.
    jobs = [Job(params=SamplingParams(max_tokens=SEEN + 3, seed=seed, **params)) for seed in range(RUNS)]  # type: ignore[arg-type]
    model, draft = TableModel(table), TableModel(Table(SMALL, 2, seed=4))
    table.row([0])[:] = np.eye(SMALL)[1]
    runs = decode(model, jobs, draft=draft, k=3, verify=verify, slots=64, rule=rule)
    counts = Counter(tuple(ids(run)[: SEEN + 1]) for run in runs)
    gap = 0.0
    for tokens in itertools.product(range(SMALL), repeat=SEEN):
        p = 1.0
        for i, token in enumerate(tokens):
            with np.errstate(divide="ignore"):
                logits = np.log(table.row((0, 1, *tokens[:i])))
            p *= distribution(logits, jobs[0].params).of(token)
        outcome = (1, *tokens)
        gap += abs(counts[outcome] / RUNS - p)
    return gap


@pytest.mark.parametrize("verify", RULES)
def test_the_loop_samples_the_targets_distribution(verify: str) -> None:
    assert measured_gap(verify) < BOUND
    assert measured_gap(verify, temperature=0.7, top_p=0.8) < BOUND


def accept_everything(p_S: Items[Distribution], draft: Draft, stream: Stream, anchor: int) -> Verdict:
    return Verdict(len(draft), rejection.next_token(p_S[len(draft)], stream, anchor, len(draft)))


def recover_from_p(p_S: Items[Distribution], draft: Draft, stream: Stream, anchor: int) -> Verdict:
    accepted = rejection.verify(p_S, draft, stream, anchor).accepted
    return Verdict(accepted, rejection.next_token(p_S[accepted], stream, anchor, accepted))


def raw_q(p_S: Items[Distribution], draft: Draft, stream: Stream, anchor: int) -> Verdict:
    """The ratio is taken against a q that was not sampled from."""
    other = tuple(replace(q, probs=np.sqrt(q.probs)) for q in draft.probs)
    return rejection.verify(p_S, Draft(draft.tokens, other), stream, anchor)


def shared_noise_propose(q: Distribution, stream: Stream, position: int, anchor: int) -> int:
    """Proposes with the very number that decides acceptance."""
    return inverse_cdf(q, stream.uniform(Purpose.ACCEPT, position, anchor))


FAULTS: dict[str, tuple[str, Callable[..., int], Callable[..., Verdict]]] = {
    "accept everything": ("token", rejection.propose, accept_everything),
    "recover from p instead of the residual": ("token", rejection.propose, recover_from_p),
    "a q that was not sampled from": ("token", rejection.propose, raw_q),
    "noise shared by proposal and acceptance": ("token", shared_noise_propose, rejection.verify),
}


@pytest.mark.fault(1, 3, 13)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_statistical_test_catches(fault: str) -> None:
    verify, propose, faulty = FAULTS[fault]
    assert measured_gap(verify, Rule(propose, faulty)) > BOUND


# ---- caches ----


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    """After a full acceptance the draft must be fed its own last token and the bonus token: a draft fed wrongly would
    still give the right output, and only its acceptance would show it."""
    for verify in ("token", "block", "coupled"):
        for run in decode(target(), RAGGED, draft=drafts()["the target itself"], k=3, verify=verify):
            assert run.stats.accepted == run.stats.drafted > 0
            assert Provenance.RECOVERED not in {t.provenance for t in run.output}


def test_no_pass_reads_a_token_twice_and_the_cache_holds_what_was_committed() -> None:
    model, draft = target(), TableModel(Table(V, 2, seed=1))
    (run,) = decode(model, [Job(params=SamplingParams(max_tokens=30, seed=5))], draft=draft, k=4, slots=1)
    scored = sum(len(chunk.tokens) for chunks in model.passes for chunk in chunks)
    assert scored == 1 + run.stats.rounds + run.stats.drafted, "the prompt, then one unread token and the draft a round"
    read = sum(len(chunk.tokens) for chunks in draft.passes for chunk in chunks)
    assert read <= 1 + len(run.output) + run.stats.drafted


# ---- ends and limits ----


@pytest.mark.fault(2)
@pytest.mark.parametrize("draft", ["alike", "the target itself", "ngram"])
@pytest.mark.parametrize(
    "changes",
    [
        {"stop_token_ids": (3,)},
        {"stop": ("dc",)},
        {"stop": ("ab", "cab", "b"), "include_stop_str_in_output": True},
        {"min_tokens": 4, "stop_token_ids": (0, 1)},
        {"min_tokens": 4, "stop": ("a", "d")},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"logit_bias": {2: -100, 1: 1.5}},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"repetition_penalty": 1.7},
        {"top_k": 2},
        {"min_p": 0.2},
    ],
    ids=str,
)
def test_every_parameter_holds_under_speculation(draft: str, changes: dict[str, object]) -> None:
    """Coupled output is the target's own, so plain decoding shows what each parameter has to give, T > 0 included."""
    for temperature in (0.0, 1.0):
        jobs = with_params([j for seed in range(4) for j in with_params(RAGGED, seed=seed)], temperature=temperature)
        jobs = with_params(jobs, **changes)
        plain = decode(target(24), jobs, k=0, verify="coupled", eos=frozenset({4}))
        fast = decode(target(24), jobs, draft=drafts(24)[draft], k=4, verify="coupled", eos=frozenset({4}))
        for a, b in zip(plain, fast, strict=True):
            assert (text(a), ids(a), a.finish_reason, a.stop_reason) == (
                text(b),
                ids(b),
                b.finish_reason,
                b.stop_reason,
            )
            assert b.stats.output_tokens == len(b.output) == len(b.tokens) - b.stats.prompt_tokens


@pytest.mark.fault(4)
def test_an_end_inside_an_accepted_block_cuts_the_block() -> None:
    jobs = with_params([Job(params=SamplingParams(max_tokens=40, seed=s)) for s in range(20)], stop=("c",))
    runs = decode(target(), jobs, draft=drafts()["the target itself"], k=7, eos=frozenset({4}))
    cut = 0
    for run in runs:
        produced = ids(run)
        assert 4 not in produced[:-1], "nothing behind an end-of-sequence token"
        assert "c" not in text(run), "the stop string is cut off"
        assert 2 not in produced[:-1], "and no token is behind it"
        assert run.stats.accepted == sum(t.provenance is Provenance.ACCEPTED for t in run.output)
        cut += run.output[-1].provenance is Provenance.ACCEPTED
    assert cut > 5, "ends inside accepted blocks did occur"


@pytest.mark.fault(4)
def test_a_stop_is_not_hidden_by_the_length_limit() -> None:
    (free,) = decode(target(), [Job(params=SamplingParams(max_tokens=3, temperature=0))], k=0)
    last = text(free)[-1]
    assert text(free).index(last) == 2, "the case needs a letter that comes last only"
    (run,) = decode(target(), [Job(params=SamplingParams(max_tokens=3, temperature=0, stop=last))], k=0)
    assert (run.finish_reason, run.stop_reason, len(run.output)) == ("stop", last, 3)


@pytest.mark.fault(5)
@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_the_last_rounds_shorten_k_at_the_targets_limit(k: int) -> None:
    for room in range(1, 10):
        job = Job(prompt=(1,) * (24 - room), params=SamplingParams(max_tokens=None, temperature=0))
        (run,) = decode(target(24), [job], draft=drafts(24)["the target itself"], k=k)
        assert (len(run.output), run.finish_reason) == (room, "length")


@pytest.mark.fault(5)
def test_a_prompt_longer_than_the_drafts_context_falls_back_to_plain_decoding() -> None:
    draft = TableModel(Table(V, 3, seed=1), context=10)
    for length in range(1, 16):
        job = Job(prompt=(2,) * length, params=SamplingParams(max_tokens=12, temperature=0))
        (plain,) = decode(target(), [job], k=0)
        (run,) = decode(target(), [job], draft=draft, k=4)
        assert ids(run) == ids(plain)
        if length <= 4:
            assert run.stats.drafted > 0
        if length > 10:
            assert run.stats.drafted == 0


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        Job(prompt=tuple(i % V for i in range(n)), params=SamplingParams(max_tokens=6, seed=3)) for n in (23, 4, 40)
    ]
    jobs = with_params(jobs, prompt_logprobs=2)
    expected = decode(target(), jobs, draft=drafts()["alike"])
    monkeypatch.setattr("paceline.decoding.round.READ_CHUNK", 5)
    monkeypatch.setattr("paceline.proposers.draft_model.READ_CHUNK", 7)
    model = target()
    got = decode(model, jobs, draft=drafts()["alike"])
    assert max(len(chunk.tokens) for chunks in model.passes for chunk in chunks) == 5
    for a, b in zip(expected, got, strict=True):
        assert ids(a) == ids(b)
        assert a.prompt_logprobs == b.prompt_logprobs
        assert len(b.prompt_logprobs) == b.stats.prompt_tokens


# ---- what is reported ----


@pytest.mark.fault(6)
def test_logprobs_are_the_targets_own_before_temperature() -> None:
    job = Job(
        prompt=(1, 0), params=SamplingParams(max_tokens=20, temperature=0.5, seed=1, logprobs=2, prompt_logprobs=0)
    )
    (run,) = decode(target(), [job], draft=drafts()["alike"])
    table = Table(V, 3, seed=1)
    for i, token in enumerate(run.output):
        row = table.row(run.tokens[: 2 + i])
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(np.log(row[token.id]), abs=1e-5)
        assert token.logprobs.rank == 1 + (row > row[token.id]).sum()
        assert [i for i, _ in token.logprobs.top] == list(np.argsort(-row)[:2])
    first, second = run.prompt_logprobs
    assert first is None
    assert second is not None
    assert second.logprob == pytest.approx(np.log(table.row([1])[0]), abs=1e-5)


@pytest.mark.fault(11)
def test_provenance_and_stats_tell_the_same_story() -> None:
    for run in decode(target(), RAGGED, draft=drafts()["bad"], k=3):
        kinds = Counter(t.provenance for t in run.output)
        stats = run.stats
        assert stats.accepted == kinds[Provenance.ACCEPTED]
        assert stats.rounds == len(run.output) - kinds[Provenance.ACCEPTED] - 1, "the first token ends the reading"
        assert run.output[0].provenance is Provenance.PLAIN
        assert stats.drafts == kinds[Provenance.RECOVERED] + kinds[Provenance.BONUS]
        assert stats.acceptance_length == 1 + stats.accepted / stats.drafts
        assert sum(stats.accepted_at) == stats.accepted
        assert stats.reached_at[0] == stats.drafts
        assert all(a <= r for a, r in zip(stats.accepted_at, stats.reached_at, strict=True))


@pytest.mark.fault(11)
def test_rounds_without_a_draft_do_not_count_as_drafts() -> None:
    (run,) = decode(target(), [Job(prompt=(0, 1, 2, 3, 4), params=SamplingParams(max_tokens=6, seed=3))], k=0)
    assert (run.stats.rounds, run.stats.drafts, run.stats.drafted) == (5, 0, 0)
    assert run.stats.acceptance_length == 1
    assert {t.provenance for t in run.output} == {Provenance.PLAIN}


@pytest.mark.fault(2)
def test_penalties_count_the_tokens_drafted_earlier_in_the_same_round() -> None:
    """One row at a time, with the drafted tokens as output, gives the same distributions as all rows together."""
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, min_tokens=3)
    sampler = Sampler(params=params, rule=RULES["token"], stream=Stream(0), prompt_length=2, end_ids=frozenset({1}))
    committed, drafted = [0, 1, 2], [2, 2, 3]
    together = Rows(sampler, logits, committed, drafted)
    for t in range(4):
        alone = sampler.distribution(logits[t], [*committed, *drafted[:t]])
        assert (together[t].dense() == alone.dense()).all()
    of_end = [row.of(1) for row in together]
    assert of_end[:2] == [0, 0]
    assert min(of_end[2:]) > 0, "min_tokens counts tokens, not rounds"


def test_rows_behind_a_token_that_falls_are_not_computed() -> None:
    logits = torch.zeros(3, V)
    logits[0, 2] = 1.0
    logits[1:] = float("nan")
    params = SamplingParams(temperature=0)
    sampler = Sampler(params=params, rule=RULES["token"], stream=Stream(0), prompt_length=1)
    rows = sampler.rows(logits, [0], Draft.certain([1, 1], V))
    assert sampler.verify(rows, Draft.certain([1, 1], V), anchor=1) == Verdict(0, 2)
    with pytest.raises(ValueError, match="must be finite"):
        sampler.verify(rows, Draft.certain([2, 1], V), anchor=1)
    assert len(rows) == 3
    assert rows[-3] is rows[0]
    with pytest.raises(IndexError):
        rows[3]
