"""What a caller gets back: vLLM's shape (one result per prompt, with `outputs`), and where each token came from.

Plain data; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.decoding.sequence import FinishReason, OutputToken, Provenance
from paceline.decoding.stats import Stats


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int
    """1 is the most probable token."""
    decoded_token: str


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One of the n completions of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    provenance: list[Provenance]
    """Where each token came from, in step with `token_ids`."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The token id or stop string that ended it; None where the length did."""
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    seed: int
    """The seed that was used: passing it again repeats this output."""
    stats: Stats


@dataclass(frozen=True, kw_only=True)
class Completion:
    """All completions of one prompt."""

    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first output."""
        return self.outputs[0].token_ids

    @property
    def stats(self) -> Stats:
        """Counts and seconds of all outputs together."""
        return sum((output.stats for output in self.outputs), Stats())


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """Text that has become certain, with the tokens it came from: all tokens of a round, not the last alone."""

    text: str
    tokens: list[OutputToken]
    completion: Completion | None
    """The whole result, with the last chunk."""
