"""The lookups of one kernel: the ids of each forward, and when the fused update of that forward runs.

Ids belong to the lookup. ``prepare_inputs`` returns the tensors that this forward passes to the kernel and that its
autograd node keeps, after the bounds check has rewritten bad ids in place. Until the end of the forward they are kept
in thread-local storage. The kernel's own attributes (``_indices``) are those of the most recent forward.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model.patch import Hook, wrap

P = ParamSpec("P")


def _called_as_it_is(function: Callable[P, None]) -> Callable[P, None]:
    """Exclude a function from compiled autograd, which traces the hooks of nodes."""
    disabled: Callable[P, None] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


@dataclass(frozen=True, slots=True)
class Lookup:
    """The ids of one forward of one kernel."""

    indices: torch.Tensor
    """Local rows, after the bounds check, ordered by feature."""
    offsets: torch.Tensor
    """Start of the ids of each bag, and end of the last ones, one feature after the other."""
    bag_starts: torch.Tensor | None = None
    """First bag of each feature, and the number of bags. None if all features have the same number of bags."""
    max_bags: int = -1
    """With ``bag_starts``: the largest number of bags of a feature."""


class _GraphTask:
    """Exists as long as one run of the autograd engine, which calls it at the end."""

    __slots__ = ("__weakref__",)

    def __call__(self) -> None: ...


Key = tuple[int, int]
"""One run of one lookup's update: a graph that is kept may run again, even on another thread at the same time."""


class FusedUpdate:
    """One run of the fused update of a lookup. Created just before the kernel, on the thread that runs it."""

    __slots__ = ("_task", "key", "lookup")

    def __init__(self, lookup: Lookup, key: Key, announced: set[int]) -> None:
        self.lookup = lookup
        self.key = key
        task = _GraphTask()
        self._task = weakref.ref(task, lambda _dead: announced.discard(key[1]))
        torch.autograd.Variable._execution_engine.queue_callback(task)
        announced.add(key[1])

    @property
    def running(self) -> bool:
        """True if the kernel may still run. False once the backward has ended for any reason."""
        return self._task() is not None


