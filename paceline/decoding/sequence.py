"""One completion while it grows: its tokens, where each came from, its text, and when it ends.

Knows no model and no proposer. A completion ends exactly where plain decoding would end it, since tokens are committed
one by one, whatever block they were accepted in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from paceline.decoding.stats import Stats
from paceline.sampling.sampler import Sampler

FinishReason = Literal["stop", "length"]


class Provenance(str, Enum):
    """Where an output token came from."""

    ACCEPTED = "accepted"
    """Drafted, and kept by the verification."""
    RECOVERED = "recovered"
    """The target's token in place of the first rejected one."""
    BONUS = "bonus"
    """The target's token behind a draft that was accepted whole."""
    PLAIN = "plain"
    """The target's token in a round without a draft."""


class Detokenizer(Protocol):
    """Tokens in, text out as soon as it is certain: never half a character."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True)
class TokenLogprobs:
    """The target's own log-probabilities at one position, before temperature and filters."""

    logprob: float
    rank: int
    """1 is the most probable token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most probable tokens, as many as were asked for."""


@dataclass
class OutputToken:
    id: int
    text: str
    """What became certain with this token; a character of several tokens belongs to the last of them."""
    provenance: Provenance
    logprobs: TokenLogprobs | None = None


class Sequence:
    """`tokens` begins with the prompt and may grow to `limit` tokens in all."""

    def __init__(self, prompt: Iterable[int], sampler: Sampler, *, limit: int, detokenizer: Detokenizer) -> None:
        self.tokens = list(prompt)
        self.sampler, self.limit = sampler, limit
        assert 0 < sampler.prompt_length == len(self.tokens) < limit
        self.output: list[OutputToken] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.stats = Stats(completions=1, prompt_tokens=len(self.tokens))
        self.slot = -1
        """Set by the batch that runs this sequence."""
        self._detokenizer = detokenizer
        self._taken = 0
        # Only the end of the text can still become a stop string.
        self._tail = ""
        self._longest_stop = max(map(len, sampler.params.stop_strings), default=0)

    def commit(self, token: int, provenance: Provenance, logprobs: TokenLogprobs | None) -> bool:
        """Append one token; True if the completion ends with it. Nothing may be committed after that."""
        assert self.finish_reason is None
        params = self.sampler.params
        self.tokens.append(token)
        self.stats.output_tokens += 1
        ends = token in self.sampler.end_ids
        last = ends or len(self.tokens) >= self.limit
        text = "" if ends and not params.include_stop_str_in_output else self._detokenizer.push(token)
        text += self._detokenizer.flush() if last else ""
        self.output.append(OutputToken(token, text, provenance, logprobs))
        # An earlier stop is never hidden by the length limit.
        stop = self._find_stop(text) if len(self.output) > params.min_tokens else None
        if stop is not None:
            self._cut(*stop)
            self.finish_reason, self.stop_reason = "stop", stop[1]
            return True
        if ends:
            self.finish_reason, self.stop_reason = "stop", token
        elif last:
            self.finish_reason = "length"
        self._tail = (self._tail + text)[-self._longest_stop :] if self._longest_stop else ""
        return last

    def take(self) -> list[OutputToken]:
        """The tokens whose text has become certain since the last call; all the rest once the completion has ended."""
        end = len(self.output)
        held = 0 if self.finish_reason else self._possible_stop()
        while held > 0:
            end -= 1
            held -= len(self.output[end].text)
        taken, self._taken = self.output[self._taken : end], end
        return taken

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """(characters before it in tail + text, stop string) of the first stop string that ends within `text`."""
        window = self._tail + text
        found = []
        for stop in self.sampler.params.stop_strings:
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0:
                found.append((start, stop))
        return min(found, default=None)

    def _cut(self, start: int, stop: str) -> None:
        """Drop the text from the stop string on (or what follows it, where it is to be included)."""
        keep_of_window = start + (len(stop) if self.sampler.params.include_stop_str_in_output else 0)
        excess = len(self._tail) + len(self.output[-1].text) - keep_of_window
        for token in reversed(self.output):
            dropped = min(excess, len(token.text))
            token.text = token.text[: len(token.text) - dropped]
            excess -= dropped

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that a stop string, not complete yet, could begin with."""
        tail, params = self._tail, self.sampler.params
        if params.include_stop_str_in_output:
            return 0
        for size in range(min(len(tail), self._longest_stop - 1), 0, -1):
            if any(size < len(stop) and stop.startswith(tail[-size:]) for stop in params.stop_strings):
                return size
        return 0
