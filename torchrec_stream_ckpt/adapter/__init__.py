"""The only room that touches private API of TorchRec and FBGEMM.

What is used, and where it was read (torchrec 1.9.2 with fbgemm 1.9.0, and torchrec 1.6.1 with fbgemm 1.6.0):

==========================================================  ==========================================
``ShardedEmbeddingBagCollection._lookups[k]``               one lookup a sharding type; the same in
                                                            ``ShardedEmbeddingCollection``
``..._emb_modules[j].config.embedding_tables[i]``           i-th table of the j-th kernel: shard offsets, local sizes
``..._emb_modules[j].fused_optimizer``                      the param group that sets the kernel's learning rate
``SplitTableBatchedEmbeddingBagsCodegen._indices``          ids of the last forward, behind the bounds check
``..._offsets``, ``_vbe_B_offsets``, ``_vbe_max_B``         their bounds by feature; the latter two only with VBE
``...feature_table_map``, ``hash_size_cumsum``              feature to table, and to linear rows
``...iter``, ``iter_cpu``, ``learning_rate_tensor``,        state of the kernel that no state_dict holds
``max_counter``
``...split_optimizer_states()``                             views of the optimizer's rows
``...ema_inplace``, ``ensemble_and_swap``,                  writers of rows outside the update
``reset_embedding_weight_momentum``
``...lxu_cache_weights``, ``lxu_cache_state``,              (GPU) the newest value of a cached row
``cache_hash_size_cumsum``
``...prefetch_stream``                                      (GPU) where a pipeline moves rows beside the step
``WarmupOptimizer._get_warmup_state``, ``_warmup_param``,   a wrapper's own state, which its state_dict loses when
``_stages``; ``GradientClippingOptimizer._step_num``        it stands around a combined optimizer
``ShardedManagedCollisionCollection``                       one id map a table: its buffers, and the counters and
``._managed_collision_modules[table]``                      history that no state_dict holds
==========================================================  ==========================================
"""

from torchrec_stream_ckpt.adapter.collision import COUNTERS, NO_ID, IdMap, id_maps
from torchrec_stream_ckpt.adapter.dense import check_dense, dense_optimizers, dense_view
from torchrec_stream_ckpt.adapter.kernels import FusedKernel, LocalShard, Lookup
from torchrec_stream_ckpt.adapter.modules import fused_kernels, sharded_embeddings
from torchrec_stream_ckpt.adapter.outside import watch_outside_writes
from torchrec_stream_ckpt.adapter.wrappers import check_wrappers, load_wrapper_states, wrapper_states

__all__ = [
    "COUNTERS",
    "NO_ID",
    "FusedKernel",
    "IdMap",
    "LocalShard",
    "Lookup",
    "check_dense",
    "check_wrappers",
    "dense_optimizers",
    "dense_view",
    "fused_kernels",
    "id_maps",
    "load_wrapper_states",
    "sharded_embeddings",
    "watch_outside_writes",
    "wrapper_states",
]
