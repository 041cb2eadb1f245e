"""An audit passes what is exact, catches every fault at its level, and says when it could not have."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.evaluation.audit import Certificate, Size, audit, replay, statistics
from paceline.evaluation.audit.certificate import Control, Journal, Level
from paceline.evaluation.audit.faults import ACCEPT_EVERYTHING, OFF_BY_ONE, RAW_Q, RESIDUAL_P
from paceline.evaluation.audit.page import page
from paceline.evaluation.audit.run import _Run, _subject
from paceline.evaluation.audit.statistics import Cells, Counts, Sample
from paceline.evaluation.audit.trials import Bench, Context, Exact
from tests import tiny

PARAMS = SamplingParams(temperature=0.6, top_p=0.95, ignore_eos=True)
PROMPTS = ["The quick brown fox", "def add(a", "Speculative sampling", "one two three one two"]
SMALL = Size(contexts=16, trials=30, slots=16, replay_tokens=16, batch_sizes=(1, 3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft that is the target with its weights disturbed: they overlap by about 0.4."""
    made = tiny.tokenizer()
    target = tiny.llama(len(made))
    draft = copy.deepcopy(target)
    torch.manual_seed(5)
    with torch.no_grad():
        for weights in draft.parameters():
            if weights.dim() > 1:
                weights.add_(0.1 * weights.std() * torch.randn_like(weights))
    paths = []
    for name, model in (("target", target), ("draft", draft)):
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        made.save_pretrained(path)
        paths.append(str(path))
    return paths[0], paths[1]


def engine(folders: tuple[str, str], verify: Any = "token", **more: Any) -> LLM:
    return LLM(folders[0], folders[1], verify=verify, **{"draft_tokens": 3, "threads": 1} | more)


def caught(certificate: Certificate) -> dict[str, set[int]]:
    """By fault, the levels that caught it."""
    found: dict[str, set[int]] = {}
    for control in certificate.controls:
        if control.caught:
            found.setdefault(control.fault, set()).add(control.level)
    return found


def test_token_verification_is_exact_and_every_fault_is_caught(folders: tuple[str, str], tmp_path: Path) -> None:
    certificate = audit(engine(folders), PARAMS, PROMPTS, size=replace(SMALL, contexts=36), out=tmp_path)
    certificate.assert_exact()
    assert certificate.exit_code == 0
    assert caught(certificate) == {
        "raw q": {1, 3},
        "shared noise": {1, 3},
        "residual = p": {1, 3},
        "accept everything": {1, 2, 3},
        "off-by-one row": {1, 2, 3},
        "standing penalties": {1, 3},
    }
    assert 0.2 < certificate.levels[0].figures["overlap of p and q, sum min(p, q)"] < 0.8
    record = json.loads((tmp_path / "certificate.json").read_text())
    assert record["verdict"] == "exact"
    assert record["setting"]["seed"] == 0
    assert "exact" in (tmp_path / "certificate.html").read_text()


@pytest.mark.parametrize("verify", ["block", "coupled"])
def test_the_other_rules_are_exact(folders: tuple[str, str], verify: str) -> None:
    certificate = audit(engine(folders, verify), PARAMS, PROMPTS, size=SMALL)
    assert [level.exact for level in certificate.levels] == [True] * 3
    found = caught(certificate)
    assert found["accept everything"] >= {2, 3}
    assert found["off-by-one row"] == {1, 2, 3}
    assert found["standing penalties"] == {1, 3}
    if verify == "coupled":
        assert "residual = p" not in found
        certificate.assert_exact()
    else:
        assert found["residual = p"] == {1, 3}
        assert 1 in found["raw q"]  # few rounds, too few for the statistics here


def test_a_faulty_engine_is_not_exact(folders: tuple[str, str]) -> None:
    llm = engine(folders)
    prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
    size = replace(SMALL, contexts=8, trials=20)
    for fault, levels in ((RESIDUAL_P, {1}), (ACCEPT_EVERYTHING, {1, 3}), (RAW_Q, {1}), (OFF_BY_ONE, {1, 3})):
        run = _Run(fault.make(_subject(llm, PARAMS)), prompts, size, 0, None, lambda text: None, {})
        first, sample = run._rounds(run._contexts().contexts)
        failed = {1} if not first.exact(0.0) else set()
        failed |= set() if statistics.examine(sample, alarm=1e-3).exact else {3}
        assert failed >= levels, fault.name
    run = _Run(ACCEPT_EVERYTHING.make(_subject(llm, PARAMS)), prompts, size, 0, None, lambda text: None, {})
    certificate = run.certificate({})
    assert certificate.exit_code == 1
    with pytest.raises(AssertionError, match="not exact"):
        certificate.assert_exact()


