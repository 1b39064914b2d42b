"""Permissions: the messages that each role may send on the client channel. Pure.

The broker's core decides separately which requests a client may see.
"""

from __future__ import annotations

from typing import Final

from swarm.wire.messages import (
    Ack,
    AdapterCommand,
    Attach,
    BrokerKeyKept,
    Cancel,
    ClientMessage,
    Describe,
    Detach,
    Enrol,
    GetAsset,
    GetRequest,
    HostDone,
    HostHello,
    Invite,
    Join,
    LookUp,
    PlanCommand,
    Query,
    Revoke,
    Rotate,
    RotateBroker,
    RotateMember,
    ShowSettings,
    Stop,
    StopWorker,
    Submit,
)

_CLIENT_MESSAGES: Final = (
    Submit,
    GetRequest,
    LookUp,
    Attach,
    Ack,
    Stop,
    Cancel,
    Detach,
    Describe,
    GetAsset,
    Query,
    Rotate,
    BrokerKeyKept,
)
_ALLOWED: Final[dict[str, tuple[type[ClientMessage], ...]]] = {
    "client": _CLIENT_MESSAGES,
    "gateway": _CLIENT_MESSAGES,
    "worker": (Describe, Rotate, BrokerKeyKept),
}
# Reports that clients may query.
_CLIENT_REPORTS: Final = frozenset({"status", "nodes", "plan", "stats", "requests", "trace"})
_DESCRIPTIONS: Final[dict[type[ClientMessage], str]] = {
    Submit: "submit requests",
    GetRequest: "read requests",
    LookUp: "read requests",
    Attach: "read requests",
    Ack: "read requests",
    Stop: "end requests",
    Cancel: "end requests",
    Detach: "read requests",
    Describe: "ask",
    GetAsset: "ask for the model's files",
    Join: "start workers",
    StopWorker: "stop workers",
    AdapterCommand: "load adapters",
    PlanCommand: "change the placement of layers",
    ShowSettings: "ask for settings",
    HostHello: "offer to start workers",
    HostDone: "offer to start workers",
    Invite: "invite",
    Revoke: "take keys away",
    Rotate: "change its key",
    RotateBroker: "change the broker's key",
    RotateMember: "change others' keys",
    BrokerKeyKept: "keep the broker's key",
}


def deny_reason(role: str | None, message: ClientMessage) -> str:
    """Return why a peer with this role may not send this message; empty if it may. ``role`` None: the key is not
    registered."""
    if role is None:
        return "this key is not registered here (any more): ask for an invitation (swarmctl invite)"
    if isinstance(message, Enrol):
        return "" if role == "invited" else "only a machine with an invitation can enrol (swarm worker --join)"
    if role == "invited":
        return "an invitation is valid for joining only: use --join"
    if role == "admin" or (isinstance(message, _ALLOWED.get(role, ())) and _is_permitted_query(message)):
        return ""
    what = f"ask for {message.what}" if isinstance(message, Query) else _DESCRIPTIONS.get(type(message), "do that")
    return f"a {role} may not {what}: that takes an admin's key, or access to the broker's machine"


def _is_permitted_query(message: ClientMessage) -> bool:
    return not isinstance(message, Query) or message.what in _CLIENT_REPORTS
