"""Logits to probabilities: the one path, for the target and for every draft.

Whatever turns a model's logits into the distribution that tokens are drawn from happens here and nowhere else, so the
q of a draft is the distribution its tokens were really drawn from, and no parameter can hold for one side only.

Order, as in vLLM: logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p. Filters keep whatever ties with
the last token kept, so that they depend on values alone and not on a sorting order.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from paceline.sampling.params import SamplingParams

_NUCLEUS_GUESS = 512  # nuclei are nearly always smaller; where one is not, the whole row is sorted


def probabilities(
    logits_TV: torch.Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    drafted: Sequence[int] = (),
    end_ids: Collection[int] = (),
) -> torch.Tensor:
    """[T, V] distributions; row t is that of the token after prompt + output + drafted[:t], with T - 1 drafted tokens.

    `end_ids` are the tokens that end this request (`min_tokens` forbids them early). Computes in the logits' own
    precision, float32 at least; the logits are left as they are. Raises ValueError where the model's logits hold NaN
    or infinity, or where the parameters leave no token at all.
    """
    rows, size = logits_TV.shape
    assert len(drafted) == rows - 1, f"{rows} rows need {rows - 1} drafted tokens, not {len(drafted)}"
    logits_TV = logits_TV.clone() if logits_TV.dtype == torch.float64 else logits_TV.to(torch.float32, copy=True)

    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_TV.device)
        logits_TV[:, ids] += logits_TV.new_tensor(list(params.logit_bias.values()))
    barred = min(max(params.min_tokens - len(output), 0), rows)
    if barred and end_ids:
        logits_TV[:barred, list(end_ids)] = -math.inf
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        _penalise(logits_TV, params, prompt, output, drafted)

    top_T1, best_T1 = logits_TV.max(-1, keepdim=True)
    if not bool(top_T1.isfinite().all()):
        raise ValueError(
            f"the largest logit of a row is {top_T1.flatten().tolist()}, it must be finite: "
            "load the model with dtype='float32', or bar fewer tokens"
        )
    if params.temperature == 0:
        return torch.zeros_like(logits_TV).scatter_(-1, best_T1, 1)
    # The maximum becomes 0, whatever the temperature; one beyond the numbers of this precision acts as its last one.
    limits = torch.finfo(logits_TV.dtype)
    logits_TV.sub_(top_T1).div_(min(max(params.temperature, limits.tiny), limits.max))
    if params.min_p > 0:
        logits_TV.masked_fill_(logits_TV < math.log(params.min_p), -math.inf)
    if 0 < params.top_k < size:
        last_T1 = logits_TV.topk(params.top_k).values[:, -1:]
        logits_TV.masked_fill_(logits_TV < last_T1, -math.inf)
    probs_TV = logits_TV.softmax(-1)
    if params.top_p < 1:
        # Softmax again rather than a division by the sum: how torch sums a row depends on how many rows there are.
        logits_TV.masked_fill_(probs_TV < _nucleus_threshold(probs_TV, params.top_p), -math.inf)
        probs_TV = logits_TV.softmax(-1)
    return probs_TV


def _penalise(
    logits_TV: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    drafted: Sequence[int],
) -> None:
    """Penalties advance through the drafted tokens: row t counts drafted[:t] as output."""
    seen, counts = set(prompt) | set(output), Counter(output)
    for t, row_V in enumerate(logits_TV):
        if t:
            seen.add(drafted[t - 1])
            counts[drafted[t - 1]] += 1
        if params.repetition_penalty != 1 and seen:
            ids = torch.tensor(sorted(seen), device=row_V.device)
            values = row_V[ids]
            penalty = params.repetition_penalty
            row_V[ids] = torch.where(values > 0, values / penalty, values * penalty)
        if counts:
            ids = torch.tensor(list(counts), device=row_V.device)
            row_V[ids] -= params.frequency_penalty * row_V.new_tensor(list(counts.values())) + params.presence_penalty


def _nucleus_threshold(probs_TV: torch.Tensor, top_p: float) -> torch.Tensor:
    """[T, 1] the probability of the last token of each row's nucleus."""
    size = probs_TV.shape[-1]
    largest_TN = probs_TV.topk(min(_NUCLEUS_GUESS, size)).values
    mass_TN = largest_TN.cumsum(-1, dtype=torch.float64)
    if size > _NUCLEUS_GUESS and bool((mass_TN[:, -1] < top_p).any()):
        largest_TN = probs_TV.sort(-1, descending=True).values
        mass_TN = largest_TN.cumsum(-1, dtype=torch.float64)
    last_T1 = (mass_TN < top_p).sum(-1, keepdim=True).clamp(max=largest_TN.shape[-1] - 1)
    return largest_TN.gather(-1, last_T1)


def log_probabilities(logits_TV: torch.Tensor) -> torch.Tensor:
    """[T, V] the model's own log-probabilities, before any parameter: what `logprobs` reports."""
    return logits_TV.float().log_softmax(-1)
