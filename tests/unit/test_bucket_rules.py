"""Which rules of a bucket lose objects of a job, and which ones only take room."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.store.bucket_rules import BucketRules, HasRules, check_rules, remarks, rules_of_s3

PREFIX = "team/job/"


def rules(*lifecycle: dict[str, Any], versioning: str = "", lock: dict[str, Any] | None = None) -> BucketRules:
    given = [{"ID": "r", "Status": "Enabled", **each} for each in lifecycle]
    found = {"ObjectLockConfiguration": lock} if lock else {}
    return rules_of_s3(PREFIX, {"Status": versioning} if versioning else {}, found, {"Rules": given}, {})


DAYS = {"Expiration": {"Days": 30}}


@pytest.mark.parametrize(
    "rule",
    [
        {"Filter": {"Prefix": ""}, **DAYS},
        {"Filter": {}, **DAYS},
        {"Prefix": "", **DAYS},  # as S3 answered before 2014
        {"Filter": {"Prefix": "team/"}, **DAYS},
        {"Filter": {"Prefix": "team/jo"}, **DAYS},
        {"Filter": {"Prefix": PREFIX}, **DAYS},
        {"Filter": {"Prefix": f"{PREFIX}data/g00000001"}, **DAYS},
        {"Filter": {"Prefix": f"{PREFIX}da"}, **DAYS},  # also of data/
        {"Filter": {"ObjectSizeGreaterThan": 1000}, **DAYS},
        {"Filter": {"And": {"Prefix": "team/", "ObjectSizeLessThan": 10**6}}, **DAYS},
        {"Filter": {"Prefix": ""}, "Expiration": {"Date": datetime(2031, 2, 3, tzinfo=UTC)}},
        {"Filter": {"Prefix": ""}, "Transitions": [{"Days": 1, "StorageClass": "DEEP_ARCHIVE"}]},
        {"Filter": {"Prefix": ""}, "Transitions": [{"Days": 0, "StorageClass": "GLACIER"}]},
    ],
)
def test_a_rule_that_reaches_what_a_job_needs_loses_it(rule: dict[str, Any]) -> None:
    (loss,) = rules(rule).losses
    assert "2031-02-03" in loss.does or " days after they were put" in loss.does
    assert ("cannot be read" in loss.does) == ("Transitions" in rule)


@pytest.mark.parametrize(
    "rule",
    [
        {"Filter": {"Prefix": "team/job2/"}, **DAYS},
        {"Filter": {"Prefix": "other"}, **DAYS},
        {"Filter": {"Prefix": f"{PREFIX}damaged/"}, **DAYS},  # all of which may be deleted
        {"Filter": {"Prefix": f"{PREFIX}readings/x"}, **DAYS},
        {"Filter": {"Prefix": ""}, "Status": "Disabled", **DAYS},
        {"Filter": {"Tag": {"Key": "a", "Value": "b"}}, **DAYS},  # our objects have no tags
        {"Filter": {"And": {"Prefix": "team/", "Tags": [{"Key": "a", "Value": "b"}]}}, **DAYS},
        {"Filter": {"Prefix": ""}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}},
        {"Filter": {"Prefix": ""}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}},
        {"Filter": {"Prefix": ""}, "Expiration": {"ExpiredObjectDeleteMarker": True}},
        {"Filter": {"Prefix": ""}, "Transitions": [{"Days": 1, "StorageClass": "INTELLIGENT_TIERING"}]},
        {"Filter": {"Prefix": ""}, "Transitions": [{"Days": 1, "StorageClass": "GLACIER_IR"}]},
    ],
)
def test_other_rules_lose_nothing(rule: dict[str, Any]) -> None:
    assert rules(rule).losses == ()


def test_versions_are_a_matter_of_room_unless_a_rule_deletes_old_ones() -> None:
    kept, limited = rules(versioning="Enabled"), {"Filter": {"ObjectSizeGreaterThan": 5}}
    old = {"NoncurrentVersionExpiration": {"NoncurrentDays": 3}}
    assert next((found.check, bool(found.hint)) for found in remarks(kept)) == ("versions", True)
    assert "NoncurrentVersionExpiration" in next(remarks(kept)).hint
    assert PREFIX in next(remarks(kept)).hint
    ended = next(remarks(rules({"Filter": {"Prefix": "team/"}, **old}, versioning="Enabled")))
    assert (ended.hint, "3 days after they were replaced or deleted" in ended.found) == ("", True)
    for rule in ({**limited, **old}, {"Filter": {"Prefix": f"{PREFIX}data/"}, **old}):  # some of the objects only
        assert next(remarks(rules(rule, versioning="Enabled"))).hint
    for off in ("", "Suspended"):
        assert not next(remarks(rules(versioning=off))).hint


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        ({"ObjectLockEnabled": "Enabled"}, "new objects are not locked"),
        ({"Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 30}}}, "GOVERNANCE, 30 days"),
        ({"Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Years": 2}}}, "COMPLIANCE, 2 years"),
    ],
)
def test_a_lock_of_new_objects_is_named_with_its_time(lock: dict[str, Any], said: str) -> None:
    found = {remark.check: remark for remark in remarks(rules(versioning="Enabled", lock=lock))}["object lock"]
    assert said in found.found
    assert bool(found.hint) == ("Rule" in lock)


def test_of_other_stores_it_is_said_that_nothing_was_checked() -> None:
    class OfGoogle:
        url = "gs://bucket/job"

        def rules(self) -> BucketRules:
            reasons = dict.fromkeys(("versions", "object lock", "lifecycle"), "no settings are read")
            return BucketRules(prefix="job/", unchecked=reasons)

    objects: Any = OfGoogle()
    check_rules(objects, warn=True)  # warnings are errors of tests only where they are warnings: nothing is refused
    assert all("could not be checked" in remark.found and not remark.hint for remark in remarks(objects.rules()))


def test_memory_has_no_rules() -> None:
    store = open_store("memory://rules")
    assert isinstance(store, HasRules)
    assert not any(remark.hint for remark in remarks(store.rules()))
    check_rules(store, warn=True)


def test_a_rule_that_loses_objects_is_refused_by_its_name() -> None:
    class Bucket:
        url = "s3://bucket/team/job"

        def rules(self) -> BucketRules:
            return rules({"ID": "clean up", "Filter": {"Prefix": "team/"}, **DAYS})

    objects: Any = Bucket()
    with pytest.raises(ConfigError, match=r"'clean up' \(prefix 'team/'\) deletes objects 30 days after") as refused:
        check_rules(objects, warn=False)
    assert "disable the rule" in refused.value.hint
