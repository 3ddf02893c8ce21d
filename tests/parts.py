"""Parts of the package that many tests use, apart from the inner API: one place that knows their modules.

So a part can move without a word in any test. A name is imported with its module when it is first used: tests of what
runs without torch do not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec_stream_ckpt.capture.sender import Drain as Drain
    from torchrec_stream_ckpt.capture.staging import RowStager as RowStager
    from torchrec_stream_ckpt.cli.main import app as app
    from torchrec_stream_ckpt.cli.main import main as main
    from torchrec_stream_ckpt.dense import dcp as dcp
    from torchrec_stream_ckpt.dense.replica_check import Scope as Scope
    from torchrec_stream_ckpt.evolve.findings import Findings as Findings
    from torchrec_stream_ckpt.extras.broker.kraft import Broker as Broker
    from torchrec_stream_ckpt.extras.follower import followed_maps as followed_maps
    from torchrec_stream_ckpt.extras.follower.core import FollowMode as FollowMode
    from torchrec_stream_ckpt.extras.follower.sink import Feed as Feed
    from torchrec_stream_ckpt.extras.follower.source import FollowedJob as FollowedJob
    from torchrec_stream_ckpt.extras.follower.updates import Changed as Changed
    from torchrec_stream_ckpt.extras.follower.updates import Update as Update
    from torchrec_stream_ckpt.extras.follower.updates import UpdateKind as UpdateKind
    from torchrec_stream_ckpt.extras.sizing.failure import GATHERS as GATHERS
    from torchrec_stream_ckpt.extras.sizing.failure import OWN_SYNCS as OWN_SYNCS
    from torchrec_stream_ckpt.extras.sizing.failure import SYNCS as SYNCS
    from torchrec_stream_ckpt.extras.sizing.inputs import UnitCosts as UnitCosts
    from torchrec_stream_ckpt.extras.tiers.relay_service import state_of as state_of
    from torchrec_stream_ckpt.find import job as job
    from torchrec_stream_ckpt.find.route import locate as locate
    from torchrec_stream_ckpt.find.tiers import TierState as TierState
    from torchrec_stream_ckpt.find.tiers import open_tiers as open_tiers
    from torchrec_stream_ckpt.format import segment as segment
    from torchrec_stream_ckpt.format.folding import body_of as body_of
    from torchrec_stream_ckpt.format.folding import lineage_of as lineage_of
    from torchrec_stream_ckpt.format.mac import CommitKey as CommitKey
    from torchrec_stream_ckpt.format.manifest import Dropped as Dropped
    from torchrec_stream_ckpt.format.manifest import Fold as Fold
    from torchrec_stream_ckpt.format.manifest import Garbage as Garbage
    from torchrec_stream_ckpt.format.manifest import Manifest as Manifest
    from torchrec_stream_ckpt.format.manifest import SegmentRef as SegmentRef
    from torchrec_stream_ckpt.format.notes import Notes as Notes
    from torchrec_stream_ckpt.format.padding import BLOCK as BLOCK
    from torchrec_stream_ckpt.format.readings import Reading as Reading
    from torchrec_stream_ckpt.format.readings import ScrubPlace as ScrubPlace
    from torchrec_stream_ckpt.format.ring import FrameBuffer as FrameBuffer
    from torchrec_stream_ckpt.format.ring import FrameRing as FrameRing
    from torchrec_stream_ckpt.format.segment import SegmentId as SegmentId
    from torchrec_stream_ckpt.format.segment import SegmentKind as SegmentKind
    from torchrec_stream_ckpt.format.segment import decode_chunk as decode_chunk
    from torchrec_stream_ckpt.format.segment import entries_of as entries_of
    from torchrec_stream_ckpt.format.segment import lay_out as lay_out
    from torchrec_stream_ckpt.format.segment import parse_front as parse_front
    from torchrec_stream_ckpt.log import control_file as control_file
    from torchrec_stream_ckpt.log import file_writer as file_writer
    from torchrec_stream_ckpt.log.api import Ack as Ack
    from torchrec_stream_ckpt.log.api import Freed as Freed
    from torchrec_stream_ckpt.log.api import Incarnation as Incarnation
    from torchrec_stream_ckpt.log.api import open_log as open_log
    from torchrec_stream_ckpt.log.control.snapshots import shorten_control as shorten_control
    from torchrec_stream_ckpt.log.control.trim import trim_log as trim_log
    from torchrec_stream_ckpt.log.files import FileLog as FileLog
    from torchrec_stream_ckpt.log.stream import read_hello as read_hello
    from torchrec_stream_ckpt.log.stream import read_mark as read_mark
    from torchrec_stream_ckpt.maintain import fold as fold
    from torchrec_stream_ckpt.maintain import interval_folder as interval_folder
    from torchrec_stream_ckpt.maintain import merge as merge
    from torchrec_stream_ckpt.maintain import summarizer as summarizer
    from torchrec_stream_ckpt.maintain.compactor import Policy as Policy
    from torchrec_stream_ckpt.maintain.engine.api import InProcess as InProcess
    from torchrec_stream_ckpt.maintain.engine.api import Site as Site
    from torchrec_stream_ckpt.maintain.gc.gc import GcRules as GcRules
    from torchrec_stream_ckpt.maintain.gc.gc import collect as collect
    from torchrec_stream_ckpt.maintain.gc.retention import GcPlan as GcPlan
    from torchrec_stream_ckpt.maintain.gc.retention import Retention as Retention
    from torchrec_stream_ckpt.maintain.gc.trim_check import check_synced as check_synced
    from torchrec_stream_ckpt.maintain.head import HeadWriter as HeadWriter
    from torchrec_stream_ckpt.maintain.interval_folder import IntervalFolder as IntervalFolder
    from torchrec_stream_ckpt.maintain.materializer import Materializer as Materializer
    from torchrec_stream_ckpt.maintain.progress import Progress as Progress
    from torchrec_stream_ckpt.maintain.proof_checker import ProofRule as ProofRule
    from torchrec_stream_ckpt.maintain.repairer import Repairer as Repairer
    from torchrec_stream_ckpt.maintain.scrub.readings import ReadBack as ReadBack
    from torchrec_stream_ckpt.maintain.scrub.scrubber import Scrubber as Scrubber
    from torchrec_stream_ckpt.model import fused_kernels as fused_kernels
    from torchrec_stream_ckpt.model import modules as modules
    from torchrec_stream_ckpt.model.versions import installed as installed
    from torchrec_stream_ckpt.proofs.window import WindowCheck as WindowCheck
    from torchrec_stream_ckpt.proofs.window import WindowReader as WindowReader
    from torchrec_stream_ckpt.restore.plan import RestorePlan as RestorePlan
    from torchrec_stream_ckpt.restore.plan import intersect as intersect
    from torchrec_stream_ckpt.restore.plan import plan_reads as plan_reads
    from torchrec_stream_ckpt.restore.target import Target as Target
    from torchrec_stream_ckpt.save.event_time import EventTime as EventTime
    from torchrec_stream_ckpt.save.generation import fence_of as fence_of
    from torchrec_stream_ckpt.store import reader as reader
    from torchrec_stream_ckpt.store.api import Entry as Entry
    from torchrec_stream_ckpt.store.catalog import Picked as Picked
    from torchrec_stream_ckpt.store.catalog import Piece as Piece
    from torchrec_stream_ckpt.store.dense import DenseFolder as DenseFolder
    from torchrec_stream_ckpt.store.dense import DenseStore as DenseStore
    from torchrec_stream_ckpt.store.dense import open_dense as open_dense
    from torchrec_stream_ckpt.store.folder import FolderObjects as FolderObjects
    from torchrec_stream_ckpt.store.identity import check_store as check_store
    from torchrec_stream_ckpt.store.identity import prepare_store as prepare_store
    from torchrec_stream_ckpt.store.identity import prove_writable as prove_writable
    from torchrec_stream_ckpt.store.identity import refuses_taken_names as refuses_taken_names
    from torchrec_stream_ckpt.store.pins import pin as pin
    from torchrec_stream_ckpt.store.reader import read_chunks as read_chunks
    from torchrec_stream_ckpt.store.write_once import put_once as put_once
    from torchrec_stream_ckpt.util import failpoints as failpoints
    from torchrec_stream_ckpt.util.failpoints import arm as arm
    from torchrec_stream_ckpt.verify.verdicts import Verifier as Verifier
    from torchrec_stream_ckpt.verify.verify import verify_marker as verify_marker

PARTS = {
    # The command line.
    "app": "cli.main",
    "main": "cli.main",
    # Capture.
    "Drain": "capture.sender",
    "RowStager": "capture.staging",
    # Frames and objects.
    "segment": "format",
    "body_of": "format.folding",
    "lineage_of": "format.folding",
    "CommitKey": "format.mac",
    "Dropped": "format.manifest",
    "Fold": "format.manifest",
    "Garbage": "format.manifest",
    "Manifest": "format.manifest",
    "SegmentRef": "format.manifest",
    "Notes": "format.notes",
    "BLOCK": "format.padding",
    "Reading": "format.readings",
    "ScrubPlace": "format.readings",
    "FrameBuffer": "format.ring",
    "FrameRing": "format.ring",
    "SegmentId": "format.segment",
    "SegmentKind": "format.segment",
    "decode_chunk": "format.segment",
    "entries_of": "format.segment",
    "lay_out": "format.segment",
    "parse_front": "format.segment",
    # Logs.
    "control_file": "log",
    "file_writer": "log",
    "Ack": "log.api",
    "Freed": "log.api",
    "Incarnation": "log.api",
    "open_log": "log.api",
    "shorten_control": "log.control.snapshots",
    "trim_log": "log.control.trim",
    "FileLog": "log.files",
    "read_hello": "log.stream",
    "read_mark": "log.stream",
    # Stores.
    "reader": "store",
    "Entry": "store.api",
    "Picked": "store.catalog",
    "Piece": "store.catalog",
    "DenseFolder": "store.dense",
    "DenseStore": "store.dense",
    "open_dense": "store.dense",
    "FolderObjects": "store.folder",
    "check_store": "store.identity",
    "prepare_store": "store.identity",
    "prove_writable": "store.identity",
    "refuses_taken_names": "store.identity",
    "pin": "store.pins",
    "read_chunks": "store.reader",
    "put_once": "store.write_once",
    # Where the bytes of a marker are.
    "job": "find",
    "locate": "find.route",
    "TierState": "find.tiers",
    "open_tiers": "find.tiers",
    "EventTime": "save.event_time",
    "fence_of": "save.generation",
    # What maintains a store.
    "fold": "maintain",
    "interval_folder": "maintain",
    "merge": "maintain",
    "summarizer": "maintain",
    "Policy": "maintain.compactor",
    "InProcess": "maintain.engine.api",
    "Site": "maintain.engine.api",
    "GcRules": "maintain.gc.gc",
    "collect": "maintain.gc.gc",
    "GcPlan": "maintain.gc.retention",
    "Retention": "maintain.gc.retention",
    "check_synced": "maintain.gc.trim_check",
    "HeadWriter": "maintain.head",
    "IntervalFolder": "maintain.interval_folder",
    "Materializer": "maintain.materializer",
    "Progress": "maintain.progress",
    "ProofRule": "maintain.proof_checker",
    "Repairer": "maintain.repairer",
    "ReadBack": "maintain.scrub.readings",
    "Scrubber": "maintain.scrub.scrubber",
    "WindowCheck": "proofs.window",
    "WindowReader": "proofs.window",
    "Verifier": "verify.verdicts",
    "verify_marker": "verify.verify",
    # What trains and restores.
    "dcp": "dense",
    "Scope": "dense.replica_check",
    "Findings": "evolve.findings",
    "fused_kernels": "model",
    "modules": "model",
    "installed": "model.versions",
    "RestorePlan": "restore.plan",
    "intersect": "restore.plan",
    "plan_reads": "restore.plan",
    "Target": "restore.target",
    # Beside the core.
    "Broker": "extras.broker.kraft",
    "followed_maps": "extras.follower",
    "FollowMode": "extras.follower.core",
    "Feed": "extras.follower.sink",
    "FollowedJob": "extras.follower.source",
    "Changed": "extras.follower.updates",
    "Update": "extras.follower.updates",
    "UpdateKind": "extras.follower.updates",
    "GATHERS": "extras.sizing.failure",
    "OWN_SYNCS": "extras.sizing.failure",
    "SYNCS": "extras.sizing.failure",
    "UnitCosts": "extras.sizing.inputs",
    "state_of": "extras.tiers.relay_service",
    # Places to fail at.
    "failpoints": "util",
    "arm": "util.failpoints",
}
"""Name -> its module, or the package of a module."""


def __getattr__(name: str) -> Any:
    if name not in PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"torchrec_stream_ckpt.{PARTS[name]}"
    part = getattr(import_module(home), name, None)
    return import_module(f"{home}.{name}") if part is None else part
