"""What is audited: a target, what drafts for it, and how its tokens are chosen. A fault is a function of this value.

Knows no test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.decoding import sequence as decoding
from paceline.decoding.generate import generate
from paceline.decoding.round import Batch
from paceline.engine.llm import NewProposer
from paceline.models.interface import LanguageModel
from paceline.sampling import block, rejection
from paceline.sampling.distribution import Distribution
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import Rule, Sampler
from paceline.sampling.streams import Stream

Decide = Callable[[Sequence[Distribution], Draft, npt.NDArray[np.float64]], tuple[int, Distribution]]
"""(p of K + 1 positions, draft, one uniform a drafted token) -> (how many stand, the next token's distribution)."""

DECIDES: dict[str, Decide] = {"token": rejection.decide, "block": block.decide}
"""The ratio rules. Coupled verification decides by the noise that draft and target share."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    target: LanguageModel
    new_proposer: NewProposer
    verify: str
    """The rule's name."""
    rule: Rule
    decide: Decide | None
    """What `rule` decides by, where it is a ratio rule."""
    params: SamplingParams
    draft_tokens: int
    end_ids: frozenset[int]
    sampler: type[Sampler] = Sampler

    def new_sampler(self, prompt_length: int, seed: int, sample: int = 0) -> Sampler:
        return self.sampler(
            params=self.params,
            rule=self.rule,
            stream=Stream(seed, sample),
            prompt_length=prompt_length,
            end_ids=self.end_ids,
        )

    def new_batch(self, slots: int, capacity: int) -> Batch:
        proposer = self.new_proposer(slots, capacity)
        return Batch(self.target, proposer, draft_tokens=self.draft_tokens, slots=slots, capacity=capacity)

    def decode(self, prompts: Iterable[Sequence[int]], *, seed: int, slots: int, tokens: int) -> list[list[int]]:
        """What each prompt is continued with, `tokens` at most, `slots` at a time. Prompt i has the seed seed + i."""
        sequences = [
            decoding.Sequence(
                prompt,
                self.new_sampler(len(prompt), seed + i),
                limit=min(self.target.context, len(prompt) + tokens),
                detokenizer=Silent(),
            )
            for i, prompt in enumerate(prompts)
        ]
        capacity = max(sequence.limit for sequence in sequences) - 1
        for _ in generate(self.new_batch(min(slots, len(sequences)), capacity), sequences):
            pass
        return [[token.id for token in sequence.output] for sequence in sequences]


class Silent:
    """A detokenizer for tokens that nobody reads as text."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""
