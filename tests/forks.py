"""The one server that processes of tests are forked from: it has imported once what each of them needs.

A process has one such server, whoever asks for it, and the last list of imports that was set before it starts counts.
"""

from __future__ import annotations

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.imported"])
