"""A sink in Redis or Valkey: one key a row, for servers in any language.

Keys begin with a prefix, which names the job:

- ``PREFIX TABLE : KEY`` (without spaces): the weights of one row, ``dim`` numbers of the table's dtype, little-endian.
  ``KEY`` is the raw id in a table with managed collision, the number of the row in any other.
- ``PREFIX _state``: a hash with ``position``, ``marker``, ``step``, ``committed_s`` (Unix time) and ``tables`` (JSON:
  rows, dim, dtype, and ``raw_id`` if its keys are raw ids, by name). ``position`` ends with ``>`` and a marker while
  that marker's rows are being written, so that rows may be of two markers, and has one such end for each update that
  broke off before. It is missing while all rows are being written.
- ``PREFIX _feed``: identifies the program that feeds the rows.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError, FencedError, SinkUnavailableError
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update, UpdateKind
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array
from torchrec_stream_ckpt.util.options import Options, read_options
from torchrec_stream_ckpt.util.types import TableSpec
from torchrec_stream_ckpt.util.units import plain

_URL = re.compile(r"rediss?://(?:[^/@\s:]+|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?(?:/[0-9]{1,3})?")
_NUMBER = re.compile(r"-?[0-9]{1,19}")
_BATCH_BYTES = 2**20
"""Weights of one transaction. Redis runs it without a pause."""
_BATCH_ROWS = 2048
_ANSWER_S = 30.0
_MISSING = 0xFF
"""Byte that rows without a key are filled with: not-a-numbers of a kind that no training computes."""
_SCANNED = 1000
"""Keys that one step of a scan goes through."""
_RAW_ID = "raw_id"
_TEXTS = ("username", "password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "client_name")


class RedisSink:
    """Rows in one database of a Redis server.

    Args:
        url: ``redis://HOST:PORT/DATABASE``, or ``rediss://`` for TLS.
        prefix: Start of all keys.
        options: ``username``, ``password``, ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``, ``client_name`` and
            ``socket_timeout`` (seconds): a mapping, or a file of ``key=value`` lines.

    Raises:
        ConfigError: the URL or an option is wrong; the client library is missing; the server may evict rows, is a
            cluster, or refuses the login.
        SinkUnavailableError: the server does not answer.
    """

    reads_back = True

    def __init__(self, url: str, prefix: str, options: Options = None) -> None:
        if "@" in url:
            raise ConfigError("the URL of a sink must not hold a login", hint="put username and password into a file")
        if _URL.fullmatch(url) is None:
            raise ConfigError(f"'{url}' is not the URL of a Redis server", hint="use redis://HOST:PORT/DATABASE")
        try:
            import redis
        except ImportError:
            raise ConfigError(
                "a sink in Redis requires redis-py", hint="pip install 'torchrec_stream_ckpt[redis]'"
            ) from None
        self._errors = redis.exceptions
        self._url = url
        self._prefix = prefix
        self._state, self._feed = f"{prefix}_state", f"{prefix}_feed"
        self._me = uuid.uuid4().hex.encode()
        self._has_claimed = False
        self._base = ""
        """Position without the markers that are being written, as it was read or stored last."""
        self._towards: list[str] = []
        """Markers of updates that have begun since."""
        self._batches = 0
        """Transactions since :meth:`begin`."""
        self._client: Any = redis.Redis.from_url(url, **_arguments(options))
        with self._answers():
            self._check(self._client.info("memory"), self._client.info("cluster"))

    def _check(self, memory: Mapping[str, Any], cluster: Mapping[str, Any]) -> None:
        if cluster.get("cluster_enabled"):
            raise ConfigError(
                "a Redis cluster cannot be a sink: rows and position have to change together",
                hint="use one server, with replicas",
                sink=self._url,
            )
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise ConfigError(
                f"this Redis server may evict rows: its maxmemory-policy is {policy}",
                hint="CONFIG SET maxmemory-policy noeviction",
                sink=self._url,
            )

    def position(self) -> str:
        with self._answers():
            stored = (self._client.hget(self._state, "position") or b"").decode()
        self._base, *self._towards = stored.split(">")
        return stored

    def begin(self, update: Update, mapped: Collection[str]) -> None:
        with self._answers():
            if not self._has_claimed:
                self._client.set(self._feed, self._me)
                self._has_claimed = True
            if update.kind is UpdateKind.LOAD:
                self._begin_load(update, mapped)
            else:
                if self._towards[-1:] != [str(update.marker)]:
                    self._towards.append(str(update.marker))
                position = ">".join((self._base, *self._towards))
                self._run(lambda pipe: pipe.hset(self._state, "position", position), begins=self._base)

    def _begin_load(self, update: Update, mapped: Collection[str]) -> None:
        """Forget the position, and delete tables that the model no longer has, or has with other rows."""
        shapes = {
            table.name: [table.rows, table.dim, table.dtype, *([_RAW_ID] if table.name in mapped else [])]
            for _, table in update.schema.live
        }
        known = json.loads(self._client.hget(self._state, "tables") or "{}")
        self._run(lambda pipe: pipe.hdel(self._state, "position"), begins="")
        self._base, self._towards = "", []
        for name, shape in known.items():
            if shapes.get(name) != shape:
                if _RAW_ID in shape:
                    numbers: Iterator[list[int]] = self._scan(name)
                else:
                    starts = range(0, shape[0], _BATCH_ROWS)
                    numbers = (list(range(begin, min(begin + _BATCH_ROWS, shape[0]))) for begin in starts)
                for keys in numbers:
                    self._run(partial(_unlink, [self._key(name, key) for key in keys]))
        self._run(lambda pipe: pipe.hset(self._state, "tables", json.dumps(shapes)))

    def put(self, changed: Changed) -> None:
        table, width = changed.table, changed.weights.itemsize
        height = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, changed.weights[:1].nbytes)))
        is_whole = changed.weights.shape[1] == table.dim
        for begin in range(0, len(changed.ids), height):
            ids = changed.ids[begin : begin + height].tolist()
            rows = [row.tobytes() for row in np.ascontiguousarray(changed.weights[begin : begin + height])]

            def fill(pipe: Any, ids: list[int] = ids, rows: list[bytes] = rows) -> None:
                keys = [self._key(table.name, row) for row in ids]
                if is_whole:
                    pipe.mset(dict(zip(keys, rows, strict=True)))
                else:
                    for key, row in zip(keys, rows, strict=True):
                        pipe.setrange(key, changed.col0 * width, row)

            with self._answers():
                self._run(fill)

    def delete(self, table: TableSpec, raw_ids: npt.NDArray[np.int64]) -> None:
        for begin in range(0, len(raw_ids), _BATCH_ROWS):
            keys = [self._key(table.name, raw_id) for raw_id in raw_ids[begin : begin + _BATCH_ROWS].tolist()]
            with self._answers():
                self._run(partial(_unlink, keys))

    def held(self, table: TableSpec) -> Iterator[npt.NDArray[np.int64]]:
        with self._answers():
            for found in self._scan(table.name):
                yield np.array(found, np.int64)

    def _scan(self, table: str) -> Iterator[list[int]]:
        """Yield the numbers in the keys of a table, from a scan of all keys of the database."""
        start = f"{self._prefix}{table}:"
        cursor, match = None, re.sub(r"([*?\[\]\\])", r"\\\1", start) + "*"
        while cursor != 0:
            cursor, keys = self._client.scan(cursor or 0, match=match, count=_SCANNED)
            numbers = [key.decode("utf-8", "replace").removeprefix(start) for key in keys]
            if found := [int(number) for number in numbers if _NUMBER.fullmatch(number)]:
                yield found

    def read(self, table: TableSpec, ids: npt.NDArray[np.int64]) -> Array:
        dtype = np.dtype(NUMPY_DTYPES[table.dtype])
        missing = bytes([_MISSING]) * (table.dim * dtype.itemsize)
        found: list[bytes] = []
        for begin in range(0, len(ids), _BATCH_ROWS):
            keys = [self._key(table.name, row) for row in ids[begin : begin + _BATCH_ROWS].tolist()]
            with self._answers():
                found += [value or missing for value in self._client.mget(keys)]
        whole = b"".join(value if len(value) == len(missing) else missing for value in found)
        return np.frombuffer(whole, dtype).reshape(len(ids), table.dim)

    def done(self, update: Update) -> None:
        state = {
            "position": update.position,
            "marker": str(update.marker),
            "step": update.step,
            "committed_s": repr(update.commit.time_s),
        }
        with self._answers():
            self._run(lambda pipe: pipe.hset(self._state, mapping=state))
        self._base, self._towards = update.position, []

    def close(self) -> None:
        self._client.close()

    def _key(self, table: str, key: int) -> str:
        return f"{self._prefix}{table}:{key}"

    def _run(self, fill: Callable[[Any], object], *, begins: str | None = None) -> None:
        """Run commands as one transaction, if nothing that this feed has written was lost meanwhile.

        Redis may have come back without its last writes. Transactions are counted, and so is theirs.

        Args:
            fill: Adds the commands to a transaction.
            begins: Begin to count, on this position; "" for any. None: go on.
        """
        with self._client.pipeline(transaction=True) as pipe:
            pipe.watch(self._feed)
            owner = pipe.get(self._feed)
            if owner is not None and owner != self._me:
                raise self._fenced()
            held = (pipe.hget(self._state, "position") or b"").decode().partition(">")[0] if begins else ""
            if owner is None or held != (begins or ""):
                self._has_claimed = owner is not None
                raise self._lost()
            pipe.multi()
            fill(pipe)
            if begins is None:
                pipe.hincrby(self._state, "batches", 1)
            else:
                pipe.hset(self._state, "batches", 0)
            try:
                answers = pipe.execute()
            except self._errors.WatchError:
                # The client also raises it if the connection broke. Whether the transaction ran is then unknown.
                owner = self._client.get(self._feed)
                if owner is not None and owner != self._me:
                    raise self._fenced() from None
                self._has_claimed = owner is not None
                raise self._lost() from None
        self._batches = 0 if begins is not None else self._batches + 1
        if begins is None and answers[-1] != self._batches:
            raise self._lost()

    def _fenced(self) -> FencedError:
        return FencedError(
            "another program feeds this sink", hint="stop one of them, or give it another prefix", sink=self._url
        )

    def _lost(self) -> SinkUnavailableError:
        return SinkUnavailableError(
            "Redis has restarted, or has lost rows that were written to it",
            hint="nothing to do now: they are written again; appendonly yes keeps them over a restart",
            sink=self._url,
        )

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Raise errors of the client as ours."""
        errors = self._errors
        try:
            yield
        except (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError) as error:
            raise ConfigError(
                f"Redis refuses: {error}",
                hint="its user needs +info +hget +hset +hdel +hincrby +get +set +mget +mset +setrange +unlink +scan "
                "+watch +unwatch +multi +exec, and the keys of the prefix",
                sink=self._url,
            ) from None
        except errors.OutOfMemoryError:
            raise SinkUnavailableError(
                "Redis is full", hint="raise its maxmemory, or follow fewer tables", sink=self._url
            ) from None
        except errors.ConnectionError as error:
            raise SinkUnavailableError(
                f"Redis does not answer: {error}", hint="check that it runs", sink=self._url
            ) from None
        except errors.RedisError as error:
            raise SinkUnavailableError(f"Redis fails: {error}", hint="see its log", sink=self._url) from None


def _unlink(keys: list[str], pipe: Any) -> None:
    pipe.unlink(*keys)


def _arguments(options: Options) -> dict[str, Any]:
    """Return arguments of the client."""
    given: dict[str, Any] = read_options(options, "sink")
    unknown = sorted(given.keys() - {*_TEXTS, "socket_timeout"})
    if unknown:
        raise ConfigError(
            f"sink options have an unknown name: {unknown[0]}", hint=f"use {', '.join(_TEXTS)} or socket_timeout"
        )
    try:
        answer_s = float(plain(str(given.pop("socket_timeout", _ANSWER_S))))
    except ValueError:
        hint = "write a number, such as socket_timeout=10"
        raise ConfigError("sink options: socket_timeout must be seconds", hint=hint) from None
    return {"socket_timeout": answer_s, "socket_connect_timeout": answer_s, **given}
