"""Partitions, lost power and lost disks on several hosts: the short form; ``make chaos`` runs the long one.

Hosts are network namespaces, which only root may make. Where that does not work, these tests fail and say why.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import followers, hosts, partitions, sites
from tests.faults.board import Board
from tests.faults.subject import Form
from tests.faults.test_chaos import judge

pytestmark = [pytest.mark.distributed, pytest.mark.kafka, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sites.Site]:
    """Three brokers and the hosts around them, for all tests here."""
    with sites.site(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def form(tmp_path_factory: pytest.TempPathFactory) -> Form:
    return Form(tmp_path_factory.mktemp("form"), Board())


def test_no_marker_is_lost_or_wrong_when_hosts_are_cut_off_or_lose_power(form: Form, site: sites.Site) -> None:
    partitions.hosts_fail(form, site, *partitions.IN_SHORT)
    judge(form)


@pytest.mark.slow
def test_ranks_that_lose_sight_of_each_other_commit_nothing_and_go_on_or_end_by_name(
    form: Form, site: sites.Site
) -> None:
    partitions.ranks_are_cut_off(form, site)
    judge(form)


def test_a_job_on_two_tiers_commits_on_while_the_outer_one_is_cut_off_and_the_relay_catches_up(
    form: Form, site: sites.Site
) -> None:
    partitions.outer_tier_is_cut_off(form, site)
    judge(form)


@pytest.mark.slow
def test_a_job_that_starts_while_one_broker_is_silent_goes_on_or_says_so_in_time(form: Form, site: sites.Site) -> None:
    partitions.attach_without_a_broker(form, site)
    judge(form)


@pytest.mark.slow
def test_a_lost_tail_is_noticed_and_the_same_job_goes_on_when_a_broker_leads_that_has_missed_markers(
    form: Form, site: sites.Site
) -> None:
    partitions.unclean_election(form, site)
    judge(form)


def test_a_materializer_and_a_spare_that_were_cut_off_catch_up_and_a_trainer_that_is_cut_off_is_followed(
    form: Form, site: sites.Site
) -> None:
    followers.followers_are_cut_off(form, site)
    judge(form)


def test_a_machine_that_cannot_make_hosts_fails_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "ip" else f"/bin/{tool}")
    with pytest.raises(hosts.NoHosts, match="apt-get install -y --no-install-recommends iproute2"):
        hosts.Network("one")
