"""Logits to distributions: the one path, for the target and for every draft.

Whatever turns a model's logits into the distribution that tokens are drawn from happens here and nowhere else, so the
q of a draft is the distribution its tokens were really drawn from, and no parameter can hold for one side only.

Order, as in vLLM: logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p. Filters keep whatever ties with
the last token kept, so that they depend on values alone and not on a sorting order. They leave few tokens, and find
them by one comparison over the vocabulary; all that follows is about these few.

Works on the host, in numpy, which compares and searches rows several times as fast as torch does on a CPU. A row never
depends on how many rows are computed with it: torch's softmax has this property, sums over a dimension have not.

Shapes: T positions, V vocabulary, N the tokens of one row that have any probability.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling.params import SamplingParams

Floats = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]

_ENOUGH = 2048
"""A nucleus seldom has tokens below the (1 - top_p) / _ENOUGH-th part of all probability."""
_GROUP = 64
"""The k-th largest of all logits is at least the k-th largest of the maxima of groups of this many."""


@dataclass(frozen=True, eq=False)
class Distribution:
    """How probable each of `size` tokens is, normalised or not.

    `probs` [N] are the probabilities of the tokens `ids` [N], which ascend; all others have none. Without `ids` they
    are those of all tokens, [V].
    """

    size: int
    probs: Floats
    ids: Ids | None = None

    def of(self, token: int) -> float:
        if self.ids is None:
            return float(self.probs[token])
        if len(self.ids) == 1:  # the greedy case, which is asked for in every round
            return float(self.probs[0]) if self.ids.item(0) == token else 0.0
        place = self.ids.searchsorted(token)
        return float(self.probs[place]) if place < len(self.ids) and self.ids[place] == token else 0.0

    def dense(self) -> Floats:
        """[V] the probabilities of all tokens."""
        if self.ids is None:
            return self.probs
        probs_V = np.zeros(self.size, self.probs.dtype)
        probs_V[self.ids] = self.probs
        return probs_V

    def minus(self, other: Distribution, scale: float = 1.0) -> Distribution:
        """max(0, scale self - other), not normalised."""
        assert self.size == other.size, (self.size, other.size)
        probs_N = self.probs if scale == 1 else scale * self.probs
        return Distribution(self.size, probs_N - np.minimum(probs_N, other._at(self.ids)), self.ids)

    def _at(self, ids: Ids | None) -> Floats:
        """The probabilities of `ids`, or of all tokens."""
        if ids is None:
            return self.dense()
        if self.ids is None:
            return self.probs[ids]
        places = np.minimum(self.ids.searchsorted(ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.probs[places], 0)


@dataclass(frozen=True, eq=False)
class Among:
    """Some tokens of a vocabulary of `size`: `ids` [D], which ascend."""

    size: int
    ids: Ids

    def lift(self, some: Distribution) -> Distribution:
        """A distribution over D columns as one over the vocabulary."""
        return Distribution(self.size, some.probs, self.ids if some.ids is None else self.ids[some.ids])

    def spread(self, logits_D: Floats) -> Floats:
        """[V] with -inf where a token is not among them."""
        logits_V = np.full(self.size, -math.inf, logits_D.dtype)
        logits_V[self.ids] = logits_D
        return logits_V


def on_host(logits: torch.Tensor) -> Floats:
    """Logits as distributions are made of them: in float32, or in float64 where that is what they are. To be asked for
    once a pass: right behind one, each call of torch takes some 25 microseconds."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    found: Floats = logits.numpy(force=True)
    return found


def distribution(
    logits_V: Floats,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_ids: Collection[int] = (),
    among: Among | None = None,
) -> Distribution:
    """Of the token behind prompt + output, where what a round has drafted so far is output too.

    `among`: the logits are those of these tokens alone, [D], and no other has any probability.

    `end_ids` are the tokens that end this request (`min_tokens` forbids them early). Computes in the logits' own
    precision, and leaves them as they are. Raises ValueError where the model's logits hold NaN or infinity, or where
    the parameters leave no token at all.
    """
    barred = end_ids if len(output) < params.min_tokens else ()
    if params.logit_bias or params.penalises or barred:
        # What a parameter says of single tokens is said by their ids.
        logits_V = logits_V.copy() if among is None else among.spread(logits_V)
    elif among is not None:
        return among.lift(distribution(logits_V, params))
    size = len(logits_V)

    if params.logit_bias:
        logits_V[list(params.logit_bias)] += list(params.logit_bias.values())
    if barred:
        logits_V[list(barred)] = -math.inf
    if params.penalises:
        _penalise(logits_V, params, prompt, output)

    if params.temperature == 0:
        # Few calls: each costs some ten times as much behind a pass of the target, which has emptied the caches.
        best = int(logits_V.argmax())
        _require_finite(logits_V.item(best))
        return Distribution(size, np.array((1,), logits_V.dtype), np.array((best,)))
    temperature = params.temperature
    if temperature != 1:  # one beyond the numbers of this precision acts as its last one
        limits = np.finfo(logits_V.dtype)
        temperature = min(max(temperature, float(limits.tiny)), float(limits.max))
    if params.min_p > 0 or 0 < params.top_k < size:
        return _chosen(logits_V, temperature, params)
    probs_V = _softmax(logits_V, temperature)
    if params.top_p == 1:
        return Distribution(size, probs_V)
    return _nucleus(size, *_likely(probs_V, params.top_p), params.top_p)


