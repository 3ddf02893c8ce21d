"""Differences between the object stores that fsspec supports: timeouts, names of settings, gaps of the libraries."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from torchrec_stream_ckpt.store.bucket_rules import LIFECYCLE, LOCK, VERSIONS, BucketRules, rules_of_s3
from torchrec_stream_ckpt.store.remote_errors import REFUSALS, UNKNOWN_CONDITION, signs_of
from torchrec_stream_ckpt.util.uris import without_login

WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
"""Protocols under which an upload becomes visible whole or not at all."""


LEAST_BYTES_PER_S = 2**17
"""Speed at which a peer has to take the body of a request. A slower one counts as silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """One kind of object store, as its library for fsspec has it."""

    extra: str = ""
    """Extra in ``pyproject.toml`` that installs the library."""
    module: str = ""
    """Module of the library's file system for ordinary buckets, if it has others too."""
    patience: Mapping[str, Any] = field(default_factory=dict)
    """Timeout settings, for those that the options do not set."""
    whole: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that make the read of a whole object one request."""
    length: Callable[[Any, str], int] | None = None
    """Function that returns the length of an object by one request. Raises FileNotFoundError if the object is missing.

    None for the library's ``info``, which may also list objects that have the name as a prefix.
    """
    upload: Callable[[Any, str, bytes], object] | None = None
    """Function that puts an object with the requests of a large one, if its name is free. It raises as ``pipe_file``.

    None if a store that supports the condition also supports it for large objects.
    """
    prepare: Callable[[Any], None] | None = None
    """Function that is called with a new file system, before its first request."""
    delete: Callable[[Any, list[str]], list[str]] | None = None
    """Function that deletes up to 1000 objects by one request. It returns those that the store did not delete.

    None if each object takes a request.
    """
    keys_hint: str = "check the store's options"
    """Hint for a login that the store does not accept."""
    servers: tuple[str, ...] = ()
    """Settings that name the server or the account."""
    variables: tuple[str, ...] = ()
    """Environment variables that name the server or the account."""
    look: Callable[[Any, str], object] | None = None
    """Function that looks up a bucket through a file system. Raises FileNotFoundError if the bucket is missing.

    None if every use of a bucket reports this.
    """
    rules: Callable[[Any, str], BucketRules] | None = None
    """Function that asks for the rules of the bucket of a path, for the objects below the path.

    None if we do not know how to ask this kind of store.
    """

    def server(self, settings: Mapping[str, Any]) -> str:
        """Return the server or the account that settings or the environment name. Empty if they name no server."""
        client = settings.get("client_kwargs")
        named = [settings.get(name) for name in self.servers]
        named += [client.get("endpoint_url")] if isinstance(client, Mapping) else []
        named.append(_of_connection(settings.get("connection_string")))
        named += [_of_connection(os.environ.get(name)) or os.environ.get(name) for name in self.variables]
        found = next((each for each in named if isinstance(each, str) and each), "")
        return without_login(found).rstrip("/")


def _of_connection(text: object) -> str:
    """Return the server or account of an Azure connection string, which also holds the key. Empty for other strings."""
    if not isinstance(text, str) or "AccountName=" not in text:
        return ""
    fields = dict(part.partition("=")[::2] for part in text.split(";"))
    return fields.get("BlobEndpoint") or fields.get("AccountName", "")


def _length_on_s3(files: Any, path: str) -> int:
    bucket, key, _ = files.split_path(path)
    return int(files.call_s3("head_object", files.kwargs, Bucket=bucket, Key=key)["ContentLength"])


def _upload_to_s3(files: Any, path: str, data: bytes) -> None:
    """Upload a single part, which may be small because it is the last, and complete it under the condition of a put."""
    bucket, key, _ = files.split_path(path)
    call = partial(files.call_s3, Bucket=bucket, Key=key)
    upload = call("create_multipart_upload")["UploadId"]
    try:
        part = call("upload_part", UploadId=upload, PartNumber=1, Body=data)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        call("complete_multipart_upload", UploadId=upload, MultipartUpload=parts, IfNoneMatch="*")
    except Exception:
        with contextlib.suppress(Exception):  # a lifecycle rule of the bucket deletes the rest
            call("abort_multipart_upload", UploadId=upload)
        raise


def _prepare_s3(files: Any) -> None:
    _send_bodies_at_once(files)
    _bound_requests(files)


def _bound_requests(files: Any) -> None:
    """Give up a request whose body the peer does not take. The client has no time-out for sending one.

    The time is that of its other time-outs, and grows with the body, at LEAST_BYTES_PER_S. The client tries again as
    after a time-out of the answer.
    """
    from aiobotocore.httpsession import AIOHTTPSession, ReadTimeoutError

    class NotTakenError(ReadTimeoutError):  # type: ignore[misc]
        fmt = "{host} did not take {num_bytes} bytes and answer within {seconds:.1f} s"

    class BoundedSession(AIOHTTPSession):  # type: ignore[misc]
        async def send(self, request: Any) -> Any:
            sent = request.headers
            num_bytes = int(sent.get("Content-Length") or sent.get("X-Amz-Decoded-Content-Length") or 0)
            if not num_bytes:
                return await super().send(request)
            given = files.config_kwargs
            waits = given.get("connect_timeout", files.connect_timeout), given.get("read_timeout", files.read_timeout)
            seconds = sum(waits) + num_bytes / LEAST_BYTES_PER_S
            try:
                async with asyncio.timeout(seconds):
                    return await super().send(request)
            except TimeoutError:
                host = urlsplit(request.url).netloc
                raise NotTakenError(host=host, num_bytes=num_bytes, seconds=seconds) from None

    files.config_kwargs.setdefault("http_session_cls", BoundedSession)


def _send_bodies_at_once(files: Any) -> None:
    """Send the body of a put without waiting for an interim answer (``Expect: 100-continue``).

    The client's time-outs do not hold for that wait, so a put to a server that does not answer would never end. It also
    takes a round trip.
    """
    from aiobotocore.session import AioSession
    from botocore.handlers import add_expect_header

    if files.session is None:
        files.session = AioSession(**files.kwargs)  # as s3fs makes it
    files.session.unregister("before-call.s3", add_expect_header)


def _delete_from_s3(files: Any, paths: list[str]) -> list[str]:
    """Delete by one request. ``rm`` of s3fs is such a request as well, but ignores what the store refuses."""
    keys = {files.split_path(path)[1]: path for path in paths}
    wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
    bucket = files.split_path(paths[0])[0]
    answer = files.call_s3("delete_objects", files.kwargs, Bucket=bucket, Delete=wanted)
    return [keys[refused["Key"]] for refused in answer.get("Errors", ())]


_RULES_OF_S3 = {  # the request, the right that it needs, and the answer's code if nothing was ever set
    VERSIONS: ("get_bucket_versioning", "s3:GetBucketVersioning", ""),
    LOCK: (
        "get_object_lock_configuration",
        "s3:GetBucketObjectLockConfiguration",
        "ObjectLockConfigurationNotFoundError",
    ),
    LIFECYCLE: (
        "get_bucket_lifecycle_configuration",
        "s3:GetLifecycleConfiguration",
        "NoSuchLifecycleConfiguration",
    ),
}


def _rules_of_s3(files: Any, path: str) -> BucketRules:
    bucket, key, _ = files.split_path(path)
    with ThreadPoolExecutor(len(_RULES_OF_S3), "stream-ckpt-rules") as pool:
        asked = [pool.submit(_ask_s3, files, bucket, *each) for each in _RULES_OF_S3.values()]
    found = dict(zip(_RULES_OF_S3, (each.result() for each in asked), strict=True))
    versioning, lock, lifecycle = ({} if isinstance(each, str) else each for each in found.values())
    unchecked = {check: each for check, each in found.items() if isinstance(each, str)}
    return rules_of_s3(f"{key}/" if key else "", versioning, lock, lifecycle, unchecked)


def _ask_s3(files: Any, bucket: str, request: str, right: str, unset: str) -> Mapping[str, Any] | str:
    """Return the answer to a request about a bucket, or the reason why there is none."""
    try:
        answer: Mapping[str, Any] = files.call_s3(request, Bucket=bucket)
    except Exception as error:
        signs = signs_of(error)
        if unset in signs:
            return {}
        if signs & REFUSALS:
            return f"this user lacks {right}"
        if signs & (UNKNOWN_CONDITION | {"MethodNotAllowed", "405"}):
            return "this server does not have the request"
        return f"the request failed ({type(error.__cause__ or error).__name__})"
    return answer


_S3 = Cloud(
    extra="s3",
    patience={
        "config_kwargs": {
            "connect_timeout": 10,
            "retries": {"mode": "standard", "max_attempts": 3},
            "max_pool_connections": 128,  # as many small objects as a plan asks for at once; botocore's own limit is 10
        }
    },
    # Otherwise s3fs asks for the length first, to read a large object by several requests. We read by ranges.
    whole={"max_concurrency": 1},
    length=_length_on_s3,
    upload=_upload_to_s3,
    prepare=_prepare_s3,
    delete=_delete_from_s3,
    keys_hint="check the store's options or the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, a profile)",
    servers=("endpoint_url",),
    variables=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    rules=_rules_of_s3,
)
"""Settings for S3. The timeouts apply if the options set none.

