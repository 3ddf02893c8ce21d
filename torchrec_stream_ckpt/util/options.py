"""Settings passed unchanged to a client library: a mapping, or a file of ``key=value`` lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError

Options = Mapping[str, Any] | str | Path | None
_FORM = "write one setting a line as NAME=VALUE; a comment begins with #"


def read_options(options: Options, what: str) -> dict[str, Any]:
    """Return the settings of a mapping, or of a file whose values are text.

    Args:
        options: A mapping, or a file's path.
        what: Owner of the settings, for errors: ``"client"``, ``"store"``. No error shows a value: it may be secret.
    """
    if options is None:
        return {}
    if isinstance(options, Mapping):
        return {str(key): value for key, value in options.items()}
    path = Path(options)
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        hint = "correct the path, or give this user the right to read the file"
        raise ConfigError(f"cannot read {what} options: {error.strerror}", hint=hint, path=path) from None
    except UnicodeError:
        raise ConfigError(f"{what} options must be text: key=value lines", hint=_FORM, path=path) from None
    settings = {}
    for number, line in enumerate(lines, 1):
        key, separator, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not separator or not key.strip():
            raise ConfigError(f"{what} options must be key=value lines", hint=_FORM, path=path, line=number)
        settings[key.strip()] = value.strip()
    return settings
