"""What it costs that one rank saves a parameter and all that its optimizer keeps for it.

    python benchmarks/dense/balance.py [--megabytes 100] [--ranks 2 4] [--share 0.5] [--rounds 5] [--out FILE.json]

Dense layers under DDP with Adam: twice the parameters' bytes are state. ``even`` has equal layers, ``one large`` has a
share of the bytes in one parameter, which with its state goes to one rank. Timed is ``mark()`` of the slowest rank, as
in ``run.py``; the facts say how many bytes the busiest rank saves, next to the mean: as it is dealt, and if each tensor
were dealt by itself.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch.distributed as dist  # noqa: E402
from common import Measured, Report, arguments, at_least, check_disk, check_memory, parse, scratch, take_turns  # noqa: E402
from job import Job, Shape, build, spread  # noqa: E402
from run import ROWS, mark  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402
from torchrec_stream_ckpt.dense.replicas import owners  # noqa: E402

EVEN, LARGE = "even", "one large"


def busiest(job: Job) -> dict[str, float]:
    """Bytes of the busiest rank over the mean, of parameters and Adam's two states."""
    parameters = {f"model.{name}": each for name, each in job.model.named_parameters() if "top" in name}
    states = {f"{kind}.{name}": (name, each) for name, each in parameters.items() for kind in ("exp_avg", "exp_avg_sq")}
    tensors = {**parameters, **{name: each for name, (_, each) in states.items()}}
    world = dist.get_world_size()

    def ratio(dealt: dict[str, int]) -> float:
        load = [0] * world
        for name, rank in dealt.items():
            load[rank] += tensors[name].nbytes
        return round(max(load) * world / sum(load), 2)

    groups = {name: parameter.removeprefix("model.") for name, (parameter, _) in states.items()}
    return {"as dealt": ratio(owners(tensors, world, groups)), "each tensor by itself": ratio(owners(tensors, world))}


def measure(num_bytes: int, share: float, rounds: int, folder: str) -> tuple[Measured, dict[str, dict[str, float]]]:
    """(all ranks) Both models, one after the other in each round."""
    jobs = {
        name: build(Shape((ROWS,), 16, dense_bytes=num_bytes, dense_share=each, dense_optimizer="adam"))
        for name, each in ((EVEN, 0.0), (LARGE, share))
    }
    variants, checkpointers = {}, []
    for name, job in jobs.items():
        config = StreamConfig(uri=f"file://{folder}/{name.replace(' ', '-')}", marker_every=None, head=None)
        checkpointers.append(StreamCheckpointer(job.model, job.optimizer, config=config))
        variants[name] = partial(mark, job, checkpointers[-1], durable=False)
    found = take_turns(variants, rounds)
    for each in checkpointers:
        each.close()
    return found, {name: busiest(job) for name, job in jobs.items()}


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--megabytes", type=at_least(1), default=100, help="of parameters")
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[2, 4])
    parser.add_argument("--share", type=float, default=0.5, help="of the bytes that one parameter has")
    args = parse(parser, megabytes=20, ranks=[2], rounds=1)
    if not 0 < args.share < 1:
        parser.error(f"--share {args.share:g}: one parameter has a share between 0 and 1")
    report = Report("dense", args, script="balance.py")
    for ranks in args.ranks:
        what = f"balance, {args.megabytes} MB, {ranks} ranks"
        check_memory(int(1e6 * args.megabytes * ranks * 2 * 8), what)
        check_disk(int(1e6 * args.megabytes * 3 * 2 * (args.rounds + 3)), what)
        with scratch("dense") as folder:
            flags = (args.megabytes * 1_000_000, args.share, args.rounds, str(folder))
            measured, shares = spread(measure, ranks, folder, *flags)
            report.add(what, measured, EVEN)
            report.facts[f"{what}: busiest rank over the mean"] = shares
    report.finish()


if __name__ == "__main__":
    main()
