"""The short form of every scenario; ``make chaos`` runs the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.faults import brokers, disks, kills, power, surgery, survivors
from tests.faults.board import Board
from tests.faults.subject import Form

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]


@pytest.fixture
def form(tmp_path: Path) -> Iterator[Form]:
    """What is injected through it is judged at the end of the test."""
    form = Form(tmp_path, Board())
    yield form
    Console(width=160).print(form.board.table())
    form.board.check()


def test_killed_on_files(form: Form) -> None:
    kills.kills_on_files(form)


@pytest.mark.kafka
def test_killed_on_kafka(form: Form, bootstrap: str) -> None:
    form.bootstrap = bootstrap
    kills.kills_on_kafka(form)


def test_killed_while_drains_are_slow(form: Form) -> None:
    kills.kills_while_drains_are_slow(form)


def test_one_rank_dies(form: Form) -> None:
    survivors.one_rank_dies(form)


def test_zombies_on_files(form: Form) -> None:
    survivors.zombies_on_files(form)


@pytest.mark.kafka
def test_zombies_on_kafka(form: Form, bootstrap: str) -> None:
    form.bootstrap = bootstrap
    survivors.zombies_on_kafka(form)


def test_the_clock_jumps(form: Form) -> None:
    survivors.clock_jumps(form)


@pytest.mark.kafka
def test_the_broker_dies(form: Form) -> None:
    brokers.broker_dies(form)


@pytest.mark.kafka
def test_the_trainer_dies_in_the_catch_up(form: Form) -> None:
    brokers.catch_up(form)


@pytest.mark.kafka
def test_the_network_fails(form: Form) -> None:
    brokers.network_fails(form)


def test_the_disk_of_the_log_is_full(form: Form) -> None:
    disks.log_full(form)


def test_the_disk_of_the_store_is_full(form: Form) -> None:
    disks.store_full(form)


@pytest.mark.kafka
def test_the_disk_of_the_broker_is_full(form: Form) -> None:
    disks.broker_disk_full(form)


def test_the_disk_fails(form: Form) -> None:
    disks.errors_of_a_disk(form)


def test_writes_are_short(form: Form) -> None:
    disks.short_writes(form)


def test_frames_of_a_file_log_are_tampered_with(form: Form) -> None:
    surgery.frames_on_files(form)


@pytest.mark.kafka
def test_frames_of_a_topic_are_tampered_with(form: Form, bootstrap: str) -> None:
    form.bootstrap = bootstrap
    surgery.frames_on_kafka(form)


def test_files_are_tampered_with(form: Form) -> None:
    surgery.files_tampered_with(form)


@pytest.mark.kafka
def test_topics_are_tampered_with(form: Form, bootstrap: str) -> None:
    form.bootstrap = bootstrap
    surgery.topics_tampered_with(form)


def test_the_power_fails(form: Form) -> None:
    power.power_loss(form)
