"""Digests of dense entries: bits count, parts add up, and a GPU is asked a fixed number of times."""

from __future__ import annotations

import struct
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.plain_proof import MASK, mix
from torchrec_stream_ckpt.dense import dense_digests
from torchrec_stream_ckpt.dense.dense_digests import LocalBox, digests
from torchrec_stream_ckpt.dense.dense_prover import MAX_ENTRIES, DenseTurns
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format import proof
from torchrec_stream_ckpt.format.dense_proof import COLUMNS, MODULUS, SECTION, digest_words
from torchrec_stream_ckpt.format.entry_digests import DenseProof, bytes_digest, scalars_digest
from torchrec_stream_ckpt.format.proof import column_keys, replicated_id, row_keys
from torchrec_stream_ckpt.inner import DenseMarks
from torchrec_stream_ckpt.proofs.dense import not_as_proved
from torchrec_stream_ckpt.util.types import MarkerId

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits of ``dtype``."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def by_the_definition(name: str, tensor: torch.Tensor) -> int:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data, f"<i{min(4, tensor.element_size())}")
    columns = column_keys(0, COLUMNS)
    rows = row_keys(replicated_id(name), SECTION, np.arange(len(words) // COLUMNS + 1, dtype=np.int64))
    return (
        sum(int(word) * int(rows[m // COLUMNS]) * int(columns[m % COLUMNS]) for m, word in enumerate(words)) % MODULUS
    )


@pytest.fixture(params=["by the kernel", "by numpy"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by numpy":
        monkeypatch.setattr(proof, "kernel", lambda: None)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_tensor_and_a_part_of_it_have_the_digests_of_the_definition(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 3 * COLUMNS + 77)
    expected = by_the_definition("a", tensor)
    runs = dense_digests.word_runs("a", LocalBox.of(tensor), (5, 2 * COLUMNS + 9))
    part = sum(digest_words("a", run.words.numpy(), run.first) for run in runs) % MODULUS
    rest = tensor.clone()
    rest[5 : 2 * COLUMNS + 9] = 0
    assert digests({"a": tensor}, {"a": (0, tensor.numel())})["a"] == expected
    assert (part + by_the_definition("a", rest)) % MODULUS == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_is_that_of_the_definition(dtype: torch.dtype) -> None:
    tensors = {f"{shape}": random_tensor(dtype, *shape) for shape in [(), (0,), (3,), (40, 70), (5, 0, 2)]}
    assert digests(tensors) == {name: by_the_definition(name, tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_finds_the_same_digests(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_digests, "_PIECE_WORDS", 2 * COLUMNS)
    tensors = {f"{shape}": random_tensor(dtype, *shape) for shape in [(), (0,), (3,), (40, 170), (1024,), (90, 91)]}
    runs = [run for name, tensor in tensors.items() for run in dense_digests.word_runs(name, LocalBox.of(tensor))]
    found = {run.name: digest for run, digest in zip(runs, dense_digests.digest_on_device(runs), strict=True)}
    assert {"(0,)": 0, **found} == digests(tensors)


def test_memory_does_not_matter() -> None:
    whole = torch.randn(40, 70)
    assert digests({"a": whole.t().contiguous().t()}) == digests({"a": whole})
    assert digests({"a": torch.ones(1).expand(3000)}) == digests({"a": torch.ones(3000)})
    assert digests({"a": whole[:, ::3]}) == digests({"a": whole[:, ::3].clone()})
    turned = torch.randn(30, dtype=torch.complex64)
    assert digests({"a": turned.conj()}) == digests({"a": turned.conj().resolve_conj()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 1100)
    before = digests({"a": tensor})
    raw = tensor.view(torch.uint8)
    for byte in [0, 1, len(raw) // 2, len(raw) - 1]:
        for bit in range(1 if dtype == torch.bool else 8):
            raw[byte] ^= 1 << bit
            assert digests({"a": tensor}) != before
            raw[byte] ^= 1 << bit
    assert digests({"a": tensor}) == before


def test_zeros_of_two_signs_and_nans_of_two_payloads_differ() -> None:
    assert digests({"a": torch.tensor([0.0])}) != digests({"a": torch.tensor([-0.0])})
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digests({"a": nans[:1]}) != digests({"a": nans[1:]})
    assert digests({"a": nans}) == digests({"a": nans.clone()})


def test_signs_of_any_two_elements_do_not_cancel() -> None:
    """Two flips of the highest bit cancel if a word has eight bytes: its key is odd."""
    tensor = torch.zeros(64, dtype=torch.float64)
    tensor[3] = tensor[40] = -0.0
    assert digests({"a": tensor}) != digests({"a": torch.zeros(64, dtype=torch.float64)})


@pytest.mark.parametrize("box", [(3, 5, 0, 70), (0, 40, 1, 69), (0, 1, 0, 70), (39, 40, 69, 70), (5, 5, 0, 70)])
def test_parts_add_up(box: tuple[int, int, int, int]) -> None:
    """Whatever is cut out of a tensor: the box and what is left of it."""
    whole = torch.randn(40, 70, dtype=torch.float64)
    row, row_end, column, column_end = box
    rest = whole.clone()
    rest[row:row_end, column:column_end] = 0
    part = LocalBox(whole[row:row_end, column:column_end], (40, 70), (row, column))
    digest = sum(digest_words("a", run.words.numpy(), run.first) for run in dense_digests.word_runs("a", part))
    assert (digest + digests({"a": rest})["a"]) % MODULUS == digests({"a": whole})["a"]
    if row < row_end:
        assert (len(list(part.runs())) == 1) == (column_end - column == 70 or row_end - row == 1)


def test_many_small_tensors_have_the_digests_of_each() -> None:
    tensors = {f"{dtype}{n}": random_tensor(dtype, n % 90, n % 7 + 1) for dtype in DTYPES for n in range(60)}
    assert digests(tensors) == {name: digests({name: tensor})[name] for name, tensor in tensors.items()}
    assert all(digests(tensors)[name] == by_the_definition(name, tensor) for name, tensor in [*tensors.items()][::17])


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64], ids=str)
def test_medium_tensors_that_share_a_matrix_have_the_digests_of_each(dtype: torch.dtype) -> None:
    sizes = [limit + more for limit in (1 << 14, 1 << 19) for more in (-64, 0, 64)] + [1 << 18] * 5
    tensors = {f"p{place}": random_tensor(dtype, size // dtype.itemsize) for place, size in enumerate(sizes)}
    tensors["parameter"] = torch.nn.Parameter(tensors["p1"].clone(), requires_grad=dtype.is_floating_point)
    tensors["strided"] = random_tensor(dtype, 300, 200).t()
    expected = {name: by_the_definition(name, tensor.detach()) for name, tensor in tensors.items()}
    assert digests(tensors) == expected
    assert digests(dict(reversed(tensors.items()))) == expected


@pytest.mark.parametrize("shape", [(50, 70), (9,)])
def test_spans_of_an_entry_add_up(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, dtype=torch.float64)
    size = whole.numel()
    cuts = [0, 1, size // 3, size - 1, size]
    parts = [digests({"a": whole}, {"a": span})["a"] for span in pairwise(cuts)]
    assert sum(parts) % MODULUS == digests({"a": whole})["a"]


def test_the_name_counts() -> None:
    tensor = torch.randn(10)
    assert digests({"a": tensor})["a"] != digests({"b": tensor})["b"]


class Counted(TorchDispatchMode):
    """Counts operators of torch, views apart: each is a launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_launches_do_not_grow_with_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _tensor: True))
    counted = []
    for number in (3, 300):
        tensors = {f"{dtype}{each}": random_tensor(dtype, 7, 9) for dtype in DTYPES for each in range(number)}
        with Counted() as mode:
            digests(tensors)
        counted.append(mode.calls)
    assert counted[0] == counted[1]
    assert sum(counted[0].values()) < 20


# Digests of dense state in MARK: by plain integers, which entries a marker proves, and what readers make of them.


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
