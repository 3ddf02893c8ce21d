"""Tested versions of this package's dependencies, and a check at the attach that all API it uses still exists.

A missing name is an error here, before anything is hooked: a hook that never runs would silently lose rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from inspect import getmro, isfunction, unwrap

import fbgemm_gpu
import torch
import torchrec

from torchrec_stream_ckpt.errors import UnsupportedError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stack:
    """Releases that belong together."""

    torchrec: str
    fbgemm: str
    torch: str

    def __str__(self) -> str:
        return f"torchrec {self.torchrec} + fbgemm {self.fbgemm} + torch {self.torch}"


TESTED = (Stack("1.6.1", "1.6.0", "2.11.0"), Stack("1.9.2", "1.9.0", "2.14.1"))
"""Versions with which ``make test-matrix`` runs the tests."""


def installed() -> Stack:
    """Return the installed versions, without the local part that names a build (``+cu130``)."""
    modules = (torchrec, fbgemm_gpu, torch)
    return Stack(*(str(getattr(module, "__version__", "unknown")).split("+")[0] for module in modules))


@cache
def check_versions() -> None:
    """Log once if the private API was tested with other versions only."""
    if installed() not in TESTED:
        log.warning("untested versions: %s; tested versions: %s", installed(), _tested())


def _tested() -> str:
    return " and ".join(map(str, TESTED))


@dataclass(frozen=True, slots=True)
class HookPoints:
    """Non-public API of one kind of object that this package uses. The table of this package gives the purpose."""

    owner: str
    names: tuple[str, ...]
    """Attributes that the object must have."""
    used_inside: tuple[str, ...] = ()
    """Names that the object's own methods must use, if existence is not enough: set by a forward, called by it."""

    def require(self, thing: object, **where: str) -> None:
        """Check one live object, or a class whose objects are created later.

        Args:
            thing: An object of the kind in ``owner``.
            where: Coordinates for the error, such as ``module=``.

        Raises:
            UnsupportedError: Names the missing attribute, and the versions.
        """
        kind = thing if isinstance(thing, type) else type(thing)
        for name in self.names:
            if not hasattr(thing, name):
                raise _gone(f"the {self.owner} {kind.__name__} has no {name}", where)
        for name in self.used_inside:
            if not _uses(kind, name):
                raise _gone(f"no method of the {self.owner} {kind.__name__} uses {name}", where)


def _gone(what: str, where: dict[str, str]) -> UnsupportedError:
    return UnsupportedError(
        f"{what}, which the capture needs: found {installed()}, tested with {_tested()}",
        hint="install the tested versions",
        **where,
    )


def _uses(kind: type, name: str) -> bool:
    """Return whether a method of a class reads, writes or calls ``name``."""
    return any(
        name in unwrap(member).__code__.co_names
        for base in getmro(kind)
        for member in vars(base).values()
        if isfunction(member)
    )


