"""What was measured, as tables for people, as JSON to be filed, and as plots like the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baselines import Timing
from common import Goal
from measure import Record

Part = Callable[[Timing], float | None]

PARTS: dict[str, Part] = {"whole": lambda timing: timing.whole_s, "delta": lambda timing: timing.delta_s}
NAIVE, DEFAULT = "naive", "store, by default"
COPY, MAPPED = "torch.load + copy", "torch.load, mmap + copy"

# Of the abstract and section 5 of PVLDB 18(4).
PAPER = {
    "IncrCP recovery, naive / IncrCP": "6.6x HDD, 4.7x flash, 5.2x 3D XPoint",
    "IncrCP storage / Check-N-Run's": "44% HDD, 34% flash, 34% 3D XPoint",
    "naive's copy to the CPU is faster by": "13.6 to 26%; construction here is all of the work",
}


def ratio(mine: Sequence[float], base: Sequence[float]) -> float:
    """Median, over rounds, of base / mine: 2 is twice as fast."""
    return statistics.median(other / max(own, 1e-6) for own, other in zip(mine, base, strict=True))


def summary(records: Mapping[str, Record], newest: str = "torch.load") -> dict[str, Any]:
    """A group's records as plain values."""
    return {name: _one(records, record, newest) for name, record in records.items()}


def _one(records: Mapping[str, Record], record: Record, newest: str) -> dict[str, Any]:
    return {
        "unavailable": record.unavailable,
        "no_cold": record.no_cold,
        "exact": record.exact,
        "build_ms": [round(1e3 * seconds, 2) for seconds in record.build_s],
        "stored": record.stored,
        "written": record.written,
        "read_back": record.read_back,
        "dead": record.dead,
        "reads": {str(marker): asdict(reads) for marker, reads in record.reads.items()},
        "warm": _times(record.warm, records[NAIVE].warm, _of(records, newest, "warm")),
        "cold": _times(record.cold, records[NAIVE].cold, _of(records, newest, "cold")),
    }


def _of(records: Mapping[str, Record], name: str, which: str) -> dict[int, list[Timing]]:
    found: dict[int, list[Timing]] = getattr(records[name], which) if name in records else {}
    return found


def _times(
    mine: Mapping[int, list[Timing]], naive: Mapping[int, list[Timing]], saved: Mapping[int, list[Timing]]
) -> dict[str, dict[str, Any]]:
    """By marker: medians and all rounds in ms, how many times faster than naive, and than reading torch.save."""
    result = {}
    for marker, timings in mine.items():
        row: dict[str, Any] = {}
        for part, of in PARTS.items():
            own = [seconds for timing in timings if (seconds := of(timing)) is not None]
            if not own:
                continue
            row[f"{part}_ms"] = round(1e3 * statistics.median(own), 2)
            row[f"{part}_ms_rounds"] = [round(1e3 * seconds, 2) for seconds in own]
            base = [seconds for timing in naive.get(marker, []) if (seconds := of(timing)) is not None]
            if len(base) == len(own):
                row[f"{part}_naive_ratio"] = round(ratio(own, base), 3)
        if len(saved.get(marker, [])) == len(timings):
            whole = [timing.whole_s for timing in timings]
            row["torch_load_ratio"] = round(ratio(whole, [timing.whole_s for timing in saved[marker]]), 3)
        result[str(marker)] = row
    return result


def lines(name: str, group: Mapping[str, Any]) -> list[str]:
    """One group of schemes as text."""
    found = [name, *_storage_lines(group)]
    for which in ("warm", "cold"):
        for part in PARTS:
            found += _time_lines(group, which, part)
    return found


