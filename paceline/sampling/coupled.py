"""Coupled, drafter-invariant verification (Daliri et al. 2024, arXiv 2408.07978).

Draft and target choose by the same noise, which depends on the seed and the position alone; a proposal stands iff the
target chooses it too. The output is then a function of target and seed: the same text for every draft, every K, and
without any draft. It accepts a little less often than the ratio rules.

Shapes: K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import torch

from paceline.sampling.draft import Draft
from paceline.sampling.draw import race
from paceline.sampling.rejection import Verdict
from paceline.sampling.streams import Purpose, Stream


def verify(p_SV: torch.Tensor, draft: Draft, stream: Stream, anchor: int) -> Verdict:
    """p_SV [K + 1, V] are the target's distributions, the first of them at position `anchor`, the committed length."""
    for accepted, proposal in enumerate(draft.tokens):
        token = _choose(p_SV[accepted], stream, anchor + accepted)
        if token != proposal:
            return Verdict(accepted, token)
    return Verdict(len(draft), _choose(p_SV[len(draft)], stream, anchor + len(draft)))


def propose(q_V: torch.Tensor, stream: Stream, position: int, anchor: int) -> int:
    """The draft's choice under the shared noise; `anchor` has no part in it."""
    return _choose(q_V, stream, position)


def _choose(probs_V: torch.Tensor, stream: Stream, position: int) -> int:
    return race(probs_V, stream.uniforms(Purpose.COUPLE, position, 0, probs_V.shape[-1]))
