"""How one request chooses its tokens: parameters, random streams and a verification rule, bound together.

A proposer and the decoding round see the same `Sampler`, so both sides go through one path to probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from paceline.sampling import block, coupled, rejection
from paceline.sampling.distribution import Among, Distribution, Floats, distribution, on_host
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

    def distribution(
        self,
        logits_V: Floats,
        tokens: Sequence[int],
        drafted: Sequence[int] = (),
        *,
        among: Among | None = None,
    ) -> Distribution:
        """Of the token behind the committed `tokens` (prompt and output) and what is drafted behind them.

        `among`: the logits are those of these tokens alone.
        """
        # Long lists are copied only where a parameter looks at them.
        looks_back = self.params.penalises or self.params.min_tokens > 0
        return distribution(
            logits_V,
            self.params,
            prompt=tokens[: self.prompt_length] if looks_back else (),
            output=[*tokens[self.prompt_length :], *drafted] if looks_back else (),
            end_ids=self.end_ids,
            among=among,
        )

    def propose(self, q: Distribution, position: int, anchor: int) -> int:
        return self.rule.propose(q, self.stream, position, anchor)

    def rows(self, logits_SV: torch.Tensor, tokens: Sequence[int], draft: Draft) -> Rows:
        """The target's distributions behind the committed `tokens` and behind each drafted one."""
        return Rows(self, on_host(logits_SV), tokens, draft.tokens)

    def verify(self, p_S: Sequence[Distribution], draft: Draft, anchor: int) -> Verdict:
        return self.rule.verify(p_S, draft, self.stream, anchor)


class Rows(Sequence[Distribution]):
    """Distributions that are computed when they are looked at first: a rule that ends early spares those behind.

    For as long as neither the committed tokens nor the logits change.
    """

    def __init__(self, sampler: Sampler, logits_SV: Floats, tokens: Sequence[int], drafted: Sequence[int]) -> None:
        assert len(logits_SV) == len(drafted) + 1, (len(logits_SV), drafted)
        self._sampler, self._logits_SV, self._tokens, self._drafted = sampler, logits_SV, tokens, drafted
        self._known: list[Distribution | None] = [None] * len(logits_SV)

    def __len__(self) -> int:
        return len(self._known)

    @overload
    def __getitem__(self, index: int) -> Distribution: ...

    @overload
    def __getitem__(self, index: slice) -> list[Distribution]: ...

    def __getitem__(self, index: int | slice) -> Distribution | list[Distribution]:
        if isinstance(index, slice):
            return [self[t] for t in range(*index.indices(len(self)))]
        t = range(len(self))[index]
        if (found := self._known[t]) is None:
            row_V = self._logits_SV[t]
            found = self._known[t] = self._sampler.distribution(row_V, self._tokens, self._drafted[:t])
        return found
