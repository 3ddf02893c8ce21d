"""A store in an object store, through fsspec. No other module uses fsspec; imported when such a store is opened."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import fsspec

from torchrec_stream_ckpt.errors import ConfigError, MissingObjectError, StreamCkptError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.store.api import Entry
from torchrec_stream_ckpt.store.bucket_rules import LIFECYCLE, LOCK, VERSIONS, BucketRules
from torchrec_stream_ckpt.store.clouds import WHOLE, Cloud, cloud_of
from torchrec_stream_ckpt.store.identity import OVERWRITES
from torchrec_stream_ckpt.store.remote_errors import (
    EXPIRED,
    NO_BUCKET,
    REFUSALS,
    TAKEN,
    UNKNOWN_CONDITION,
    no_bucket,
    shorter,
    signs_of,
    translated,
    wordless,
)
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import check_object_name, is_object_name
from torchrec_stream_ckpt.util.uris import StoreUrl

log = logging.getLogger(__name__)


class FsspecObjects:
    """Objects below one URL of an object store. The rules of a store hold as follows:

    * *Whole or not at all*: a put is one request, or a multipart upload that the store shows when it is completed;
      never fsspec's file handles, which complete a partial object when an error closes them. Protocols that show an
      upload while it grows (sftp, ftp, hdfs) are refused.
    * *Durable on return*: the store answers a put, or a completion, when it has the data. S3 is then consistent.
    * *No rename, no append*: none is needed, because a name follows from the object's contents.
    * *Once*: :meth:`create` asks the store to refuse a name that is taken (S3 and Azure ``If-None-Match: *``, Google
      ``ifGenerationMatch=0``). If the store answers that it does not support this (501), or was seen to ignore it, each
      name is checked first from then on (one HEAD), and another writer may write in between.
    * *No half-written leftovers*: parts of a multipart upload that was never completed cannot be listed as objects.
      A lifecycle rule of the bucket deletes them.

    Listings are not cached, because others write at the same time.

    Args:
        where: URL of the store.
        options: Arguments of fsspec's file system. Values may be text, see :func:`typed`.

    Raises:
        ConfigError: the protocol is unknown or unsuitable, or its library is not installed.
    """

    reads_ahead = 16

    def __init__(self, where: StoreUrl, options: Mapping[str, Any]) -> None:
        self.url = str(where)
        _check_protocol(where)
        self._cloud = cloud_of(where.scheme)
        kind = _plain(fsspec.get_filesystem_class(where.scheme), self._cloud.module)
        settings = kind._get_kwargs_from_urls(self.url) | self._cloud.patience | typed(options)
        self._make = partial(_file_system, kind, self._cloud, settings)
        try:
            self._fs = self._make()
        except (TypeError, ValueError) as error:
            hint = "correct store_options (--store-options): they are passed to the store's client library"
            raise ConfigError(f"the store's options are not valid: {error}", hint=hint, url=self.url) from None
        except Exception as error:  # without its message, which may contain a token
            raise ConfigError(
                f"cannot open the store with these options: {type(error).__name__}",
                hint=self._cloud.keys_hint,
                url=self.url,
            ) from None
        self.server = self._cloud.server(settings)
        self._root = str(kind._strip_protocol(self.url)).rstrip("/")
        self._bucket_seen = self._cloud.look is None
        self._answered = False
        """True if an access to an object has shown that the bucket exists."""
        self._looks_first = False

    @property
    def looks_first(self) -> bool:
        return self._looks_first

    @looks_first.setter
    def looks_first(self, value: bool) -> None:
        if value and not self._looks_first:
            log.warning("the store at %s: %s", self.url, OVERWRITES)
        self._looks_first = value

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._upload(name, b"".join(parts), "overwrite")

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        data = b"".join(parts)
        if not self._looks_first:
            created = self._upload(name, data, "create")
            if created is not None:
                return created
            self.looks_first = True
        if self.size(name) is not None:
            return False
        self._upload(name, data, "overwrite")
        return True

    def overwrites_in_parts(self, name: str, parts: Sequence[Buffer]) -> bool:
        return self._cloud.upload is not None and self._upload(name, b"".join(parts), "create in parts") is not False

    def _upload(self, name: str, data: bytes, mode: Literal["overwrite", "create", "create in parts"]) -> bool | None:
        """Put an object. Returns False if its name is taken, None if the store does not support the condition."""
        path, may_be_taken = self._path(name), mode != "overwrite"
        with self._errors("write", name):
            failpoint("store.upload")
            try:
                if mode == "create in parts" and self._cloud.upload is not None:
                    self._cloud.upload(self._fs, path, data)
                else:
                    self._fs.pipe_file(path, data, mode=mode)
            except Exception as error:
                signs = signs_of(error)
                if may_be_taken and signs & TAKEN:
                    return False
                if may_be_taken and signs & UNKNOWN_CONDITION:
                    return None
                if may_be_taken or "NoSuchUpload" not in signs:
                    raise
                # The answer to a completion was lost, and the client asked again. Put the same bytes again.
                self._fs.pipe_file(path, data)
            failpoint("store.uploaded")
        return True

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        path = self._path(name)
        if begin < 0:
            raise shorter(self.url, name, begin, begin if end is None else end)
        if end is None and begin:
            end = self._size(name)
        if end is not None and end <= begin:
            if not 0 <= begin == end <= self._size(name):
                raise shorter(self.url, name, begin, end)
            return memoryview(b"")
        with self._errors("read", name):
            whole = end is None
            data = (
                self._fs.cat_file(path, **self._cloud.whole) if whole else self._fs.cat_file(path, start=begin, end=end)
            )
        if end is not None and len(data) != end - begin:
            raise shorter(self.url, name, begin, end)
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
        if not isinstance(found, dict):  # adlfs returns this for a path that is an object and not a folder
            found = {}
        if not found:
            self._check_bucket("list", prefix)
        for path, info in found.items():
            name = path.removeprefix(f"{self._root}/")
            if info["type"] == "file" and name.startswith(prefix) and is_object_name(name):
                yield Entry(name, int(info["size"]))

    def put_at(self, name: str) -> float | None:
        with self._errors("inspect", name):
            try:
                return float(self._fs.modified(self._path(name)).timestamp())
            except NotImplementedError:
                return None

    def delete(self, name: str) -> None:
        with contextlib.suppress(MissingObjectError), self._errors("delete", name):
            self._fs.rm_file(self._path(name))

    def delete_many(self, names: Sequence[str]) -> Sequence[str]:
        if self._cloud.delete is None:
            return names
        paths = {self._path(name): name for name in names}
        try:
            return [paths[path] for path in self._cloud.delete(self._fs, [*paths])]
        except Exception:  # the request failed, or this server does not know it: each single request says what is wrong
            return names

    def clear_leftovers(self) -> int:
        return 0  # only a bucket's lifecycle rule can tell abandoned multipart uploads from running ones

    def rules(self) -> BucketRules:
        if self._cloud.rules is not None:
            return self._cloud.rules(self._fs, self._root)
        prefix = f"{self._root.partition('/')[2]}/".lstrip("/")
        scheme = self.url.partition(":")[0]
        reason = f"of {scheme}:// no settings are read; look at those of the bucket"
        unchecked = dict.fromkeys((VERSIONS, LOCK, LIFECYCLE), reason) if self._cloud.extra else {}
        return BucketRules(prefix=prefix, unchecked=unchecked)

    def close(self) -> None:
        self._fs = None  # s3fs closes its connections when no reference to it is left

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_object_name(name)}"

    def _size(self, name: str) -> int:
        path = self._path(name)
        with self._errors("inspect", name):
            if self._cloud.length is not None and self._answered:
                return self._cloud.length(self._fs, path)
            try:
                info = self._fs.info(path)
            except FileNotFoundError as error:
                self._answered |= signs_of(error).isdisjoint(NO_BUCKET)
                raise
            self._answered = True
            if info["type"] != "file":
                raise FileNotFoundError(name)
            return int(info["size"])

    @contextlib.contextmanager
    def _errors(self, doing: str, name: str) -> Iterator[None]:
        """Convert errors of fsspec and of the libraries below it to ours."""
        try:
            yield
        except StreamCkptError:
            raise
        except Exception as error:  # each library of an object store has its own exceptions
            if isinstance(error, FileNotFoundError):
                self._check_bucket(doing, name)
            if signs_of(error) & EXPIRED and self._fs is not None:
                self._fs = self._make()  # a client reads a session in a file once; the next call reads the file again
            raise translated(self._with_reason(error), doing, self.url, name, self._cloud.keys_hint) from error

    def _with_reason(self, error: Exception) -> Exception:
        """Return the error with more information. A refused HEAD has no message, but a listing gives the reason."""
        if not wordless(error):
            return error
        try:
            self._fs.ls(self._root)
        except Exception as reason:
            return reason if isinstance(reason, PermissionError) else error
        return error

    def _check_bucket(self, doing: str, name: str) -> None:
        """Raise an error if the bucket does not exist, for libraries that report it like an empty one.

        A bucket that was seen once is not checked again.
        """
        if self._bucket_seen or self._cloud.look is None:
            return
        try:
            self._cloud.look(self._fs, self._root.partition("/")[0])
        except FileNotFoundError:
            raise no_bucket(doing, self.url, name) from None
        except Exception as error:  # the user has rights for this prefix only; the next request reports any fault
            if not signs_of(error) & REFUSALS:
                raise translated(error, doing, self.url, name, self._cloud.keys_hint) from error
        self._bucket_seen = True


def _file_system(kind: type[Any], cloud: Cloud, settings: Mapping[str, Any]) -> Any:
    """Return a separate file system. fsspec would share one, with its caches, between callers with the same options."""
    # A copy, because botocore modifies the retry settings that it is given.
    files = kind(skip_instance_cache=True, use_listings_cache=False, **copy.deepcopy(dict(settings)))
    if cloud.prepare is not None:
        cloud.prepare(files)
    return files


def _plain(kind: type[Any], module: str) -> type[Any]:
    """Return the class for ordinary buckets, if its library extends it for others."""
    return next((each for each in kind.__mro__ if each.__module__ == module), kind)


def typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options of fsspec's file system from text.

    ``true`` and ``false`` become bools, values in ``{}`` or ``[]`` are read as JSON, and ``client_kwargs.region_name``
    is ``region_name`` within ``client_kwargs``. All other values stay text, because a secret may consist of digits.

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
                raise ConfigError(
                    f"the store's option '{key}' conflicts with option '{part}', which has a value",
                    hint=f"omit one of the two, or write all of '{part}' as one JSON object",
                )
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
        hint = "a value that begins with { or [ is read as JSON: correct it, with double quotes around names and text"
        raise ConfigError(f"the store's option '{key}' is not JSON", hint=hint) from None


def _check_protocol(where: StoreUrl) -> None:
    if where.scheme not in fsspec.available_protocols():
        raise ConfigError(f"'{where.scheme}://' is not a protocol of fsspec", hint="use file://DIR or s3://BUCKET")
    if where.scheme not in WHOLE:
        raise ConfigError(
            f"'{where.scheme}://' cannot hold a store because readers may see incomplete uploads",
            hint="use file://DIR or s3://BUCKET/PREFIX",
        )
    try:
        fsspec.get_filesystem_class(where.scheme)
    except ImportError as error:
        extra = cloud_of(where.scheme).extra
        hint = f"pip install 'torchrec_stream_ckpt[{extra}]'" if extra else str(error)
        raise ConfigError(f"the package for '{where.scheme}://' is not installed", hint=hint) from None
