"""Deliberately wrong variants, each a fault that some engine shipped: the controls that an audit has to catch.

Each is made out of values that the engine takes anyway (a rule, a sampler, a proposer, a model); the engine knows none
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paceline.evaluation.audit.subject import Decide, Subject
from paceline.models.interface import Cache, Chunk, InFront, Scores
from paceline.proposers.base import Proposer, Prospect, Request
from paceline.sampling.distribution import Distribution, Floats
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from paceline.sampling.rejection import Verdict, accept_uniforms, next_token
from paceline.sampling.sampler import Rule, Sampler
from paceline.sampling.streams import Purpose, Stream


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    make: Callable[[Subject], Subject]
    levels: frozenset[int]
    """The levels that have to catch it, where it can exist."""
    needs_decide: bool = False
    """Level 1 sees it by recombination alone, which only ratio rules have."""


@dataclass(frozen=True)
class Pair:
    """What decides which faults can exist."""

    subject: Subject
    chance: bool
    """Tokens are proposed by chance: some q is not one-hot."""


def why_not(fault: Fault, pair: Pair) -> str | None:
    """Why this fault cannot exist for this pair; None where it can."""
    subject, ratio = pair.subject, pair.subject.decide is not None
    if fault in (RAW_Q, SHARED_NOISE, RESIDUAL_P) and not ratio:
        return "coupled verification uses no q, no acceptance numbers and no residual"
    if fault in (RAW_Q, SHARED_NOISE) and not pair.chance:
        return "this draft proposes its tokens without chance: its q is one-hot before and after any parameter"
    if fault is RAW_Q and _neutral(subject.params) == subject.params:
        return "no parameter changes the distribution (temperature 1, no filter, no penalty): raw q is q"
    return None


def _accept_everything(p_S: Sequence[Distribution], draft: Draft, uniforms_K: Any) -> tuple[int, Distribution]:
    return len(draft), p_S[len(draft)]


def _deciding(subject: Subject, decide: Decide) -> Subject:
    def verify(p_S: Sequence[Distribution], draft: Draft, stream: Stream, anchor: int) -> Verdict:
        accepted, rest = decide(p_S, draft, accept_uniforms(draft, stream, anchor))
        return Verdict(accepted, next_token(rest, stream, anchor, accepted))

    return replace(subject, rule=Rule(subject.rule.propose, verify), decide=decide)


def _accepting(subject: Subject) -> Subject:
    return _deciding(subject, _accept_everything)


def _recovering_from_p(subject: Subject) -> Subject:
    right = subject.decide
    assert right is not None

    def decide(p_S: Sequence[Distribution], draft: Draft, uniforms_K: Any) -> tuple[int, Distribution]:
        accepted, _ = right(p_S, draft, uniforms_K)
        return accepted, p_S[accepted]

    return _deciding(subject, decide)


def _sharing(subject: Subject) -> Subject:
    decide = subject.decide
    assert decide is not None

    def verify(p_S: Sequence[Distribution], draft: Draft, stream: Stream, anchor: int) -> Verdict:
        reused = [stream.uniform(Purpose.PROPOSE, anchor + t, anchor) for t in range(len(draft))]
        accepted, rest = decide(p_S, draft, np.array(reused))
        return Verdict(accepted, next_token(rest, stream, anchor, accepted))

    return replace(subject, rule=Rule(subject.rule.propose, verify))


def _neutral(params: SamplingParams) -> SamplingParams:
    return replace(
        params,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=None,
        min_tokens=0,
    )


@dataclass(frozen=True, kw_only=True)
class _RawSampler(Sampler):
    """Says what the draft's distribution is before any parameter, and draws from the one behind them."""

    right: Sampler
    drawn_from: list[Distribution] = field(default_factory=list)

    def distribution(self, logits_V: Floats, *args: Any, **more: Any) -> Distribution:
        self.drawn_from[:] = [self.right.distribution(logits_V, *args, **more)]
        return replace(self, params=_neutral(self.params), drawn_from=[])._raw(logits_V, *args, **more)

    def _raw(self, logits_V: Floats, *args: Any, **more: Any) -> Distribution:
        return super().distribution(logits_V, *args, **more)

    def propose(self, q: Distribution, position: int, anchor: int) -> int:
        return self.right.propose(self.drawn_from[-1], position, anchor)


