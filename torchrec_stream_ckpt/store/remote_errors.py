"""Conversion of errors of the libraries below fsspec to ours: what is wrong, where, and what to try."""

from __future__ import annotations

from collections.abc import Mapping

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, StoreUnavailableError, StreamCkptError

_RIGHTS_HINT = "grant this user the permissions that docs/security.md lists: get, put, delete and list"
_KEYS_HINT = ""  # each cloud has a different one
_REGION_HINT = "set the bucket's region: client_kwargs.region_name in the store's options, or AWS_DEFAULT_REGION"
_BUSY_HINT = "try again later; ask for a higher request rate, or use fewer ranks, partitions or intervals at once"
_NETWORK_HINT = "check the address (endpoint_url in the store's options), the network and the server"
_WORDLESS = frozenset({"403", "Forbidden"})
_SHORTER = frozenset({"InvalidRange", "416"})
NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "FilesystemNotFound"})
"""Signs that the bucket does not exist."""
REFUSALS = _WORDLESS | {"AccessDenied", "AuthorizationFailure", "AuthorizationPermissionMismatch", "PermissionError"}
"""Signs that a user lacks one permission, whatever other permissions the user has."""
TAKEN = frozenset({"FileExistsError", "PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchUpload"})
"""Signs that a name is or may be taken: by an upload in progress, or by our own whose answer was lost."""
UNKNOWN_CONDITION = frozenset({"NotImplemented", "501"})
"""Signs that a store does not support the condition of a put."""
EXPIRED = frozenset({"ExpiredToken", "TokenRefreshRequired", "InvalidToken"})
"""Signs that the store does not accept the session any longer. The client has to look for its login again."""
ROLE_REFUSED = "role refused"
"""Sign that the service that gives sessions for a role refused it."""
_REFUSED_ROLES = frozenset(
    {"AccessDenied", "ExpiredTokenException", "InvalidIdentityToken", "IDPRejectedClaim", "IDPCommunicationError"}
)
_ROLE_HINT = (
    "check AWS_ROLE_ARN, the token in AWS_WEB_IDENTITY_TOKEN_FILE, and the role's trust policy: it has to name this "
    "cluster and this service account"
)
RETAINED = "retained"
"""Sign that a rule of the bucket refuses to delete or to overwrite an object."""
_RETENTION = ("object lock", "retention", "immutab", "worm protected")
"""Words of stores about such a rule. Their codes are those of missing permissions."""
_CAUSES: tuple[tuple[frozenset[str], str, str], ...] = (
    (NO_BUCKET, "the bucket does not exist", "create the bucket, or correct the store's URL"),
    (
        frozenset({"InvalidBucketName", "InvalidResourceName"}),
        "the bucket name is not valid",
        "correct the store's URL",
    ),
    (frozenset({"InvalidAccessKeyId"}), "the store does not know this access key", _KEYS_HINT),
    (frozenset({"RequestTimeTooSkewed"}), "this machine's clock is wrong", "set the clock: run NTP"),
    (frozenset({"SignatureDoesNotMatch"}), "the secret key does not match the access key", _KEYS_HINT),
    (EXPIRED, "the session's token has expired", _KEYS_HINT),
    (
        frozenset({"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}),
        "no credentials were found",
        _KEYS_HINT,
    ),
    (frozenset({"NoRegionError"}), "no region is set", _REGION_HINT),
    (
        frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "301", "IllegalLocationConstraintException"}),
        "the bucket is in another region",
        _REGION_HINT,
    ),
    (
        frozenset({"401", "AuthenticationFailed", "RefreshError"}),
        "the store does not accept these credentials",
        _KEYS_HINT,
    ),
    (
        frozenset({RETAINED}),
        "the bucket protects the object by an object lock or a retention",
        "try again when the retention is over, or use a bucket without one; markers commit and restore meanwhile",
    ),
    (
        frozenset({"AccessDenied", "AllAccessDisabled", "AuthorizationPermissionMismatch"}),
        "permission denied by the store",
        _RIGHTS_HINT,
    ),
    (_WORDLESS, "wrong credentials, or missing permissions", _RIGHTS_HINT),
    (
        frozenset({"SlowDown", "ServerBusy", "TooManyRequests", "429", "503", "ServiceUnavailable"}),
        "the store is still too busy after all retries",
        _BUSY_HINT,
    ),
    (
        frozenset({"InternalError", "500", "502", "504", "RequestTimeout", "OperationTimedOut"}),
        "the store still fails after all retries",
        "try again later; if it fails again, ask the store's operator",
    ),
    (frozenset({"SSLError", "SSLCertVerificationError"}), "TLS failed", "check the address and the CA (verify)"),
    (
        frozenset(
            {
                "EndpointConnectionError",
                "ConnectTimeoutError",
                "ClientConnectorError",
                "ServiceRequestError",
                "gaierror",
            }
        ),
        "no server answers at this address",
        _NETWORK_HINT,
    ),
    (
        frozenset({"ConnectionClosedError", "ReadTimeoutError", "HTTPClientError", "ClientPayloadError"})
        | {"ServiceResponseError", "ServerDisconnectedError", "ClientOSError", "TimeoutError", "IncompleteReadError"},
        "the connection was lost",
        _NETWORK_HINT,
    ),
    (REFUSALS, "permission denied by the store", _RIGHTS_HINT),
)
"""(Error codes of the stores or names of exceptions, cause, what to try). The first match counts."""


