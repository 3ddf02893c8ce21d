"""The versions that the adapter knows, and its check that all that it reaches for is there."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    UserEnabledConfigDefinition,
)
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.parts import installed, modules
from torchrec_stream_ckpt import model
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.model.optimizers import OPTIMIZERS
from torchrec_stream_ckpt.model.versions import HOOK_POINTS, KERNEL, OPTIMIZER_WRAPPER, TESTED, Stack

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
ADAPTER = Path(model.__file__).parent
_, NEWER = TESTED


@pytest.fixture(autouse=True)
def unsaid() -> Iterator[None]:
    """The warning comes once a process: each test starts a new one, as it were."""
    versions.check_versions.cache_clear()
    yield
    versions.check_versions.cache_clear()


@pytest.fixture
def kernel() -> SplitTableBatchedEmbeddingBagsCodegen:
    return SplitTableBatchedEmbeddingBagsCodegen([(4, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)])


def test_the_locks_hold_what_counts_as_tested() -> None:
    locked = set()
    for lock in REQUIREMENTS.glob("cpu*.txt"):
        pins = dict(re.findall(r"^([\w-]+)==(\S+)$", lock.read_text(), re.MULTILINE))
        locked.add(Stack(pins["torchrec"], pins["fbgemm-gpu-cpu"], pins["torch"]))
    assert locked == set(TESTED)


def test_versions_of_a_lock_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert installed() in TESTED, "run the tests in an environment that make has set up"
    versions.check_versions()
    assert caplog.records == []


def test_unknown_version_warns_once_with_what_was_found_and_tested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torchrec, "__version__", "99.1+local")
    for _ in range(3):
        versions.check_versions()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "torchrec 99.1 + fbgemm" in record.getMessage()
    assert all(str(stack) in record.getMessage() for stack in TESTED)


@pytest.mark.parametrize(("points", "name"), [(points, name) for points in HOOK_POINTS for name in points.names])
def test_each_name_that_is_missing_is_refused_by_name(points: versions.HookPoints, name: str) -> None:
    stand_in = SimpleNamespace(**{other: None for other in points.names if other != name})
    with pytest.raises(UnsupportedError, match=f"has no {name},") as caught:
        points.require(stand_in, module="a.b", tables="t1,t2")
    said = str(caught.value)
    assert points.owner in said
    assert "module=a.b, tables=t1,t2" in said
    assert all(str(stack) in said for stack in (installed(), *TESTED))


@pytest.mark.parametrize("name", KERNEL.used_inside)
def test_name_that_no_method_uses_any_more_is_refused(name: str) -> None:
    """It is there, and is never set or called: a hook on it would be silent."""

    class StandIn:
        def forward(self) -> None: ...

    stand_in = StandIn()
    for each in KERNEL.names:
        setattr(stand_in, each, None)
    body = "; ".join(f"self.{other}" for other in KERNEL.used_inside if other != name)
    methods: dict[str, object] = {}
    exec(f"def forward(self): {body}", methods)
    StandIn.forward = methods["forward"]  # type: ignore[method-assign, assignment]
    with pytest.raises(UnsupportedError, match=f"no method of the kernel StandIn uses {name},"):
        KERNEL.require(stand_in)


def test_a_real_kernel_passes_and_one_without_a_method_is_refused(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, monkeypatch: pytest.MonkeyPatch
) -> None:
    KERNEL.require(kernel)
    monkeypatch.delattr(SplitTableBatchedEmbeddingBagsCodegen, "reset_embedding_weight_momentum")
    with pytest.raises(UnsupportedError, match="has no reset_embedding_weight_momentum,"):
        KERNEL.require(kernel)


@pytest.mark.pitfall(30)
@pytest.mark.parametrize(
    ("kind", "bias"), [*((kind, False) for kind in [*OPTIMIZERS, EmbOptimType.NONE]), (EmbOptimType.ADAM, True)]
)
def test_kernels_of_every_optimizer_have_what_is_checked(kind: EmbOptimType, bias: bool) -> None:
    """As a GPU would build them, without memory; whether the optimizer itself is captured is another question."""
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 8, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=kind,
        extra_optimizer_config=UserEnabledConfigDefinition(use_rowwise_bias_correction=bias),
        device=torch.device("meta"),
    )
    KERNEL.require(kernel)


@pytest.mark.parametrize("kind", [EmbOptimType.LARS_SGD, EmbOptimType.NONE])
def test_a_kernel_of_an_optimizer_that_is_not_known_is_refused_by_name(kind: EmbOptimType) -> None:
    """TorchRec cannot build a module over LARS, so the kernel itself is shown to the check."""
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 8, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)], optimizer=kind, device=torch.device("meta")
    )
    with pytest.raises(UnsupportedError, match=f"the fused optimizer {kind.name} is not captured"):
        modules.check_kernel(kernel, {})


def test_a_class_is_checked_before_it_has_objects() -> None:
    OPTIMIZER_WRAPPER.require(KeyedOptimizerWrapper)
    with pytest.raises(UnsupportedError, match="no method of the wrapper of an optimizer object uses _optimizer,"):
        OPTIMIZER_WRAPPER.require(object)


def test_the_optimizer_that_is_new_in_1_9_is_known_exactly_where_fbgemm_has_it() -> None:
    """An older FBGEMM has no name to ask for it by; the others are in both."""
    known = {kind.name for kind in OPTIMIZERS}
    assert ("ROWWISE_RMSPROP_AR" in known) == (installed() == NEWER)
    assert known >= {
        "EXACT_SGD",
        "EXACT_ADAGRAD",
        "EXACT_ROWWISE_ADAGRAD",
        "EMAINPLACE_ROWWISE_ADAGRAD",
        "ADAM",
        "LAMB",
    }


def table_names() -> set[str]:
    """First column of the table in the adapter's docstring, without the lines that name an owner."""
    _, _, body, _ = re.split(r"^=+  =+  =+$", model.__doc__ or "", flags=re.MULTILINE)
    rows = [line for line in body.splitlines() if line.startswith("``")]
    return {name for row in rows for name in re.findall(r"``(\w+)``", re.split(r"\s\d+\.\d+\s", row)[0])}


def checked_names() -> set[str]:
    return {name for points in HOOK_POINTS for name in (*points.names, *points.used_inside)}


def test_the_table_of_private_api_names_what_the_check_knows() -> None:
    assert table_names() == checked_names()


def test_every_private_name_that_the_room_reads_is_checked_at_attach() -> None:
    read = {
        node.attr
        for path in ADAPTER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert read >= {"_lookups", "_emb_modules"}
    assert read - checked_names() == set(), (
        "add them to HOOK_POINTS of versions.py and to the table of model/__init__.py"
    )
