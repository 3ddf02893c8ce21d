"""Digests of dense state in MARK: by plain integers, which entries a marker proves, and what readers make of them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.plain_proof import MASK, mix
from torchrec_stream_ckpt.dense.dense_prover import MAX_ENTRIES, DenseTurns
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.dense_proof import digest_words
from torchrec_stream_ckpt.format.entry_digests import DenseProof, bytes_digest, scalars_digest
from torchrec_stream_ckpt.format.proof import replicated_id
from torchrec_stream_ckpt.inner import DenseMarks
from torchrec_stream_ckpt.proofs.dense import not_as_proved
from torchrec_stream_ckpt.util.types import MarkerId

SCALARS = [(1, 0, 2**40, 0, 16, 2**63, 1.0, 0.1, -0.0)]


def plain_digest(name: str, words: list[int]) -> int:
    """As docs/format.md has it: row m div 1024, column m mod 1024, section 63."""
    seed, total = mix(64 * replicated_id(name) + 63), 0
    for place, word in enumerate(words):
        row, column = divmod(place, 1024)
        of_row = 1 | mix((row * 0x9E3779B97F4A7C15 + seed) & MASK)
        total += word * of_row * (1 | mix((column + 0x9E3779B97F4A7C15) & MASK))
    return total & MASK


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 4096, 4101, 9001])
def test_a_blob_is_words_of_4_bytes_and_its_length(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    padded = data.tobytes().ljust(-(-size // 4) * 4, b"\0")
    words = [*struct.unpack(f"<{len(padded) // 4}i", padded), size]
    assert bytes_digest("rank0.random", data) == plain_digest("rank0.random", words)


def test_a_blob_that_ends_in_zeros_is_not_the_shorter_one() -> None:
    data = np.zeros(12, np.uint8)
    assert len({bytes_digest("shared.seed", data[:size]) for size in range(13)}) == 13


def test_scalars_are_numbers_of_8_bytes() -> None:
    packed = b"".join(struct.pack("<QQQQQQddd", *each) for each in SCALARS)
    words = list(struct.unpack(f"<{len(packed) // 4}i", packed))
    assert scalars_digest(SCALARS) == plain_digest("scalars", words)
    assert scalars_digest(SCALARS) == digest_words("scalars", np.frombuffer(packed, "<i4"))
    assert scalars_digest([(*SCALARS[0][:-1], 0.0)]) != scalars_digest(SCALARS)  # -0.0 is another value


def test_scalars_that_differ_are_refused_with_both_digests() -> None:
    proof = DenseProof.of({}, scalars_digest(SCALARS))
    proof.check_scalars(SCALARS, "MARK.scalars")
    with pytest.raises(CorruptionError, match=rf"their digest is 0{{16}}, expected {proof.scalars:016x}"):
        proof.check_scalars([], "MARK.scalars")


def test_a_small_dense_state_is_proved_whole_at_each_marker() -> None:
    turns = DenseTurns(100)
    for _ in range(3):
        names, after = turns.choose({"a": 60, "b": 40})
        assert names == ["a", "b"]
        turns.settled(after, committed=True)


def test_a_large_one_is_proved_whole_at_first_and_then_by_turns() -> None:
    turns, sizes = DenseTurns(100), {"a": 60, "b": 60, "c": 30, "d": 500, "e": 10}
    rounds = []
    for _ in range(6):
        names, after = turns.choose(sizes)
        rounds.append(names)
        turns.settled(after, committed=True)
    assert rounds == [["a", "b", "c", "d", "e"], ["a"], ["b", "c"], ["d"], ["e", "a"], ["b", "c"]]


def test_a_marker_that_was_given_up_has_proved_nothing() -> None:
    turns, sizes = DenseTurns(10), {"a": 10, "b": 10}
    turns.settled("", committed=False)
    assert turns.choose(sizes) == (["a", "b"], "")
    turns.settled("", committed=True)
    for committed in (False, True):
        names, after = turns.choose(sizes)
        assert names == ["a"]
        turns.settled(after, committed=committed)
    assert turns.choose(sizes)[0] == ["b"]


def test_under_paranoid_every_marker_proves_all() -> None:
    turns = DenseTurns(10, whole=True)
    turns.settled("", committed=True)
    assert turns.choose({"a": 100, "b": 100}) == (["a", "b"], "")


def test_entries_beyond_what_a_frame_takes_go_by_turns() -> None:
    turns, sizes = DenseTurns(1 << 40), {f"{number:06d}": 1 for number in range(MAX_ENTRIES + 5)}
    names, after = turns.choose(sizes)
    assert len(names) == MAX_ENTRIES
    turns.settled(after, committed=True)
    assert turns.choose(sizes)[0][:5] == sorted(sizes)[-5:]
    assert len(DenseProof.of(dict.fromkeys(names, MASK), 0).entries) < 250_000


def test_digests_of_parts_add_up_over_ranks() -> None:
    proofs = {0: DenseProof.of({"model.w": MASK, "rank0.random": 5}, 0), 1: DenseProof.of({"model.w": 3}, 0)}
    marks = DenseMarks(proofs, 2)
    assert marks.differing({"model.w": 2, "rank0.random": 5, "model.unknown": 1}) == []
    (each,) = marks.differing({"model.w": 3})
    assert str(each) == "model.w (digest 0000000000000003, ranks 0, 1 proved 0000000000000002)"
    for error in (not_as_proved([each], MarkerId(1, 3)), DenseMarks.damaged([each], MarkerId(1, 3))):
        assert error.where == {"marker": MarkerId(1, 3), "entry": "model.w", "rank": 0}


def test_without_all_marks_only_blobs_are_compared() -> None:
    marks = DenseMarks({0: DenseProof.of({"model.w": 1, "rank0.random": 5}, 0)}, 2)
    assert [each.name for each in marks.differing({"model.w": 2, "rank0.random": 6})] == ["rank0.random"]
