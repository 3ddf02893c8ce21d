"""Rules of a bucket that act on its objects by themselves: versions, object lock, lifecycle.

A job's first objects (a log's identity, a store's format) are put once and needed as long as the job exists. So a rule
that deletes or archives objects after any number of days loses the job.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.util.layout import DAMAGED_DIR, READINGS_DIR, SUMMARIES_DIR

log = logging.getLogger(__name__)

VERSIONS, LOCK, LIFECYCLE = "versions", "object lock", "lifecycle"
_SPARE = (DAMAGED_DIR, READINGS_DIR, SUMMARIES_DIR)
"""Folders whose objects may be deleted at any time (docs/operations.md)."""
_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Storage classes that cannot be read before a restore by hand, which takes hours."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Lifecycle rule that deletes or archives objects of a job."""

    rule: str
    """Its ID, or its place in the configuration."""
    prefix: str
    """Prefix of the keys that it applies to. Empty for all keys of the bucket."""
    does: str
    """Action and its time: ``deletes objects 30 days after they were put``."""

    def __str__(self) -> str:
        return f"the lifecycle rule '{self.rule}' (prefix '{self.prefix}') {self.does}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRules:
    """Rules of a bucket, as far as its store reports them to this user."""

    prefix: str
    """Beginning of the keys of the objects in question."""
    keeps_versions: bool = False
    """True if a delete or an overwrite keeps the old bytes as a version."""
    versions_end: str = ""
    """When a lifecycle rule deletes old versions of these objects. Empty if no rule does."""
    retention: str = ""
    """Mode and time for which each new object is locked. Empty if new objects are not locked."""
    losses: tuple[Loss, ...] = ()
    unchecked: Mapping[str, str] = field(default_factory=dict)
    """Reasons why something could not be checked, by ``VERSIONS``, ``LOCK`` or ``LIFECYCLE``."""


class Remark(NamedTuple):
    """One line about a bucket, for people."""

    check: str
    found: str
    hint: str = ""
    """Suggested action. Empty if nothing is wrong, or nothing is known."""


@runtime_checkable
class HasRules(Protocol):
    """Store whose objects may be subject to rules of a bucket."""

    def rules(self) -> BucketRules:
        """Ask the bucket for its rules. Never raises: what cannot be checked is part of the result."""


def check_rules(objects: Objects, *, warn: bool) -> None:
    """Refuse a bucket that will delete or archive objects of a job.

    Args:
        objects: Store or log.
        warn: Log a warning if deleted objects will go on to take room.

    Raises:
        ConfigError: a lifecycle rule does.
    """
    if not isinstance(objects, HasRules):
        return
    rules = objects.rules()
    for loss in rules.losses:
        raise ConfigError(f"{loss}, but a job needs its oldest objects as long as it exists", hint=_fix(rules))
    for remark in remarks(rules):
        if remark.hint and warn:
            log.warning("%s: %s: %s. Try: %s", objects.url, remark.check, remark.found, remark.hint)


def remarks(rules: BucketRules) -> Iterator[Remark]:
    """Yield one line each about versions and object lock, and one for each lifecycle rule that loses objects."""
    yield _versions(rules)
    yield _lock(rules)
    if LIFECYCLE in rules.unchecked:
        yield _unknown(rules, LIFECYCLE)
    elif not rules.losses:
        yield Remark(LIFECYCLE, f"no rule deletes or archives objects below '{rules.prefix}'")
    for loss in rules.losses:
        yield Remark(LIFECYCLE, f"{loss}, but a job needs its oldest objects as long as it exists", _fix(rules))


def _versions(rules: BucketRules) -> Remark:
    if VERSIONS in rules.unchecked:
        return _unknown(rules, VERSIONS)
    if not rules.keeps_versions:
        return Remark(VERSIONS, "the bucket keeps no versions: deleted objects free their room")
    if rules.versions_end:
        return Remark(VERSIONS, f"the bucket keeps versions, and deletes old ones {rules.versions_end}")
    if LIFECYCLE in rules.unchecked:
        found = "the bucket keeps versions. It could not be checked whether a lifecycle rule deletes old ones"
        return Remark(VERSIONS, found, f"check that a rule does, otherwise {_version_rule(rules)}")
    return Remark(
        VERSIONS,
        "the bucket keeps versions, and no lifecycle rule deletes old ones: what gc and trim delete frees no room",
        _version_rule(rules),
    )