def test_a_draft_equal_to_its_target_proves_nothing(folders: tuple[str, str]) -> None:
    """Accepting everything is then no fault, and an audit could not tell."""
    certificate = audit(
        LLM(folders[0], folders[0], draft_tokens=3, threads=1), PARAMS, PROMPTS, size=replace(SMALL, contexts=12)
    )
    assert certificate.verdict == "proves nothing"
    assert certificate.exit_code == 3
    assert ("accept everything", 3) in {(c.fault, c.level) for c in certificate.uncaught}


def test_without_a_draft_anywhere_it_proves_nothing(folders: tuple[str, str]) -> None:
    llm = LLM(folders[0], "ngram", draft_tokens=3, threads=1)
    certificate = audit(llm, SamplingParams(temperature=5.0, ignore_eos=True), ["The quick"], size=SMALL)
    if not certificate.doubts:
        pytest.skip("something repeated after all")
    assert certificate.verdict == "proves nothing"
    assert "proposed nothing" in certificate.doubts[0]


def test_faults_of_q_cannot_exist_with_a_draft_without_chance(folders: tuple[str, str]) -> None:
    llm = LLM(folders[0], "ngram", draft_tokens=3, threads=1)
    repeating = SamplingParams(temperature=0.8, presence_penalty=-2, frequency_penalty=-2, ignore_eos=True)
    certificate = audit(llm, repeating, PROMPTS, size=replace(SMALL, contexts=12))
    why = {c.fault: c.detail for c in certificate.controls if c.caught is None}
    assert set(why) == {"raw q", "shared noise"}
    assert "one-hot" in why["raw q"]


