"""A store in an object store, through fsspec. The only module that knows fsspec; imported when one is opened."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MissingObjectError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.layout import check_object_name, is_object_name
from torchrec_stream_ckpt.store.api import Entry
from torchrec_stream_ckpt.uris import StoreUrl, without_login

_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
"""Protocols under which an upload is seen whole or not at all."""
_EXTRAS = {"s3": "s3", "s3a": "s3"}
_S3_PATIENCE = {
    "config_kwargs": {
        "connect_timeout": 10,
        "retries": {"mode": "standard", "max_attempts": 3},
        "max_pool_connections": 128,  # as many small objects as a plan asks for at once; botocore's own limit is 10
    }
}
_PATIENCE: dict[str, dict[str, Any]] = {"s3": _S3_PATIENCE, "s3a": _S3_PATIENCE}
"""Where the options do not say how long to wait: s3fs tries five times what botocore has tried, 60 s each time. With
botocore's own five tries a server that says nothing would hold a marker for longer than the ranks wait for each other.
"""
_RIGHTS_HINT = "give this user the rights that docs/operations.md names: get, put, delete and list"
_KEYS_HINT = "check the store's options or the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, a profile)"
_NETWORK_HINT = "check the address (endpoint_url in the store's options), the network and the server"
_WORDLESS = frozenset({"403", "Forbidden"})
_SHORTER = frozenset({"InvalidRange", "416"})
_CAUSES: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"NoSuchBucket"}), "there is no such bucket", "make the bucket, or correct the store's URL"),
    (frozenset({"InvalidBucketName"}), "that cannot be a bucket's name", "correct the store's URL"),
    (frozenset({"InvalidAccessKeyId"}), "the store does not know this access key", _KEYS_HINT),
    (frozenset({"SignatureDoesNotMatch"}), "the secret does not belong to the access key", _KEYS_HINT),
    (
        frozenset({"ExpiredToken", "TokenRefreshRequired", "InvalidToken"}),
        "the session's token has expired",
        _KEYS_HINT,
    ),
    (frozenset({"RequestTimeTooSkewed"}), "this machine's clock is wrong", "set the clock: run NTP"),
    (frozenset({"NoCredentialsError", "PartialCredentialsError"}), "no credentials were found", _KEYS_HINT),
    (_WORDLESS, "wrong credentials, or rights that are missing", _RIGHTS_HINT),
    (frozenset({"AccessDenied", "AllAccessDisabled"}), "the store does not allow it", _RIGHTS_HINT),
    (frozenset({"SSLError", "SSLCertVerificationError"}), "TLS failed", "check the address and the CA (verify)"),
    (
        frozenset({"EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError", "gaierror"}),
        "no server answers at its address",
        _NETWORK_HINT,
    ),
    (
        frozenset({"ConnectionClosedError", "ReadTimeoutError", "HTTPClientError", "ClientPayloadError"}),
        "the connection broke",
        _NETWORK_HINT,
    ),
    (frozenset({"PermissionError"}), "the store does not allow it", _RIGHTS_HINT),
)
"""Error codes of S3, or names of exceptions: what is wrong, and what to try. The first that fits counts."""


class FsspecObjects:
    """Objects below one URL of an object store. How each rule holds there:

    * *Whole or not at all*: a put is one request, or a multipart upload that the store shows when it is completed;
      never fsspec's file handles, which complete what they have when an error closes them. Protocols that show an
      upload while it grows (sftp, ftp, hdfs) are refused.
    * *Durable on return*: the store answers a put, or a completion, when it has it; S3 is consistent from then on.
    * *No rename, no append*: none is needed, a name follows from what the object holds. Two writers of one name write
      the same bytes, so it does not matter whose answer comes last.
    * *No half-written leftovers*: parts of a multipart upload that was never completed cannot be listed as objects;
      a lifecycle rule of the bucket takes them away.

    No listing is kept: others write at the same time.

    Args:
        where: Where the store is.
        options: Arguments of fsspec's file system; values may be text, see :func:`typed`.

    Raises:
        ConfigError: the protocol is unknown or not fit, or its library is not installed.
    """

    reads_ahead = 16

    def __init__(self, where: StoreUrl, options: Mapping[str, Any]) -> None:
        self.url = str(where)
        _check_protocol(where)
        # A copy: botocore rewrites the retries that it is given.
        settings = copy.deepcopy(_PATIENCE.get(where.scheme, {})) | typed(options)
        try:
            # Our own instance: fsspec would share one, with its caches, between callers that give the same options.
            found = url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False, **settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the store's options do not fit: {error}", url=self.url) from None
        self.server = _server(settings)
        self._fs, root = found
        self._root = root.rstrip("/")

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        path = self._path(name)
        with self._errors("write", name):
            failpoint("store.upload")
            self._fs.pipe_file(path, b"".join(parts))
            failpoint("store.uploaded")

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        path = self._path(name)
        if end is None and begin:
            end = self._size(name)
        if end is not None and end <= begin:
            if not 0 <= begin == end <= self._size(name):
                raise _shorter(self.url, name, begin, end)
            return memoryview(b"")
        with self._errors("read", name):
            whole = end is None
            data = self._fs.cat_file(path) if whole else self._fs.cat_file(path, start=begin, end=end)
        if end is not None and len(data) != end - begin:
            raise _shorter(self.url, name, begin, end)
        return memoryview(data).toreadonly()

    def size(self, name: str) -> int | None:
        try:
            return self._size(name)
        except MissingObjectError:
            return None

    def list(self, prefix: str) -> Iterator[Entry]:
        assert not prefix or prefix.endswith("/")
        folder = self._path(prefix[:-1]) if prefix else self._root
        found: dict[str, Any] = {}
        with contextlib.suppress(MissingObjectError), self._errors("list", prefix):
            found = self._fs.find(folder, detail=True)
        for path, info in found.items():
            name = path.removeprefix(f"{self._root}/")
            if info["type"] == "file" and name.startswith(prefix) and is_object_name(name):
                yield Entry(name, int(info["size"]))

    def put_at(self, name: str) -> float | None:
        with self._errors("look at", name):
            try:
                return float(self._fs.modified(self._path(name)).timestamp())
            except NotImplementedError:
                return None

    def delete(self, name: str) -> None:
        with contextlib.suppress(MissingObjectError), self._errors("delete", name):
            self._fs.rm_file(self._path(name))

    def clear_leftovers(self) -> int:
        return 0  # whose multipart uploads are abandoned and whose still run, only a bucket's lifecycle rule can say

    def close(self) -> None:
        self._fs = None  # s3fs closes its connections when no reference to it is left

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_object_name(name)}"

    def _size(self, name: str) -> int:
        with self._errors("look at", name):
            info = self._fs.info(self._path(name))
            if info["type"] != "file":
                raise FileNotFoundError(name)
            return int(info["size"])

    @contextlib.contextmanager
    def _errors(self, doing: str, name: str) -> Iterator[None]:
        """Errors of fsspec and of what lies below it as ours."""
        try:
            yield
        except StreamCkptError:
            raise
        except Exception as error:  # each library of an object store has exceptions of its own
            raise _translated(self._with_reason(error), doing, self.url, name) from error

    def _with_reason(self, error: Exception) -> Exception:
        """What says more: a HEAD is refused without a word, a listing with the reason."""
        if _signs(error).isdisjoint(_WORDLESS):
            return error
        try:
            self._fs.ls(self._root)
        except Exception as reason:
            return reason if isinstance(reason, PermissionError) else error
        return error


def typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of fsspec's file system from text.

    ``true`` and ``false`` become bools, values in ``{}`` or ``[]`` are read as JSON, and ``client_kwargs.region_name``
    is ``region_name`` within ``client_kwargs``. All other values stay text: a secret may consist of digits.

    Raises:
        ConfigError: a value is not JSON, or two options contradict each other; no value is shown.
    """
    found: dict[str, Any] = {}
    for key, value in options.items():
        *outer, last = key.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"the store's option '{key}' lies in '{part}', which has a value of its own")
        place[last] = _typed(key, value) if isinstance(value, str) else value
    return found


