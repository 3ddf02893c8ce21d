"""A CUDA device that the CPU plays: the library runs its branches for a GPU, on a machine that has none.

``cuda.py`` plays streams, events, memory and random state, ``fbgemm.py`` the operators that only a GPU has and a UVM
cache. Work is done at once and in order, so what is shown is that the branches compute the right thing and ask for
order where they must; not that the order which they ask for is enough (``tests/unit/test_stream_schedules.py``), and
nothing about real kernels, real waits and real memory (``make test-gpu``).
"""
