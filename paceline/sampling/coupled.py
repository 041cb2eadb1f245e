"""Coupled, drafter-invariant verification (Daliri et al. 2024, arXiv 2408.07978).

Draft and target choose by the same noise, which depends on the seed and the position alone; a proposal stands iff the
target chooses it too. The output is then a function of target and seed: the same text for every draft, every K, and
without any draft. It accepts a little less often than the ratio rules.

Shapes: S = K + 1 target distributions for K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sampling.distribution import Distribution
from paceline.sampling.draft import Draft
from paceline.sampling.draw import race
from paceline.sampling.rejection import Verdict
from paceline.sampling.streams import Purpose, Stream


def verify(p_S: Sequence[Distribution], draft: Draft, stream: Stream, anchor: int) -> Verdict:
    """`p_S` are the target's distributions, the first of them at position `anchor`, the committed length."""
    for accepted, proposal in enumerate(draft.tokens):
        token = _choose(p_S[accepted], stream, anchor + accepted)
        if token != proposal:
            return Verdict(accepted, token)
    return Verdict(len(draft), _choose(p_S[len(draft)], stream, anchor + len(draft)))


def propose(q: Distribution, stream: Stream, position: int, anchor: int) -> int:
    """The draft's choice under the shared noise; `anchor` has no part in it."""
    return _choose(q, stream, position)


def _choose(distribution: Distribution, stream: Stream, position: int) -> int:
    # Token i has the i-th number, so numbers behind the last token that has any probability are not needed.
    count = distribution.size if distribution.ids is None else int(distribution.ids[-1]) + 1
    return race(distribution, stream.uniforms(Purpose.COUPLE, position, 0, count))