def _softmax(logits_V: Floats, temperature: float) -> Floats:
    """Of logits / temperature."""
    scaled_V = logits_V
    if temperature != 1:
        with np.errstate(over="ignore"):
            scaled_V = logits_V / temperature
    probs_V: Floats = torch.from_numpy(scaled_V).softmax(-1).numpy()
    if math.isnan(probs_V.item(0)):  # and so is all of it: its maximum is not finite, before the division or behind it
        top = logits_V.max()
        _require_finite(top)
        # A maximum of 0 stays what it is, and -inf is what the others may become.
        with np.errstate(over="ignore"):
            scaled_V = (logits_V - top) / temperature
        probs_V = torch.from_numpy(scaled_V).softmax(-1).numpy()
    return probs_V


def _chosen(logits_V: Floats, temperature: float, params: SamplingParams) -> Distribution:
    """Temperature and filters of one row, min_p or top_k among them."""
    top = logits_V.max()
    _require_finite(top)
    floor = temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
    with np.errstate(over="ignore"):  # -inf is what becomes of a difference beyond all numbers
        ids_N = _largest(logits_V, params.top_k, float(top) + floor)
        weights_N = np.exp((logits_V[ids_N] - top) / temperature)
    return _nucleus(len(logits_V), weights_N / np.add.reduce(weights_N), ids_N, params.top_p)


def _likely(probs_V: Floats, top_p: float) -> tuple[Floats, Ids]:
    """Some of the most probable tokens, with all of the nucleus among them.

    Tokens below (1 - top_p) / V together have less than 1 - top_p: none of them is needed. Mostly far fewer are.
    """
    for count in (_ENOUGH, len(probs_V)):
        ids_N = (probs_V >= (1 - top_p) / count).nonzero()[0]
        probs_N = probs_V[ids_N]
        if probs_N.sum(dtype=np.float64) > top_p + 1e-9:  # in whatever order it is summed
            break
    return probs_N, ids_N


def _nucleus(size: int, probs_N: Floats, ids_N: Ids, top_p: float) -> Distribution:
    """The most probable of `ids_N` that together reach `top_p`, renormalised; no other token has to be looked at."""
    if top_p < 1:
        ordered_N = np.sort(probs_N)[::-1]
        last = int(ordered_N.astype(np.float64).cumsum().searchsorted(top_p))
        kept_N = probs_N >= ordered_N[min(last, len(ordered_N) - 1)]
        probs_N, ids_N = probs_N[kept_N], ids_N[kept_N]
        probs_N = probs_N / np.add.reduce(probs_N)
    return Distribution(size, probs_N, ids_N)


def _largest(logits_V: Floats, k: int, floor: float) -> Ids:
    """The tokens of the k largest logits, ties with the last of them included, that reach `floor`; with k = 0 of all
    that reach it."""
    groups = len(logits_V) // _GROUP
    if 0 < k <= groups:
        maxima = logits_V[: _GROUP * groups].reshape(_GROUP, groups).max(0)
        floor = max(floor, np.partition(maxima, groups - k)[groups - k])
    ids_N = (logits_V >= floor).nonzero()[0]
    if 0 < k < len(ids_N):
        few_N = logits_V[ids_N]
        ids_N = ids_N[few_N >= np.partition(few_N, len(few_N) - k)[len(few_N) - k]]
    return ids_N


def _require_finite(top: float) -> None:
    if not math.isfinite(top):
        raise ValueError(
            f"the largest logit of a row is {top}, it must be finite: "
            "load the model with dtype='float32', or bar fewer tokens"
        )


def _penalise(logits_V: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    of_output = Counter(output)
    seen = sorted({*prompt, *of_output})
    counts_N = np.array([of_output[token] for token in seen], logits_V.dtype)
    values_N, penalty = logits_V[seen], params.repetition_penalty
    values_N = np.where(values_N > 0, values_N / penalty, values_N * penalty)
    once, each = params.presence_penalty, params.frequency_penalty
    logits_V[seen] = values_N - (each * counts_N + once * (counts_N > 0))


def log_probabilities(logits_TV: torch.Tensor) -> torch.Tensor:
    """[T, V], of T rows: the model's own log-probabilities, before any parameter: what `logprobs` reports."""
    return logits_TV.float().log_softmax(-1)