s3fs makes five attempts, each of which is four attempts of botocore, 60 s each. With botocore's own retries, a silent
server would hold a marker for longer than the ranks wait for each other.
"""
_GS = Cloud(
    extra="gs",
    # The library's other file system writes objects that are readable before they are complete, into zonal buckets.
    module="gcsfs.core",
    patience={"requests_timeout": 120},
    keys_hint="check the store's options (token) or the environment (GOOGLE_APPLICATION_CREDENTIALS)",
    servers=("endpoint_url",),
    variables=("STORAGE_EMULATOR_HOST",),
    look=lambda files, bucket: files.call("GET", "b/{}/o", bucket, maxResults=1),
)
_AZURE = Cloud(
    extra="abfs",
    patience={"connection_timeout": 10, "read_timeout": 60},
    keys_hint=(
        "check the store's options (account_name, account_key, connection_string) "
        "or the environment (AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_KEY)"
    ),
    servers=("account_host", "account_name"),
    variables=("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"),
    look=lambda files, bucket: files.info(bucket),
)
_CLOUDS = {"s3": _S3, "s3a": _S3, "gs": _GS, "gcs": _GS, "abfs": _AZURE, "abfss": _AZURE, "az": _AZURE}


def cloud_of(scheme: str) -> Cloud:
    """Return the kind of store for a URL's scheme. For an unknown scheme, it has no settings."""
    return _CLOUDS.get(scheme, Cloud())
