"""The path from logits to probabilities against plain numpy that shares nothing with it, and at its edges.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from paceline.sampling.distribution import Distribution, distribution, log_probabilities, on_host
from paceline.sampling.params import SamplingParams
from tests.fakes import Vector

INF = math.inf


def reference(
    logits_V: Vector,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_ids: Sequence[int] = (),
) -> Vector:
    """One row, token by token where that is clearest, renormalised after every filter."""
    x = np.array(logits_V, dtype=np.float64)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        x[list(end_ids)] = -INF
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return np.eye(len(x))[np.flatnonzero(x == x.max())[0]]
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    p = np.where(p < params.min_p * p.max(), 0, p)
    p /= p.sum()
    if 0 < params.top_k < len(p):
        p = np.where(p < np.sort(p)[::-1][params.top_k - 1], 0, p)
        p /= p.sum()
    if params.top_p < 1:
        mass, least = 0.0, 0.0
        for least in np.sort(p)[::-1]:
            mass += least
            if mass >= params.top_p:
                break
        p = np.where(p < least, 0, p)
        p /= p.sum()
    return p


def rows(
    logits_TV: torch.Tensor,
    params: SamplingParams,
    *,
    output: Sequence[int] = (),
    drafted: Sequence[int] = (),
    **history: Any,
) -> list[Distribution]:
    """Row t is behind output + drafted[:t]."""
    return [
        distribution(row_V, params, output=[*output, *drafted[:t]], **history)
        for t, row_V in enumerate(on_host(logits_TV))
    ]


def probabilities(logits_TV: torch.Tensor, params: SamplingParams, **history: Any) -> torch.Tensor:
    """[T, V], the tokens without probability included."""
    return torch.from_numpy(np.stack([row.dense() for row in rows(logits_TV, params, **history)]))


def computed(logits: object, params: SamplingParams, **history: Any) -> Vector:
    logits_TV = torch.as_tensor(np.atleast_2d(np.array(logits, dtype=np.float64)))
    return probabilities(logits_TV, params, **history).numpy()


def one(logits: Sequence[float], **changes: Any) -> list[float]:
    """One row without history."""
    return computed(logits, SamplingParams(**changes))[0].tolist()


@dataclass(frozen=True)
class Case:
    logits_TV: Vector
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    drafted: list[int]
    end_ids: list[int]


def choose(rng: np.random.Generator, *values: Any) -> Any:
    return values[rng.integers(len(values))]


def random_case(seed: int) -> Case:
    rng = np.random.default_rng([11, seed])
    size, rows = int(choose(rng, 2, 3, 7, 40, 700)), int(rng.integers(1, 6))
    logits_TV = rng.normal(size=(rows, size)) * choose(rng, 0.1, 1.0, 5.0)
    if rng.random() < 0.4:  # many ties: a grid on which sums, halves and doubles are exact
        logits_TV = np.round(logits_TV * 2) / 2
        penalty, once, each, bias = choose(rng, 1.0, 2.0, 0.5), choose(rng, 0.0, 0.5), choose(rng, 0.0, -0.25), 1.5
        temperature = choose(rng, 0.0, 1.0, 0.5, 2.0)
    else:
        penalty, once, each = choose(rng, 1.0, 1.3, 0.8), choose(rng, 0.0, 1.1), choose(rng, 0.0, 0.4, -0.6)
        bias, temperature = rng.uniform(-8, 8), choose(rng, 0.0, 1.0, 0.3, 1.7)
    if rng.random() < 0.3:  # some tokens have no probability, one at least has
        logits_TV[rng.random((rows, size)) < 0.3] = -INF
        logits_TV[:, 0] = 0
    params = SamplingParams(
        temperature=temperature,
        top_k=choose(rng, 0, -1, 1, 2, 5, 10_000),
        top_p=choose(rng, 1.0, 0.9, 0.6, 0.03),
        min_p=choose(rng, 0.0, 0.02, 0.3),
        repetition_penalty=penalty,
        presence_penalty=once,
        frequency_penalty=each,
        logit_bias=choose(rng, None, {int(rng.integers(size)): bias, 0: 0.5}),
        min_tokens=int(rng.integers(0, 9)),
    )
    prompt, output, drafted = (rng.integers(size, size=n).tolist() for n in (*rng.integers(0, 6, 2), rows - 1))
    return Case(logits_TV, params, prompt, output, drafted, [1] if rng.random() < 0.7 else [])


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_all_parameters_together_agree_with_plain_numpy(start: int) -> None:
    for seed in range(start, start + 100):
        case = random_case(seed)
        p_TV = computed(
            case.logits_TV,
            case.params,
            prompt=case.prompt,
            output=case.output,
            drafted=case.drafted,
            end_ids=case.end_ids,
        )
        for t, row_V in enumerate(case.logits_TV):
            output = [*case.output, *case.drafted[:t]]
            expected_V = reference(row_V, case.params, case.prompt, output, case.end_ids)
            assert np.abs(p_TV[t] - expected_V).max() < 1e-12, (seed, t, case.params)


SINGLE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.25},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.2},
    {"frequency_penalty": -0.7},
    {"logit_bias": {0: 3.0, 5: -100.0}},
    {"min_tokens": 3},
]


@pytest.mark.parametrize("changes", SINGLE, ids=str)
def test_each_parameter_alone_agrees_with_plain_numpy(changes: dict[str, Any]) -> None:
    rng, params = np.random.default_rng(5), SamplingParams(**changes)
    for _ in range(20):
        logits_TV = rng.normal(size=(4, 12)) * 2
        prompt, output, drafted = [1, 2, 2], [3, 1], [3, 0, 3]
        p_TV = computed(logits_TV, params, prompt=prompt, output=output, drafted=drafted, end_ids=[4, 6])
        for t in range(4):
            expected_V = reference(logits_TV[t], params, prompt, [*output, *drafted[:t]], [4, 6])
            assert np.abs(p_TV[t] - expected_V).max() < 1e-12
            assert p_TV[t].sum() == pytest.approx(1, abs=1e-12)


# ---- what each parameter means, by hand ----


def test_repetition_penalty_counts_the_prompt_and_the_others_the_output_alone() -> None:
    logits = [2.0, -2.0, 2.0, -2.0, 0.0]
    history: dict[str, Any] = {"prompt": [0, 1], "output": [2, 3, 3]}

    def shifts(**changes: Any) -> list[float]:
        """How far each logit moved, with token 4, never seen, as the fixed point."""
        row = np.log(computed(logits, SamplingParams(**changes), **history)[0])
        return np.round(row - row[4] - logits, 9).tolist()

    assert shifts(repetition_penalty=2.0) == [-1, -2, -1, -2, 0]
    assert shifts(presence_penalty=0.5) == [0, 0, -0.5, -0.5, 0]
    assert shifts(frequency_penalty=0.5) == [0, 0, -0.5, -1.0, 0]


def test_repetition_comes_before_the_other_penalties_and_behind_the_bias() -> None:
    # 1 + 3 = 4, halved to 2, minus 0.5 + 2 * 0.25; any other order gives something else
    params = SamplingParams(
        logit_bias={0: 3.0}, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, temperature=0.5
    )
    p = computed([1.0, 0.0], params, output=[0, 0])[0]
    assert math.log(p[0] / p[1]) == pytest.approx(1.0 / 0.5)


def test_min_p_is_measured_after_the_temperature() -> None:
    logits = [0.0, math.log(0.3)]
    assert one(logits, min_p=0.2)[1] > 0
    assert one(logits, min_p=0.2, temperature=0.5)[1] == 0, "0.3 squared is below 0.2"
    assert one(logits, min_p=0.2, temperature=2.0)[1] > 0


def test_top_p_is_measured_on_what_min_p_and_top_k_leave() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert np.count_nonzero(one(logits, top_p=0.65)) == 2
    assert np.count_nonzero(one(logits, top_p=0.65, top_k=3)) == 2, "0.7 / 0.9 reaches 0.65"
    assert np.count_nonzero(one(logits, top_p=0.75, top_k=3)) == 2, "0.7 / 0.9 reaches 0.75, 0.7 does not"
    assert np.count_nonzero(one(logits, top_p=0.75, min_p=0.45)) == 2
    assert np.count_nonzero(one(logits, top_p=0.75)) == 3


def test_min_tokens_bars_the_end_ids_up_to_that_many_output_tokens_drafted_ones_included() -> None:
    params = SamplingParams(min_tokens=4)
    p_TV = computed(np.zeros((5, 3)), params, prompt=[0, 0, 0], output=[0, 0], drafted=[0] * 4, end_ids=[1, 2])
    assert (p_TV[:, 1:] > 0).all(-1).tolist() == [False, False, True, True, True]
    assert p_TV[:2].tolist() == [[1, 0, 0]] * 2


def test_filters_keep_whatever_ties_with_the_last_token_kept() -> None:
    logits = [1.0, 2.0, 1.0, 1.0, 0.0]
    assert np.flatnonzero(one(logits, top_k=2)).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(one(logits, top_p=0.5)).tolist() == [0, 1, 2, 3], "the top token alone has 0.45"
    assert np.flatnonzero(one([2.0, 2.0, 1.0], min_p=1.0)).tolist() == [0, 1]


@pytest.mark.parametrize("size", [5, 13, 511, 512, 513, 2003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_logits_are_equal_probabilities_wherever_they_stand_in_the_row(size: int, dtype: torch.dtype) -> None:
    for params in (
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=2),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=0.3, top_p=1e-9),
    ):
        p_1V = probabilities(torch.full((1, size), -3.7, dtype=dtype), params)
        assert bool((p_1V == p_1V[0, 0]).all()), params
        assert p_1V.sum().item() == pytest.approx(1, abs=1e-5)


# ---- greedy ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_greedy_is_one_hot_on_the_lowest_id_among_equals(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    for size in (3, 17, 1001, 40_000):
        logits_TV = torch.from_numpy(rng.integers(-3, 3, size=(4, size))).to(dtype)
        best = [int(np.flatnonzero(row == row.max())[0]) for row in logits_TV.double().numpy()]
        p_TV = probabilities(logits_TV, SamplingParams(temperature=0))
        assert torch.equal(p_TV, torch.nn.functional.one_hot(torch.tensor(best), size).to(p_TV.dtype))


def test_greedy_is_subject_to_bias_penalties_and_min_tokens() -> None:
    def winner(**changes: Any) -> int:
        params = SamplingParams(temperature=0, **changes)
        return int(computed([3.0, 2.9, 1.0], params, prompt=[0], output=[1], end_ids=[0])[0].argmax())

    assert winner() == 0
    assert winner(logit_bias={2: 2.5}) == 2
    assert winner(repetition_penalty=4.0) == 2
    assert winner(min_tokens=2) == 1
    assert winner(min_tokens=2, presence_penalty=2.0) == 2


# ---- extremes ----


def test_a_tiny_temperature_is_greedy_and_shares_among_ties() -> None:
    assert one([1.0, 1.0 + 1e-3, 0.5, 1.0 + 1e-3], temperature=1e-6) == [0, 0.5, 0, 0.5]
    assert one([1e5, 1e5 - 1e-3, -1e5], temperature=1e-6) == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-38, 1e-6, 1e30, 1e39, 1e300])
def test_every_temperature_that_is_accepted_gives_a_distribution(temperature: float, dtype: torch.dtype) -> None:
    """Also where the temperature itself is 0 or infinite in the precision that is computed in."""
    logits_1V = torch.tensor([[1.0, 2.0, 2.0, -INF]], dtype=dtype)
    p = probabilities(logits_1V, SamplingParams(temperature=temperature))[0].tolist()
    expected = [0, 1 / 2, 1 / 2, 0] if temperature < 1 else [1 / 3, 1 / 3, 1 / 3, 0]
    assert p == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=3)
    big = torch.finfo(dtype).max
    for top in (1e4, 1e30, big):
        logits_1V = torch.tensor([[-top, top, -INF, top, 0.0]], dtype=dtype)
        assert probabilities(logits_1V, params)[0].tolist() == [0, 0.5, 0, 0.5, 0]
    low = torch.tensor([[-big, -big, -INF]], dtype=dtype)
    assert probabilities(low, SamplingParams())[0].tolist() == [0.5, 0.5, 0]


def test_a_token_without_probability_stays_without_whatever_the_parameters() -> None:
    params = SamplingParams(
        temperature=1.5,
        top_k=3,
        top_p=0.9999,
        repetition_penalty=0.5,
        presence_penalty=-2,
        frequency_penalty=-2,
        logit_bias={1: 100},
    )
    p = computed([0.0, -INF, 1.0, -INF], params, prompt=[1], output=[1, 3, 3])[0]
    assert (p[[1, 3]] == 0).all()
    assert p.sum() == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nucleus_beyond_the_partial_selection_is_found_whole(dtype: torch.dtype) -> None:
    """So flat a row that its nucleus exceeds any guess of a few hundred tokens."""
    rng = np.random.default_rng(8)
    for size in (600, 3000):
        flat_V, sharp_V = rng.normal(size=size) * 0.1, rng.normal(size=size) * 12
        logits_TV = torch.from_numpy(np.stack([sharp_V, flat_V, sharp_V[::-1]])).to(dtype)
        for top_p in (0.5, 0.95, 1 - 1e-12):
            p_TV = probabilities(logits_TV, SamplingParams(top_p=top_p))
            for t in range(3):
                expected_V = reference(logits_TV[t].double().numpy(), SamplingParams(top_p=top_p))
                assert np.abs(p_TV[t].double().numpy() - expected_V).max() < (1e-6 if dtype is torch.float32 else 1e-12)
                if dtype is torch.float64:
                    assert ((p_TV[t].numpy() > 0) == (expected_V > 0)).all()
            if size == 3000:
                assert int((p_TV[1] > 0).sum()) > 1200, "the case needs more than a guess would hold"


@pytest.mark.parametrize("size", [640, 4_000, 4_013, 30_001])
@pytest.mark.parametrize("spread", [0.5, 3.0, 6.0])
def test_what_is_selected_from_a_large_vocabulary_is_what_the_definition_keeps(size: int, spread: float) -> None:
    """Ks on both sides of what the groups of the search can bound, and rows full of ties."""
    rng = np.random.default_rng(size)
    fine_V = rng.normal(size=size) * spread
    for row_V in (fine_V, np.round(fine_V), np.where(rng.random(size) < 0.5, -INF, fine_V)):
        cases: list[dict[str, Any]] = [
            *({"top_k": k} for k in (1, 2, 9, 10, 11, 60, 200, 639)),
            *({"min_p": p} for p in (1e-4, 0.05, 0.9)),
            *({"top_p": p, "temperature": t} for p in (0.1, 0.95, 0.999) for t in (0.5, 1.0, 3.0)),
            {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
            {"top_k": 300, "min_p": 0.5},
        ]
        for changes in cases:
            params = SamplingParams(**changes)
            p_V, expected_V = computed(row_V, params)[0], reference(row_V, params)
            assert ((p_V > 0) == (expected_V > 0)).all(), changes
            assert np.abs(p_V - expected_V).max() < 1e-12, changes


def test_filters_give_the_tokens_they_keep_and_greedy_gives_one() -> None:
    logits_TV = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * 4
    cases: list[tuple[dict[str, Any], int]] = [
        ({"temperature": 0.0}, 1),
        ({"top_k": 20}, 20),
        ({"min_p": 0.1}, 100),
        ({"top_p": 0.5}, 500),
    ]
    for changes, most in cases:
        for row in rows(logits_TV, SamplingParams(**changes)):
            assert row.ids is not None
            assert (np.diff(row.ids) > 0).all()
            assert len(row.ids) == len(row.probs) <= most


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("value", [math.nan, INF])
def test_logits_that_are_no_numbers_are_refused(changes: dict[str, Any], value: float) -> None:
    for place in range(3):
        logits_TV = torch.zeros(2, 3)
        logits_TV[1, place] = value
        with pytest.raises(ValueError, match=r"largest logit of a row is .*must be finite.*float32"):
            probabilities(logits_TV, SamplingParams(**changes))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_no_token_left_is_refused(temperature: float) -> None:
    params = SamplingParams(min_tokens=1, temperature=temperature)
    with pytest.raises(ValueError, match=r"-inf.*bar fewer tokens"):
        probabilities(torch.zeros(1, 2), params, end_ids=[0, 1])


# ---- precision, and what is left alone ----


@pytest.mark.parametrize("changes", [{}, *SINGLE, {"top_p": 0.8, "top_k": 4, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logits_are_left_alone_and_half_precision_is_computed_in_float32(
    dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    logits_TV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits_TV.clone()
    history: dict[str, Any] = {"prompt": [1, 2], "output": [3, 3], "drafted": [4, 3], "end_ids": [7, 8]}
    p_TV = probabilities(logits_TV, SamplingParams(**changes), **history)
    assert torch.equal(logits_TV, before)
    assert p_TV.data_ptr() != logits_TV.data_ptr()
    assert p_TV.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    widened = probabilities(before.to(p_TV.dtype), SamplingParams(**changes), **history)
    assert torch.equal(p_TV, widened)
    assert p_TV.sum(-1).tolist() == pytest.approx([1.0] * 3, abs=1e-5)


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_row_that_overflows_when_divided_by_the_temperature_is_a_distribution_all_the_same(
    changes: dict[str, Any],
) -> None:
    params = SamplingParams(temperature=1e-3, **changes)
    logits_TV = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)) * 1e-3
    logits_TV[0, 7], logits_TV[0, 9] = 1e37, 1e37
    logits_TV[1] -= 1e37
    p_TV = probabilities(logits_TV, params)
    assert p_TV[0, [7, 9]].tolist() == [0.5, 0.5]
    assert p_TV.sum(-1).tolist() == pytest.approx([1] * 2, abs=1e-5)


def test_all_tokens_or_those_with_probability_are_the_same_distribution() -> None:
    rng = np.random.default_rng(4)
    for dtype in (np.float32, np.float64):
        for size in (1, 2, 30, 1000):
            p_V, q_V = ((rng.random(size) * (rng.random(size) < 0.4)).astype(dtype) for _ in range(2))
            p_V[rng.integers(size)] = q_V[rng.integers(size)] = 0.3
            p_forms, q_forms = (
                [Distribution(size, row_V), Distribution(size, row_V[row_V > 0], np.flatnonzero(row_V))]
                for row_V in (p_V, q_V)
            )
            for p in p_forms:
                assert (p.dense() == p_V).all()
                assert [p.of(token) for token in range(size)] == p_V.tolist()
                for q in q_forms:
                    for scale in (1.0, 0.6):
                        rest = p.minus(q, scale)
                        assert (rest.dense() == np.maximum(dtype(scale) * p_V - q_V, 0)).all()
                        assert rest.probs.dtype == dtype
                assert (p.dense() == p_V).all(), "it was left as it is"


def test_a_draft_over_another_vocabulary_is_refused() -> None:
    with pytest.raises(AssertionError):
        Distribution(3, np.ones(3) / 3).minus(Distribution(4, np.ones(1), np.array([2])))


def test_log_probabilities_are_the_models_own() -> None:
    logits = np.random.default_rng(3).normal(size=(3, 9)) * 4
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for dtype in (torch.float32, torch.float64):
        logs_TV = log_probabilities(torch.from_numpy(logits).to(dtype))
        assert np.abs(logs_TV.double().numpy() - expected).max() < 1e-5
    half = torch.from_numpy(logits).to(torch.bfloat16)
    assert torch.equal(log_probabilities(half), log_probabilities(half.float()))
    assert log_probabilities(half).dtype == torch.float32
