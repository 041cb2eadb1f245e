"""How a draft's tokens stand for the target's: same ids, other padding, or another vocabulary altogether."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from paceline.proposers.vocabulary import SMALLEST_SHARE, Token, VocabularyMap
from paceline.sampling.distribution import distribution, on_host
from paceline.sampling.params import SamplingParams


def plain(*texts: str) -> list[Token]:
    return [(False, text.encode()) for text in texts]


def special(*texts: str) -> list[Token]:
    return [(True, text.encode()) for text in texts]


class Speller:
    """The draft's tokenizer: letter by letter, letters it does not know left out. Records what it was asked."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.ids = {data.decode(): i for i, (_, data) in enumerate(tokens)}
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        return [self.ids[letter] for letter in text if letter in self.ids]


def build(
    target: list[Token], draft: list[Token], *, target_size: int | None = None, draft_size: int | None = None
) -> tuple[VocabularyMap, Speller]:
    speller = Speller(draft)
    made = VocabularyMap(
        target,
        draft,
        speller,
        target_size=len(target) if target_size is None else target_size,
        draft_size=len(draft) if draft_size is None else draft_size,
    )
    return made, speller


def logits(size: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(size))


# ---- the same tokens ----


def test_identical_tokens_stand_for_themselves() -> None:
    tokens = [*special("<s>"), *plain("a", "b", "ab")]
    made, speller = build(tokens, list(tokens))
    assert made.identical
    assert made.share == 1
    assert [made.spell(i) for i in range(4)] == [(0,), (1,), (2,), (3,)]
    scores_D = logits(4)[0].numpy()
    assert (made.to_target(scores_D) == scores_D).all()
    assert speller.asked == []


@pytest.mark.parametrize(("target_size", "draft_size"), [(10, 12), (12, 10), (10, 8), (8, 10)])
def test_identical_tokens_with_unequal_padding_keep_their_ids(target_size: int, draft_size: int) -> None:
    tokens = plain(*"abcdefgh")
    made, _ = build(tokens, list(tokens), target_size=target_size, draft_size=draft_size)
    common = min(target_size, draft_size)
    assert made.identical
    assert made.share == 1, "padding is nothing that can be shared"
    scores_D = logits(draft_size)[0].numpy()
    mapped_V = made.to_target(scores_D)
    assert mapped_V.shape == (target_size,)
    assert (mapped_V[:common] == scores_D[:common]).all()
    assert (mapped_V[common:] == -math.inf).all()
    for token in range(target_size):
        spelling = made.spell(token)
        assert spelling, "a token must fill a position of the draft"
        assert all(0 <= i < draft_size for i in spelling)
        if token < common:
            assert spelling == (token,)


def test_a_draft_with_fewer_rows_than_tokens_reads_the_others_in_rows_that_it_has() -> None:
    """Tokens added to a tokenizer whose model was never resized: the draft's own spelling names rows it has not."""
    tokens = plain(*"abcdefgh")
    for target in (tokens, [*tokens, *plain("x")]):
        made, _ = build(target, list(tokens), draft_size=6)
        assert [made.spell(i) for i in range(6)] == [(i,) for i in range(6)]
        for token in range(6, len(target)):
            assert made.spell(token)
            assert all(i < 6 for i in made.spell(token)), (token, made.spell(token))


def test_equal_tokens_in_another_order_are_not_identical_but_all_shared() -> None:
    made, _ = build(plain("a", "b", "c"), plain("c", "a", "b"))
    assert not made.identical
    assert made.share == 1
    assert [made.spell(i) for i in range(3)] == [(1,), (2,), (0,)]
    assert made.to_target(np.array([10.0, 20.0, 30.0])).tolist() == [20, 30, 10]


# ---- different vocabularies ----


TARGET = [*special("<s>"), *plain("a", "b", "c", "xyz", "q")]
DRAFT = [*plain("x", "c"), *special("</s>", "<s>"), *plain("y", "z", "a")]


