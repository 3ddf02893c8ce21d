"""The inner API: the names of the core that ``extras/``, the command line and tests may use. At most 40.

Everything else below the core's districts may move without a word to those who use this page. A name is imported with
the module that has it when it is first used: the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec_stream_ckpt.dense.dense_prover import entry_digests as entry_digests
    from torchrec_stream_ckpt.dense.optimizer_state import read_saved as read_saved
    from torchrec_stream_ckpt.evolve.model_schema import DenseEntry as DenseEntry
    from torchrec_stream_ckpt.evolve.report import EvolutionReport as EvolutionReport
    from torchrec_stream_ckpt.find.find import Damaged as Damaged
    from torchrec_stream_ckpt.find.find import find as find
    from torchrec_stream_ckpt.find.holdings import Holdings as Holdings
    from torchrec_stream_ckpt.find.job import Job as Job
    from torchrec_stream_ckpt.find.job import Tier as Tier
    from torchrec_stream_ckpt.find.route import Route as Route
    from torchrec_stream_ckpt.find.tiers import Tiers as Tiers
    from torchrec_stream_ckpt.find.tiers import open_job as open_job
    from torchrec_stream_ckpt.log.api import Log as Log
    from torchrec_stream_ckpt.log.control.partition import Control as Control
    from torchrec_stream_ckpt.log.stream import read_stream as read_stream
    from torchrec_stream_ckpt.model import optimizer_states as optimizer_states
    from torchrec_stream_ckpt.model.inference import served_parts as served_parts
    from torchrec_stream_ckpt.proofs.dense import DenseMarks as DenseMarks
    from torchrec_stream_ckpt.proofs.proof_status import ProofStatus as ProofStatus
    from torchrec_stream_ckpt.proofs.unproved import Compared as Compared
    from torchrec_stream_ckpt.proofs.unproved import Unproved as Unproved
    from torchrec_stream_ckpt.proofs.unproved import UnprovedBlock as UnprovedBlock
    from torchrec_stream_ckpt.proofs.weights import WeightProof as WeightProof
    from torchrec_stream_ckpt.read.marker_lookup import Where as Where
    from torchrec_stream_ckpt.read.marker_lookup import find_marker as find_marker
    from torchrec_stream_ckpt.read.rows import MarkerRows as MarkerRows
    from torchrec_stream_ckpt.read.rows import TableReader as TableReader
    from torchrec_stream_ckpt.read.rows import TableWindow as TableWindow
    from torchrec_stream_ckpt.read.rows import open_rows as open_rows
    from torchrec_stream_ckpt.read.rows import rows_at as rows_at
    from torchrec_stream_ckpt.restore.proof_check import compare_replicated as compare_replicated
    from torchrec_stream_ckpt.restore.regions import Region as Region
    from torchrec_stream_ckpt.restore.regions import fill as fill
    from torchrec_stream_ckpt.restore.target import Plane as Plane
    from torchrec_stream_ckpt.save.import_writer import Batch as Batch
    from torchrec_stream_ckpt.save.import_writer import write_import as write_import
    from torchrec_stream_ckpt.store.api import Objects as Objects
    from torchrec_stream_ckpt.store.api import open_store as open_store
    from torchrec_stream_ckpt.store.catalog import Catalog as Catalog
    from torchrec_stream_ckpt.tiers.relay import Relay as Relay

PAGE = {
    # A job.
    "Job": ("find.job", "the log, control partition and stores of a job with one log"),
    "Tier": ("find.job", "a job that is open for writing, with its settings"),
    "Tiers": ("find.tiers", "both logs of a job with two tiers"),
    "open_job": ("find.tiers", "open a job by its settings"),
    "Relay": ("tiers.relay", "copies markers from the inner log to the outer one"),
    "Holdings": ("find.holdings", "what a store holds of each marker"),
    # Where the bytes of a marker are.
    "Route": ("find.route", "the places of all rows of one marker"),
    "find": ("find.find", "choose a marker, and compare its dense state with the digests"),
    "Damaged": ("find.find", "places that were found damaged, for a search that goes on elsewhere"),
    "Where": ("read.marker_lookup", "a job by its URI and options; opens it for reading"),
    "find_marker": ("read.marker_lookup", "find one marker, judging by names and directories"),
    # Log and store.
    "Log": ("log.api", "the interface of both kinds of log"),
    "Control": ("log.control.partition", "reads and appends control records"),
    "read_stream": ("log.stream", "the frames of one rank up to a marker, checked"),
    "Objects": ("store.api", "the objects of one store"),
    "open_store": ("store.api", "open the store at a URL"),
    "Catalog": ("store.catalog", "the objects of one job in a store"),
    # Rows of a marker without a model.
    "open_rows": ("read.rows", "open all rows that lead to a marker, or those after another one"),
    "rows_at": ("read.rows", "open all rows of a marker at the place where it was found"),
    "MarkerRows": ("read.rows", "the open rows of a marker, with its proofs"),
    "TableReader": ("read.rows", "reads the newest version of the rows of one table"),
    "TableWindow": ("read.rows", "adjacent rows of one table, with their states"),
    "Region": ("restore.regions", "rows and columns of one table, and the tensors for them"),
    "fill": ("restore.regions", "fill regions with the rows of a marker"),
    "Plane": ("restore.target", "a tensor that is written by rows"),
    # Proofs.
    "WeightProof": ("proofs.weights", "proof of the weights of a marker"),
    "Compared": ("proofs.unproved", "how much was compared, and what differs"),
    "Unproved": ("proofs.unproved", "all blocks that differ from a proof"),
    "UnprovedBlock": ("proofs.unproved", "one block that differs from a proof"),
    "ProofStatus": ("proofs.proof_status", "summary of the comparisons of a marker"),
    "DenseMarks": ("proofs.dense", "proofs of the entries of the dense state"),
    "compare_replicated": ("restore.proof_check", "compare data-parallel tables with a proof"),
    "entry_digests": ("dense.dense_prover", "digests of entries of the dense state"),
    # Imports and models.
    "read_saved": ("dense.optimizer_state", "dense optimizers in a saved dense state"),
    "write_import": ("save.import_writer", "commit the first marker of a log without a job"),
    "Batch": ("save.import_writer", "rows of one shard for it"),
    "DenseEntry": ("evolve.model_schema", "one entry of the dense state in a `ModelSchema`"),
    "EvolutionReport": ("evolve.report", "what becomes of a marker in a model"),
    "optimizer_states": ("model", "the states of a fused optimizer, and which are row-wise"),
    "served_parts": ("model.inference", "the tables of an inference module, to write by rows"),
}
"""Name -> its module, and what it is."""


def __getattr__(name: str) -> Any:
    if name in PAGE:
        return getattr(import_module(f"torchrec_stream_ckpt.{PAGE[name][0]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
