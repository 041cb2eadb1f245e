"""Drafts from the target's hidden states: what they keep between rounds is what they would compute from the start."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.checkpoints.drafts import load_draft
from paceline.decoding.generate import generate
from paceline.decoding.round import Batch
from paceline.decoding.sequence import Sequence as Generated
from paceline.models.decoder import Decoder
from paceline.models.feature import FeatureDraft
from paceline.models.heads import Heads
from paceline.models.interface import Chunk
from paceline.proposers.base import NoProposer, Proposer, Request
from paceline.proposers.feature import FeatureProposer
from paceline.proposers.heads import HeadsProposer
from paceline.sampling.distribution import Among, on_host
from paceline.sampling.draft import Draft
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import RULES, Sampler
from paceline.sampling.streams import Stream
from tests.fakes import Letters
from tests.training.test_learners import IDS, learner, target

CAPACITY = 63


class Recomputed(FeatureProposer):
    """Checks every draft against one made from nothing but all hidden states so far; counts what rounds accepted."""

    def __init__(self, model: FeatureDraft, among: Among | None, slots: int) -> None:
        super().__init__(model, among, slots=slots, capacity=CAPACITY)
        self.states: dict[int, list[torch.Tensor]] = {}
        self.accepted: Counter[int] = Counter()
        self.drafted: dict[int, tuple[int, int]] = {}

    def begin(self, slot: int) -> None:
        super().begin(slot)
        self.states[slot] = []
        self.drafted.pop(slot, None)

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        super().observe(slot, tokens, features_TFH)
        assert features_TFH is not None
        self.states[slot].append(features_TFH.clone())
        assert sum(map(len, self.states[slot])) <= len(tokens) - 1
        if slot in self.drafted:
            before, k = self.drafted.pop(slot)
            self.accepted[len(tokens) - before - 1] += 1
            assert len(tokens) - before - 1 <= k

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        drafts = super().propose(requests)
        for r, draft in zip(requests, drafts, strict=True):
            self.drafted[r.slot] = len(r.tokens), len(draft)
            assert sum(map(len, self.states[r.slot])) == len(r.tokens) - 1
            cache = self.model.new_cache(1, CAPACITY)
            given = self.model.project(torch.cat(self.states[r.slot]))
            chunk, history = Chunk(0, r.tokens[1:]), list(r.tokens)
            for q, token in zip(draft.probs, draft.tokens, strict=True):
                logits, given = self.model([chunk], given, cache)
                expected = r.sampler.distribution(on_host(logits)[0], history, among=self.among)
                torch.testing.assert_close(
                    torch.from_numpy(q.dense()), torch.from_numpy(expected.dense()), atol=1e-5, rtol=1e-4
                )
                history.append(token)
                chunk = Chunk(0, [token])
        return drafts


def run(
    of: Decoder, proposer: Proposer, params: SamplingParams, *, k: int, slots: int, verify: str = "token"
) -> list[list[int]]:
    prompts = [[7, 9, 30], [1], [50, 3, 3, 3, 3, 3, 20, 41, 2], [60, 61, 62, 63], [5] * 20]
    sequences = [
        Generated(
            prompt,
            Sampler(params=params, rule=RULES[verify], stream=Stream(n), prompt_length=len(prompt)),
            limit=len(prompt) + 24,
            detokenizer=Letters(),
        )
        for n, prompt in enumerate(prompts)
    ]
    batch = Batch(of, proposer, draft_tokens=k, slots=slots, capacity=CAPACITY)
    for _ in generate(batch, sequences):
        pass
    return [[token.id for token in sequence.output] for sequence in sequences]


def drafts(
    kind: str, tmp_path: Path, *, packed: bool, reduced: bool
) -> tuple[Decoder, FeatureDraft | Heads, Among | None]:
    of = target(packed=packed)
    learner(kind, target(), IDS if reduced else None).save(tmp_path)
    loaded = load_draft(tmp_path, of)
    assert isinstance(loaded.module, (FeatureDraft, Heads))
    return of, loaded.module, None if loaded.ids is None else Among(of.vocab_size, loaded.ids)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("k", "slots"), [(1, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_draft_is_what_all_hidden_states_so_far_give(
    kind: str, k: int, slots: int, packed: bool, tmp_path: Path
) -> None:
    of, model, among = drafts(kind, tmp_path, packed=packed, reduced=k == 3)
    assert isinstance(model, FeatureDraft)
    proposer = Recomputed(model, among, slots)
    run(of, proposer, SamplingParams(temperature=1.5), k=k, slots=slots)
    # Rounds that kept nothing, some and all of a draft have to be among them.
    assert proposer.accepted[0] > 3
    assert sum(count for kept, count in proposer.accepted.items() if kept) > 3


@pytest.mark.parametrize("verify", RULES)
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "heads"])
def test_greedy_output_is_the_targets(kind: str, verify: str, tmp_path: Path) -> None:
    of, model, among = drafts(kind, tmp_path, packed=True, reduced=True)
    greedy = SamplingParams(temperature=0)
    expected = run(of, NoProposer(), greedy, k=0, slots=1)
    for k, slots in ((1, 1), (4, 2), (9, 5)):
        if isinstance(model, Heads):
            proposer: Proposer = HeadsProposer(model, among)
        else:
            proposer = FeatureProposer(model, among, slots=slots, capacity=CAPACITY)
        assert run(of, proposer, greedy, k=k, slots=slots, verify=verify) == expected


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of, model, among = drafts("eagle3", tmp_path, packed=False, reduced=False)
    assert isinstance(model, FeatureDraft)
    monkeypatch.setattr("paceline.proposers.feature.FEW", 2)
    monkeypatch.setattr("paceline.decoding.round.READ_CHUNK", 6)
    run(of, Recomputed(model, among, 2), SamplingParams(), k=3, slots=2)


def test_heads_propose_what_each_says_of_the_last_state(tmp_path: Path) -> None:
    of, model, among = drafts("heads", tmp_path, packed=False, reduced=True)
    assert isinstance(model, Heads)
    assert among is not None
    proposer = HeadsProposer(model, among)
    proposer.begin(0)
    states = torch.randn(3, 1, of.config.hidden_size)
    proposer.observe(0, [1, 2, 3, 4], states)
    sampler = Sampler(params=SamplingParams(), rule=RULES["token"], stream=Stream(0), prompt_length=1)
    (draft,) = proposer.propose([Request(slot=0, tokens=[1, 2, 3, 4], k=9, sampler=sampler)])
    assert len(draft) == len(model.layers)
    rows = of.head_rows(torch.tensor(IDS))
    for layer, q in zip(model.layers, draft.probs, strict=True):
        h = states[-1, 0]
        expected = torch.zeros(of.vocab_size)
        expected[IDS] = ((h + torch.nn.functional.silu(layer(h))) @ rows.T).softmax(-1)
        torch.testing.assert_close(torch.from_numpy(q.dense()), expected)
    assert set(draft.tokens) <= set(IDS)


def test_drafts_stop_at_the_capacity(tmp_path: Path) -> None:
    """The last rounds shorten K instead of writing behind the end of the draft's cache."""
    of, model, among = drafts("eagle3", tmp_path, packed=False, reduced=False)
    assert isinstance(model, FeatureDraft)
    prompt = list(range(40))
    sampler = Sampler(params=SamplingParams(temperature=0), rule=RULES["token"], stream=Stream(0), prompt_length=40)
    for capacity in (39, 40, 43):
        proposer = FeatureProposer(model, among, slots=1, capacity=capacity)
        proposer.begin(0)
        proposer.observe(0, prompt, torch.randn(39, len(model.features), of.config.hidden_size))
        (draft,) = proposer.propose([Request(slot=0, tokens=prompt, k=8, sampler=sampler)])
        assert len(draft) == capacity - 39 + 1


