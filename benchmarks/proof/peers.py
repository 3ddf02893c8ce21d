"""The same job without streaming checkpoints, saved by what TorchRec users have: each as a careful user would build it.

Each of them resumes on the ranks and the plan that it was saved on, from the newest save that is complete. It saves as
often as stalls of the training thread that add up to 5% of the time allow; that is measured while it runs.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import at_end_of, note_load, record_loss
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode

STALL_SHARE = 0.05
KEPT = 2
"""Complete saves that stay on the disk."""
SAVED = "saved.jsonl"


class Saved:
    """The state of a job by name: what is saved, and what a load writes into."""

    def __init__(self, model: Any, optimizer: Any, loader: Any) -> None:
        self.loader = loader
        self.values: dict[str, Any] = {f"model/{name}": value for name, value in model.state_dict().items()}
        for kind, (_, part) in zip(("fused", "dense"), optimizer.optimizers, strict=True):
            for parameter, states in part.state_dict()["state"].items():
                self.values |= {f"{kind}/{parameter}/{name}": value for name, value in states.items()}

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors that this rank holds: its shards, and the dense state, which each rank has."""
        for name, value in self.values.items():
            if isinstance(value, ShardedTensor):
                for number, shard in enumerate(value.local_shards()):
                    yield f"{name}#{number}", shard.tensor
            else:
                yield name, value

    def small(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Without tables and their optimizer states."""
        for name, value in self.values.items():
            if not isinstance(value, ShardedTensor):
                yield name, value


class Saver:
    """Saves of one job in a folder, as folders ``step-N``."""

    every: int | None = None
    """Steps between saves, where their cost is measured; None for as often as stalls allow."""

    def __init__(self, folder: Path, model: Any, optimizer: Any, loader: Any) -> None:
        self.folder, self.model = folder, model
        self.saved = Saved(model, optimizer, loader)
        self.rank = dist.get_rank()
        self._last, self._stall_s = time.monotonic(), 0.0
        folder.mkdir(exist_ok=True)

    def complete(self) -> list[tuple[int, Path]]:
        """Saves that a restart may take, oldest first."""
        found = ((int(path.name.removeprefix("step-")), path) for path in self.folder.glob("step-*"))
        return sorted((step, path) for step, path in found if (path / "complete").exists())

    def load(self) -> int:
        """(all ranks) Load the newest complete save; the step that it holds, 0 if there is none."""
        found = self.complete()
        if not found:
            return 0
        step, path = found[-1]
        self.read(step, path)
        self.saved.loader.load_state_dict(torch.load(path / "loader.pt", weights_only=False))
        return step

    def after(self, step: int) -> None:
        """(all ranks) A step is done: save if the stall of the last save is paid off. Rank 0 decides for all."""
        paid = time.monotonic() - self._last >= self._stall_s / STALL_SHARE
        due = torch.tensor(float((paid if self.every is None else step % self.every == 0) and self.ready()))
        dist.broadcast(due, 0)
        if not due:
            return
        begin = time.monotonic()
        self.save(step, self.folder / f"step-{step}")
        self._last = time.monotonic()
        self._stall_s = self._last - begin

    def ready(self) -> bool:
        """(rank 0) Whether another save may begin."""
        return True

    def finish(self, path: Path) -> None:
        """(all ranks) All have written: it counts from here on."""
        dist.barrier()
        if self.rank == 0:
            self.seal(path)
            with (self.folder / SAVED).open("a") as file:
                file.write(json.dumps([int(path.name.removeprefix("step-")), time.time()]) + "\n")

    def seal(self, path: Path) -> None:
        """(rank 0) Say that it is complete, and delete older ones."""
        (path / "complete").touch()
        for _, old in self.complete()[:-KEPT]:
            (old / "complete").unlink()
            shutil.rmtree(old, ignore_errors=True)

    def keep_loader(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            torch.save(self.saved.loader.state_dict(), path / "loader.pt")

    def save(self, step: int, path: Path) -> None:
        raise NotImplementedError

    def read(self, step: int, path: Path) -> None:
        raise NotImplementedError


def saved(folder: Path) -> dict[int, float]:
    """Step of each save that was ever complete -> the Unix time at which it was."""
    path = folder / SAVED
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


def copy_in(found: dict[str, torch.Tensor], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    with torch.no_grad():
        for name, tensor in tensors:
            tensor.copy_(found[name])


class TorchSave(Saver):
    """``torch.save`` of each rank's tensors; the save counts when all ranks have written theirs."""

    def save(self, step: int, path: Path) -> None:
        self.keep_loader(path)
        torch.save(dict(self.saved.local()), path / f"rank-{self.rank}.pt")
        self.finish(path)

    def read(self, step: int, path: Path) -> None:
        copy_in(torch.load(path / f"rank-{self.rank}.pt"), self.saved.local())


class DcpAsync(Saver):
    """``dcp.async_save`` by a thread; another one begins when all ranks have ended the last one.

    Its stager refuses TorchRec's sharded tensors on a CPU (no ``data_ptr``), so each rank saves its shards by names of
    its own. Such a save loads on the same ranks and plan.
    """

    def __init__(self, *job: Any) -> None:
        super().__init__(*job)
        self._pending: tuple[Any, Path] | None = None
        self._group = dist.new_group(backend="gloo")

    def ready(self) -> bool:
        return self._pending is None or self._pending[0].done()

    def _by_rank(self) -> dict[str, torch.Tensor]:
        return {f"{self.rank}/{name}" if "#" in name else name: tensor for name, tensor in self.saved.local()}

    def save(self, step: int, path: Path) -> None:
        self.settle()
        self.keep_loader(path)
        upload = dcp.async_save(self._by_rank(), checkpoint_id=path / "dcp", process_group=self._group)
        self._pending = (upload, path)

    def settle(self) -> None:
        """(all ranks) The save before is complete."""
        if self._pending is not None:
            upload, path = self._pending
            upload.result()
            self.finish(path)
            self._pending = None

    def after(self, step: int) -> None:
        done = torch.tensor(float(self._pending is not None and self._pending[0].done()))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done:
            self.settle()
        super().after(step)

    def read(self, step: int, path: Path) -> None:
        dcp.load(self._by_rank(), checkpoint_id=path / "dcp")


class TrackerDcp(DcpAsync):
    """Between full saves by DCP, each save holds only the rows that TorchRec's ModelDeltaTracker names since the last
    one, with their optimizer state, and the dense state. A full save comes after every ten of these."""

    DELTAS = 10

    def __init__(self, *job: Any) -> None:
        super().__init__(*job)
        config = DeltaTrackerConfig(tracking_mode=TrackingMode.ID_ONLY)
        self._tracker = self.model.init_torchrec_delta_tracker(config)
        self._deltas: list[int] = []
        """Steps of the saves of rows since the full one, which is the first of them."""

    def save(self, step: int, path: Path) -> None:
        if not self._deltas or len(self._deltas) > self.DELTAS:
            self._tracker.get_unique_ids()
            self._deltas = [step]
            super().save(step, path)
            return
        self.settle()
        self.keep_loader(path)
        rows = self._tracker.get_unique_ids()
        found: dict[str, Any] = {"dense": dict(self.saved.small()), "rows": {}, "after": list(self._deltas)}
        for name, tensor in self.saved.local():
            if "#" in name and (ids := _ids_of(name, rows)) is not None:
                found["rows"][name] = (ids, tensor[ids].clone())
        torch.save(found, path / f"rows-{self.rank}.pt")
        self._deltas.append(step)
        self.finish(path)

    def seal(self, path: Path) -> None:
        """Saves of rows need those before them, so nothing is deleted before the next full save is complete."""
        (path / "complete").touch()
        if (path / "dcp").exists():
            for _, old in self.complete():
                if old != path:
                    (old / "complete").unlink()
                    shutil.rmtree(old, ignore_errors=True)

    def read(self, step: int, path: Path) -> None:
        if (path / "dcp").exists():
            super().read(step, path)
            return
        newest = torch.load(path / f"rows-{self.rank}.pt")
        first, *others = (self.folder / f"step-{each}" for each in newest["after"])
        super().read(step, first)
        local = dict(self.saved.local())
        with torch.no_grad():
            for each in (*others, path):
                for name, (ids, values) in torch.load(each / f"rows-{self.rank}.pt")["rows"].items():
                    local[name][ids] = values
        copy_in(newest["dense"], self.saved.small())


def _ids_of(name: str, rows: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Changed rows of a shard. The tracker names a table once, however many column shards this rank has of it."""
    return next((ids for table, ids in rows.items() if f"{table.removesuffix('.weight')}." in name), None)


PEERS: dict[str, type[Saver]] = {
    "torch.save": TorchSave,
    "dcp.async_save": DcpAsync,
    "ModelDeltaTracker and DCP": TrackerDcp,
}


def peer(flags: list[str], folder: Path, kind: str, every: int | None = None) -> None:
    """(rank) Train without our checkpoints until the last stop, saved by ``kind``; ``none`` saves nothing."""
    from torchrec_stream_ckpt.recipes import train_dlrm as recipe
    from torchrec_stream_ckpt.recipes.proof import StepEvent, gather

    args = recipe.parse_args(flags)
    recipe.configure_logging(int(os.environ["RANK"]))
    with recipe.process_group() as device:
        model, optimizer, loader = recipe.build(args, device)
        saver = PEERS[kind](folder / "saves", model, optimizer, loader) if kind != "none" else None
        if saver:
            saver.every = every
        step = saver.load() if saver else 0
        note_load(folder, step)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss, _ = model(batch.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            record_loss(folder, step, loss.detach())
            if saver:
                saver.after(step)
            event = StepEvent(step, model, optimizer, loader, None, None, None)
            if at_end_of(step, folder, lambda event=event: gather(event)):  # type: ignore[misc]
                break
        del saver
        gc.collect()
