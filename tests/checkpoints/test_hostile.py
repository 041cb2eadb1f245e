"""Files that lie: each must end in a ValueError, at once and without allocating what it claims to hold."""

from __future__ import annotations

import math
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.checkpoints import gguf_file
from paceline.checkpoints.gguf_file import read_config, read_gguf, read_tensors
from tests.checkpoints.test_gguf_file import write_llama

HUGE = (1 << 64) - 1
ONE_TENSOR: list[tuple[str, tuple[int, ...], int, int]] = [("t", (32,), 0, 0)]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    keys: list[bytes] | None = None,
    key_count: int | None = None,
    tensors: list[tuple[str, tuple[int, ...], int, int]] | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
    data: int = 128,
) -> bytes:
    keys, tensors = keys or [], ONE_TENSOR if tensors is None else tensors
    header = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header += b"".join(keys) + b"".join(tensor(*t) for t in tensors)
    return header + bytes(-len(header) % alignment) + bytes(data)


def refused(path: Path, raw: bytes, message: str) -> None:
    """Refused with this message, within a second, allocating less than a few megabytes."""
    path.write_bytes(raw)
    tracemalloc.start()
    begun = time.perf_counter()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            read_gguf(path)
        seconds, peak = time.perf_counter() - begun, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert seconds < 1
    assert peak < len(raw) + (4 << 20)


def test_the_files_built_here_are_sound_until_they_are_spoilt(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes(keys=[key("a", 8, text("b"))]))
    file = read_gguf(path)
    assert file.metadata == {"a": "b"}
    assert file.tensors["t"].size == 128
    assert file.tensors["t"].offset + 128 == path.stat().st_size


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "shorter than a header"),
        (b"GGUF", "shorter than a header"),
        (gguf_bytes(magic=b"GGML"), "does not begin with 'GGUF'"),
        (b"<html>" + b" " * 100, "does not begin with 'GGUF'"),
        (gguf_bytes(version=1), "version is 1"),
        (gguf_bytes(version=4), "version is 4"),
        (gguf_bytes(version=3 << 24), "big-endian"),
        (gguf_bytes(tensor_count=HUGE), "18,446,744,073,709,551,615 tensors do not fit"),
        (gguf_bytes(key_count=HUGE), "metadata keys do not fit"),
        (gguf_bytes(key_count=1 << 40), "metadata keys do not fit"),
        (gguf_bytes(keys=[struct.pack("<Q", HUGE) + bytes(40)]), "bytes are announced"),
        (gguf_bytes(keys=[struct.pack("<Q", 1 << 62) + bytes(40)]), "bytes are announced"),
        (gguf_bytes(keys=[key("a", 8, struct.pack("<Q", 1 << 45))]), "bytes are announced"),
        (gguf_bytes(keys=[key("a", 13, b"")]), "13 is not a type"),
        (gguf_bytes(keys=[key("a", 0xFFFFFFFF, b"")]), "4294967295 is not a type"),
        (gguf_bytes(keys=[key("a", 9, array(0, HUGE))]), "over the limit"),
        (gguf_bytes(keys=[key("a", 9, array(8, HUGE))]), "over the limit"),
        (gguf_bytes(keys=[key("a", 9, array(4, 1 << 20))]), "4,194,304 bytes are announced"),
        (gguf_bytes(keys=[key("a", 9, array(8, 1 << 20))]), "bytes are announced"),
        (gguf_bytes(keys=[key("a", 9, array(99, 1))]), "99 is not a type"),
        (gguf_bytes(keys=[key("a", 9, array(9, 1, array(9, 1, array(9, 1))))]), "an array holds arrays"),
        (gguf_bytes(keys=[key("a", 9, array(9, 100_000, array(9, 1) * 100_000))]), "an array holds arrays"),
        (gguf_bytes(keys=[key("a", 0, b"x"), key("a", 0, b"y")]), "the key 'a' is there twice"),
        (gguf_bytes(keys=[key("a", 8, text(b"\xff\xfe"))]), "not UTF-8"),
        (gguf_bytes(keys=[key("general.alignment", 4, struct.pack("<I", 0))]), "alignment is 0"),
        (gguf_bytes(keys=[key("general.alignment", 4, struct.pack("<I", 24))]), "alignment is 24"),
        (gguf_bytes(keys=[key("general.alignment", 4, struct.pack("<I", 1 << 31))]), "alignment is 2147483648"),
        (gguf_bytes(keys=[key("general.alignment", 8, text("32"))]), "alignment is '32'"),
        (gguf_bytes(tensors=[("t", (), 0, 0)]), "0 dimensions"),
        (gguf_bytes(tensors=[("t", (2, 2, 2, 2, 2), 0, 0)]), "5 dimensions"),
        (gguf_bytes(tensors=[("t", (32,), 0, 0)] * 2), "the tensor 't' is there twice"),
        (gguf_bytes(tensors=[("t", (32,), 99, 0)]), "type 99"),
        (gguf_bytes(tensors=[("t", (32,), 4, 0)]), "type 4"),
        (gguf_bytes(tensors=[("t", (0, 8), 0, 0)]), "blocks of 1"),
        (gguf_bytes(tensors=[("t", (31, 2), 2, 0)]), "rows are not blocks of 32"),
        (gguf_bytes(tensors=[("t", (32, 8), 12, 0)]), "rows are not blocks of 256"),
        (gguf_bytes(tensors=[("t", (HUGE, HUGE, HUGE, HUGE), 0, 0)]), "ends at byte"),
        (gguf_bytes(tensors=[("t", (1 << 32, 1 << 32), 0, 0)]), "ends at byte"),  # 2**66 bytes: 0 in 64 bits
        (gguf_bytes(tensors=[("t", (33,), 0, 0)]), "ends at byte"),
        (gguf_bytes(tensors=[("t", (32,), 0, 32)]), "ends at byte"),
        (gguf_bytes(tensors=[("t", (32,), 0, HUGE - 31)]), "ends at byte"),  # wraps to just before the data
        (gguf_bytes(tensors=[("t", (16,), 0, 16)]), "not aligned to 32"),
        (gguf_bytes(tensors=[("t", (32,), 0, 0), ("u", (8,), 0, 32)]), "'u' lies over another"),
        (gguf_bytes(tensors=[(f"t{i}", (32,), 0, 0) for i in range(1000)]), "lies over another"),
    ],
)
def test_lies_in_the_header(raw: bytes, message: str, tmp_path: Path) -> None:
    refused(tmp_path / "x.gguf", raw, message)