def _storage_lines(group: Mapping[str, Any]) -> list[str]:
    head = f"  {'scheme':26}{'stored GB':>10}{'/ naive':>9}{'written GB':>12}{'amplif.':>9}{'read GB':>9}{'build s':>9}"
    found = [head]
    naive = group[NAIVE]["stored"][-1]
    for scheme, row in group.items():
        if row["unavailable"] or not row["stored"] or not row["stored"][-1]:
            found.append(f"  {scheme:26}  {row['unavailable'] or 'has no files of its own'}")
            continue
        stored, written, read_back = row["stored"][-1], row["written"][-1], row["read_back"][-1]
        found.append(
            f"  {scheme:26}{stored / 1e9:>10.3f}{stored / naive:>9.2f}{written / 1e9:>12.3f}{written / naive:>9.2f}"
            f"{read_back / 1e9:>9.3f}{sum(row['build_ms']) / 1e3:>9.2f}"
        )
    return found


def _time_lines(group: Mapping[str, Any], which: str, part: str) -> list[str]:
    markers = list(group[NAIVE][which])
    if not markers:
        return [f"  {which}: {group[NAIVE]['no_cold'] or 'not measured'}"]
    found = [
        f"  {which}, {part}: ms (times as fast as naive)",
        f"  {'marker':26}" + "".join(f"{m:>16}" for m in markers),
    ]
    for scheme, row in group.items():
        if any(f"{part}_ms" in times for times in row[which].values()):
            found.append(f"  {scheme:26}" + "".join(f"{_cell(row[which].get(m), part):>16}" for m in markers))
    return found


def _cell(row: Mapping[str, Any] | None, part: str) -> str:
    if row is None or f"{part}_ms" not in row:
        return "-"
    times = f"{row[f'{part}_naive_ratio']:.2f}x" if f"{part}_naive_ratio" in row else "-"
    return f"{row[f'{part}_ms']:.1f} ({times})"


