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
from collections.abc import Collection, Iterable, Sequence
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

    def spread(self, logits_TD: torch.Tensor) -> torch.Tensor:
        """[T, V] with -inf where a token is not among them."""
        logits_TV = logits_TD.new_full((logits_TD.shape[0], self.size), -math.inf)
        logits_TV[:, torch.from_numpy(self.ids)] = logits_TD
        return logits_TV


def distributions(
    logits_TV: torch.Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    drafted: Sequence[int] = (),
    end_ids: Collection[int] = (),
    among: Among | None = None,
) -> list[Distribution]:
    """One for each row; that of row t is for the token after prompt + output + drafted[:t], with T - 1 drafted tokens.

    `among`: the logits are those of these tokens alone, [T, D], and no other has any probability.

    `end_ids` are the tokens that end this request (`min_tokens` forbids them early). Computes in the logits' own
    precision, float32 at least; the logits are left as they are. Raises ValueError where the model's logits hold NaN
    or infinity, or where the parameters leave no token at all.
    """
    if among is not None:
        # What a parameter says of single tokens is said by their ids.
        if params.logit_bias or params.penalises or (params.min_tokens > len(output) and end_ids):
            logits_TV = among.spread(logits_TV)
        else:
            return [among.lift(each) for each in distributions(logits_TV, params, drafted=drafted)]
    rows, size = logits_TV.shape
    assert len(drafted) == rows - 1, f"{rows} rows need {rows - 1} drafted tokens, not {len(drafted)}"
    if logits_TV.dtype != torch.float64:
        logits_TV = logits_TV.float()
    scores_TV: Floats = logits_TV.numpy(force=True)

    barred = min(max(params.min_tokens - len(output), 0), rows) if end_ids else 0
    if params.logit_bias or barred or params.penalises:
        scores_TV = scores_TV.copy()
    if params.logit_bias:
        scores_TV[:, list(params.logit_bias)] += list(params.logit_bias.values())
    if barred:
        scores_TV[:barred, list(end_ids)] = -math.inf
    if params.penalises:
        _penalise(scores_TV, params, prompt, output, drafted)

    if params.temperature == 0:
        # Few calls: each costs some ten times as much behind a pass of the target, which has emptied the caches.
        best_T, one = scores_TV.argmax(-1), np.array((1,), scores_TV.dtype)
        _require_finite([scores_TV.item(t, best) for t, best in enumerate(best_T.tolist())])
        return [Distribution(size, one, best_T[t : t + 1]) for t in range(rows)]
    temperature = params.temperature
    if temperature != 1:  # one beyond the numbers of this precision acts as its last one
        limits = torch.finfo(logits_TV.dtype)
        temperature = min(max(temperature, limits.tiny), limits.max)
    if params.min_p > 0 or 0 < params.top_k < size:
        return [_chosen(row_V, temperature, params) for row_V in scores_TV]
    probs_TV = _softmax(scores_TV, temperature)
    if params.top_p == 1:
        return [Distribution(size, probs_V) for probs_V in probs_TV]
    return [_nucleus(size, *_likely(probs_V, params.top_p), params.top_p) for probs_V in probs_TV]


def _softmax(logits_TV: Floats, temperature: float) -> Floats:
    """Of logits / temperature. A row is NaN throughout if its maximum is not finite before or after the division."""
    scaled_TV = logits_TV
    if temperature != 1:
        with np.errstate(over="ignore"):
            scaled_TV = logits_TV / temperature
    probs_TV: Floats = torch.from_numpy(scaled_TV).softmax(-1).numpy()
    if math.isnan(sum(probs_TV[:, 0].tolist())):
        failed_T = np.isnan(probs_TV[:, 0])
        top_T1 = logits_TV[failed_T].max(-1, keepdims=True)
        _require_finite(top_T1[:, 0])
        # A maximum of 0 stays what it is, and -inf is what the others may become.
        with np.errstate(over="ignore"):
            scaled_TV = (logits_TV[failed_T] - top_T1) / temperature
        probs_TV[failed_T] = torch.from_numpy(scaled_TV).softmax(-1).numpy()
    return probs_TV


def _chosen(logits_V: Floats, temperature: float, params: SamplingParams) -> Distribution:
    """Temperature and filters of one row, min_p or top_k among them."""
    top = logits_V.max()
    _require_finite((top,))
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


def _require_finite(tops: Iterable[float]) -> None:
    if failed := [top for top in tops if not math.isfinite(top)]:
        raise ValueError(
            f"the largest logit of a row is {failed[0]}, it must be finite: "
            "load the model with dtype='float32', or bar fewer tokens"
        )


def _penalise(
    logits_TV: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], drafted: Sequence[int]
) -> None:
    """Penalties advance through the drafted tokens: row t counts drafted[:t] as output."""
    of_prompt, of_output = set(prompt), Counter(output)
    known = sorted({*of_prompt, *of_output, *drafted})
    column = {token: n for n, token in enumerate(known)}
    counts_TN = np.tile(np.array([of_output[token] for token in known], logits_TV.dtype), (len(logits_TV), 1))
    for t, token in enumerate(drafted, start=1):
        counts_TN[t:, column[token]] += 1
    seen_TN = (counts_TN > 0) | np.array([token in of_prompt for token in known], bool)

    values_TN, penalty = logits_TV[:, known], params.repetition_penalty
    values_TN = np.where(seen_TN, np.where(values_TN > 0, values_TN / penalty, values_TN * penalty), values_TN)
    once, each = params.presence_penalty, params.frequency_penalty
    logits_TV[:, known] = values_TN - (each * counts_TN + once * (counts_TN > 0))


def log_probabilities(logits_TV: torch.Tensor) -> torch.Tensor:
    """[T, V] the model's own log-probabilities, before any parameter: what `logprobs` reports."""
    return logits_TV.float().log_softmax(-1)
