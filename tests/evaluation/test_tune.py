"""Advice: what is predicted, what is said of what was measured, and that what is kept is used."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.decoding.control import MAX_DRAFT, Costs
from paceline.decoding.stats import Stats
from paceline.engine.llm import LLM
from paceline.engine.profile import Profile
from paceline.evaluation.intervals import Estimate
from paceline.evaluation.tune import Accepted, Advice, choice, predicted, tune, words
from paceline.sampling.params import SamplingParams
from tests import tiny

COSTS = Costs(
    rows=(1, 17),
    round_s=(1.0, 2.6),
    context_s=(0.0, 0.0),
    batches=(1, 2),
    draft_s=(tuple(0.05 * k for k in range(9)), tuple(0.06 * k for k in range(9))),
    read_s=0.0,
)
ACCEPTED = Accepted(drafting=0.5, marginal=(0.8, 0.6, 0.4, 0.2, 0.1, 0.0, 0.0, 0.0), context=100)
ALWAYS = replace(ACCEPTED, drafting=1.0)


def test_predictions_are_tokens_by_seconds() -> None:
    assert predicted(COSTS, ALWAYS, 0, 1) == 1
    assert predicted(COSTS, ALWAYS, 2, 1) == pytest.approx((1 + 0.8 + 0.6) / (1.2 + 0.1))
    # Half of the rounds are plain ones, but for a step that found nothing.
    assert predicted(COSTS, ACCEPTED, 2, 1) == pytest.approx((1 + 0.7) / (0.5 * 1.3 + 0.5 * 1.05))
    # Three drafts in four have a second token, and all have had the step that would have drafted it.
    early = replace(ALWAYS, drafted=(1.0, 0.75, *[0.5] * 6))
    assert predicted(COSTS, early, 2, 1) == pytest.approx(2.4 / (1.175 + 0.1))
    assert predicted(COSTS, early, 3, 1) == pytest.approx(2.8 / (1.225 + 0.1375))
    # Two sequences: six rows in place of two.
    assert predicted(COSTS, ALWAYS, 2, 2) == pytest.approx(2.4 * 1.1 / (1.5 + 0.12))


def test_acceptance_is_taken_from_what_was_counted() -> None:
    one, two = Stats(completions=1, prompt_tokens=10, output_tokens=20), Stats(completions=1, prompt_tokens=30)
    for stats, accepted in ((one, 2), (one, 0), (two, 8)):
        stats.count_round(8, accepted)
    two.count_round(0, 0)
    found = Accepted.seen([one, two])
    assert found.drafting == 3 / 4
    assert found.marginal == pytest.approx([2 / 3, 2 / 3, *[1 / 3] * 6])
    assert found.context == 25
    assert found.drafted == (1.0,) * MAX_DRAFT
    two.count_round(2, 1)
    assert Accepted.seen([one, two]).drafted == (1.0, 1.0, *[0.75] * 6)
    assert Accepted.seen([]).marginal == (0,) * MAX_DRAFT


def advice(measured: Estimate, accepted: Accepted = ACCEPTED) -> Advice:
    predictions = {n: [predicted(COSTS, accepted, k, n) for k in range(MAX_DRAFT + 1)] for n in (1, 2, 8)}
    return Advice("d", COSTS, accepted, predictions, measured, {3: Estimate(1.2, 1.1, 1.3)}, {}, None)


@pytest.mark.parametrize(
    ("measured", "verdict", "pays"),
    [
        (Estimate(1.3, 1.2, 1.4), "d: it pays. auto gave 1.30 (1.20 to 1.40) times the speed", True),
        (Estimate(0.9, 0.8, 0.95), "d: it does not pay. auto gave 0.90", False),
        (
            Estimate(1.1, -math.inf, math.inf),
            "d: no difference that these prompts could show. auto gave 1.10 (one",
            False,
        ),
        (Estimate(1.1, 0.9, 1.3), "d: no difference that these prompts could show. auto gave 1.10", False),
    ],
)
def test_what_is_said_of_what_was_measured(measured: Estimate, verdict: str, pays: bool) -> None:
    found = advice(measured)
    assert words(found)[0].startswith(verdict)
    assert found.pays is pays
    assert found.record()["pays"] is pays
    json.dumps(found.record(), allow_nan=False)
    assert "A round drafts in 50% of the cases" in words(found)[1]
    assert "accepted in 80%, the fourth in 20%" in words(found)[1]


def test_one_of_several_drafts_is_named() -> None:
    slow, fast = advice(Estimate(1.1, 1.05, 1.2)), replace(advice(Estimate(1.4, 1.3, 1.5)), draft="e")
    assert choice([slow, fast]) == "Of these, take e: 1.40 (1.30 to 1.50) times plain decoding."
    unsure = replace(fast, measured=Estimate(1.4, 0.9, 1.5))
    assert choice([unsure, slow]).startswith("Of these, none was shown to pay; e came out best")


def test_batches_are_said_up_to_where_it_pays() -> None:
    said = replace(advice(Estimate(1, 1, 1)), predictions={1: [1, 1.2], 2: [1, 1.05], 4: [1, 0.9], 8: [1, 1.1]})
    assert "up to 2 sequences at once (1.05 times plain with K = 1), and not with 4." in words(said)[-1]
    never = advice(Estimate(1, 1, 1), replace(ACCEPTED, marginal=(0.0,) * 8))
    assert words(never)[-1] == (
        "Predicted: no fixed K pays; auto drafts where a draft is likely to be right, and not elsewhere."
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tuned"))


def test_a_draft_that_is_always_right_pays_and_one_that_costs_as_much_does_not_lie(model: Path) -> None:
    """The target as its own draft: every token is accepted, and every step costs a whole pass."""
    llm = LLM(model, None)
    prompts = [llm.tokenizer.encode(text) for text in ("the quick brown fox", "one two three")]
    said: list[str] = []
    ticks: dict[str, int] = {}

    def track(total: int, what: str) -> Any:
        said.append(what)
        ticks[what] = total

        def advance() -> None:
            ticks[what] -= 1

        return advance

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    own, ngram = tune(llm, [str(model), "ngram"], prompts, params, batches=[2], track=track)
    assert own.accepted.drafting > 0.9
    assert own.accepted.marginal[0] == 1
    assert set(own.predictions) == {1, 2}
    assert (own.draft, ngram.draft) == (str(model), "ngram")
    assert not any(ticks.values()), "every step that was announced was taken"
    assert len(said) == 6
    assert own.totals["0"]["drafted"] == 0 < own.totals["auto"]["output_tokens"]
    assert own.kept_in is not None
    kept = Profile.load(Path(own.kept_in))
    assert kept is not None
    assert kept.costs == own.costs
    again = LLM(model, model)
    assert again.profile() == kept, "found by who runs the same"
    assert kept.acceptance["draft"][0] > 0.8, "all was accepted, whether auto thinks that it pays or not"


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == code, result.output + result.stderr
    return result


def test_the_command_says_it_and_writes_json(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "the quick brown fox"}\n{"prompt": "lazy dog"}\n')
    asked = [str(file), "--model", str(model), "--temperature", "0", "--max-tokens", "8", "--ignore-eos"]
    result = run(*asked, "--batch", "3")
    assert "ngram: times the speed of plain decoding, predicted" in " ".join(result.stdout.split())
    assert "times the speed of plain decoding, one sequence at a time" in " ".join(result.stdout.split())
    record = json.loads(run(*asked, "--batch", "1", "--json").stdout)
    assert record["draft"] == "ngram"
    assert record["predictions"].keys() == {"1"}
    assert record["measured"]["low"] <= record["measured"]["value"] <= record["measured"]["high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch is 0, it must be at least 1"),
        (["--draft", "nowhere"], "nowhere"),
        (["missing.jsonl"], "missing.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_said(model: Path, arguments: list[str], message: str) -> None:
    assert message in run("--model", str(model), *arguments, code=2).stderr