def against_paper(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the paper reports of IncrCP, beside what its layout does here."""
    one, new = groups.values()
    found: dict[str, Any] = {"paper": PAPER}
    for name, group in (("IncrCP", one), ("IncrCP, base reset", new)):
        if name in group and group[name]["warm"]:
            row, naive = group[name], group[NAIVE]
            found[name] = {
                "construction / naive's": round(sum(row["build_ms"][1:]) / sum(naive["build_ms"][1:]), 2),
                **{
                    f"recovery, {which}, {part}, naive / IncrCP": {
                        marker: times.get(f"{part}_naive_ratio") for marker, times in row[which].items()
                    }
                    for which in ("warm", "cold")
                    for part in PARTS
                },
            }
    for name, chain, group in (
        ("storage, IncrCP / differential", ("IncrCP", "differential"), one),
        ("storage, IncrCP / Check-N-Run", ("IncrCP, base reset", "Check-N-Run"), new),
    ):
        if all(each in group and group[each]["stored"] for each in chain):
            found[name] = round(group[chain[0]]["stored"][-1] / group[chain[1]]["stored"][-1], 3)
    return found


def goals(groups: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """What the store as it is by default should reach, beside schemes of its own group."""
    group = list(groups.values())[-1]
    ours, naive = group.get(DEFAULT, {}), group[NAIVE]
    found = []
    for marker, least in (("50", 1.9), ("150", 2.7)):
        for which in ("warm", "cold"):
            times = ours.get(which, {}).get(marker, {})
            what = f"delta of marker {marker}, {which}: naive / {DEFAULT}"
            found.append(Goal.at_least(what, least, times.get("delta_naive_ratio")))
    for which, most in (("warm", 1.0), ("cold", 1.2)):
        for other in (COPY, MAPPED):
            pair = [_newest(group.get(name, {}), which) for name in (DEFAULT, other)]
            share = ratio(pair[1], pair[0]) if all(pair) else None
            found.append(Goal.at_most(f"newest marker, {which}: {DEFAULT} / {other}", most, share, "x"))
    if ours.get("written"):
        share = (ours["written"][-1] - ours["written"][0]) / (naive["written"][-1] - naive["written"][0])
        found.append(Goal.at_most(f"written after the first base: {DEFAULT} / naive", 2.5, share, "x"))
    return found


def _newest(row: Mapping[str, Any], which: str) -> list[float]:
    """Rounds of the whole restore of the newest marker."""
    times = row.get(which) or {}
    return list(times[max(times, key=int)]["whole_ms_rounds"]) if times else []


def newest_lines(group: Mapping[str, Any]) -> list[str]:
    """Newest marker against reading a ``torch.save`` file of the same tables."""
    found = ["  newest marker: whole restore, ms (times as fast as torch.load)"]
    for which in ("warm", "cold"):
        for scheme, row in group.items():
            last = row[which].get(max(row[which], key=int)) if row[which] else None
            if last and "torch_load_ratio" in last:
                found.append(f"  {which:6}{scheme:26}{last['whole_ms']:>10.1f} ({last['torch_load_ratio']:.2f}x)")
    return found


def plot(workload: str, groups: Mapping[str, Mapping[str, Any]], stem: Path) -> list[Path]:
    """Recovery time, storage and construction over markers, and warm beside cold: figures 10 to 12 and 16."""
    import matplotlib as mpl

    mpl.use("Agg")
    return [
        _plot(stem, "recovery", lambda axes: _recovery(axes, groups), f"{workload}: recovery, page cache warm"),
        _plot(stem, "storage", lambda axes: _over_markers(axes, groups, "stored", 1e9, "GB stored"), workload),
        _plot(stem, "written", lambda axes: _over_markers(axes, groups, "written", 1e9, "GB written"), workload),
        _plot(stem, "construction", lambda axes: _construction(axes, groups), f"{workload}: construction"),
        _plot(stem, "warm-cold", lambda axes: _bars(axes, groups), f"{workload}: newest marker, whole restore"),
    ]


def _plot(stem: Path, what: str, draw: Callable[[Any], None], title: str) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    draw(axes)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    path = stem.with_name(f"{stem.name}_{what}.png")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _each(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Every scheme once; naive is in each group, as what the others are held against."""
    found: dict[str, Any] = {}
    for group in groups.values():
        for scheme, row in group.items():
            found.setdefault(scheme, row)
    return found


def _recovery(axes: Any, groups: Mapping[str, Mapping[str, Any]]) -> None:
    for scheme, row in _each(groups).items():
        if len(row["warm"]) > 1:
            axes.plot([int(m) for m in row["warm"]], [t["whole_ms"] for t in row["warm"].values()], "o-", label=scheme)
    axes.set(xlabel="marker", ylabel="ms", ylim=(0, None))


def _over_markers(axes: Any, groups: Mapping[str, Mapping[str, Any]], key: str, unit: float, label: str) -> None:
    for scheme, row in _each(groups).items():
        if len(row["warm"]) > 1:
            axes.plot([value / unit for value in row[key]], label=scheme)
    axes.set(xlabel="marker", ylabel=label, yscale="log")


def _construction(axes: Any, groups: Mapping[str, Mapping[str, Any]]) -> None:
    for scheme, row in _each(groups).items():
        if any("delta_ms" in times for times in row["warm"].values()):
            axes.plot(range(1, len(row["build_ms"])), row["build_ms"][1:], label=scheme, linewidth=1)
    axes.set(xlabel="marker", ylabel="ms a marker, durable", yscale="log")


def _bars(axes: Any, groups: Mapping[str, Mapping[str, Any]]) -> None:
    rows = {scheme: row for scheme, row in _each(groups).items() if row["warm"]}
    newest = max(int(marker) for row in rows.values() for marker in row["warm"])
    shown = [scheme for scheme, row in rows.items() if str(newest) in row["warm"]]
    for place, which in enumerate(("warm", "cold")):
        heights = [rows[scheme][which].get(str(newest), {}).get("whole_ms", 0.0) for scheme in shown]
        axes.barh([number + 0.4 * place for number in range(len(shown))], heights, height=0.4, label=which)
    axes.set(xlabel="ms", yticks=[number + 0.2 for number in range(len(shown))], yticklabels=shown)
    axes.invert_yaxis()
