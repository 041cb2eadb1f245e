"""How one request chooses its tokens: parameters, random streams and a verification rule, bound together.

A proposer and the decoding round see the same `Sampler`, so both sides go through one path to probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.sampling import block, coupled, rejection
from paceline.sampling.distribution import Among, Distribution, distributions
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from paceline.sampling.rejection import Verdict
from paceline.sampling.streams import Stream


@dataclass(frozen=True)
class Rule:
    """A verification rule: how proposals are drawn, and which of them stand. Two pure functions."""

    propose: Callable[[Distribution, Stream, int, int], int]
    """(q, stream, position, anchor) -> token"""
    verify: Callable[[Sequence[Distribution], Draft, Stream, int], Verdict]
    """(p of K + 1 positions, draft, stream, anchor) -> verdict"""


RULES = {
    "token": Rule(rejection.propose, rejection.verify),
    "block": Rule(block.propose, block.verify),
    "coupled": Rule(coupled.propose, coupled.verify),
}


@dataclass(frozen=True, kw_only=True)
class Sampler:
    params: SamplingParams
    rule: Rule
    stream: Stream
    prompt_length: int
    """Committed tokens before this are the prompt, those behind it the output: penalties tell them apart."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the request: end-of-sequence tokens (unless ignored) and `stop_token_ids`."""

    def distributions(
        self,
        logits_TV: torch.Tensor,
        tokens: Sequence[int],
        drafted: Sequence[int] = (),
        *,
        among: Among | None = None,
    ) -> list[Distribution]:
        """One for each row: that of the token behind the committed `tokens` (prompt and output) and drafted[:t].

        `among`: the logits are those of these tokens alone.
        """
        # Long lists are copied only where a parameter looks at them.
        looks_back = self.params.penalises or self.params.min_tokens > 0
        return distributions(
            logits_TV,
            self.params,
            prompt=tokens[: self.prompt_length] if looks_back else (),
            output=tokens[self.prompt_length :] if looks_back else (),
            drafted=drafted,
            end_ids=self.end_ids,
            among=among,
        )

    def propose(self, q: Distribution, position: int, anchor: int) -> int:
        return self.rule.propose(q, self.stream, position, anchor)

    def verify(self, p_S: Sequence[Distribution], draft: Draft, anchor: int) -> Verdict:
        return self.rule.verify(p_S, draft, self.stream, anchor)
