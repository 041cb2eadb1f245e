"""The public interface, on tiny real models: folders, models in memory, drafts of every kind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, Completion, SamplingParams, load
from paceline.checkpoints.load import Checkpoint
from paceline.decoding.sequence import Provenance
from tests import tiny

PROMPTS = ["The quick brown", "def add(", "🚀 速度 is", "one two three one two three one two"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def padded_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("draft"), layers=1, seed=1, padding=24)


@pytest.fixture(scope="module")
def foreign_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tokenizer: fewer merges, so only some of the target's tokens."""
    return tiny.save(tmp_path_factory.mktemp("foreign"), vocab_size=300, layers=1, seed=2)


def greedy(n: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n)


def test_results_have_vllms_shape(target: Path) -> None:
    params = [SamplingParams(n=2, seed=1, max_tokens=8, logprobs=2, prompt_logprobs=1), greedy(5), greedy(5)]
    asked: list[str | list[int]] = ["The quick brown", [40, 41, 42], "def"]
    results = LLM(str(target)).generate(asked, params)
    assert [type(r) for r in results] == [Completion] * 3
    first, second, _ = results
    assert first.prompt == "The quick brown"
    assert (second.prompt, second.prompt_token_ids) == (None, [40, 41, 42])
    assert [o.index for o in first.outputs] == [0, 1]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids, "each of the n has its own random numbers"
    assert (first.text, first.token_ids) == (first.outputs[0].text, first.outputs[0].token_ids)
    output = first.outputs[0]
    assert len(output.token_ids) == len(output.provenance) == output.stats.output_tokens
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, entries in zip(output.token_ids, output.logprobs, strict=True):
        assert 2 <= len(entries) <= 3
        assert entries[token].logprob < 0
        assert entries[token].rank >= 1
    assert output.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    )
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    assert second.outputs[0].logprobs is None
    assert second.outputs[0].finish_reason in ("length", "stop")


def test_logprobs_are_the_targets_whatever_the_draft(target: Path, padded_draft: Path) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=16, logprobs=1, ignore_eos=True)
    llm = LLM(str(target), str(padded_draft), draft_tokens=4, verify="coupled")
    plain = LLM(str(target), None, verify="coupled")
    a, b = llm.generate(PROMPTS[0], params)[0], plain.generate(PROMPTS[0], params)[0]
    assert a.token_ids == b.token_ids
    assert a.outputs[0].logprobs is not None
    assert b.outputs[0].logprobs is not None
    for left, right in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
        assert left.keys() == right.keys()
        assert [e.logprob for e in left.values()] == pytest.approx([e.logprob for e in right.values()], abs=1e-4)


@pytest.mark.fault(9)
@pytest.mark.parametrize("verify", ["token", "block", "coupled"])
def test_every_draft_gives_the_targets_greedy_text(
    target: Path, padded_draft: Path, foreign_draft: Path, verify: str
) -> None:
    expected = [r.token_ids for r in LLM(str(target), None).generate(PROMPTS, greedy())]
    for draft in ("auto", "ngram", str(target), str(padded_draft), str(foreign_draft)):
        for k in (1, 5):
            llm = LLM(str(target), draft, draft_tokens=k, verify=verify)  # type: ignore[arg-type]
            results = llm.generate(PROMPTS, greedy())
            assert [r.token_ids for r in results] == expected, draft
            if draft == str(target):
                assert all(r.stats.accepted > 0.9 * r.stats.drafted for r in results)


def test_a_draft_with_another_tokenizer_says_what_it_shares(target: Path, foreign_draft: Path) -> None:
    llm = LLM(str(target), str(foreign_draft), draft_tokens=4)
    assert any("of the target's tokens" in note for note in llm.notes)
    assert llm.generate(PROMPTS[0], greedy())[0].stats.drafted > 0


