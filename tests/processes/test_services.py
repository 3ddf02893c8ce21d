"""``stream-ckpt materialize`` as a service in a process of its own: outages, several of them, and what they say."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import synthetic
from tests.faults.disks import CannotMount, fill, small_disk
from tests.faults.materializer import start, wait
from tests.synthetic import Job, image_of_store, images_of_chain
from tests.unit.folded_job import check_folded, events_of, folded_job, has, lose_frames, materialize, store_of
from tests.unit.scrubbed_job import harm
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.util.layout import SCRUB_DIR, manifest_name
from torchrec_stream_ckpt.util.metrics import METRICS
from torchrec_stream_ckpt.util.ports import free_port
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three markers, folded; the fourth is committed and not folded yet."""
    return folded_job(tmp_path / "log")


@pytest.fixture
def serving(job: Job) -> Iterator[Callable[..., Path]]:
    """Starts services in processes of their own; returns the file that takes what they print."""
    started = []

    def serve(*more: str) -> Path:
        output = job.root.parent / f"output-{len(started)}"
        output.touch()
        arguments = [f"file://{job.root}", "--store", str(store_of(job)), "--poll-s", "0.02", "--json", *more]
        started.append(start(arguments, output))
        serve.process = started[-1]  # type: ignore[attr-defined]
        return output

    yield serve
    for process in started:
        process.kill()
        process.join()


def test_a_full_disk_is_outlasted(job: Job, serving: Callable[..., Path]) -> None:
    disk = job.root.parent / "disk"
    try:
        with small_disk(disk, 2 * 2**20):
            ballast = fill(disk, 16 * 2**10)
            output = serving("--store", str(disk / "store"))
            wait("the full disk", lambda: "No space left" in output.read_text(), output)
            assert not list((disk / "store").rglob(".put-*"))
            ballast.unlink()
            wait("the fourth marker", has(output, "marker", marker="1:4"), output)
            wait("the end of that round", has(output, "recovered"), output)
            kinds = [event["event"] for event in events_of(output)]
            assert kinds.count("trouble") == kinds.count("recovered") == 1, "it is said once"
            lineage, objects = Control(job.log).refresh(), open_store(str(disk / "store"))
            for commit, image in images_of_chain(job.log, lineage, MarkerId(1, 4)):
                assert image_of_store(objects, lineage, commit.id) == image
    except CannotMount as error:
        pytest.skip(str(error))


def test_it_waits_for_a_log_and_its_first_marker_and_ends_by_sigterm(
    tmp_path: Path, job: Job, serving: Callable[..., Path]
) -> None:
    late = Job(tmp_path / "late" / "log")
    output = tmp_path / "output"
    output.touch()
    process = start([f"file://{late.root}", "--poll-s", "0.02", "--json"], output)  # the store: where the job says
    try:
        wait("it to wait", has(output, "waiting"), output)
        late.begin()
        late.touch()
        late.commit(store=f"file://{tmp_path}/kept")
        wait("the marker", has(output, "marker", marker="1:1", lag_markers=0), output)
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join(20)
        assert process.exitcode == 0
        assert events_of(output)[-1]["event"] == "stop"
    finally:
        process.kill()
        process.join()
    assert Catalog.load(open_store(str(tmp_path / "kept")), synthetic.JOB).markers == {MarkerId(1, 1)}


def test_several_at_one_store_do_no_harm_and_the_last_one_goes_on(job: Job, serving: Callable[..., Path]) -> None:
    outputs, processes = [], []
    for _ in range(3):
        outputs.append(serving())
        processes.append(serving.process)  # type: ignore[attr-defined]
    everything = lambda marker: any(has(output, "marker", marker=marker)() for output in outputs)  # noqa: E731
    wait("the fourth marker", lambda: everything("1:4"), outputs[0])
    for number in (0, 1):
        processes[number].kill()
        processes[number].join()
        job.touch(2)
        marker = str(job.commit().id)
        wait(marker, lambda marker=marker: marker_is_there(job, marker), outputs[2])
    wait("its line", has(outputs[2], "marker", marker="1:6"), outputs[2])
    check_folded(job, [1, 2, 3, 4, 5, 6])


def marker_is_there(job: Job, marker: str) -> bool:
    return (store_of(job) / manifest_name(synthetic.JOB, MarkerId.parse(marker))).exists()


def test_metrics_say_where_it_stands(job: Job, serving: Callable[..., Path]) -> None:
    port = free_port()
    output = serving("--metrics-port", str(port))
    wait("the fourth marker", has(output, "marker", marker="1:4"), output)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    assert '{stream_job="log"} ' in text
    text = text.replace('{stream_job="log"}', "")
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    assert values.keys() == {metric.name for metric in METRICS.values()}
    prefix = "stream_ckpt_materializer"
    assert values[f"{prefix}_markers_total"] == 1
    assert values[f"{prefix}_newest_marker"] == 4
    assert values[f"{prefix}_head_marker"] == 0
    assert values[f"{prefix}_lag_markers"] == values[f"{prefix}_errors_total"] == 0
    (event,) = (each for each in events_of(output) if each["event"] == "marker")
    assert values[f"{prefix}_frames_read_bytes_total"] == event["frames_bytes"] > 0  # type: ignore[operator]
    assert values[f"{prefix}_segments_written_bytes_total"] == event["segment_bytes"]


def interval(job: Job, marker: int = 2) -> Path:
    (path,) = store_of(job).glob(f"segments/*/g00000001-r00000-m{marker:08d}-p000.seg")
    return path


def test_a_service_mends_what_nobody_reads_and_folds_on(job: Job, serving: Callable[..., Path]) -> None:
    assert materialize(job)[0] == 0
    whole = harm(interval(job))
    output = serving("--scrub-bytes-per-s", "50MB")
    wait("the pass", has(output, "scrubbed", damaged=0), output)
    name = str(interval(job).relative_to(store_of(job)))
    (repaired,) = [each for each in events_of(output) if each["event"] == "repaired"]
    assert (repaired["name"], repaired["source"], repaired["aside"]) == (name, "the log", f"damaged/{name}")
    assert interval(job).read_bytes() == whole
    job.touch(2)
    job.commit()
    wait("a marker", has(output, "marker", marker="1:5"), output)
    check_folded(job, [1, 2, 3, 4, 5])
    serving.process.terminate()  # type: ignore[attr-defined]
    wait("the end", has(output, "stop"), output)
    assert len(list(store_of(job).glob(f"{SCRUB_DIR}/*/service-*"))) == 1
    again = serving("--scrub-bytes-per-s", "50MB")
    wait("its first round", has(again, "start"), again)
    time.sleep(0.5)
    assert not has(again, "scrubbed")(), "a pass begins an hour after the one before"


def test_what_cannot_be_mended_is_said_and_folding_goes_on(job: Job, serving: Callable[..., Path]) -> None:
    assert materialize(job)[0] == 0
    job.touch(2)
    lose_frames(job)
    job.root.joinpath("data").mkdir(exist_ok=True)
    harm(interval(job))
    output = serving("--scrub-bytes-per-s", "50MB")
    wait("the pass", has(output, "scrubbed", damaged=1), output)
    (damaged,) = [each for each in events_of(output) if each["event"] == "damaged"]
    assert damaged["name"] == str(interval(job).relative_to(store_of(job)))
    assert damaged["lost"]
    assert serving.process.is_alive()  # type: ignore[attr-defined]