def shorter(url: str, name: str, begin: int, end: int) -> CorruptionError:
    """Return the error for an object that does not have the bytes [begin, end)."""
    return CorruptionError(f"bytes [{begin}, {end}) were requested, but the object is shorter", store=url, name=name)


def no_bucket(doing: str, url: str, name: str) -> StoreUnavailableError:
    """Return the error for a bucket that does not exist."""
    _, _, hint = _CAUSES[0]
    bucket = url.partition("://")[2].partition("/")[0]
    return StoreUnavailableError(
        f"{_cannot(doing, url)}: the bucket '{bucket}' does not exist", hint=hint, store=url, name=name
    )


def _cannot(doing: str, url: str) -> str:
    """Return the start of a message. A listing has no object that the message could mean by *it*."""
    return f"cannot list the objects below {url}" if doing == "list" else f"cannot {doing} it"


def translated(error: Exception, doing: str, url: str, name: str, keys_hint: str) -> Exception:
    """Convert an error of a library to one of ours.

    Args:
        error: Exception of the library.
        doing: Operation on the object, as a verb.
        url: URL of the store.
        name: Name of the object, or a prefix of names.
        keys_hint: Hint for a login that the store does not accept.
    """
    signs = signs_of(error)
    if isinstance(error, FileNotFoundError) and signs.isdisjoint(NO_BUCKET) and doing != "write":
        return MissingObjectError(
            "the store does not hold this object",
            hint="try again if stream-ckpt gc ran meanwhile; run stream-ckpt verify to see which markers are intact",
            store=url,
            name=name,
        )
    if signs & _SHORTER:
        return CorruptionError("an object of the store is shorter than the requested range", store=url, name=name)
    if "FlexibleChecksumError" in signs:
        return CorruptionError("the object's bytes differ from its checksum in the store", store=url, name=name)
    if signs & NO_BUCKET:
        return no_bucket(doing, url, name)
    start = _cannot(doing, url)
    if ROLE_REFUSED in signs:
        code = next(iter(signs & _REFUSED_ROLES), "an unknown code")
        said = f"{start}: the token service refuses the role ({code})"
        return StoreUnavailableError(said, hint=_ROLE_HINT, store=url, name=name)
    if "NotTakenError" in signs:
        return StoreUnavailableError(f"{start}: {error}", hint=_NETWORK_HINT, store=url, name=name)
    for known, wrong, hint in _CAUSES:
        if signs & known:
            return StoreUnavailableError(f"{start}: {wrong}", hint=hint or keys_hint, store=url, name=name)
    return StoreUnavailableError(f"{start}: {type(error).__name__}: {error}", hint=_NETWORK_HINT, store=url, name=name)


def wordless(error: Exception) -> bool:
    """Return whether a refusal has no reason."""
    return not signs_of(error).isdisjoint(_WORDLESS)


def signs_of(error: BaseException | None) -> set[str]:
    """Return error codes and names of exception classes of an error and of all its causes.

    The search ends at one of our own errors: the caller was handling it, so no library caused it.
    """
    signs: set[str] = set()
    while error is not None and not isinstance(error, StreamCkptError):
        signs |= {kind.__name__ for kind in type(error).__mro__}
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):
            signs.add(str(response.get("Error", {}).get("Code")))
            if str(getattr(error, "operation_name", "")).startswith("AssumeRole"):
                signs.add(ROLE_REFUSED)
        for name in ("error_code", "code", "status_code"):  # of Azure, of Google, of Azure again
            code = getattr(error, name, None)
            if isinstance(code, str | int):
                signs.add(str(getattr(code, "value", code)))
        if any(word in str(error).lower() for word in _RETENTION):
            signs.add(RETAINED)
        if isinstance(error, OSError) and str(error).startswith("Forbidden: "):  # gcsfs's conversion of a 403
            signs.add("403")
        error = error.__cause__ or error.__context__
    return signs
