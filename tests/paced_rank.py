"""One rank of the DLRM recipe that rests after every step: what looks at a live trainer has the cores meanwhile.

A trainer without a rest takes all of them for as long as it is looked at.
"""

from __future__ import annotations

import sys
import time

from torchrec_stream_ckpt.recipes import proof

REST_S = 0.02

if __name__ == "__main__":
    proof.train(sys.argv[1:], lambda _: time.sleep(REST_S))