def _version_rule(rules: BucketRules) -> str:
    return (
        f"add a lifecycle rule for the prefix '{rules.prefix}' with NoncurrentVersionExpiration (NoncurrentDays 1) and "
        "Expiration (ExpiredObjectDeleteMarker true)"
    )


def _lock(rules: BucketRules) -> Remark:
    if LOCK in rules.unchecked:
        return _unknown(rules, LOCK)
    if not rules.retention:
        return Remark(LOCK, "new objects are not locked")
    return Remark(
        LOCK,
        f"the bucket locks each new object ({rules.retention}). On S3, gc and trim only hide what they delete, and "
        "overwritten names gain versions: the room is free after that time at the earliest. A server that refuses the "
        "delete of a locked object makes gc and trim fail; markers commit and restore as usual",
        "count these objects into the cost of the bucket, or use a bucket without a default retention",
    )


def _unknown(rules: BucketRules, check: str) -> Remark:
    return Remark(check, f"could not be checked: {rules.unchecked[check]}")


def _fix(rules: BucketRules) -> str:
    return (
        f"disable the rule, or limit it to keys outside '{rules.prefix}'. stream-ckpt gc and trim delete what no "
        "marker needs"
    )


def rules_of_s3(
    prefix: str,
    versioning: Mapping[str, Any],
    lock: Mapping[str, Any],
    lifecycle: Mapping[str, Any],
    unchecked: Mapping[str, str],
) -> BucketRules:
    """Read the answers of S3 to GetBucketVersioning, GetObjectLockConfiguration, GetBucketLifecycleConfiguration.

    Args:
        prefix: Beginning of the keys of the objects in question.
        versioning: Answer, as botocore parses it. Empty if there is none.
        lock: Likewise.
        lifecycle: Likewise.
        unchecked: Reasons why an answer is missing, by name.
    """
    retention = lock.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention", {})
    span = next((f"{retention[unit]} {unit.lower()}" for unit in ("Days", "Years") if retention.get(unit)), "")
    losses: list[Loss] = []
    versions_end = ""
    for number, rule in enumerate(lifecycle.get("Rules", ()), 1):
        begin, limited = _filter(rule)
        if rule.get("Status") != "Enabled" or not _concerns(begin, prefix):
            continue
        end = rule.get("NoncurrentVersionExpiration", {})
        if end.get("NoncurrentDays") and prefix.startswith(begin) and not limited:
            versions_end = f"{end['NoncurrentDays']} days after they were replaced or deleted"
        if not _tagged(rule):
            losses += [Loss(str(rule.get("ID") or f"number {number}"), begin, does) for does in _losing(rule)]
    return BucketRules(
        prefix=prefix,
        keeps_versions=versioning.get("Status") == "Enabled",
        versions_end=versions_end,
        retention=f"{retention.get('Mode', 'locked')}, {span}" if span else "",
        losses=tuple(losses),
        unchecked=dict(unchecked),
    )


def _filter(rule: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the prefix of a rule's keys, and whether the rule applies to some of them only."""
    given = rule.get("Filter", {})
    several = given.get("And", {})
    begin = several.get("Prefix") or given.get("Prefix") or rule.get("Prefix") or ""
    return begin, bool(several.keys() - {"Prefix"} or given.keys() - {"And", "Prefix"})


def _tagged(rule: Mapping[str, Any]) -> bool:
    """Return whether a rule applies only to objects with tags, which ours do not have."""
    given = rule.get("Filter", {})
    return bool(given.get("Tag") or given.get("And", {}).get("Tags"))


def _concerns(begin: str, prefix: str) -> bool:
    """Return whether keys that begin with ``begin`` may be those of objects below ``prefix`` that a job needs."""
    if prefix.startswith(begin):
        return True
    return begin.startswith(prefix) and not begin.removeprefix(prefix).startswith(tuple(f"{each}/" for each in _SPARE))


def _losing(rule: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a rule does that loses current objects."""
    for what, each in (
        ("deletes objects", rule.get("Expiration", {})),
        *(
            (f"archives objects ({move['StorageClass']}), which cannot be read then,", move)
            for move in rule.get("Transitions", ())
            if move.get("StorageClass") in _ARCHIVES
        ),
    ):
        if each.get("Date"):
            yield f"{what} on {each['Date']:%Y-%m-%d}"
        elif each.get("Days") is not None:
            yield f"{what} {each['Days']} days after they were put"