def _typed(key: str, text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"the store's option '{key}' is not JSON") from None


def _server(settings: Mapping[str, Any]) -> str:
    """The server or the account that settings or the environment name; empty: none."""
    client = settings.get("client_kwargs")
    named = [settings.get("endpoint_url"), client.get("endpoint_url") if isinstance(client, Mapping) else None]
    named += [os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"), settings.get("account_name")]
    found = next((each for each in named if isinstance(each, str) and each), "")
    return without_login(found).rstrip("/")


def _check_protocol(where: StoreUrl) -> None:
    if where.scheme not in fsspec.available_protocols():
        raise ConfigError(
            f"'{where.scheme}://' is not a protocol that fsspec knows", hint="use file://DIR or s3://BUCKET"
        )
    if where.scheme not in _WHOLE:
        raise ConfigError(
            f"'{where.scheme}://' cannot hold a store: others may see an upload half written",
            hint="use file://DIR or s3://BUCKET/PREFIX",
        )
    try:
        fsspec.get_filesystem_class(where.scheme)
    except ImportError as error:
        extra = _EXTRAS.get(where.scheme)
        hint = f"pip install 'torchrec_stream_ckpt[{extra}]'" if extra else str(error)
        raise ConfigError(f"what reads '{where.scheme}://' is not installed", hint=hint) from None


def _shorter(url: str, name: str, begin: int, end: int) -> CorruptionError:
    return CorruptionError(f"bytes [{begin}, {end}) were asked for, the object is shorter", store=url, name=name)


def _translated(error: Exception, doing: str, url: str, name: str) -> Exception:
    signs = _signs(error)
    if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in signs:
        return MissingObjectError(
            "the store does not hold this object",
            hint="if stream-ckpt gc ran meanwhile, try again; stream-ckpt verify tells which markers are whole",
            store=url,
            name=name,
        )
    if signs & _SHORTER:
        return CorruptionError("an object of the store is shorter than what was asked for", store=url, name=name)
    for known, wrong, hint in _CAUSES:
        if signs & known:
            return StoreUnavailableError(f"cannot {doing} it: {wrong}", hint=hint, store=url, name=name)
    return StoreUnavailableError(
        f"cannot {doing} it: {type(error).__name__}: {error}", hint=_NETWORK_HINT, store=url, name=name
    )


def _signs(error: BaseException | None) -> set[str]:
    """Error codes and names of exception classes of an error and of all that caused it."""
    signs: set[str] = set()
    while error is not None:
        signs |= {kind.__name__ for kind in type(error).__mro__}
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):
            signs.add(str(response.get("Error", {}).get("Code")))
        error = error.__cause__ or error.__context__
    return signs
