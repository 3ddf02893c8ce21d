"""What differs between the object stores that fsspec speaks to: patience, names of settings, what libraries hide."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrec_stream_ckpt.util.uris import without_login

WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
"""Protocols under which an upload is seen whole or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """One kind of object store, as its library for fsspec has it."""

    extra: str = ""
    """Of ``pyproject.toml``: what installs the library."""
    module: str = ""
    """Where the library's file system for ordinary buckets is, if it has others too."""
    patience: Mapping[str, Any] = field(default_factory=dict)
    """Settings that say how long to wait, for those that the options leave open."""
    whole: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that make the read of a whole object one request."""
    length: Callable[[Any, str], int] | None = None
    """Length of an object by one request; raises FileNotFoundError if it is not there. None: the library's ``info``,
    which may also list what has the name as a prefix.
    """
    upload: Callable[[Any, str, bytes], object] | None = None
    """Puts an object by the requests of a large one, if its name is free; raises as ``pipe_file``. None: where a store
    knows the condition, it knows it for large objects, too.
    """
    keys_hint: str = "check the store's options"
    """What to try when the store does not accept our login."""
    servers: tuple[str, ...] = ()
    """Settings that name the server or the account."""
    variables: tuple[str, ...] = ()
    """Variables of the environment that do."""
    look: Callable[[Any, str], object] | None = None
    """Looks at a bucket through a file system; raises FileNotFoundError if it is not there. None: every use says so."""

    def server(self, settings: Mapping[str, Any]) -> str:
        """The server or the account that settings or the environment name; empty: none."""
        client = settings.get("client_kwargs")
        named = [settings.get(name) for name in self.servers]
        named += [client.get("endpoint_url")] if isinstance(client, Mapping) else []
        named.append(_of_connection(settings.get("connection_string")))
        named += [_of_connection(os.environ.get(name)) or os.environ.get(name) for name in self.variables]
        found = next((each for each in named if isinstance(each, str) and each), "")
        return without_login(found).rstrip("/")


def _of_connection(text: object) -> str:
    """Server or account of an Azure connection string, which also holds the key; empty: it is no such string."""
    if not isinstance(text, str) or "AccountName=" not in text:
        return ""
    fields = dict(part.partition("=")[::2] for part in text.split(";"))
    return fields.get("BlobEndpoint") or fields.get("AccountName", "")


def _length_on_s3(files: Any, path: str) -> int:
    bucket, key, _ = files.split_path(path)
    return int(files.call_s3("head_object", files.kwargs, Bucket=bucket, Key=key)["ContentLength"])


def _upload_to_s3(files: Any, path: str, data: bytes) -> None:
    """Upload one part, which may be small as it is the last one, and complete it by the condition of a put."""
    bucket, key, _ = files.split_path(path)
    call = partial(files.call_s3, Bucket=bucket, Key=key)
    upload = call("create_multipart_upload")["UploadId"]
    try:
        part = call("upload_part", UploadId=upload, PartNumber=1, Body=data)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        call("complete_multipart_upload", UploadId=upload, MultipartUpload=parts, IfNoneMatch="*")
    except Exception:
        with contextlib.suppress(Exception):  # a lifecycle rule of the bucket takes what stays
            call("abort_multipart_upload", UploadId=upload)
        raise


_S3 = Cloud(
    extra="s3",
    patience={
        "config_kwargs": {
            "connect_timeout": 10,
            "retries": {"mode": "standard", "max_attempts": 3},
            "max_pool_connections": 128,  # as many small objects as a plan asks for at once; botocore's own limit is 10
        }
    },
    # Else s3fs asks for the length first, to read a large object by several requests. Ours are read by ranges.
    whole={"max_concurrency": 1},
    length=_length_on_s3,
    upload=_upload_to_s3,
    keys_hint="check the store's options or the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, a profile)",
    servers=("endpoint_url",),
    variables=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
)
"""Where the options do not say how long to wait: s3fs tries five times what botocore has tried four times, 60 s each
time. With botocore's own tries a server that says nothing would hold a marker for longer than the ranks wait for each
other.
"""
_GS = Cloud(
    extra="gs",
    # Its other one writes objects that can be read before they are whole, into buckets of a zone.
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
    """The kind of store under a URL's scheme; one without any settings for a scheme that is not known."""
    return _CLOUDS.get(scheme, Cloud())
