"""A broker on loopback for the cases, and whether it syncs."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any

from common import UnavailableError, scratch

from torchrec_stream_ckpt import StreamCkptError

_SETTING = "log.flush.interval.messages"
_NEVER = str((1 << 63) - 1)
_WAIT_S = 60.0


def start_broker(case: str, stack: ExitStack) -> str:
    """Bootstrap servers of one that goes with the stack.

    Raises:
        UnavailableError: it does not start; says why.
    """
    from torchrec_stream_ckpt.extras.broker.kraft import Broker

    broker = Broker(stack.enter_context(scratch(case)) / "broker")
    try:
        bootstrap = broker.start(die_with=os.getpid()).bootstrap
    except (StreamCkptError, OSError) as error:
        raise UnavailableError(f"no broker: {error}") from None
    stack.callback(broker.stop)
    return str(bootstrap)


def set_fsync(bootstrap: str, fsync: bool) -> None:
    """Whether the broker syncs records before it acknowledges them. By itself it leaves that to the kernel.

    Raises:
        TimeoutError: the broker has taken the setting and does not show it.
    """
    from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

    admin, value = AdminClient({"bootstrap.servers": bootstrap}), "1" if fsync else _NEVER
    (broker,) = map(str, admin.list_topics(timeout=_WAIT_S).brokers)
    entry = ConfigEntry(_SETTING, value, incremental_operation=AlterConfigOpType.SET)
    change = ConfigResource(ConfigResource.Type.BROKER, broker, incremental_configs=[entry])
    admin.incremental_alter_configs([change])[change].result(_WAIT_S)
    asked = ConfigResource(ConfigResource.Type.BROKER, broker)
    deadline = time.monotonic() + _WAIT_S
    while (found := _shown(admin, asked)) != value:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{_SETTING} of broker {broker} is {found}, not {value}, after {_WAIT_S:g} s")
        time.sleep(0.01)


def _shown(admin: Any, asked: Any) -> str:
    return str(admin.describe_configs([asked])[asked].result(_WAIT_S)[_SETTING].value)
