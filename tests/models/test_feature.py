"""Drafts from hidden states in the kernels: one call gives what the modules give part by part in torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoints.drafts import load_draft
from paceline.models.decoder import Decoder
from paceline.models.feature import Eagle3, FeatureDraft
from paceline.models.interface import Chunk
from tests.training.test_learners import IDS, learner, target


def loaded(kind: str, folder: Path, ids: Sequence[int] | None, **changes: Any) -> tuple[Decoder, FeatureDraft]:
    of = target(packed=True, **changes)
    learner(kind, target(**changes), ids).save(folder)
    draft = load_draft(folder, of).module
    assert isinstance(draft, FeatureDraft)
    return of, draft


def passes(draft: FeatureDraft) -> list[torch.Tensor]:
    """Prompts from states, a step from the draft's own, rewinding, and states again, of slots in any order."""
    torch.manual_seed(3)
    cache, found = draft.new_cache(3, 60), []
    many, one = (torch.randn(n, len(draft.features), 64) for n in (29, 1))
    chunks = [Chunk(2, range(5, 25)), Chunk(0, [7] * 8), Chunk(1, [90])]
    logits, hidden = draft(chunks, many, cache)
    found += [logits, hidden.clone()]
    before = hidden.clone()
    logits, hidden = draft([Chunk(2, [1]), Chunk(0, [2]), Chunk(1, [3])], hidden, cache)
    assert not torch.equal(before, hidden)
    found += [logits, hidden]
    cache.truncate(0, 5)
    found += draft([Chunk(0, [9])], one, cache)
    found += draft([Chunk(2, [9]), Chunk(1, [8])], hidden[1:], cache)
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("changes", [{}, {"embedding_scale": 3.0, "logit_softcap": 5.0, "tied": False}])
def test_the_kernels_give_what_torch_gives(
    kind: str, ids: Sequence[int] | None, threads: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    torch.set_num_threads(threads)
    _, draft = loaded(kind, tmp_path, ids, **changes)
    with torch.inference_mode():
        assert draft._native is not None
        found = passes(draft)
        draft.__dict__["_native"] = None
        expected = passes(draft)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert expected[0].std() > 0.1, "a flat draft would hide faults"


def test_what_is_given_is_left_as_it_is(tmp_path: Path) -> None:
    """A draft's own state may be gone on from twice."""
    _, draft = loaded("eagle3", tmp_path, IDS)
    states = torch.randn(2, 1, len(draft.features), 64)
    own = torch.randn(1, 64)
    for given in (states[0], own):
        kept = given.clone()
        draft([Chunk(0, [4])], given, draft.new_cache(1, 8))
        assert torch.equal(given, kept)


def test_states_that_do_not_lie_side_by_side_are_read_alike(tmp_path: Path) -> None:
    _, draft = loaded("eagle3", tmp_path, IDS)
    wide = torch.randn(3, len(draft.features) + 2, 64)
    part = wide[:, 1:-1]
    assert not part.is_contiguous()
    for a, b in zip(
        *(draft([Chunk(0, [4, 5, 6])], s, draft.new_cache(1, 8)) for s in (part, part.clone())), strict=True
    ):
        assert torch.equal(a, b)


def test_rows_do_not_depend_on_those_beside_them(tmp_path: Path) -> None:
    _, draft = loaded("eagle3", tmp_path, IDS)
    states = torch.randn(9, len(draft.features), 64)
    cache = draft.new_cache(2, 20)
    together, _ = draft([Chunk(0, [4, 5, 6, 7]), Chunk(1, [1, 2, 3, 4, 5])], states, cache)
    alone, _ = draft([Chunk(0, [1, 2, 3, 4, 5])], states[4:], draft.new_cache(1, 20))
    assert torch.equal(together[1], alone[0])


def test_features_may_be_asked_for_in_any_order_and_twice() -> None:
    for of in (target(packed=True), target()):
        cache = of.new_cache(1, 20)
        last = of.config.num_layers
        (sorted_NFH,) = of([Chunk(0, [1, 2, 3])], cache, (0, 3, last)).features
        cache.truncate(0, 0)
        (found_NFH,) = of([Chunk(0, [1, 2, 3])], cache, (last, 0, 3, 0)).features
        assert torch.equal(found_NFH, sorted_NFH[:, [2, 0, 1, 0]])


def test_a_draft_is_left_to_torch_where_a_part_of_it_is_not_packed(tmp_path: Path) -> None:
    _, draft = loaded("eagle3", tmp_path, None)
    assert isinstance(draft, Eagle3)
    packed = draft.fc.packed
    assert packed is not None
    draft.fc.packed = None
    draft.fc.weight = torch.nn.Parameter(packed.unpack())
    assert draft._native is None
    (logits, _) = draft([Chunk(0, [4])], torch.randn(1, len(draft.features), 64), draft.new_cache(1, 8))
    assert logits.shape == (1, 96)


def test_a_pass_that_gets_no_memory_says_so() -> None:
    of = target(packed=True)
    assert of._native is not None
    of._native._struct.scratch = 1 << 50
    with pytest.raises(MemoryError, match=r"a pass over 2 tokens needs [0-9,]{17,} bytes more"):
        of([Chunk(0, [1, 2])], of.new_cache(1, 4))
