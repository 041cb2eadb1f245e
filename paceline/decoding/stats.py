"""What happened: rounds, tokens and time. Counts only; the edges format them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(kw_only=True)
class Stats:
    """Counts and seconds of one completion, or of several added up.

    A round that drafted nothing is a round, not a draft: it counts for speed and not for acceptance. Seconds are those
    of the rounds the completion took part in; completions of one batch share their rounds.
    """

    completions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    """Target passes that gave tokens, reading the prompt apart."""
    drafts: int = 0
    """Rounds that drafted at least one token."""
    drafted: int = 0
    accepted: int = 0
    """Drafted tokens that are in the output."""
    reached_at: list[int] = field(default_factory=list)
    """By position in the draft: how often it was drafted and everything before it accepted."""
    accepted_at: list[int] = field(default_factory=list)
    drafts_of: list[int] = field(default_factory=list)
    """By length: how many drafts had just so many tokens, beginning with those of one."""
    prefill_s: float = 0.0
    """Rounds that read the prompt; the first token comes out of the last of them."""
    draft_s: float = 0.0
    score_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    def count_round(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        if not drafted:
            return
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        missing = [0] * (drafted - len(self.reached_at))
        self.reached_at += missing
        self.accepted_at += missing
        self.drafts_of += missing
        self.drafts_of[drafted - 1] += 1
        for i in range(min(accepted + 1, drafted)):
            self.reached_at[i] += 1
            self.accepted_at[i] += i < accepted

    @property
    def decode_s(self) -> float:
        """Seconds of all rounds behind the prompt."""
        return self.draft_s + self.score_s + self.verify_s + self.other_s

    @property
    def tokens_per_second(self) -> float:
        """Of one completion, decoding alone: its first token is not counted. Added up, the mean over completions."""
        return (self.output_tokens - self.completions) / self.decode_s if self.decode_s else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens that a round with a draft gives on average, 1 + accepted/drafts (vLLM's mean acceptance length)."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of all drafted tokens, those behind a rejection included."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def conditional_acceptance(self) -> list[float]:
        """By position: how often a token was accepted, given that all before it were (the alpha of the theory)."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted_at, self.reached_at, strict=True)]

    @property
    def marginal_acceptance(self) -> list[float]:
        """By position: how often a round with a draft accepted it at all (vLLM's per-position rate)."""
        return [a / self.drafts for a in self.accepted_at]

    def __add__(self, other: Stats) -> Stats:
        total = Stats()
        for item in fields(Stats):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, list):
                size = max(len(mine), len(theirs))
                padded = [x + [0] * (size - len(x)) for x in (mine, theirs)]
                setattr(total, item.name, [a + b for a, b in zip(*padded, strict=True)])
            else:
                setattr(total, item.name, mine + theirs)
        return total
