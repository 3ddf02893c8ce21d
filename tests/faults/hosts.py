"""Several hosts on this machine: network namespaces around a router that drops what a partition forbids.

Nothing here has a name on the machine. A namespace lives as long as the process that holds it, and that one ends with
the test, however the test ends. Hosts reach each other and nobody else: there is no link to the machine's own network.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

from tests import forks

CLONE_NEWNET = 0x40000000


class NoHosts(AssertionError):  # noqa: N818
    """This machine cannot make network namespaces; says what it lacks. A failure, never a skip."""


def enter(namespace: Path) -> None:
    """Move the calling thread, and all threads and processes that it starts, into a network namespace."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            code = ctypes.get_errno()
            raise NoHosts(f"cannot enter {namespace}: {os.strerror(code)}; run as root, with CAP_SYS_ADMIN")
    finally:
        os.close(descriptor)


def _call(*command: str, given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}; run as root, with CAP_SYS_ADMIN and CAP_NET_ADMIN")


@dataclass
class Host:
    """One host: an address, a link that may be down, and whatever was started there."""

    name: str
    address: str = ""
    _holder: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        for tool, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2")):
            if shutil.which(tool) is None:
                raise NoHosts(f"`{tool}` is not installed: apt-get install -y --no-install-recommends {package}")
        # It ends at the end of its input: when this process closes the pipe, or is gone.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise NoHosts(f"unshare --net fails for host {self.name}: run as root, with CAP_SYS_ADMIN")
        self._holder.stdout.close()

    @property
    def pid(self) -> int:
        """Of the process that holds the namespace."""
        return self._holder.pid

    @property
    def namespace(self) -> Path:
        return Path(f"/proc/{self.pid}/ns/net")

    def command(self, *command: str) -> list[str]:
        """``command``, to be run on this host; the process that it becomes is ``command`` itself."""
        return ["nsenter", f"--net={self.namespace}", "--", *command]

    def ip(self, *lines: str) -> None:
        """Run lines of ``ip`` on this host."""
        _call(*self.command("ip", "-batch", "-"), given="\n".join(lines))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts, is on this host within the block."""
        assert forks.context is not None  # it has said what the server imports
        forkserver.ensure_running()  # outside of the host: all that tests fork later comes from this one server
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            enter(self.namespace)
            yield
        finally:
            enter(Path(f"/proc/self/fd/{before}"))
            os.close(before)

    def close(self) -> None:
        assert self._holder.stdin is not None
        with suppress(OSError):
            self._holder.stdin.close()
        self._holder.wait(10)


class Network:
    """Hosts by name. A partition is silent, as a lost route is: packets vanish, and no sender is told.

    Args:
        names: Of the hosts.
    """

    def __init__(self, *names: str) -> None:
        self._hosts: list[Host] = []
        self._cut: set[tuple[str, str]] = set()
        try:
            self._router = self._add("router")
            _call(*self._router.command("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
            self.hosts = {name: self._plug(name, number) for number, name in enumerate(names, 1)}
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut(self, one: str, *others: str) -> None:
        """Nothing goes from ``one`` to ``others`` or back any more; without ``others``, to nobody at all."""
        self._change("add", one, others or self._all_but(one))

    def heal(self, one: str, *others: str) -> None:
        """Undo a cut."""
        self._change("del", one, others or self._all_but(one))

    def close(self) -> None:
        """Take all hosts away; what still runs there is left without a link."""
        for host in self._hosts:
            host.close()

    def _add(self, name: str, address: str = "") -> Host:
        host = Host(name, address)
        self._hosts.append(host)
        return host

    def _all_but(self, name: str) -> tuple[str, ...]:
        return tuple(other for other in self.hosts if other != name)

    def _plug(self, name: str, number: int) -> Host:
        host = self._add(name, f"10.213.{number}.2")
        self._router.ip(
            f"link add to{number} type veth peer name eth0 netns {host.pid}",
            f"address add 10.213.{number}.1/24 dev to{number}",
            f"link set to{number} up",
        )
        host.ip(
            "link set lo up",
            f"address add {host.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via 10.213.{number}.1",
        )
        return host

    def _change(self, how: str, one: str, others: tuple[str, ...]) -> None:
        lines = []
        for other in others:
            pair = (min(one, other), max(one, other))
            if (pair in self._cut) == (how == "add"):
                continue
            self._cut ^= {pair}
            first, second = self.hosts[pair[0]].address, self.hosts[pair[1]].address
            lines += [f"rule {how} from {a} to {b} blackhole" for a, b in ((first, second), (second, first))]
        if lines:
            self._router.ip(*lines, "route flush cache")