class Lookups:
    """Hooks the forwards of one kernel.

    Args:
        tbe: The kernel.
        count: True to count the forwards that are in flight.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, count: bool) -> None:
        self._tbe = tbe
        self._count = count
        self._numbers = itertools.count(1)
        self._made: dict[int, int] = {}
        """Number of forwards that lead to an update, by the thread that made them. Each thread writes only its own
        number."""
        self._pending: dict[int, weakref.ref[Any]] = {}
        """Number of a forward after the last update -> its hook, which exists as long as its graph does."""
        self._bound = threading.local()
        """``lookup``: the ids of the current forward of this thread."""

    @property
    def in_flight(self) -> int:
        """Forwards after the last update whose backward may still come: their graphs exist. 0 if not counted."""
        return len(self._pending)

    @property
    def forwards(self) -> int:
        """Forwards that lead to an update, since the hooks exist. No rank of a sharded module makes one alone."""
        return sum(self._made.copy().values())

    def forget(self) -> None:
        """Count no forward so far as in flight."""
        self._pending.clear()

    def on_update(
        self,
        before: Callable[[FusedUpdate], None],
        after: Callable[[Lookup, Key], None],
        unseen: Callable[[], None],
        writing: Callable[[], None],
        guard: Callable[[], Callable[[], None]] | None = None,
    ) -> Callable[[], None]:
        """Call ``before`` and ``after`` around the fused update of every forward. Returns the remover.

        Both calls run on the autograd thread, right around the kernel (on its stream on a GPU). A forward without a
        backward calls neither.

        Args:
            before: A run of the update is about to start. If it raises, the update does not run.
            after: The run of this key has ended. Not called if an exception is raised in between.
            unseen: A backward has run updates of this kernel, and none of them was announced: its forward preceded this
                call, or bypassed the hooks of modules.
            writing: (GPU) Rows change on the current stream.
            guard: (GPU) A forward has ended. The function that it returns is called before the update, ahead of all of
                these.
        """
        announced: set[int] = set()
        """Graph tasks that run now and in which an update was announced."""

        @_called_as_it_is
        def start(lookup: Lookup, number: int) -> None:
            before(FusedUpdate(lookup, (number, torch._C._current_graph_task_id()), announced))

        @_called_as_it_is
        def end(lookup: Lookup, number: int) -> None:
            for earlier in [known for known in self._pending.copy() if known <= number]:
                self._pending.pop(earlier, None)
            after(lookup, (number, torch._C._current_graph_task_id()))

        @_called_as_it_is
        def accumulating(_grads: object) -> None:
            if torch._C._current_graph_task_id() not in announced:
                unseen()

        @_called_as_it_is
        def reaching(_grads: object) -> None:
            unseen()

        def hook(lookup: Lookup, node: Any, check: Callable[[], None] | None) -> None:
            number, thread = next(self._numbers), threading.get_ident()
            self._made[thread] = self._made.get(thread, 0) + 1

            def starting(_grads: object) -> None:
                start(lookup, number)

            def ended(_inputs: object, _outputs: object) -> None:
                end(lookup, number)

            if check is not None:
                node.register_prehook(lambda _grads: check())
            # Before the hook that notifies the streams of a write: rows may be read once more before it.
            node.register_prehook(starting)
            if lookup.indices.is_cuda:
                node.register_prehook(lambda _grads: writing())
            node.register_hook(ended)
            if self._count:
                self._pending[number] = weakref.ref(ended, lambda _dead: self._pending.pop(number, None))

        def entering(_tbe: object, _args: object) -> None:
            if torch.compiler.is_compiling():
                raise _compiled()
            self._bound.lookup = None

        def preparing(prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            prepared = prepare(*args, **kwargs)
            if not torch.compiler.is_compiling():
                indices, offsets, _, vbe = prepared
                self._bound.lookup = Lookup(indices, offsets, vbe.B_offsets, int(vbe.max_B))
            return prepared

        def looked_up(_tbe: object, _args: object, output: torch.Tensor) -> None:
            lookup, self._bound.lookup = self._bound.lookup, None
            check = guard() if guard is not None else None
            node = output.grad_fn
            if node is None:
                return
            if lookup is None:
                raise _compiled()
            if "LookupFunction" not in node.name():
                raise UnsupportedError(
                    f"the output of the fused kernel comes from {node.name()} instead of its lookup",
                    hint="exclude sharded embeddings from torch.compile; use the torchrec and fbgemm versions in the "
                    "README",
                )
            hook(lookup, node, check)

        # Every lookup of this kernel leads to one node, which runs after them. Earlier lookups keep their node: an
        # update that reaches it was not announced, even if the same backward also runs announced ones.
        leaf = self._tbe.placeholder_autograd_tensor
        earlier = torch.autograd.graph.get_gradient_edge(leaf).node
        handles = [earlier.register_prehook(reaching)]
        del earlier
        _lead_elsewhere(leaf)
        accumulate = torch.autograd.graph.get_gradient_edge(leaf).node
        handles += [
            accumulate.register_prehook(accumulating),
            self._tbe.register_forward_pre_hook(Hook(entering)),
            self._tbe.register_forward_hook(Hook(looked_up), prepend=True),
        ]
        unpatch = wrap(self._tbe, "prepare_inputs", preparing)
        keep = [accumulate]  # otherwise torch would create it again, without the hook, once no graph exists

        def remove() -> None:
            for handle in handles:
                handle.remove()
            unpatch()
            keep.clear()

        return remove


def _lead_elsewhere(leaf: torch.Tensor) -> None:
    """Make later graphs end in a new node for this empty parameter: torch creates one when its dtype has changed."""
    data = leaf.data
    leaf.data = torch.empty(0, dtype=torch.float64, device=leaf.device)
    leaf.data = data


def _compiled() -> UnsupportedError:
    return UnsupportedError(
        "a compiled lookup does not expose its ids", hint="exclude sharded embeddings from torch.compile"
    )
