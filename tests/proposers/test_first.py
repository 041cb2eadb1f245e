"""Proposers in a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from paceline import LLM
from paceline.models.feature import FeatureDraft
from paceline.proposers.base import NoProposer, Request
from paceline.proposers.feature import FeatureProposer
from paceline.proposers.first import FirstOf
from paceline.proposers.ngram import NgramProposer
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from tests import tiny
from tests.proposers.test_feature import CAPACITY, drafts, run


class Counting(NgramProposer):
    asked = answered = 0

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        found = super().propose(requests)
        self.asked += len(found)
        self.answered += sum(bool(draft.tokens) for draft in found)
        return found


class Second(FeatureProposer):
    asked = 0

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        self.asked += len(requests)
        return super().propose(requests)


def test_the_second_is_asked_where_the_first_has_nothing_and_misses_nothing_meanwhile(tmp_path: Path) -> None:
    of, model, among = drafts("eagle3", tmp_path, packed=False, reduced=False)
    assert isinstance(model, FeatureDraft)
    greedy = SamplingParams(temperature=0)
    first = Counting(of.vocab_size, shortest=1)
    second = Second(model, among, slots=3, capacity=CAPACITY)
    found = run(of, FirstOf(first, second), greedy, k=3, slots=3)
    assert found == run(of, NoProposer(), greedy, k=0, slots=1)
    assert 0 < first.answered < first.asked
    assert second.asked == first.asked - first.answered


def test_hidden_states_go_to_all_of_them() -> None:
    both = FirstOf(NgramProposer(9, shortest=1), NoProposer())
    both.begin(0)
    both.observe(0, [1, 2, 1], torch.zeros(2, 0, 4))
    assert both.features == ()


def test_prompt_lookup_ahead_of_a_draft_model_by_name(tmp_path: Path) -> None:
    target, draft = tiny.save(tmp_path / "target"), tiny.save(tmp_path / "draft", seed=1)
    asked = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = ["one two three one two three one two", "a b c"]
    (plain, *_), (lookup, *_), (both, *_) = (
        [LLM(target, name, draft_tokens=4, device="cpu").generate(prompts, asked)]
        for name in (None, "ngram", f"ngram+{draft}")
    )
    assert [c.token_ids for c in both] == [c.token_ids for c in plain] == [c.token_ids for c in lookup]
    rounds = [sum(c.stats.drafts for c in found) for found in (lookup, both)]
    assert rounds[0] < rounds[1], "where prompt lookup finds nothing, the model drafts"