def test_only_what_both_know_can_be_proposed() -> None:
    made, _ = build(TARGET, DRAFT, target_size=8, draft_size=9)
    assert not made.identical
    assert made.share == pytest.approx(3 / 6), "<s>, a and c"
    assert made.to_target(np.arange(9.0)).tolist() == [3, 6, -math.inf, 1, *[-math.inf] * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_q_is_the_drafts_own_restricted_to_the_intersection_and_renormalised(dtype: torch.dtype) -> None:
    made, _ = build(TARGET, DRAFT, target_size=8, draft_size=9)
    scores = logits(9, rows=5).to(dtype)
    before = scores.clone()
    mapped = [made.to_target(scores_D) for scores_D in on_host(scores)]
    assert mapped[0].dtype == (np.float64 if dtype == torch.float64 else np.float32)
    assert torch.equal(scores, before)
    q_TV = np.stack([distribution(mapped_V, SamplingParams()).dense() for mapped_V in mapped])
    own_TD = scores.double().softmax(-1)
    pairs = {0: 3, 1: 6, 3: 1}
    kept = own_TD[:, list(pairs.values())].sum(-1)
    for i in range(8):
        expected = own_TD[:, pairs[i]] / kept if i in pairs else torch.zeros(5)
        assert q_TV[:, i].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert q_TV.sum(-1).tolist() == pytest.approx([1] * 5)


def test_special_tokens_never_match_ordinary_ones_of_equal_bytes() -> None:
    made, _ = build([*plain("<s>", "a"), *special("<e>")], [*special("<s>"), *plain("<e>", "a")])
    assert made.share == pytest.approx(1 / 3)
    assert made.to_target(np.array([1.0, 2.0, 3.0])).tolist() == [-math.inf, 3, -math.inf]
    both, _ = build([*special("s"), *plain("s", "a")], [*plain("a", "s"), *special("s")])
    assert both.to_target(np.array([1.0, 2.0, 3.0])).tolist() == [3, 2, 1]


def test_of_two_ids_for_the_same_bytes_the_later_counts_on_either_side() -> None:
    twice_in_target, _ = build(plain("a", "b", "a"), plain("a", "c"))
    assert twice_in_target.to_target(np.array([5.0, 6.0])).tolist() == [-math.inf, -math.inf, 5]
    assert twice_in_target.spell(2) == (0,)
    assert twice_in_target.spell(0) == (0,), "the earlier one is respelled, and reads the same"
    twice_in_draft, _ = build(plain("b", "a"), plain("a", "c", "a"))
    assert twice_in_draft.to_target(np.array([5.0, 6.0, 7.0])).tolist() == [-math.inf, 7]
    assert twice_in_draft.spell(1) == (2,)


def test_a_duplicate_among_identical_tokens_needs_no_choice() -> None:
    tokens = plain("a", "b", "a")
    made, _ = build(tokens, list(tokens))
    assert [made.spell(i) for i in range(3)] == [(0,), (1,), (2,)]


def test_unshared_tokens_are_respelled_with_the_drafts_own() -> None:
    made, speller = build(TARGET, DRAFT, target_size=8, draft_size=9)
    assert [made.spell(i) for i in (0, 1, 3)] == [(3,), (6,), (1,)]
    assert speller.asked == [], "shared tokens are never re-encoded"
    assert made.spell(4) == (0, 4, 5), "xyz is x y z to the draft"
    assert made.spell(4) == (0, 4, 5)
    assert speller.asked == ["xyz"], "and that is asked once"


def test_a_token_that_the_draft_cannot_spell_fills_one_position_all_the_same() -> None:
    made, speller = build(TARGET, DRAFT, target_size=8, draft_size=9)
    for token in (2, 5, 6, 7):  # b and q, which the draft has no letters for, and two rows of padding
        spelling = made.spell(token)
        assert len(spelling) == 1
        assert 0 <= spelling[0] < 9
    assert speller.asked == ["b", "q", "", ""]


def test_half_a_character_is_spelled_without_the_bytes_that_mean_nothing() -> None:
    target: list[Token] = [(False, b"a"), (False, b"a\xc3"), (False, b"\xa9"), (False, "\u00e9".encode())]
    made, speller = build(target, plain("a", "z"))
    assert made.spell(1) == (0,)
    assert len(made.spell(2)) == 1
    made.spell(3)
    assert speller.asked == ["a", "", "\u00e9"]


def test_padding_rows_of_the_draft_stand_for_nothing() -> None:
    """Tokens that the draft's tokenizer knows, but not its model, are not shared; nor are the target's own such."""
    made, _ = build(plain("a", "b", "c"), plain("b", "a", "x", "c"), draft_size=3)
    assert made.share == pytest.approx(2 / 3)
    assert made.to_target(np.array([1.0, 2.0, 3.0])).tolist() == [2, 1, -math.inf]
    small_target, _ = build(plain("a", "b", "c"), plain("c", "b", "a"), target_size=2)
    assert small_target.to_target(np.array([1.0, 2.0, 3.0])).tolist() == [3, 2]


# ---- refusal ----


def test_an_intersection_below_five_percent_is_refused_and_five_percent_is_not() -> None:
    assert SMALLEST_SHARE == 0.05
    target = plain(*(f"t{i}" for i in range(100)))
    made, _ = build(target, plain("t0", "t1", "t2", "t3", "t4", "x"))
    assert made.share == pytest.approx(0.05)
    refusal = r"share 4 of the target's 100 tokens, less than 5%: use a draft made for this tokenizer, or draft='ngram'"
    with pytest.raises(ValueError, match=refusal):
        build(target, plain("t0", "t1", "t2", "t3", "x", "y"))


def test_no_intersection_at_all_is_refused_like_a_small_one() -> None:
    with pytest.raises(ValueError, match="share 0 of the target's 2 tokens"):
        build(plain("a", "b"), special("a", "b"))