class _Wrapped:
    """A proposer that passes everything on."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner

    @property
    def features(self) -> tuple[int, ...]:
        return self.inner.features

    def begin(self, slot: int) -> None:
        self.inner.begin(slot)

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        return self.inner.prospects(requests)

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return self.inner.propose(requests)

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        self.inner.observe(slot, tokens, features_TFH)


class _RawProposer(_Wrapped):
    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return super().propose([replace(r, sampler=_raw_sampler(r.sampler)) for r in requests])


def _raw_sampler(right: Sampler) -> Sampler:
    return _RawSampler(
        params=right.params,
        rule=right.rule,
        stream=right.stream,
        prompt_length=right.prompt_length,
        end_ids=right.end_ids,
        right=right,
    )


def _raw(subject: Subject) -> Subject:
    return replace(subject, new_proposer=lambda slots, capacity: _RawProposer(subject.new_proposer(slots, capacity)))


class _OffByOne(InFront):
    """A target whose rows are read one too late: each drafted token is judged by what follows it."""

    def __call__(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        scores = super().__call__(chunks, cache, features)
        late = [torch.cat((rows_OV[1:], rows_OV[-1:])) if len(rows_OV) > 1 else rows_OV for rows_OV in scores.logits]
        return Scores(late, scores.features)


def _off_by_one(subject: Subject) -> Subject:
    return replace(subject, target=_OffByOne(subject.target))


@dataclass(frozen=True, kw_only=True)
class _StandingPenalties(Sampler):
    """Counts for every row what was committed, and nothing of what is drafted ahead of it."""

    def distribution(
        self, logits_V: Floats, tokens: Sequence[int], drafted: Sequence[int] = (), **more: Any
    ) -> Distribution:
        return super().distribution(logits_V, tokens, (), **more)


def penalising(params: SamplingParams) -> SamplingParams:
    """Parameters under which the drafted tokens matter much for the rows behind them: what was given is given again.

    Those asked for may have no penalty, or one so weak that a fault of penalties would change next to nothing.
    """
    return replace(params, repetition_penalty=1.0, presence_penalty=-2.0, frequency_penalty=-2.0)


def _standing(subject: Subject) -> Subject:
    return replace(subject, sampler=_StandingPenalties)


def _fault(name: str, what: str, make: Callable[[Subject], Subject], *levels: int) -> Fault:
    return Fault(name, what, make, frozenset(levels))


RAW_Q = _fault("raw q", "the ratio uses q as it was before temperature, filters and penalties", _raw, 1, 3)
SHARED_NOISE = _fault("shared noise", "acceptance uses the number that the proposal was drawn with", _sharing, 1, 3)
RESIDUAL_P = _fault(
    "residual = p", "a rejected token is replaced by one from p, not from max(0, p - q)", _recovering_from_p, 1, 3
)
ACCEPT_EVERYTHING = replace(
    _fault("accept everything", "every drafted token stands", _accepting, 1, 2, 3), needs_decide=True
)
OFF_BY_ONE = _fault("off-by-one row", "drafted tokens are judged by the row behind them", _off_by_one, 1, 2, 3)
PENALTIES = _fault("standing penalties", "penalties do not advance along the draft", _standing, 1, 3)

FAULTS = (RAW_Q, SHARED_NOISE, RESIDUAL_P, ACCEPT_EVERYTHING, OFF_BY_ONE, PENALTIES)
__all__ = ["FAULTS", "Fault", "Pair", "penalising", "why_not"]
