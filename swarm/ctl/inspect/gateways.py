"""HTTP queries to a gateway, for information that the broker lacks: it has no list of its gateways."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from swarm.wire.messages import Json

_TIMEOUT_S: Final = 5.0
_MAX_BYTES: Final = 1 << 20


def api_key_from(variable: str | None) -> str:
    """Return the API key in an environment variable; empty if no variable is named. Raises BadParameter."""
    if variable is not None and not os.environ.get(variable):
        raise typer.BadParameter(f"--api-key-env names a variable that holds the key, and {variable} is empty or unset")
    return os.environ[variable] if variable is not None else ""


def query_gateway(address: str, path: str, key: str) -> Json:
    """Return the gateway's JSON answer. Raises BadParameter, Unavailable, or RequestFailed with the gateway's error
    text."""
    from swarm.errors import RequestFailed, Unavailable

    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise typer.BadParameter(f"--gateway takes a URL like http://127.0.0.1:8000, not {address!r}")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    question = urllib.request.Request(f"{parts.scheme}://{parts.netloc}{path}", headers=headers)
    try:
        with urllib.request.urlopen(question, timeout=_TIMEOUT_S) as answer:
            body = json.loads(answer.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        raise RequestFailed(f"the gateway at {address} answers {error.code}: {_error_text(error)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"no gateway answers at {address} ({reason})") from None
    except http.client.HTTPException:
        raise Unavailable(f"no gateway answers at {address} (it is not an HTTP server)") from None
    if not isinstance(body, dict):
        raise RequestFailed(f"{address} is not a gateway of Swarm")
    return body


def _error_text(error: urllib.error.HTTPError) -> str:
    """Return the error text in the response. (If gateway.console is off, the path does not exist.)"""
    try:
        return str(json.loads(error.read(_MAX_BYTES))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason
