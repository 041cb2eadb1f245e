"""Alpha against brute force over the whole vocabulary, lengths and speed-ups against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.decoding.control import Costs
from paceline.sampling.distribution import distribution, on_host
from paceline.sampling.params import SamplingParams
from paceline.training import evaluation
from paceline.training.evaluation import Evaluation, evaluate
from tests.training.fakes import FakeLearner, FakeSource, V

REDUCED = torch.tensor([0, 2, 3, 5, 7, 11, 13, 17, 19, 22])


def by_hand(learner: FakeLearner, source: FakeSource, indices: list[int], params: SamplingParams) -> torch.Tensor:
    """Dense vectors of probabilities, one row at a time."""
    sums_J3 = torch.zeros(3, 3, dtype=torch.float64)
    batch = source.batch(indices)
    for j, (logits_RD, rows_R) in enumerate(learner.unroll(batch, 3)):
        for logits_D, row in zip(logits_RD, rows_R, strict=True):
            for column, temperature in enumerate((params.temperature, 0.0)):
                wanted = SamplingParams(temperature=temperature, top_p=params.top_p, top_k=params.top_k)
                p = distribution(on_host(source.target_logits(batch.hidden_NH[row])), wanted)
                q = distribution(on_host(logits_D), wanted)
                q_V = torch.zeros(V)
                ids = torch.arange(V) if learner.ids_D is None else learner.ids_D
                q_V[ids] = torch.from_numpy(q.dense())
                sums_J3[j, column] += torch.minimum(torch.from_numpy(p.dense()), q_V).double().sum()
            sums_J3[j, 2] += 1
    return sums_J3


@pytest.mark.parametrize("ids_D", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=0.0),
    ],
    ids=["plain", "top_p", "top_k", "greedy"],
)
def test_alpha_is_the_overlap_over_the_whole_vocabulary(
    params: SamplingParams, ids_D: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "ROWS", 7)  # several parts, the last one short
    source = FakeSource()
    learner = FakeLearner(source, ids_D)
    learner.module.eval()
    batches = [source.batch([0, 1, 2]), source.batch([3])]
    sums_J3 = evaluate(learner, batches, source.target_logits, params, 3)
    with torch.no_grad():
        expected_J3 = by_hand(learner, source, [0, 1, 2], params) + by_hand(learner, source, [3], params)
    torch.testing.assert_close(sums_J3, expected_J3, rtol=1e-5, atol=1e-5)
    found = Evaluation.of(sums_J3)
    assert 0.02 < found.alpha[0] < 0.98, "a case that tells something"
    if params.temperature == 0:
        assert found.alpha == found.greedy


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    source = FakeSource()

    class Twin(FakeLearner):
        def unroll(self, batch: Any, steps: int) -> Any:
            rows = batch.trained_N.nonzero()[:, 0]
            yield source.target_logits(batch.hidden_NH[rows]), rows

    found = Evaluation.of(evaluate(Twin(source), [source.batch([0, 1])], source.target_logits, SamplingParams()))
    assert found.alpha == pytest.approx([1.0])
    assert found.greedy == [1.0]
    assert found.lengths == pytest.approx([2, 3, 4, 5, 6, 7, 8, 9])


def test_what_a_reduced_vocabulary_lacks_is_never_accepted() -> None:
    source = FakeSource()
    ids_D = torch.tensor([4])
    learner = FakeLearner(source, ids_D)
    batch = source.batch([0, 1])
    found = Evaluation.of(evaluate(learner, [batch], source.target_logits, SamplingParams()))
    p_RV = source.target_logits(batch.hidden_NH[batch.trained_N]).softmax(-1)
    assert found.alpha[0] == pytest.approx(p_RV[:, 4].mean().item(), rel=1e-5)


def test_lengths_end_where_a_draft_ends() -> None:
    """A draft of two heads gives no third token, whatever is asked for."""
    found = Evaluation(alpha=[0.5, 0.4], greedy=[0.5, 0.4], rows=10, reach=2)
    assert found.lengths == pytest.approx([1.5, *[1.7] * 7])


def test_lengths_go_on_with_the_last_alpha() -> None:
    found = Evaluation(alpha=[0.5, 0.4], greedy=[0.5, 0.4], rows=10)
    assert found.lengths[:3] == pytest.approx([1.5, 1.5 + 0.2, 1.5 + 0.2 + 0.08])
    assert len(found.lengths) == 8


def test_speedups_are_tokens_a_second_against_plain_decoding() -> None:
    found = Evaluation(alpha=[0.5], greedy=[0.5], rows=10)
    costs = Costs(
        rows=(1, 9),
        round_s=(0.01, 0.026),
        context_s=(0.0, 0.0),
        batches=(1,),
        draft_s=(tuple(0.001 * k for k in range(9)),),
        read_s=0.0,
    )
    assert found.speedups(costs)[0] == pytest.approx(1.5 * 0.01 / 0.013)
    assert found.speedups(costs)[7] == pytest.approx(found.lengths[7] * 0.01 / 0.034)


def test_parameters_that_look_back_are_refused() -> None:
    source = FakeSource()
    for params in (SamplingParams(presence_penalty=1), SamplingParams(min_tokens=2)):
        with pytest.raises(ValueError, match="depend on the text so far"):
            evaluate(FakeLearner(source), [], source.target_logits, params)


def test_nothing_to_evaluate_on_is_an_error() -> None:
    source = FakeSource()
    sums_J3 = evaluate(FakeLearner(source), [], source.target_logits, SamplingParams())
    with pytest.raises(ValueError, match="no trained positions"):
        Evaluation.of(sums_J3)
