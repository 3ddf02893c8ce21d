"""Compute the needs of a job: bandwidth, disks, memory, and the cost of a failure. A pure model: no I/O, no torch.

``stream-ckpt plan`` prints it. ``benchmarks/scale`` measures its unit costs and compares it with real jobs. Names
contain the units: ``_s`` seconds, ``_bytes`` bytes, ``_per_s`` per second. docs/sizing.md explains each line for
operators.
"""
