"""Generate docs/coverage.md from the ``covers`` markers of the tests.

``python -m tests.coverage`` writes it; a test holds it up to date. A marker names a cell of the cross product
(optimizer, kernel, plan, module, pipeline), what is so there (``exact``, ``limited``, ``refused`` or ``unverified``),
and why. Its argument ``served`` lists what the test has served of the job, names of :data:`SERVED` with commas.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import astuple, dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOC = ROOT / "docs" / "coverage.md"
# What is known to go wrong in checkpoints of TorchRec and FBGEMM; a test carries the number in a ``pitfall`` marker.
PITFALLS = {
    1: "ids are known at the lookup, before the update: rows read in between are stale",
    2: "a semi-synchronous pipeline looks up the next batch before the backward of this one",
    3: "evaluation and no_grad lookups change nothing, but may be recorded",
    4: "two modules have features of one name",
    5: "a model without dense parameters is not wrapped by DDP",
    6: "EmbeddingCollection removes double ids before the lookup",
    7: "with VBE, the bounds of a feature's ids are not at multiples of one batch size",
    8: "the linear row space of a kernel is not the one of its cache, and has no slot for ignored ids",
    9: "under UVM caching the newest value of a row is in the cache, not in the table",
    10: "a prefetch moves rows before the backward of an earlier batch",
    11: "key-value (SSD) tables hold rows in more than one place",
    12: "the column shards of a table have the same row ids",
    13: "row-wise state is laid out end to end under column-wise plans, with rolling offsets under grid",
    14: "a change of the column split changes the optimizer's meaning",
    15: "2D parallelism averages rows that no local lookup has touched",
    16: "fully sharded 2D parallelism resizes the tables' storage between forward and backward",
    17: "memory stashing frees tables between forward and backward",
    18: "managed collision gives ids other rows, and its eviction writes rows outside the update",
    19: "the reset of evicted rows clears the optimizer's rows under row-wise Adagrad only",
    20: "the 2D sync of hash tables (MPZCH) permutes whole tables",
    21: "ITEP prunes rows and keeps an address table next to them",
    22: "EMA and ensemble optimizers rewrite whole tables on some steps",
    23: "lazy weight decay and counters need the row's last iteration, its counter, and the table's largest one",
    24: "Adam's iteration is in no state dict",
    25: "the kernel counts in iter_cpu, while set_optimizer_step sets iter alone",
    26: "low-precision rows are rounded at random: replaying gradients does not reproduce them",
    27: "clipping and max_norm change a row by another value than its gradient",
    28: "momentum moves rows whose gradient is zero",
    29: "tables with the dense kernel are updated by the dense optimizer, later",
    30: "CPUs run five of the fused optimizers only",
    31: "DMP.reshard rebuilds the kernels and drops hooks and iterations",
    32: "a sharded module has one slot for a tracker, and the last one registered gets it",
    33: "optimizer states have other names in TorchRec than in FBGEMM",
    34: "private API changes between versions",
    35: "tables and optimizer rows are written in place, outside the update and every hook",
    36: "kernels are replaced, or captured twice, silently",
    37: "a deep copy of a model takes patched methods of the original along",
}
OUTCOMES = ("exact", "limited", "refused", "unverified")
RESTORED = ("exact", "limited")
"""Outcomes of jobs that have a stream, which can be served."""
SERVED = ("tables", "model", "raw ids")
"""Ways to serve a job."""
FOLDED = (2, 3, 4, 1, 0)
"""Columns in which a line lists several values: plan, module, pipeline, kernel and optimizer."""

INTRO = """# Coverage