def test_an_audit_goes_on_where_it_was_interrupted(folders: tuple[str, str], tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(text: str) -> None:
        if text.startswith("8 of"):
            raise Stop

    llm, size = engine(folders), replace(SMALL, contexts=8, trials=4, slots=4)
    with pytest.raises(Stop):
        audit(llm, PARAMS, PROMPTS, size=size, out=tmp_path, say=stop)
    steps = tmp_path / "steps.jsonl"
    kept = steps.read_text()
    assert kept.count('"step": "contexts ') == 2
    steps.write_text(kept + '{"step": "torn')
    whole = audit(llm, PARAMS, PROMPTS, size=size, out=tmp_path)
    assert steps.read_text().startswith(kept)
    fresh = audit(llm, PARAMS, PROMPTS, size=size)
    assert whole.levels == fresh.levels
    assert whole.controls == fresh.controls
    with pytest.raises(ValueError, match="another setting"):
        audit(llm, PARAMS, PROMPTS, size=size, seed=1, out=tmp_path)


def test_rounds_begin_at_their_context_every_time(folders: tuple[str, str]) -> None:
    """The same numbers give the same tokens, and these are what the engine gives from the beginning."""
    llm = engine(folders)
    subject = _subject(llm, PARAMS)
    prompt = llm.tokenizer.encode("The quick brown fox")
    (text,) = subject.decode([prompt], seed=3, slots=1, tokens=8)
    contexts = [Context(tuple(prompt), tuple(text[:n])) for n in (1, 4, 8)]
    bench = Bench(subject, contexts, ahead=3)
    samplers = [subject.new_sampler(len(prompt), 7, i) for i in range(3)]
    first = [outcome.tokens for outcome in bench.run(samplers)]
    bench.run([subject.new_sampler(len(prompt), 8, i) for i in range(3)])
    assert [outcome.tokens for outcome in bench.run(samplers)] == first
    fresh = Bench(subject, contexts[:1], ahead=3)
    assert fresh.run(samplers[:1])[0].tokens == first[0]


@pytest.mark.parametrize("draft", ["model", "ngram"])
def test_a_bench_moves_on_to_other_contexts(folders: tuple[str, str], draft: str) -> None:
    """Longer ones of the same text, others, and fewer: as if it had begun there."""
    subject = _subject(LLM(folders[0], folders[1] if draft == "model" else "ngram", draft_tokens=3, threads=1), PARAMS)
    one, other = Context((5, 6, 7, 5, 6, 7), (8, 5, 6)), Context((9, 10, 9, 10, 9), (10, 9))
    longer = Context(one.prompt, (*one.output, 7, 8, 5))
    moving = Bench(subject, [one, other], ahead=3, longest=20)
    exact = Exact(subject, [one, other], ahead=4, longest=20)
    for contexts in ([longer, one], [other, longer], [one], [longer]):
        samplers = [subject.new_sampler(len(context.prompt), 7, i) for i, context in enumerate(contexts)]
        moving.move(contexts)
        exact.move(contexts)
        fresh, plain = Bench(subject, contexts, ahead=3), Exact(subject, contexts, ahead=4)
        for _ in range(2):
            assert [o.tokens for o in moving.run(samplers)] == [o.tokens for o in fresh.run(samplers)]
        for scorer in (exact, plain):
            scorer.learn([[(20, 21), (20, 22)] for _ in contexts])
        for i in range(len(contexts)):
            for more in ((), (20,), (20, 21), (20, 22)):
                assert (exact.p(i, more).dense() == plain.p(i, more).dense()).all()


def test_exact_rows_are_the_models_own(folders: tuple[str, str]) -> None:
    subject = _subject(engine(folders), PARAMS)
    contexts = [Context((5, 6, 7), (8,)), Context((9, 10), (11, 12, 13))]
    exact = Exact(subject, contexts, ahead=3)
    exact.learn([[(20, 21)], [(22,)]])
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    for slot, more in ((0, ()), (0, (20,)), (0, (20, 21)), (1, (22,))):
        with torch.no_grad():
            row_V = model(torch.tensor([[*contexts[slot].tokens, *more]])).logits[0, -1]
        p_V = (row_V / 0.6).softmax(-1).numpy()
        ordered = np.sort(p_V)[::-1]
        p_V[p_V < ordered[ordered.cumsum().searchsorted(0.95)] - 1e-9] = 0
        assert np.abs(statistics.share(exact.p(slot, more)) - p_V / p_V.sum()).max() < 1e-4


def null_sample(rng: np.random.Generator, *, bias: float = 0.0, contexts: int = 40, rounds: int = 20) -> Sample:
    """First tokens drawn from (1 - bias) p + bias q: what an engine gives that accepts too much."""
    sample = Sample(1)
    for _ in range(contexts):
        p, q = rng.dirichlet(np.full(12, 0.5)), rng.dirichlet(np.full(12, 0.5))
        tokens = rng.choice(12, rounds, p=(1 - bias) * p + bias * q).tolist()
        sample.add(p, q, (), tokens)
        sample.cells.append(Cells.of(p, tokens))
        sample.trials += rounds
    return sample


def test_false_alarms_come_at_the_stated_rate() -> None:
    rng, runs, alarm = np.random.default_rng(0), 400, 0.2
    alarms = sum(not statistics.examine(null_sample(rng), alarm=alarm, seed=n).exact for n in range(runs))
    # Tests that are corrected for their number may raise fewer than stated, not more: three standard errors.
    assert 0.3 * alarm < alarms / runs < alarm + 3 * np.sqrt(alarm * (1 - alarm) / runs)


def test_each_tail_is_that_of_the_sum_of_its_events() -> None:
    rng = np.random.default_rng(1)
    for size, low, high in ((30, 0.0, 1.0), (200, 0.0, 0.05), (300, 0.4, 0.6)):
        masses = rng.uniform(low, high, size)
        pmf = np.ones(1)
        for mass in masses:
            pmf = np.convolve(pmf, [1 - mass, mass])
        for hits in range(size + 1):
            upper = float(pmf[hits:].sum())
            if 1e-12 < upper < 0.2:
                assert statistics._at_least(masses, hits) == pytest.approx(upper, rel=0.1), (size, hits)
    assert statistics.two_sided(np.array([1.0, 1.0, 0.5]), 1) == 0
    assert statistics.two_sided(np.array([0.3] * 10), 10) == pytest.approx(2 * 0.3**10)


def test_the_power_statement_holds() -> None:
    """A bias of the stated size is seen with the stated probability."""
    rng, seen, runs = np.random.default_rng(2), 0, 150
    for n in range(runs):
        state = rng.bit_generator.state
        plain = statistics.examine(null_sample(rng), alarm=0.01, seed=n)
        rng.bit_generator.state = state
        # Towards the draft: what (1 - bias) p + bias q adds to the favoured tokens is bias x total variation.
        favoured = next(f for f in plain.findings if f.contrast == "favoured")
        apart = np.mean([np.abs(p - q).sum() / 2 for p, q in _pairs_of(rng, 40)])
        rng.bit_generator.state = state
        biased = null_sample(rng, bias=favoured.detectable / float(apart))
        finding = statistics.examine(biased, alarm=0.01, seed=n).findings
        seen += any(f.contrast == "favoured" and abs(f.observed - f.expected) > f.limit for f in finding)
    assert seen / runs > 0.95 - 3 * np.sqrt(0.05 * 0.95 / runs)


def _pairs_of(rng: np.random.Generator, contexts: int) -> list[tuple[Any, Any]]:
    pairs = []
    for _ in range(contexts):
        pairs.append((rng.dirichlet(np.full(12, 0.5)), rng.dirichlet(np.full(12, 0.5))))
        rng.choice(12, 20, p=pairs[-1][0])
    return pairs


def test_a_bias_is_seen_and_an_impossible_token_fails() -> None:
    rng = np.random.default_rng(3)
    assert not statistics.examine(null_sample(rng, bias=0.5), alarm=1e-3).exact
    sample = null_sample(rng)
    assert statistics.examine(sample, alarm=1e-3).exact
    sample.add(np.array([0.0, 1.0]), None, (), [0])
    assert not statistics.examine(sample, alarm=1e-3).exact
    assert Counts() == Counts([], [], 0)


def test_a_flip_is_a_near_tie_only_within_the_noise(folders: tuple[str, str]) -> None:
    subject = replay.determined(_subject(engine(folders), PARAMS))
    llm = engine(folders)
    prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
    plain = replace(subject, draft_tokens=0).decode(prompts, seed=0, slots=1, tokens=8)
    other = [[*text[:5], (text[5] + 1) % 300, *text[6:]] for text in plain]
    verdicts = {}
    for scores in (0.0, 1e-6, 1e3):
        noise = replay.Noise(positions=1, scores=scores, variation=0.0)
        found = replay.examine(subject, other, subject, prompts, seed=0, tokens=8, batch_sizes=(2,), noise=noise)
        assert [flip.position for flip in found.flips] == [5] * 4
        verdicts[scores] = found.errors
    assert verdicts == {0.0: 4, 1e-6: 4, 1e3: 0}


def test_rows_do_not_differ_between_passes_of_the_cpu_kernels(folders: tuple[str, str]) -> None:
    subject = _subject(engine(folders), PARAMS)
    noise = replay.measure_noise(subject, [Context(tuple(range(20)), (3,)), Context(tuple(range(30)), (4,))])
    assert noise.positions == 12
    assert noise.scores == noise.variation == 0


def made_certificate(**changes: Any) -> Certificate:
    level = Level(number=1, title="Identity", covers="", exact=True, summary="", figures={"x": float("inf")})
    return replace(Certificate(subject={}, levels=[level], controls=[], doubts=[], setting={}), **changes)


def test_a_verdict_is_what_levels_and_controls_say() -> None:
    missed = Control(fault="raw q", what="", level=3, caught=False, detail="p = 0.5")
    assert made_certificate().verdict == "exact"
    assert made_certificate(controls=[missed]).verdict == "proves nothing"
    assert made_certificate(controls=[replace(missed, caught=None)]).verdict == "exact"
    assert made_certificate(doubts=["nothing was drafted"]).exit_code == 3
    failed = replace(made_certificate().levels[0], exact=False)
    assert made_certificate(levels=[failed], controls=[missed]).verdict == "not exact"
    assert made_certificate(levels=[]).verdict == "proves nothing"


def test_hostile_text_does_not_become_markup(tmp_path: Path) -> None:
    bad = "<script>alert('x')</script>\"'&"
    certificate = made_certificate(
        subject={bad: bad},
        controls=[Control(fault=bad, what=bad, level=1, caught=False, detail=bad)],
        doubts=[bad],
        notes=[bad],
        setting={"command": bad},
        levels=[Level(number=1, title=bad, covers=bad, exact=False, summary=bad, figures={bad: [bad, {bad: bad}]})],
    )
    text = page(certificate)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 12
    assert "http" not in text, "the page needs nothing else"
    certificate.save(tmp_path)
    assert json.loads((tmp_path / "certificate.json").read_text())["subject"] == {bad: bad}


def test_a_journal_keeps_what_was_done(tmp_path: Path) -> None:
    path, calls = tmp_path / "steps.jsonl", []

    def compute() -> int:
        calls.append(1)
        return len(calls)

    for _ in range(2):
        journal = Journal(path, {"seed": 1})
        assert journal.once("a", compute) == 1
    assert Journal(None, {}).once("a", compute) == 2


def test_the_command(folders: tuple[str, str], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from paceline.cli import app

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    asked = [
        "audit",
        folders[0],
        "--draft",
        folders[1],
        "--prompts",
        str(prompts),
        "--raw",
        "-k",
        "3",
        "--threads",
        "1",
    ]
    asked += ["--contexts", "16", "--trials", "10", "--verify", "coupled", "--ignore-eos", "--out", str(tmp_path / "c")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "verdict: exact" in done.output
    assert (tmp_path / "c" / "certificate.html").exists()
    done = CliRunner().invoke(app, [*asked, "--draft", "none"])
    assert done.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"contexts": 0}, "contexts is 0"), ({"trials": 1}, "trials is 1"), ({"alarm": 0.7}, "alarm is 0.7")],
)
def test_sizes_are_checked(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Size(**changes)
