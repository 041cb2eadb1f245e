from __future__ import annotations

import pytest
import torch

from paceline.models.cache import KVCache
from paceline.models.interface import Chunk


def make(slots: int = 2, capacity: int = 8) -> KVCache:
    return KVCache(
        layers=1,
        slots=slots,
        kv_heads=2,
        capacity=capacity,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_chunks_land_at_their_positions_in_their_slot() -> None:
    cache = make()
    k_TKD, v_TKD = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    cache.extend(0, 1, 0, 0, k_TKD[:3], v_TKD[:3])
    cache.commit({1: 3})
    keys_1KLD, values_1KLD = cache.extend(0, 1, 3, 1, k_TKD[3:], v_TKD[3:])
    assert torch.equal(keys_1KLD[0], k_TKD[1:].transpose(0, 1))
    assert torch.equal(values_1KLD[0], v_TKD[1:].transpose(0, 1))
    assert torch.equal(cache.keys[0][1, :, :5], k_TKD.transpose(0, 1))
    assert (cache.length(0), cache.length(1)) == (0, 3), "only commit moves a length"


def test_writing_takes_no_part_in_a_graph() -> None:
    cache = make()
    keys_1KLD, _ = cache.extend(0, 0, 0, 0, torch.randn(1, 2, 4, requires_grad=True), torch.randn(1, 2, 4))
    assert not keys_1KLD.requires_grad
    assert not cache.keys[0].requires_grad


def test_truncate_is_absolute_and_only_shortens() -> None:
    cache = make()
    cache.commit({0: 6})
    cache.truncate(0, 6)
    cache.truncate(0, 2)
    assert cache.length(0) == 2
    with pytest.raises(ValueError, match="slot 0 holds 2 tokens and cannot be cut to 3: give 0 to 2"):
        cache.truncate(0, 3)
    with pytest.raises(ValueError, match="cannot be cut to -1"):
        cache.truncate(0, -1)
    with pytest.raises(ValueError, match="slot 2 does not exist: this cache has slots 0 to 1"):
        cache.truncate(2, 0)
    with pytest.raises(ValueError, match="slot -1 does not exist"):
        cache.length(-1)


def test_chunks_of_one_slot_follow_each_other() -> None:
    cache = make()
    cache.commit({0: 2})
    chunks = [Chunk(0, [1, 2]), Chunk(1, [3]), Chunk(0, [4, 5, 6])]
    assert cache.place(chunks, vocab_size=9) == ([2, 0, 4], {0: 7, 1: 1})
    assert cache.length(0) == 2


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(0, []), "a chunk of 0 tokens"),
        (Chunk(0, [1], outputs=2), "cannot have 2 outputs"),
        (Chunk(0, [1], outputs=-1), "cannot have -1 outputs"),
        (Chunk(0, [1] * 9), "holds 0 tokens and cannot take 9 more: its capacity is 8"),
        (Chunk(0, [1, 9]), "token id 9 is not one of the model's 9"),
        (Chunk(0, [-1, 1]), "token id -1"),
        (Chunk(5, [1]), "slot 5 does not exist"),
    ],
)
def test_chunks_that_cannot_run_are_refused(chunk: Chunk, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().place([Chunk(1, [1]), chunk], vocab_size=9)


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        make(slots=0)
    with pytest.raises(ValueError, match="of 0 tokens"):
        make(capacity=0)