Can I use my model with it? First in short, then each combination with its tests.
"""
IN_SHORT = (
    (
        "your job has",
        "restored on a CPU",
        "restored on a GPU (one H100, one rank)",
        "served, on a CPU",
    ),
    (
        "SGD, Adagrad, row-wise Adagrad (weight decay and moving average too), row-wise RMSprop",
        "exact",
        "exact; moving average and row-wise RMSprop: not run",
        "tables, model",
    ),
    (
        "Adam, LAMB, their partial row-wise forms, ensemble row-wise Adagrad",
        "FBGEMM has none",
        "exact; Adam with fp16 weights: FBGEMM fails; ensemble row-wise Adagrad: not run",
        "not tested",
    ),
    (
        "table-wise, row-wise, column-wise, table-column-wise, table-row-wise, grid plans, each into each other",
        "exact",
        "table-wise: exact; the others need several GPUs: not run",
        "tables, model",
    ),
    (
        "another column split under a row-wise optimizer",
        "refused, or merged inexactly",
        "the same",
        "where it is merged: not tested",
    ),
    (
        "`EmbeddingBagCollection`, `EmbeddingCollection`, feature processors, varying batch sizes",
        "exact where TorchRec trains them",
        "exact; feature processors: not run",
        "tables, model",
    ),
    (
        "`DistributedModelParallel`, or `shard_modules` with DDP or FSDP2 around the dense layers",
        "exact",
        "`DistributedModelParallel`: exact; `shard_modules`: not tested",
        "tables, model; `shard_modules`: tables",
    ),
    (
        "managed collision with LFU, LRU, DistanceLFU",
        "exact; shards that split an old one are refused, or by value if `reassigned`",
        "not tested",
        "raw ids, model",
    ),
    (
        "hash ZCH (MPZCH) with TTL, LRU or no eviction",
        "exact, where a stand-in of the tests trains it; other buckets are refused, or by value if `reassigned`",
        "not tested",
        "raw ids, model",
    ),
    (
        "fp32, fp16 or bf16 weights",
        "fp32, fp16: exact; bf16: TorchRec trains none",
        "fp32, fp16: exact; bf16: refused",
        "fp32, fp16: tables, model; bf16: tables, quantized: refused",
    ),
    (
        "a plain loop, `TrainPipelineBase`, `TrainPipelineSparseDist`; semi-synchronous and prefetching pipelines",
        "exact; for semi-synchronous and prefetching pipelines with their order staged by hand",
        "exact; a semi-synchronous one with a UVM cache is refused",
        "not tested with pipelines",
    ),
    (
        "DDP or FSDP2 around the dense part, any optimizer of torch; FSDP1, tables inside FSDP2",
        "exact; FSDP1 and tables inside FSDP2: refused",
        "DDP with SGD, Adam, AdamW, fused and capturable ones too: exact; FSDP2: not tested; the others: refused",
        "DDP with Adam: tables, model; the others: not tested",
    ),
    (
        "UVM tables; SSD and key-value tables, 2D parallelism, ITEP, quantized tables",
        "UVM needs a GPU; the others are refused",
        "UVM: exact, with a cache too; the others: refused",
        "not tested",
    ),
)
"""What people ask first."""
MORE = """\
*Exact*: every table, optimizer state, counter of the kernels and the dense model, restored from a marker, equal those
of the live job at the cut, bit for bit. *Refused*: by an error, with its text. *On an H100*: [one
rank](guarantees.md#on-a-gpu). *Not run*, *not tested*: unknown. Not in it: [writes outside the
update](guarantees.md#limits-of-exactness). `make coverage` generates this page from the tests.

*Served*: the same test [follows](follow.md) the job on a CPU, and compares the answers at markers with the trainer's
state, bit for bit: *tables* by `FollowedTables`, a *model* by `FollowedModel`, in float and in int8, *raw ids* by
`lookup()` of each that has a row. [Refusals](#refused) are separate.

A row covers every combination of the entries that semicolons separate.
"""
HEADINGS = {
    "exact": ("Exact", "shown by"),
    "limited": ("Exact, but not the steps after it", "difference (test that shows it)"),
    "refused": ("Refused", "error (test)"),
    "unverified": ("Unverified", "why (test that shows it)"),
}


SHARDERS = """
## Sharders of TorchRec

All sharders of the installed TorchRec; *exact* for the kernels and plans above.

| sharder | its modules are | test |
|---|---|---|
"""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What one test says of one combination; "any" where a part makes no difference."""

    optimizer: str = "any"
    kernel: str = "any"
    plan: str = "any"
    module: str = "any"
    pipeline: str = "any"

    def __post_init__(self) -> None:
        parts = astuple(self)
        assert not any(";" in part for part in parts), f"a semicolon separates the entries of a list: {parts}"


@dataclass(frozen=True, slots=True)
class Claim:
    cell: Cell
    outcome: str
    test: str
    why: str = ""
    served: str = ""
    """Ways in which the test serves the job: names of :data:`SERVED`, with commas."""


@dataclass(slots=True)
class Suite:
    """What the whole suite says."""

    claims: list[Claim] = field(default_factory=list)
    pitfalls: dict[int, set[str]] = field(default_factory=dict)
    """Number -> tests that carry it."""
    sharders: dict[str, set[tuple[str, str, str]]] = field(default_factory=dict)
    """Sharder of TorchRec -> outcome, what the error says, and test."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """As a plugin of pytest: read the markers of everything collected."""
        for item in session.items:
            test = item.nodeid.split("[")[0].removeprefix("tests/")
            for mark in item.iter_markers("pitfall"):
                for number in mark.args:
                    self.pitfalls.setdefault(number, set()).add(test)
            for mark in item.iter_markers("sharder"):
                outcome, why = mark.kwargs.get("outcome", "exact"), mark.kwargs.get("why", "")
                assert outcome == "exact" or (outcome == "refused" and why), f"{test}: exact, or refused and why"
                for name in mark.args:
                    self.sharders.setdefault(name, set()).add((outcome, why, test))
            for mark in item.iter_markers("covers"):
                says = dict(mark.kwargs)
                outcome, why = says.pop("outcome", "exact"), says.pop("why", "")
                assert outcome in OUTCOMES, f"{test}: unknown outcome {outcome}"
                served = says.pop("served", "")
                assert why or outcome == "exact", f"{test}: say why it is {outcome}"
                assert not served or outcome in RESTORED, f"{test}: nothing can be served of a job that is {outcome}"
                assert not served or set(served.split(", ")) <= set(SERVED), f"{test}: unknown way to serve: {served}"
                self.claims.append(Claim(Cell(**says), outcome, test, why, served))


def carriers() -> list[str]:
    """Files of tests that have such a marker, or import a helper that has one. An item of any other says nothing."""
    texts = {str(path): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    having = {path for path, text in texts.items() if re.search(r"\bmark\.(covers|pitfall|sharder)\b", text)}
    helper = rf"^from tests\b.*\b({'|'.join(Path(path).stem for path in having if '/test_' not in path)})\b"
    having |= {path for path, text in texts.items() if re.search(helper, text, re.MULTILINE)}
    return sorted(path for path in having if "/test_" in path)


def collect() -> Suite:
    """Everything that the suite says, GPU tests included; runs none of it."""
    suite = Suite()
    said = io.StringIO()
    arguments = ["--collect-only", "-q", "-m", "gpu or slow or not slow", "-p", "no:cacheprovider", "--assert=plain"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*arguments, *carriers()], plugins=[suite])
    assert code == pytest.ExitCode.OK, said.getvalue()
    return suite


def render(suite: Suite) -> str:
    """The page."""
    parts = [INTRO, "\n", *_in_short(), "\n", MORE]
    for outcome in OUTCOMES:
        title, shown = HEADINGS[outcome]
        rows: dict[Cell, dict[str, None]] = {}
        served: dict[Cell, set[str]] = {}
        for claim in sorted(suite.claims, key=lambda each: (each.cell, each.why, each.test)):
            if claim.outcome == outcome:
                text = f"{claim.why} (`{claim.test}`)" if claim.why else f"`{claim.test}`"
                rows.setdefault(claim.cell, {})[text] = None
                served.setdefault(claim.cell, set()).update(claim.served.split(", "))
        more = ("served",) if outcome in RESTORED else ()
        heading = ("optimizer", "kernel", "plan", "module", "pipeline", *more, shown)
        parts.append(f"\n## {title}\n\n| {' | '.join(heading)} |\n|{'---|' * len(heading)}\n")
        lines = [
            (*astuple(cell), *(_ways(served[cell]) for _ in more), "; ".join(texts)) for cell, texts in rows.items()
        ]
        for column in FOLDED:
            lines = _fold(lines, column)
        parts += ["| " + " | ".join(line) + " |\n" for line in lines]
    parts.append(SHARDERS)
    for name, said in sorted(suite.sharders.items()):
        for outcome, why, test in sorted(said):
            parts.append(f"| `{name}` | {outcome}{': ' + why if why else ''} | `{test}` |\n")
    parts.append("\n## Pitfalls\n\n| # | pitfall | test |\n|---|---|---|\n")
    for number, text in PITFALLS.items():
        tests = "; ".join(map(_named, sorted(suite.pitfalls.get(number, ()))))
        parts.append(f"| {number} | {text} | {tests} |\n")
    return "".join(parts)


def _ways(served: set[str]) -> str:
    """How a cell is served."""
    return ", ".join(way for way in SERVED if way in served) or "not tested"


def _fold(lines: list[tuple[str, ...]], column: int) -> list[tuple[str, ...]]:
    """Make one line of those that differ in ``column`` only, and list the values there."""
    values: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        values.setdefault((*line[:column], *line[column + 1 :]), []).append(line[column])
    return [(*rest[:column], "; ".join(listed), *rest[column:]) for rest, listed in values.items()]


def _in_short() -> list[str]:
    lines = ["| " + " | ".join(row) + " |\n" for row in IN_SHORT]
    return [lines[0], f"|{'---|' * len(IN_SHORT[0])}\n", *lines[1:]]


def _named(test: str) -> str:
    return f"`{test}` on an H100" if test.startswith("gpu/") else f"`{test}`"


if __name__ == "__main__":
    DOC.write_text(render(collect()))
    print(f"{DOC.relative_to(ROOT)} is up to date")
