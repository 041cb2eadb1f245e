"""Level 2: the same text as plain decoding, token by token, wherever text is determined.

Coupled verification determines it by the seed, so the parameters asked for are used. The ratio rules determine it at
temperature 0 alone, so that is what is replayed under them, with the other parameters as they are.

Where texts differ, only the first token that does is judged. It is a near-tie where what it lost by is within the noise
of the format, which is measured: how far the same position's scores differ with what else is in the pass. Where they do
not differ at all, as with the CPU kernels, there are no near-ties, and every flip is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.evaluation.audit.identity import distance
from paceline.evaluation.audit.subject import Subject
from paceline.evaluation.audit.trials import Context, Exact
from paceline.sampling.distribution import log_probabilities, on_host
from paceline.sampling.streams import Purpose, Stream


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far one position's row differs between passes of different shapes, over the positions looked at."""

    positions: int
    scores: float
    """Largest difference of the log-probabilities of the most probable tokens."""
    variation: float
    """Largest total variation."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """The first token at which a text differs from plain decoding."""

    prompt: int
    slots: int
    position: int
    plain: int
    speculative: int
    margin: float
    """By how much the plain token's score leads: of log-probabilities or, coupled, of the race."""
    near_tie: bool


@dataclass(kw_only=True)
class Replay:
    texts: int = 0
    tokens: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)

    @property
    def errors(self) -> int:
        return sum(not flip.near_tie for flip in self.flips)

    @property
    def exact(self) -> bool:
        return self.texts > 0 and not self.errors


def determined(subject: Subject) -> Subject:
    """The same, with parameters under which its text is determined."""
    if subject.verify == "coupled":
        return subject
    return replace(subject, params=replace(subject.params, temperature=0.0))


def measure_noise(subject: Subject, contexts: Sequence[Context]) -> Noise:
    """Score the last positions of some contexts alone, with others, and as part of a longer pass."""
    contexts = [c for c in contexts if len(c.tokens) > 10][:8]
    scores = variation = 0.0
    count = 0
    if not contexts:
        return Noise(positions=0, scores=0.0, variation=0.0)
    cut = [Context(tuple(c.tokens[:-6]), (c.tokens[-6],)) for c in contexts]
    together = Exact(subject, cut, ahead=6)
    tails = [(i, c.tokens[-5:]) for i, c in enumerate(contexts)]
    long = together.logits(tails)
    for i, tail in tails:
        alone = Exact(subject, [cut[i]], ahead=6)
        for t in range(len(tail) + 1):
            (rows,) = alone.logits([(0, tail[:t])])
            a, b = log_probabilities(rows[-1:])[0], log_probabilities(long[i][t : t + 1])[0]
            top = a.topk(min(50, len(a))).indices
            scores = max(scores, float((a[top] - b[top]).abs().max()))
            variation = max(
                variation, distance(alone.choose(0, tail[:t], rows[-1]), together.choose(i, tail[:t], long[i][t]))
            )
            count += 1
    return Noise(positions=count, scores=scores, variation=variation)


def examine(
    subject: Subject,
    plain: Sequence[Sequence[int]],
    right: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    tokens: int,
    batch_sizes: Sequence[int],
    noise: Noise,
) -> Replay:
    """`plain`: the texts of plain decoding, of `right`, the subject without a fault; both with determined text."""
    found = Replay(batch_sizes=list(batch_sizes))
    for slots in batch_sizes:
        texts = subject.decode(prompts, seed=seed, slots=slots, tokens=tokens)
        for index, (expected, text) in enumerate(zip(plain, texts, strict=True)):
            found.texts += 1
            found.tokens += len(expected)
            if text == expected:
                continue
            position = next(
                (i for i, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b),
                min(len(expected), len(text)),
            )
            found.flips.append(
                _flip(right, index, prompts[index], expected, text, position, seed + index, slots, noise)
            )
    return found


def _flip(
    right: Subject,
    index: int,
    prompt: Sequence[int],
    expected: Sequence[int],
    text: Sequence[int],
    position: int,
    seed: int,
    slots: int,
    noise: Noise,
) -> Flip:
    if position >= min(len(expected), len(text)):  # one ends where the other goes on: no tie explains that
        pair, margin = (-1, -1), float("inf")
    else:
        pair = (expected[position], text[position])
        before = [*prompt, *expected[:position]]
        margin = _margin(right, before, len(prompt), pair, seed)
    return Flip(
        prompt=index,
        slots=slots,
        position=position,
        plain=pair[0],
        speculative=pair[1],
        margin=margin,
        near_tie=noise.scores > 0 and margin <= 2 * noise.scores,
    )


def _margin(right: Subject, before: Sequence[int], prompt_length: int, pair: tuple[int, int], seed: int) -> float:
    """How far the first token of `pair` leads in plain decoding."""
    scorer = Exact(right, [Context(tuple(before[:-1]), (before[-1],))], ahead=1)
    ((row_V,),) = scorer.logits([(0, ())])
    params = right.params
    if right.verify != "coupled":
        params = replace(params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    sampler = replace(right, params=params).new_sampler(prompt_length, seed)
    p = sampler.distribution(on_host(row_V), list(before))
    first, second = (p.of(token) for token in pair)
    if not first or not second:
        return float("inf")
    margin = float(np.log(first) - np.log(second))
    if right.verify == "coupled":
        uniforms = Stream(seed).uniforms(Purpose.COUPLE, len(before), 0, max(pair) + 1)
        races = [-np.log1p(-uniforms[token]) for token in pair]
        margin += float(np.log(races[1]) - np.log(races[0]))
    return abs(margin)