def test_models_of_transformers_in_memory(target: Path) -> None:
    tokenizer = tiny.tokenizer()
    model, draft = tiny.llama(len(tokenizer)), tiny.llama(len(tokenizer), layers=1, seed=5)
    llm = LLM(model=model, tokenizer=tokenizer, draft=draft, draft_tokens=3)
    expected = [r.token_ids for r in LLM(str(target), None).generate(PROMPTS, greedy())]
    assert [r.token_ids for r in llm.generate(PROMPTS, greedy())] == expected, "the same weights as the folder holds"
    with pytest.raises(ValueError, match="needs its tokenizer"):
        LLM(model)


def test_transformers_own_generate_gives_the_same_greedy_tokens(target: Path) -> None:
    tokenizer = tiny.tokenizer()
    model = tiny.llama(len(tokenizer))
    for prompt, result in zip(PROMPTS, LLM(str(target)).generate(PROMPTS, greedy()), strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        theirs = model.generate(**inputs, do_sample=False, max_new_tokens=24, pad_token_id=0)
        assert theirs[0, inputs["input_ids"].shape[1] :].tolist() == result.token_ids


@pytest.mark.fault(4, 6)
def test_streaming_gives_every_token_and_the_same_text(target: Path) -> None:
    llm = LLM(str(target), str(target), draft_tokens=5)
    for seed in range(5):
        params = SamplingParams(seed=seed, max_tokens=30, temperature=1.2)
        chunks = list(llm.stream("速度", params))
        whole = llm.generate("速度", params)[0]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [token.id for chunk in chunks for token in chunk.tokens] == whole.token_ids
        assert [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].completion is not None
        assert chunks[-1].completion.token_ids == whole.token_ids
        assert any(len(chunk.tokens) > 1 for chunk in chunks), "a round's tokens come together"
        assert whole.text == llm.tokenizer.decode(whole.token_ids)


def test_a_stream_closed_early_leaves_a_clean_state(target: Path) -> None:
    llm = LLM(str(target), "ngram", draft_tokens=4)
    expected = llm.generate(PROMPTS, greedy())
    stream = llm.stream(PROMPTS[0], greedy())
    next(stream)
    other = llm.stream(PROMPTS[3], greedy())
    next(other)
    stream.close()
    assert [r.token_ids for r in llm.generate(PROMPTS, greedy())] == [r.token_ids for r in expected]
    rest = list(other)
    assert rest[-1].completion is not None
    assert rest[-1].completion.token_ids == expected[3].token_ids, "streams do not see each other"


def test_chat_goes_through_the_template(target: Path) -> None:
    llm = LLM(str(target))
    conversation = [{"role": "user", "content": "one two"}]
    (one,) = llm.chat(conversation, greedy(6))
    assert (
        llm.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False) == "<|user|>one two<|end|><|assistant|>"
    )
    many = llm.chat([conversation, conversation], greedy(6))
    assert [r.token_ids for r in many] == [one.token_ids] * 2
    streamed = list(llm.stream(conversation, greedy(6)))[-1].completion
    assert streamed is not None
    assert streamed.token_ids == one.token_ids


@pytest.mark.fault(6, 13)
def test_seeds_repeat_and_unseeded_requests_report_theirs(target: Path) -> None:
    llm = LLM(str(target))
    params = SamplingParams(max_tokens=10, seed=5)
    first = llm.generate(PROMPTS[0], params)[0].token_ids
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    assert llm.generate(PROMPTS[0], params)[0].token_ids == first, "other randomness of the process has no say"
    free = llm.generate(PROMPTS[0], SamplingParams(max_tokens=10))[0]
    again = llm.generate(PROMPTS[0], SamplingParams(max_tokens=10, seed=free.outputs[0].seed))[0]
    assert again.token_ids == free.token_ids
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=10))[0].outputs[0].seed != free.outputs[0].seed


def test_what_is_done_is_kept_when_the_rest_is_interrupted(target: Path) -> None:
    llm = LLM(str(target), max_num_seqs=1)
    found = []
    for index, completion in llm.as_completed(PROMPTS, greedy(4)):
        found.append((index, completion.text))
        if len(found) == 2:
            break
    assert [index for index, _ in found] == [0, 1]


