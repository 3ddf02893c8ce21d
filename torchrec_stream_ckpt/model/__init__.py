"""The only package that uses private API of TorchRec and FBGEMM.

The table lists all of it. "Since" is the oldest release that has a name, of those that were examined:
torchrec and fbgemm 1.0, 1.2, 1.4, 1.6 and 1.9. ``versions.py`` checks every one of these names at the attach, and has
the versions that the tests run with.

====================================================  =====  ==================================================
name                                                  since  what for
====================================================  =====  ==================================================
of ``DistributedModelParallel``:
``_ddp_wrapped``                                      1.0    whether the dense part is data parallel yet
``fused_optimizer``                                   1.0    loading its state writes rows
``reshard``                                           1.4    moves rows
of ``torch.nn.Module`` (torch 2.11 is the oldest that was looked at):
``_buffers``                                          2.11   the buffers themselves, those that are None too
``_non_persistent_buffers_set``                       2.11   which of them are state
``_modules``                                          2.11   whether a kernel was replaced
``_state_dict_hooks``                                 2.11   whether a module saves what only its own code knows
of what ``torch.compile`` makes of a module:
``_orig_mod``                                         2.11   the module inside, whose names markers have
of ``torch.nn.parallel.DistributedDataParallel``:
``_comm_hooks``                                       2.11   whether gradients pass through code with a state
of ``DistributedDataParallel``:
``_assign_modules_buffers``                           2.11   lists again the buffers that it broadcasts
of ``torch.Tensor``:
``_version``                                          2.11   whether something has written in place
of a ``DistributedDataParallel`` and its reducer:
``reducer``, ``_get_ddp_logging_data``                2.11   how many parameters it averages the gradients of
``_get_zeros_like_grad_buckets``                      2.11   which ones
of a slice of a data-parallel table:
``_original_tensor``                                  1.6    the parameter that has its gradient
of a module of FSDP2, its state and its groups of parameters:
``_get_fsdp_state``, ``_fsdp_param_group``            2.11   the groups; several of them since 2.14
``fsdp_params``, ``_partial_reduce_output``           2.11   gradients that are this rank's own
of ``torch.optim.Optimizer``:
``_optimizer_state_dict_post_hooks``                  2.11   the same of an optimizer
of ``torch``, ``torch._C`` and ``torch.autograd.Variable``:
``_C``, ``_current_graph_task_id``                    2.11   which run of the autograd engine this is
``_execution_engine``                                 2.11   whether that run has ended
of a sharded module:
``_lookups``                                          1.0    one lookup a sharding type
of a lookup:
``_emb_modules``                                      1.0    one group of tables a kernel
of a group of tables:
``config``                                            1.0    ``embedding_tables[i]``: i-th table of the kernel
``emb_module``                                        1.0    the kernel
``fused_optimizer``                                   1.0    the param group that sets the kernel's learning rate
of ``embedding_tables[i]``:
``local_metadata``, ``local_rows``, ``local_cols``    1.0    shard offsets and sizes
of ``SplitTableBatchedEmbeddingBagsCodegen``:
``prepare_inputs``                                    1.0    ids of a forward, after the bounds check; bags with VBE
``placeholder_autograd_tensor``                       1.0    where the graphs of all its lookups end
``feature_table_map``, ``hash_size_cumsum``           1.0    feature to table, and to linear rows
``iter``, ``max_counter``                             1.0    state of the kernel that no state_dict holds
``iter_cpu``                                          1.2    the same: what the kernel really counts in
``get_learning_rate``                                 1.2    the same: what it updates with now
``set_learning_rate``                                 1.0    puts that back
``split_embedding_weights``, ``embedding_specs``      1.0    views of the rows, one a table
``split_optimizer_states``                            1.0    views of the optimizer's rows
``optimizer``, ``weights_precision``                  1.0    which states and dtypes those have
``optimizer_args``                                    1.0    numbers that the update reads
``use_rowwise_bias_correction``                       1.2    (Adam) one state more
``_used_rowwise_adagrad_with_counter``                1.0    (row-wise Adagrad) two states more
``_used_rowwise_adagrad_with_global_weight_decay``    1.0    (row-wise Adagrad) one state more
``ema_inplace``                                       1.2    writer of rows outside the update
``ensemble_and_swap``                                 1.0    writer of rows outside the update
``reset_embedding_weight_momentum``                   1.0    writer of rows outside the update
``init_embedding_weights_uniform``                    1.0    writer of rows outside the update
``current_device``                                    1.0    where the rows are
``lxu_cache_weights``, ``lxu_cache_state``            1.0    (GPU) the newest value of a cached row
``cache_hash_size_cumsum``, ``total_cache_hash_size`` 1.0    (GPU) where to look for it
``flush``, ``reset_cache_states``                     1.0    (GPU) no cached row may cover one that is restored
``_prefetch``, ``lxu_cache_locations_list``           1.0    (GPU) moves cached rows; batches it has done that for
``prefetch_pipeline``                                 1.0    (GPU) whether those leave the slots of others alone
``weights_dev``, ``weights_host``, ``weights_uvm``    1.0    whether the views have memory
of a collection of ``torchrec.quant``:
``_emb_modules``, ``_key_to_tables``                  1.6    (inference) its kernels, and the tables of each
of ``IntNBitTableBatchedEmbeddingBagsCodegen``:
``split_embedding_weights``, ``embedding_specs``      1.6    (inference) views of the rows, one a table
``index_remappings_array``,                           1.6    (inference) whether rows were pruned
``index_remapping_hash_table``
``scale_bias_size_in_bytes``                          1.6    (inference) layout of a row
``weight_initialized``, ``current_device``            1.6    (inference) whether the views have memory
of a managed collision collection and its wrapper:
``_managed_collision_collection``, ``_env``           1.0    the collection inside; its ranks
``_managed_collision_modules``                        1.0    one id map a table
``_created_feature_order``                            1.4    (inference) whether it knows the order of features
``need_preprocess``                                   1.2    (inference) whether the trainer's shards hash raw ids
of ``MCHManagedCollisionModule``:
``_mch_sorted_raw_ids``,                              1.0    raw ids and their rows
``_mch_remapped_ids_mapping``, ``_mch_metadata``
``_output_global_offset``, ``_zch_size``              1.0    which rows those are
``_input_hash_func``, ``remap``                       1.0    (inference) whether it hashes raw ids; its lookup
``_eviction_policy``, ``_eviction_interval``          1.0    what it keeps of an id, and when it evicts
``_current_iter``, ``_current_iter_tensor``,          1.0    counters; the first and the last two are in no state_dict
``_last_eviction_iter``, ``_evicted``
``_evicted_emb_indices``                              1.0    rows whose reset is due
``_history_accumulator``, ``_history_metadata``,      1.0    raw ids since the last eviction
``_current_history_buffer_offset``,
``_input_history_buffer_size``
of ``DistanceLFU_EvictionPolicy``:
``_decay_exponent``                                   1.0    which of two raw ids it keeps
of ``HashZchManagedCollisionModule``:
``_hash_zch_identities``, ``_hash_zch_metadata``,     1.9    raw id, hour of expiry and counters of each row
``_hash_zch_runtime_meta``, ``_zch_size``
``_output_segments``, ``_start_bucket``               1.9    the rows of each bucket, and which those are
``_output_global_offset_tensor``, ``input_mapper``    1.9    the bucket of a raw id
``_input_hash_size``, ``_max_probe``,                 1.9    where a raw id is looked for
``_opt_in_prob``, ``_disable_fallback``,
``get_reserved_slots_per_bucket``
``evict``, ``_evicted_indices``                       1.9    rows whose reset is due
``_is_inference``                                     1.9    whether it trains
``is_sharded``, ``remap``                             1.9    (inference) whether it has all rows; its lookup
of its ``TrainInputMapper``:
``_inference_dispatch_div_train_world_size``          1.9    whether it keeps raw ids, or quotients
of ``torch.ops.fbgemm``:
``linearize_cache_indices``, ``lxu_cache_lookup``     1.0    (GPU) linear rows, and their place in the cache
of ``KeyedOptimizerWrapper``, ``WarmupOptimizer`` and ``GradientClippingOptimizer``:
``_optimizer``                                        1.0    the optimizer inside
of ``WarmupOptimizer``:
``_get_warmup_state``, ``_warmup_param``              1.6    iteration and stage, which its state_dict may lose
``_stages``                                           1.6    how many it has
of ``GradientClippingOptimizer``:
``_step_num``                                         1.6    how many steps it has made
====================================================  =====  ==================================================

In ``optimizers.py``, the fused optimizer ROWWISE_RMSPROP_AR is new in 1.9, and EMAINPLACE_ROWWISE_ADAGRAD in 1.2.
"""

