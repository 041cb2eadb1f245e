"""The one loop: propose, score, verify, commit, for a batch of sequences at whatever point each of them is.

Reading a prompt is a round that drafts nothing and, until the prompt's last chunk, gives nothing. Plain decoding is
K = 0; greedy decoding is a one-hot distribution. There is no other loop.

What holds between rounds, for every running sequence of n committed tokens: the target's cache holds the first n - 1
of them or fewer, and nothing else.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import torch

from paceline.decoding.control import Control, Fixed
from paceline.decoding.sequence import Provenance, Sequence, TokenLogprobs
from paceline.models.interface import Chunk, LanguageModel
from paceline.proposers.base import Proposer, Request
from paceline.sampling.distribution import log_probabilities
from paceline.sampling.draft import Draft

READ_CHUNK = 512
"""Prompt tokens that one pass reads of a sequence."""


@dataclass
class _Turn:
    """What one sequence does in this round."""

    sequence: Sequence
    unread: list[int]
    """Committed tokens that this pass reads."""
    reads_prompt: bool
    gives_tokens: bool
    draft: Draft

    @property
    def chunk(self) -> Chunk:
        wants_all = self.reads_prompt and self.sequence.sampler.params.prompt_logprobs is not None
        outputs = len(self.draft) + 1 if self.gives_tokens else 0
        return Chunk(
            self.sequence.slot,
            [*self.unread, *self.draft.tokens],
            outputs=len(self.unread) if wants_all else outputs,
        )


class Batch:
    """Sequences that run together on one target with one proposer. They enter and leave between rounds.

    `capacity` is the longest sequence, in tokens, that a slot can hold. `proposer` serves the same slots.
    `draft_tokens` is K, or what chooses it anew for every sequence and round.
    """

    def __init__(
        self, target: LanguageModel, proposer: Proposer, *, draft_tokens: int | Control, slots: int, capacity: int
    ) -> None:
        self.target, self.proposer = target, proposer
        self.control: Control = Fixed(draft_tokens) if isinstance(draft_tokens, int) else draft_tokens
        self.running: list[Sequence] = []
        self._cache = target.new_cache(slots, capacity)
        self._runs_ahead = target.device.type == "cuda"
        self._free = list(range(slots))

    @property
    def full(self) -> bool:
        return not self._free

    def admit(self, sequence: Sequence) -> None:
        assert sequence.limit <= self._cache.capacity + 1, (sequence.limit, self._cache.capacity)
        sequence.slot = self._free.pop()
        self._cache.truncate(sequence.slot, 0)
        self.proposer.begin(sequence.slot)
        self.control.begin(sequence.slot)
        self.running.append(sequence)

    @torch.inference_mode()
    def round(self) -> list[Sequence]:
        """One round of every running sequence; returns them. Those that ended have left the batch."""
        clock = [self._now()]

        # 1. Decide how many tokens to draft, before anything is drafted, and draft them.
        turns = [self._plan(sequence) for sequence in self.running]
        self._draft(turns)
        clock.append(self._now())

        # 2. Score what is unread and drafted, all sequences in one pass of the target.
        scores = self.target([turn.chunk for turn in turns], self._cache, self.proposer.features)
        clock.append(self._now())

        # 3. Verify: which of the drafted tokens stand, and which token follows them.
        outcomes = [self._verify(turn, logits) for turn, logits in zip(turns, scores.logits, strict=True)]
        clock.append(self._now())

        # 4. Commit token by token, up to where the sequence ends; rewind both caches to what was committed.
        features = scores.features or itertools.repeat(None)
        for turn, outcome, of_turn in zip(turns, outcomes, features, strict=False):
            self._commit(turn, outcome, of_turn)
        clock.append(self._now())

        draft_s, score_s, verify_s, other_s = (after - before for before, after in itertools.pairwise(clock))
        for turn in turns:
            stats = turn.sequence.stats
            if turn.reads_prompt:
                stats.prefill_s += clock[-1] - clock[0]
            else:
                stats.draft_s += draft_s
                stats.score_s += score_s
                stats.verify_s += verify_s
                stats.other_s += other_s
        self.running = [turn.sequence for turn in turns if turn.sequence.finish_reason is None]
        return [turn.sequence for turn in turns]

    def _plan(self, sequence: Sequence) -> _Turn:
        unread = sequence.tokens[self._cache.length(sequence.slot) :]
        return _Turn(
            sequence,
            unread[:READ_CHUNK],
            reads_prompt=not sequence.output,
            gives_tokens=len(unread) <= READ_CHUNK,
            draft=Draft(),
        )

    def _draft(self, turns: list[_Turn]) -> None:
        drafting, requests = [], []
        for turn in turns:
            sequence = turn.sequence
            # A round gives one token more than it drafts, and may not give more than the sequence can take.
            room = sequence.limit - len(sequence.tokens) - 1
            if room > 0 and not turn.reads_prompt:
                drafting.append(turn)
                requests.append(Request(slot=sequence.slot, tokens=sequence.tokens, k=room, sampler=sequence.sampler))
        if requests:
            chosen = self.control.choose(requests)
            asked = [(turn, replace(r, k=k)) for turn, r, k in zip(drafting, requests, chosen, strict=True) if k]
            drafts = self.proposer.propose([request for _, request in asked]) if asked else []
            for (turn, _), draft in zip(asked, drafts, strict=True):
                turn.draft = draft

    def _verify(self, turn: _Turn, logits_OV: torch.Tensor) -> list[tuple[int, Provenance, TokenLogprobs | None]]:
        """The tokens this round gives, at least one unless the prompt is still being read."""
        sequence, draft, sampler = turn.sequence, turn.draft, turn.sequence.sampler
        if turn.reads_prompt and sampler.params.prompt_logprobs is not None:
            self._report_prompt(turn, logits_OV)
        if not turn.gives_tokens:
            return []
        logits_SV = logits_OV if len(logits_OV) == len(draft) + 1 else logits_OV[-len(draft) - 1 :]
        p_S = sampler.rows(logits_SV, sequence.tokens, draft)
        verdict = sampler.verify(p_S, draft, anchor=len(sequence.tokens))
        tokens = [*draft.tokens[: verdict.accepted], verdict.token]
        last = Provenance.BONUS if verdict.accepted == len(draft) else Provenance.RECOVERED
        provenance = [Provenance.ACCEPTED] * verdict.accepted + [last if draft.tokens else Provenance.PLAIN]
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if sampler.params.logprobs is not None:
            logprobs = [*report(logits_SV[: len(tokens)], tokens, sampler.params.logprobs)]
        return list(zip(tokens, provenance, logprobs, strict=True))

    def _report_prompt(self, turn: _Turn, logits_TV: torch.Tensor) -> None:
        """The log-probability of each prompt token but the first, which nothing precedes."""
        sequence, count = turn.sequence, turn.sequence.sampler.params.prompt_logprobs
        assert count is not None
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        start = len(sequence.prompt_logprobs)
        following = sequence.tokens[start : start + len(turn.unread)]
        sequence.prompt_logprobs += report(logits_TV[: len(following)], following, count)

    def _commit(
        self,
        turn: _Turn,
        outcome: list[tuple[int, Provenance, TokenLogprobs | None]],
        features_TFH: torch.Tensor | None,
    ) -> None:
        sequence = turn.sequence
        accepted = 0
        for token, provenance, logprobs in outcome:
            accepted += provenance is Provenance.ACCEPTED
            if sequence.commit(token, provenance, logprobs):
                break
        if not turn.reads_prompt:
            sequence.stats.count_round(len(turn.draft), accepted)
            self.control.learn(sequence.slot, len(turn.draft), accepted)
        read = self._cache.length(sequence.slot)
        stands = min(read, len(sequence.tokens) - 1)
        self._cache.truncate(sequence.slot, stands)
        if features_TFH is not None and read > stands:
            features_TFH = features_TFH.narrow(0, 0, len(features_TFH) - (read - stands))
        self.proposer.observe(sequence.slot, sequence.tokens, features_TFH)
        if sequence.finish_reason is not None:
            self._free.append(sequence.slot)

    def _now(self) -> float:
        if self._runs_ahead:  # untested: kernels run behind the clock's back otherwise
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def report(logits_TV: torch.Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """The log-probabilities of `tokens`, one a row, and of the `count` most probable tokens beside each."""
    logs_TV = log_probabilities(logits_TV)
    own_T = logs_TV.gather(-1, torch.tensor(tokens, device=logs_TV.device)[:, None])
    ranks = (logs_TV > own_T).sum(-1) + 1
    values, ids = logs_TV.topk(count)
    return [
        TokenLogprobs(float(own), int(rank), tuple(zip(row_ids, row_values, strict=True)))
        for own, rank, row_ids, row_values in zip(own_T[:, 0], ranks, ids.tolist(), values.tolist(), strict=True)
    ]