@pytest.mark.parametrize("verify", RULES)
def test_a_draft_ends_before_its_chance_falls_below_the_limit(verify: str, tmp_path: Path) -> None:
    of, model, among = drafts("eagle3", tmp_path, packed=False, reduced=False)
    assert isinstance(model, FeatureDraft)
    prompt, states = list(range(30)), torch.randn(29, len(model.features), of.config.hidden_size)
    sampler = Sampler(params=SamplingParams(), rule=RULES[verify], stream=Stream(0), prompt_length=30)

    def propose(p_min: float) -> Draft:
        proposer = FeatureProposer(model, among, slots=1, capacity=CAPACITY, p_min=p_min)
        proposer.begin(0)
        proposer.observe(0, prompt, states)
        return proposer.propose([Request(slot=0, tokens=prompt, k=8, sampler=sampler)])[0]

    whole = propose(0)
    chances = [math.prod(float(q.probs.max()) for q in whole.probs[: n + 1]) for n in range(8)]
    assert len(propose(chances[0] * 1.01)) == 0
    for n in range(7):
        found = propose(chances[n] * 0.99)
        assert len(found) >= n + 1
        assert len(propose(chances[n + 1] * 1.01)) <= n + 1
        assert found.tokens == whole.tokens[: len(found)], "what is drafted does not depend on where it ends"
    # Coupled text is a function of target and seed at any temperature, wherever drafts end.
    for temperature in (0.0, 1.0) if verify == "coupled" else (0.0,):
        asked = SamplingParams(temperature=temperature)
        stopping = FeatureProposer(model, among, slots=2, capacity=CAPACITY, p_min=0.3)
        decoded = run(of, stopping, asked, k=5, slots=2, verify=verify)
        assert decoded == run(of, NoProposer(), asked, k=0, slots=1, verify=verify)


def test_heads_end_a_draft_before_its_chance_falls_below_the_limit(tmp_path: Path) -> None:
    of, model, among = drafts("heads", tmp_path, packed=False, reduced=False)
    assert isinstance(model, Heads)
    states = torch.randn(3, 1, of.config.hidden_size)
    sampler = Sampler(params=SamplingParams(), rule=RULES["token"], stream=Stream(0), prompt_length=1)

    def propose(p_min: float) -> Draft:
        proposer = HeadsProposer(model, among, p_min=p_min)
        proposer.begin(0)
        proposer.observe(0, [1, 2, 3, 4], states)
        return proposer.propose([Request(slot=0, tokens=[1, 2, 3, 4], k=3, sampler=sampler)])[0]

    chances = [math.prod(float(q.probs.max()) for q in propose(0).probs[: n + 1]) for n in range(3)]
    assert [len(propose(chance * 1.01)) for chance in chances] == [0, 1, 2]
    assert [len(propose(chance * 0.99)) for chance in chances] == [1, 2, 3]