_OF_MODULES = ("_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks")
MODEL = HookPoints("model", _OF_MODULES)
DMP = HookPoints("model", (*_OF_MODULES, "_ddp_wrapped", "fused_optimizer", "reshard"), used_inside=("_ddp_wrapped",))
SHARDED_MODULE = HookPoints("sharded module", ("_lookups",), used_inside=("_lookups",))
LOOKUP = HookPoints("lookup", ("_emb_modules",), used_inside=("_emb_modules",))
GROUP = HookPoints("group of tables", ("config", "emb_module"))
FUSED_GROUP = HookPoints("group of fused tables", ("fused_optimizer",))
TABLE = HookPoints("table of a group", ("local_cols", "local_metadata", "local_rows"))
KERNEL = HookPoints(
    "kernel",
    (
        "_prefetch",
        "_used_rowwise_adagrad_with_counter",
        "_used_rowwise_adagrad_with_global_weight_decay",
        "cache_hash_size_cumsum",
        "current_device",
        "ema_inplace",
        "embedding_specs",
        "ensemble_and_swap",
        "feature_table_map",
        "flush",
        "get_learning_rate",
        "hash_size_cumsum",
        "init_embedding_weights_uniform",
        "iter_cpu",
        "lxu_cache_locations_list",
        "lxu_cache_state",
        "lxu_cache_weights",
        "optimizer",
        "optimizer_args",
        "placeholder_autograd_tensor",
        "prepare_inputs",
        "prefetch_pipeline",
        "reset_cache_states",
        "reset_embedding_weight_momentum",
        "set_learning_rate",
        "split_embedding_weights",
        "split_optimizer_states",
        "total_cache_hash_size",
        "use_rowwise_bias_correction",
        "weights_dev",
        "weights_host",
        "weights_precision",
        "weights_uvm",
    ),
    used_inside=(
        "_prefetch",
        "ema_inplace",
        "ensemble_and_swap",
        "iter",
        "iter_cpu",
        "max_counter",
        "optimizer_args",
        "placeholder_autograd_tensor",
        "prepare_inputs",
    ),
)
TENSOR = HookPoints("tensor of a kernel", ("_version",))
DDP = HookPoints("DDP wrapper", ("_get_ddp_logging_data", "reducer"))
REDUCER = HookPoints("reducer of DDP", ("_get_zeros_like_grad_buckets",))
FSDP_MODULE = HookPoints("module of FSDP2", ("_get_fsdp_state",))
FSDP_STATE = HookPoints("state of FSDP2", ("_fsdp_param_group",))
FSDP_GROUP = HookPoints("group of FSDP2's parameters", ("_partial_reduce_output", "fsdp_params"))
TABLE_SLICE = HookPoints("slice of a data-parallel table", ("_original_tensor",))
COLLISION_WRAPPER = HookPoints("managed collision wrapper", ("_managed_collision_collection",))
COLLISION_COLLECTION = HookPoints("managed collision collection", ("_env", "_managed_collision_modules"))
ID_MAP = HookPoints(
    "id map",
    (
        "_current_history_buffer_offset",
        "_current_iter",
        "_current_iter_tensor",
        "_evicted",
        "_evicted_emb_indices",
        "_eviction_interval",
        "_eviction_policy",
        "_history_metadata",
        "_input_history_buffer_size",
        "_last_eviction_iter",
        "_mch_metadata",
        "_mch_remapped_ids_mapping",
        "_mch_sorted_raw_ids",
        "_output_global_offset",
        "_zch_size",
    ),
    used_inside=("_current_history_buffer_offset", "_evicted_emb_indices", "_history_accumulator"),
)
DISTANCE_LFU = HookPoints("eviction policy", ("_decay_exponent",))
HASH_MAP = HookPoints(
    "hash ZCH module",
    (
        "_disable_fallback",
        "_evicted_indices",
        "_hash_zch_identities",
        "_hash_zch_metadata",
        "_hash_zch_runtime_meta",
        "_input_hash_size",
        "_is_inference",
        "_max_probe",
        "_opt_in_prob",
        "_output_global_offset_tensor",
        "_output_segments",
        "_start_bucket",
        "_zch_size",
        "evict",
        "get_reserved_slots_per_bucket",
        "input_mapper",
    ),
    used_inside=("_evicted_indices", "_hash_zch_identities", "_hash_zch_runtime_meta"),
)
INPUT_MAPPER = HookPoints("input mapper of a hash ZCH module", ("_inference_dispatch_div_train_world_size",))
TORCH = HookPoints("package", ("_C",))
BINDINGS = HookPoints("bindings of torch", ("_current_graph_task_id",))
VARIABLE = HookPoints("class of tensors", ("_execution_engine",))
CUDA_OPERATORS = HookPoints("namespace torch.ops.fbgemm", ("linearize_cache_indices", "lxu_cache_lookup"))
DATA_PARALLEL = HookPoints("DDP wrapper", ("_assign_modules_buffers",))
DENSE_OPTIMIZER = HookPoints("dense optimizer", ("_optimizer_state_dict_post_hooks",))
OPTIMIZER_WRAPPER = HookPoints("wrapper of an optimizer", (), used_inside=("_optimizer",))
WARM_UP = HookPoints("warm-up wrapper", ("_get_warmup_state",), used_inside=("_stages", "_warmup_param"))
COMPILED = HookPoints("compiled module", ("_orig_mod",))
REPLICATED = HookPoints("DistributedDataParallel", ("_comm_hooks",), used_inside=("_comm_hooks",))
CLIPPING = HookPoints("clipping wrapper", (), used_inside=("_step_num",))
QUANTIZED_COLLECTION = HookPoints("quantized collection", ("_emb_modules", "_key_to_tables"))
INFERENCE_KERNEL = HookPoints(
    "inference kernel",
    (
        "current_device",
        "embedding_specs",
        "index_remapping_hash_table",
        "index_remappings_array",
        "scale_bias_size_in_bytes",
        "split_embedding_weights",
        "weight_initialized",
    ),
)
INFERENCE_COLLISION = HookPoints(
    "managed collision collection",
    ("_created_feature_order", "_managed_collision_modules", "need_preprocess"),
    used_inside=("_created_feature_order",),
)
INFERENCE_ID_MAP = HookPoints(
    "id map",
    (
        "_input_hash_func",
        "_mch_remapped_ids_mapping",
        "_mch_sorted_raw_ids",
        "_output_global_offset",
        "_zch_size",
    ),
    used_inside=("_mch_remapped_ids_mapping", "_mch_sorted_raw_ids", "remap"),
)
INFERENCE_HASH_MAP = HookPoints(
    "hash ZCH module",
    ("_disable_fallback", "_hash_zch_identities", "_output_global_offset_tensor", "is_sharded"),
    used_inside=("_hash_zch_identities", "remap"),
)
HOOK_POINTS = tuple(each for each in list(globals().values()) if isinstance(each, HookPoints))