def test_each_prompt_comes_once_when_all_its_samples_end_together(target: Path) -> None:
    found = list(LLM(str(target)).as_completed(PROMPTS, SamplingParams(n=3, max_tokens=1)))
    assert sorted(index for index, _ in found) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda llm: llm.generate("", greedy()), "0 tokens"),
        (lambda llm: llm.generate([[]], greedy()), "0 tokens"),
        (lambda llm: llm.generate([[1] * 128], greedy()), "128 tokens, at most 127"),
        (lambda llm: llm.generate([[9999]], greedy()), "token id 9999"),
        (lambda llm: llm.generate([[-1]], greedy()), "token id -1"),
        (lambda llm: llm.generate(["a", "b"], [greedy()]), "1 sampling params for 2 prompts"),
        (lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[9999])), "9999, it must be below"),
        (lambda llm: llm.generate("a", SamplingParams(logit_bias={9999: 1.0})), "9999, it must be below"),
        (lambda llm: llm.generate("a", SamplingParams(logprobs=9999)), "9999, it must be at most"),
        (lambda llm: next(llm.stream("a", SamplingParams(n=2))), "n is 2"),
    ],
)
def test_refusals_name_the_value_and_the_limit(target: Path, make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(LLM(str(target)))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "typical"}, "token, block, coupled"),
        ({"draft_tokens": -1}, "draft_tokens is -1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"dtype": "int3"}, "int3"),
        ({"quantize": "int3"}, "quantize 'int3' is unknown: choose q8_0"),
        ({"draft": "no-such-draft"}, "no-such-draft"),
    ],
)
def test_bad_options_are_refused(target: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(target), **options)  # type: ignore[arg-type]


def test_quantize_is_for_what_is_loaded_by_name(
    target: Path, padded_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, object]] = []

    def spy(name: str, **options: Any) -> Checkpoint:
        asked.append((name, options["quantize"]))
        return load(name, **options)

    monkeypatch.setattr("paceline.engine.llm.load", spy)
    names = (str(target), str(padded_draft))
    llm = LLM(*names, draft_tokens=4, quantize="q8_0")
    assert asked == [(name, "q8_0") for name in names]
    assert llm.notes[0].startswith("16 float32 matrices quantized to Q8_0")
    plain = LLM(names[0], None, quantize="q8_0")
    results = llm.generate(PROMPTS, greedy())
    assert [r.token_ids for r in results] == [r.token_ids for r in plain.generate(PROMPTS, greedy())]
    assert sum(r.stats.drafted for r in results) > 0

    tokenizer = tiny.tokenizer()
    in_memory = tiny.llama(len(tokenizer), layers=1)
    LLM(names[0], in_memory, quantize="q8_0")
    with pytest.raises(ValueError, match="quantize is 'q8_0' and the model is in memory already"):
        LLM(in_memory, tokenizer=tokenizer, quantize="q8_0")


def test_no_prompts_give_no_results(target: Path) -> None:
    assert LLM(str(target)).generate([], greedy()) == []


def test_plain_decoding_is_k_zero(target: Path, padded_draft: Path) -> None:
    for llm in (LLM(str(target), None), LLM(str(target), str(padded_draft), draft_tokens=0)):
        result = llm.generate(PROMPTS[0], greedy())[0]
        assert result.stats.drafted == 0
        assert set(result.outputs[0].provenance) == {Provenance.PLAIN}


@pytest.mark.fault(10)
def test_time_is_reported_by_part(target: Path, padded_draft: Path) -> None:
    stats = LLM(str(target), str(padded_draft), draft_tokens=4).generate(PROMPTS[0], greedy(40))[0].stats
    parts = [stats.draft_s, stats.score_s, stats.verify_s, stats.other_s]
    assert all(part > 0 for part in parts)
    assert stats.decode_s == pytest.approx(sum(parts))
    assert stats.prefill_s > 0
    assert stats.tokens_per_second == pytest.approx((stats.output_tokens - 1) / stats.decode_s)
    plain = LLM(str(target), None).generate(PROMPTS[0], greedy(40))[0].stats
    assert plain.draft_s < 0.5 * plain.score_s  # a pass of this model is hardly more than Python
