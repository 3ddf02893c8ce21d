"""A job with two file tiers and no trainer: what its ranks would have written to the inner log. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import synthetic
from tests.builders import Stream, digest_files
from tests.parts import open_tiers
from tests.synthetic import Image, image_of_log
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.inner import Relay, Tiers
from torchrec_stream_ckpt.save.generation import Opening
from torchrec_stream_ckpt.tiers.two_claims import claim_both
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import MarkerId


def config(inner: Path, outer: Path | str, every: int = 1, **more: object) -> StreamConfig:
    far = outer if isinstance(outer, str) else f"file://{outer}"
    return StreamConfig(uri=(f"file://{inner}", far), outer_every=every, **more)  # type: ignore[arg-type]


def relay(tiers: Tiers, *, upto: str = "", everything: bool = False) -> list[str]:
    """Copy once; the markers that the outer tier has got."""
    one = Relay(tiers)
    try:
        marker = MarkerId.parse(upto) if upto else None
        return [str(commit.id) for commit in one.catch_up(upto=marker, everything=everything)]
    finally:
        one.close()


def lose(tiers: Tiers) -> None:
    """The node is gone, and its disk."""
    tiers.inner.control.close()  # nobody writes there any more
    shutil.rmtree(tiers.folder)


@dataclass
class TieredJob(synthetic.Job):
    """Writes to the inner log, as a trainer on this node does; generations are claimed on both."""

    settings: StreamConfig = field(kw_only=True)

    def __post_init__(self) -> None:
        self.tiers = open_tiers(self.settings)
        self.log = self.tiers.inner.log
        super().__post_init__()

    def begin(  # type: ignore[override]
        self,
        parent: str | None = None,
        *,
        world: int | None = None,
        swept: Sequence[int] | None = None,
        changes: ClaimChanges | None = None,
    ) -> Claim:
        """Open a generation on both tiers."""
        self.world = world or self.world
        above = MarkerId.parse(parent) if parent else None
        swept = tuple(range(len(self.schema.tables)) if swept is None and above is None else swept or ())
        self.splits[self.generation] = [1] * len(self.schema.tables)
        self.tiers.seen = None  # no restore has chosen the parent
        self.claim, _ = claim_both(self.tiers, Opening(self.schema, self.world, above, swept, self.layout(), changes))
        self.generation, self.marker = self.claim.generation, above.marker if above else 0
        self.splits[self.generation] = [1] * len(self.schema.tables)
        self.streams = [
            Stream(
                rank,
                self.generation,
                job=self.claim.job,
                shards=tuple(self._shards(rank)),
                schema=self.claim.schema,
                world=self.world,
            )
            for rank in range(self.world)
        ]
        self._written, self._begins, self._ends = ([0] * self.world for _ in range(3))
        self._sweep(self.claim.swept)
        self.flush()
        return self.claim

    def commit(self, **more: object) -> Commit:
        """A marker on the inner tier, with dense state."""
        number = MarkerId(self.generation, self.marker + 1)
        folder = self.tiers.folder / dense_name(self.claim.job, number)
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(f"dense state of {number}".encode())
        (folder / "__0_0.distcp").write_bytes(self.random.bytes(1000))
        files = digest_files(folder, [".metadata", "__0_0.distcp"])
        return super().commit(job=self.claim.job, nonce=self.claim.nonce, dense_files=files, **more)

    def markers(self, count: int) -> list[Commit]:
        """So many of them, with rows between."""
        made = []
        for _ in range(count):
            self.touch()
            made.append(self.commit())
        return made

    def truth(self, marker: MarkerId) -> Image:
        """By definition: all frames on its path, read where they were written."""
        return image_of_log(self.log, self.tiers.inner.control.refresh(), marker)