def test_a_header_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_HEADER", 1000)
    refused(tmp_path / "x.gguf", gguf_bytes(keys=[key("a", 8, text("x" * 5000))]), "its header exceeds 1,000 bytes")


def test_arrays_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_ELEMENTS", 1000)
    keys = [key(str(i), 9, array(0, 300, bytes(300))) for i in range(4)]
    refused(tmp_path / "x.gguf", gguf_bytes(keys=keys), "1,200 elements, over the limit of 1,000")


def test_records_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_RECORDS", 10)
    many_keys = gguf_bytes(keys=[key(str(i), 0, b"x") for i in range(11)])
    refused(tmp_path / "x.gguf", many_keys, "11 metadata keys do not fit into it, or exceed the limit of 10")
    many_tensors = gguf_bytes(tensors=[(str(i), (8,), 0, 32 * i) for i in range(11)], data=11 * 32)
    refused(tmp_path / "x.gguf", many_tensors, "11 tensors do not fit into it, or exceed")


def test_messages_stay_short(tmp_path: Path) -> None:
    long = "x" * 1_000_000
    path = tmp_path / "x.gguf"
    for raw in (
        gguf_bytes(keys=[key(long, 0, b"x")] * 2),
        gguf_bytes(keys=[key("general.alignment", 8, text(long))]),
        gguf_bytes(tensors=[(long, (33,), 0, 0)]),
        gguf_bytes(tensors=[(long, (32,), 99, 0)]),
        gguf_bytes(keys=[key("general.architecture", 8, text(long))]),
        gguf_bytes(keys=[key("general.architecture", 8, text("llama")), key("llama.expert_count", 8, text(long))]),
        gguf_bytes(keys=[key("general.type", 8, text(long))]),
    ):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match="xxx") as caught:
            read_config(read_gguf(path))
        assert len(str(caught.value)) < len(str(path)) + 500


def test_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening one for reading would wait for ever
    for path in (tmp_path, tmp_path / "none.gguf", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="is not a file"):
            read_gguf(path)


def test_truncation_anywhere(tmp_path: Path) -> None:
    """Cut at every byte of the header, and at many of the data."""
    path = write_llama(tmp_path / "x.gguf", metadata={"tags": ["a", "bc"]})
    whole = path.read_bytes()
    data = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    end = max(tensor.offset + tensor.size for tensor in read_gguf(path).tensors.values())
    for length in [*range(data + 1), *range(data, end, 997), end - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"not a (sound )?GGUF file"):
            read_gguf(path)
    path.write_bytes(whole[:end])
    read_gguf(path)


def test_truncation_after_the_header_was_read(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf")
    file = read_gguf(path)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ValueError, match="truncated after it was opened"):
        dict(read_tensors(file, read_config(file)))


def spoil_bytes(raw: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))


def spoil_word(raw: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(raw) - 8)
    raw[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 31, 1 << 32, 1 << 40, 1 << 63, HUGE)))


@pytest.mark.parametrize("spoil", [spoil_bytes, spoil_word])
def test_random_damage_never_does_worse_than_valueerror(
    spoil: Callable[[bytearray, random.Random], None], tmp_path: Path
) -> None:
    path = write_llama(tmp_path / "x.gguf", metadata={"tags": ["a", "bc"], "rope.scaling.factor": 2.0})
    whole = path.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    rng = random.Random(0)
    accepted = 0
    begun = time.perf_counter()
    for _ in range(1500):
        raw = bytearray(whole[:header])
        spoil(raw, rng)
        path.write_bytes(raw + whole[header:])
        try:
            file = read_gguf(path)
            config = read_config(file)
            numbers = sum(math.prod(values.shape) for _, values in read_tensors(file, config))
        except ValueError:
            continue
        accepted += 1
        assert numbers == config.num_parameters
    assert 0 < accepted < 1500  # damage to a name in the metadata is not always seen; most is
    assert time.perf_counter() - begun < 20
