"""How a draft's tokens stand for the target's.

Usually they are the same tokens with the same ids, and only the padding of the embeddings may differ. Otherwise the
tokens that both know, by the text they stand for, form the intersection (TLI, Timor et al. 2025, arXiv 2502.05202):
q is restricted to it and renormalised, which is exact under any verification rule, and a committed token outside of
it is respelled with the draft's own tokens. Knows no tokenizer: spellings come in as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from paceline.sampling.distribution import Among, Floats

Token = tuple[bool, bytes]
"""A token by what it stands for: whether it is a special token, and its bytes."""

SMALLEST_SHARE = 0.05
"""An intersection below this part of the target's vocabulary is refused: hardly anything could be proposed."""


class Vocabulary(Protocol):
    """What a proposer needs to know of a draft model's tokens."""

    identical: bool
    """Every token of the target is one of the draft's."""

    def spell(self, token: int) -> tuple[int, ...]: ...

    def to_target(self, logits_D: Floats) -> Floats: ...


class VocabularyMap:
    """Which of the target's tokens a draft can propose, and how the draft reads the others.

    `target` and `draft` are the tokens by id, as many as the tokenizers know; `target_size` and `draft_size` the rows
    of logits of the models, padding included; `encode_draft` the draft's tokenizer, without special tokens.
    Raises ValueError where less than `SMALLEST_SHARE` of the target's tokens are shared.
    """

    def __init__(
        self,
        target: Sequence[Token],
        draft: Sequence[Token],
        encode_draft: Callable[[str], Sequence[int]],
        *,
        target_size: int,
        draft_size: int,
    ) -> None:
        self.target_size, self._draft_size = target_size, draft_size
        self._target, self._encode_draft = target, encode_draft
        self.identical = list(target) == list(draft)
        if self.identical:
            shared = {i: i for i in range(min(target_size, draft_size))}
        else:
            # Two ids may stand for the same bytes (SentencePiece has byte tokens first); the later is the ordinary one.
            draft_of = {token: i for i, token in enumerate(draft[:draft_size])}
            target_of = {token: i for i, token in enumerate(target[:target_size])}
            shared = {i: draft_of[token] for token, i in target_of.items() if token in draft_of}
        self.share = min(1.0, len(shared) / len(target))
        """The part of the target's tokens that the draft can propose."""
        if self.share < SMALLEST_SHARE:
            raise ValueError(
                f"target and draft share {len(shared)} of the target's {len(target)} tokens, less than "
                f"{SMALLEST_SHARE:.0%}: use a draft made for this tokenizer, or draft='ngram'"
            )
        self._spellings: dict[int, tuple[int, ...]] = {i: (other,) for i, other in shared.items()}
        self._any = next(iter(shared.values()))
        self._aligned = self.identical and target_size == draft_size
        self._target_ids = np.array(list(shared))
        self._draft_ids = np.array(list(shared.values()))

    def spell(self, token: int) -> tuple[int, ...]:
        """The draft's tokens, one at least, that stand for the target's `token` in the draft's context.

        Any spelling keeps the output exact; a good one keeps the draft good.
        """
        if token not in self._spellings:
            text = self._target[token][1].decode("utf-8", errors="ignore") if token < len(self._target) else ""
            known = tuple(i for i in self._encode_draft(text) if i < self._draft_size)
            self._spellings[token] = known or (self._any,)
        return self._spellings[token]

    def to_target(self, logits_D: Floats) -> Floats:
        """The draft's logits [draft_size] over the target's vocabulary: -inf where a token is not shared."""
        if self._aligned:
            return logits_D
        logits_V = np.full(self.target_size, -math.inf, logits_D.dtype)
        logits_V[self._target_ids] = logits_D[self._draft_ids]
        return logits_V


class ReducedVocabulary:
    """A draft over some of the target's own tokens: it reads all of them, and proposes these."""

    identical = True

    def __init__(self, among: Among) -> None:
        self.among = among

    def spell(self, token: int) -> tuple[int, ...]:
        return (token,)

    def to_target(self, logits_D: Floats) -> Floats:
        return self.among.spread(logits_D)
