"""Every sharder that the installed TorchRec has, found by walking its modules."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import torchrec
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder

NOT_OF_THE_LIBRARY = (".tests", ".test_utils", ".benchmark", ".examples", ".experimental", ".inference")
"""Parts of TorchRec whose modules are no library for training; some need packages that the lock has not."""


def installed_sharders() -> set[str]:
    """Names of the classes of sharders that can be built, and those of ``get_default_sharders()``."""
    for module in pkgutil.walk_packages(torchrec.__path__, "torchrec.", onerror=lambda _: None):
        if not any(part in module.name for part in NOT_OF_THE_LIBRARY):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    found = {each for each in _below(ModuleSharder) if each.__module__.startswith("torchrec.")}
    kinds = {each.__name__ for each in found if not inspect.isabstract(each)}
    return kinds | {type(each).__name__ for each in get_default_sharders()}


def _below(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        if not any(part in f".{each.__module__}" for part in NOT_OF_THE_LIBRARY):
            yield each
        yield from _below(each)