from torchrec_stream_ckpt.model.buffers import BufferSlot as BufferSlot
from torchrec_stream_ckpt.model.buffers import add_buffer as add_buffer
from torchrec_stream_ckpt.model.buffers import buffer_slots as buffer_slots
from torchrec_stream_ckpt.model.buffers import check_buffers as check_buffers
from torchrec_stream_ckpt.model.buffers import check_writable as check_writable
from torchrec_stream_ckpt.model.buffers import count_writes as count_writes
from torchrec_stream_ckpt.model.buffers import has_home as has_home
from torchrec_stream_ckpt.model.buffers import tell_ddp as tell_ddp
from torchrec_stream_ckpt.model.collision import COUNTERS as COUNTERS
from torchrec_stream_ckpt.model.collision import NO_ID as NO_ID
from torchrec_stream_ckpt.model.collision import CollisionMap as CollisionMap
from torchrec_stream_ckpt.model.collision import IdMap as IdMap
from torchrec_stream_ckpt.model.collision import id_maps as id_maps
from torchrec_stream_ckpt.model.comm_hooks import comm_hooks as comm_hooks
from torchrec_stream_ckpt.model.dense import ReplicatedTables as ReplicatedTables
from torchrec_stream_ckpt.model.dense import check_data_parallel as check_data_parallel
from torchrec_stream_ckpt.model.dense import check_dense as check_dense
from torchrec_stream_ckpt.model.dense import dense_optimizers as dense_optimizers
from torchrec_stream_ckpt.model.dense import dense_view as dense_view
from torchrec_stream_ckpt.model.dense import has_own_state_dict as has_own_state_dict
from torchrec_stream_ckpt.model.dense import named_states as named_states
from torchrec_stream_ckpt.model.dense_identity import DensePrint as DensePrint
from torchrec_stream_ckpt.model.dense_identity import combined_parts as combined_parts
from torchrec_stream_ckpt.model.dense_identity import optimizer_parts as optimizer_parts
from torchrec_stream_ckpt.model.dense_identity import reduced_parameters as reduced_parameters
from torchrec_stream_ckpt.model.gradients import GradientNote as GradientNote
from torchrec_stream_ckpt.model.gradients import set_gradient as set_gradient
from torchrec_stream_ckpt.model.gradients import unreduced as unreduced
from torchrec_stream_ckpt.model.gradients import watch_no_sync as watch_no_sync
from torchrec_stream_ckpt.model.gradients import watch_steps as watch_steps
from torchrec_stream_ckpt.model.gradients import watch_zero_grad as watch_zero_grad
from torchrec_stream_ckpt.model.hash_collision import FREE as FREE
from torchrec_stream_ckpt.model.hash_collision import LAYOUT as LAYOUT
from torchrec_stream_ckpt.model.hash_collision import HashMap as HashMap
from torchrec_stream_ckpt.model.hash_collision import MapShard as MapShard
from torchrec_stream_ckpt.model.kernel_guard import KernelGuard as KernelGuard
from torchrec_stream_ckpt.model.kernel_guard import check_free as check_free
from torchrec_stream_ckpt.model.kernel_guard import claim as claim
from torchrec_stream_ckpt.model.kernels import FusedKernel as FusedKernel
from torchrec_stream_ckpt.model.kernels import LocalShard as LocalShard
from torchrec_stream_ckpt.model.lookups import FusedUpdate as FusedUpdate
from torchrec_stream_ckpt.model.lookups import Key as Key
from torchrec_stream_ckpt.model.lookups import Lookup as Lookup
from torchrec_stream_ckpt.model.modules import fused_kernels as fused_kernels
from torchrec_stream_ckpt.model.modules import sharded_embeddings as sharded_embeddings
from torchrec_stream_ckpt.model.optimizers import optimizer_states as optimizer_states
from torchrec_stream_ckpt.model.outside_writes import watch_outside_writes as watch_outside_writes
from torchrec_stream_ckpt.model.wrappers import check_wrappers as check_wrappers
from torchrec_stream_ckpt.model.wrappers import load_wrapper_states as load_wrapper_states
from torchrec_stream_ckpt.model.wrappers import wrapper_parameters as wrapper_parameters
from torchrec_stream_ckpt.model.wrappers import wrapper_states as wrapper_states
