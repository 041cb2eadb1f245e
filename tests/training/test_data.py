"""Texts that a draft learns from: what is in them, and that no interruption changes it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline import LLM
from paceline.models.interface import Chunk
from paceline.training.data import Answering, Example, Prompt, Texts, read_prompts
from tests import tiny

HOW = Answering(max_tokens=12)
FEATURES = (0, 1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny.save(tmp_path_factory.mktemp("model")), None, device="cpu")


def prompts(llm: LLM, count: int = 24) -> list[Prompt]:
    asked = [Prompt(tuple(llm.tokenizer.encode(f"The quick brown {n} fox" * (1 + n % 3)))) for n in range(count)]
    asked[5] = Prompt((9, 8, 7, 6, 5, 4), (False, False, True, True, True, False))
    return asked


def texts(folder: Path, llm: LLM, *, budget: int = 1 << 20, how: Answering = HOW) -> Texts:
    return Texts(folder, llm, prompts(llm), how, features=FEATURES, budget=budget)


def contents(made: Texts) -> list[tuple[Example, torch.Tensor, torch.Tensor]]:
    return [(made.example(index), *made.kept(index)) for index in made.indices]


def same(one: Texts, other: Texts) -> bool:
    pairs = zip(contents(one), contents(other), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in pairs)


class Stopped(Exception):
    pass


def stopping(after: int) -> Callable[[int, int], None]:
    left = after

    def advance(texts: int, tokens: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped

    return advance


def test_interrupted_ten_times_the_texts_are_those_of_one_run(llm: LLM, tmp_path: Path) -> None:
    whole = texts(tmp_path / "whole", llm)
    whole.make(batch=5)
    assert len(whole.indices) == 24
    draw = random.Random(3)
    for interruption in range(10):
        part = texts(tmp_path / "parts", llm)
        try:
            part.make(batch=draw.choice([1, 3, 7]), advance=stopping(draw.choice([0, 1, 2])))
        except Stopped:
            # As if the machine had died while it wrote: a torn line, and hidden states without one.
            lines, features = tmp_path / "parts" / "answers.jsonl", tmp_path / "parts" / "features.bin"
            if interruption % 2 and lines.stat().st_size:
                with lines.open("ab") as file:
                    file.write(b'{"id": 3, "tokens": [1, 2')
            with features.open("ab") as file:
                file.write(b"x" * draw.randrange(99))
    part = texts(tmp_path / "parts", llm)
    assert 0 < len(part.missing) < 24
    part.make(batch=4)
    assert same(part, whole)
    assert same(texts(tmp_path / "parts", llm), whole), "read anew"


def test_hidden_states_are_the_same_kept_or_computed(llm: LLM, tmp_path: Path) -> None:
    """They were captured one token at a time, and are computed in one pass."""
    kept, computed = texts(tmp_path / "kept", llm), texts(tmp_path / "computed", llm, budget=0)
    kept.make()
    computed.make()
    assert (tmp_path / "computed" / "features.bin").stat().st_size == 0
    assert (tmp_path / "kept" / "features.bin").stat().st_size > 0
    for index in kept.indices:
        (one, one_lse), (other, other_lse) = kept.kept(index), computed.kept(index)
        assert torch.equal(one, other)
        torch.testing.assert_close(one_lse, other_lse, atol=1e-4, rtol=0)


def test_a_budget_is_kept_to(llm: LLM, tmp_path: Path) -> None:
    made = texts(tmp_path, llm, budget=20_000)
    made.make()
    size = (tmp_path / "features.bin").stat().st_size
    assert 0 < size <= 20_000
    assert len(made.batch(made.indices).lengths) == 24


def test_a_batch_holds_what_the_target_computes(llm: LLM, tmp_path: Path) -> None:
    made = texts(tmp_path, llm)
    made.make()
    indices = [3, 5, 8]
    batch = made.batch(indices)
    start = 0
    for index, length in zip(indices, batch.lengths, strict=True):
        example, rows = made.example(index), slice(start, start + length)
        start += length
        assert batch.tokens_N[rows].tolist() == list(example.tokens[:-1])
        assert batch.next_N[rows].tolist() == list(example.tokens[1:])
        assert batch.trained_N[rows].tolist() == list(example.mask[1:])
        chunk = Chunk(0, example.tokens[:-1], outputs=length)
        with torch.inference_mode():
            scores = llm.target([chunk], llm.target.new_cache(1, 120), [*FEATURES, 2])
        torch.testing.assert_close(batch.features_NFH[rows], scores.features[0][:, :2], atol=0.02, rtol=0.01)
        torch.testing.assert_close(batch.hidden_NH[rows], scores.features[0][:, 2], atol=0.02, rtol=0.01)
        expected = scores.logits[0].logsumexp(-1)
        trained = batch.trained_N[rows]
        torch.testing.assert_close(batch.lse_N[rows][trained], expected[trained], atol=0.05, rtol=0)
        assert (batch.lse_N[rows][~trained] == 0).all()


def test_answers_are_the_targets_at_the_temperatures_in_turn(llm: LLM, tmp_path: Path) -> None:
    made = texts(tmp_path, llm)
    made.make(batch=3)
    for index in (0, 1, 2):
        prompt = list(prompts(llm)[index].tokens)
        (expected,) = llm.generate([prompt], HOW.params(index))
        assert list(made.example(index).tokens) == [*prompt, *expected.outputs[0].token_ids]
    assert HOW.params(0).temperature == 0
    assert HOW.params(1).temperature == 0.8
    assert HOW.params(1).seed != HOW.params(3).seed


def test_every_epoch_has_every_text_once_in_another_order(llm: LLM, tmp_path: Path) -> None:
    made = texts(tmp_path, llm)
    made.make()
    plans = [made.plan(0, epoch, 60) for epoch in (0, 1, 0)]
    assert plans[0] == plans[2] != plans[1]
    for plan in plans:
        assert sorted(index for batch in plan for index in batch) == made.train()
        assert all(sum(len(made.example(i).tokens) - 1 for i in batch) <= 60 or len(batch) == 1 for batch in plan)
    assert not set(made.train()) & set(made.held_out())


def test_the_draft_vocabulary_is_what_answers_hold(llm: LLM, tmp_path: Path) -> None:
    made = texts(tmp_path, llm)
    made.make()
    few, many = made.frequent(5), made.frequent(llm.target.vocab_size)
    assert few == sorted(few)
    assert len(few) == 5
    assert llm.eos_ids <= set(few)
    assert len(many) == llm.target.vocab_size
    assert made.coverage(few) < made.coverage(many) == 1


def test_a_folder_begun_otherwise_is_refused(llm: LLM, tmp_path: Path) -> None:
    texts(tmp_path, llm)
    with pytest.raises(ValueError, match=r"begun with max_tokens 12 and is now to go on with 13"):
        texts(tmp_path, llm, how=Answering(max_tokens=13))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "one of prompt"),
        ('{"prompt": "a", "text": "b"}', "one of prompt"),
        ('{"tokens": [1, 2, 3], "mask": [0, 0, 0]}', "all-zero mask"),
        ('{"tokens": [1, 2, 3], "mask": [1, 0, 0]}', "all-zero mask"),
        ('{"tokens": [1, 2, 3], "mask": [1]}', "mask of 1"),
        ('{"tokens": [1, 99999]}', "ids from 0"),
        ('{"prompt": 3}', "line 2"),
        ("[1]", "one of prompt"),
        ("{", "line 2"),
    ],
)
def test_lines_that_cannot_be_used_are_named(line: str, message: str, llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(file, llm)
    assert "line 2" in str(error.value)


def test_prompts_of_every_form(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    given = [
        {"prompt": "Hello"},
        {"prompt": "Hello", "chat": False},
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"text": "Hello there"},
        {"tokens": [4, 5, 6], "mask": [0, 1, 1]},
    ]
    file.write_text("\n".join(map(json.dumps, given)) + "\n\n")
    chat, raw, messages, text, tokens = read_prompts(file, llm)
    assert chat == messages == Prompt(tuple(llm.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])))
    assert raw == Prompt(tuple(llm.tokenizer.encode("Hello")))
    assert text.tokens == tuple(llm.tokenizer.encode("Hello there"))
    assert text.mask == (True,) * len(text.tokens)
    assert tokens == Prompt((4, 5, 6), (False, True, True))
