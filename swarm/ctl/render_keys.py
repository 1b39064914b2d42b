"""Rendering of keys for people: API keys, machines and invitations, the broker's own key, and joined swarms."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from swarm.admin.report_rows import read_rows
from swarm.ctl.render import Body, fields, join_names, render_table


def keys(body: Body) -> RenderableType:
    """Render API keys, members and invitations, as far as the report has them."""
    parts: list[RenderableType] = []
    for what, title, none in (
        ("keys", "API keys:", "no API keys"),
        ("members", "machines:", "no machines have joined"),
        ("invitations", "invitations:", "no invitations"),
    ):
        rows = read_rows(body.get(what))
        if rows:
            parts += [Text(title), render_table(rows, (), _columns_with_normal_values(rows))]
        elif what in body and not (what != "keys" and body.get("problem")):
            parts.append(Text(none))
    if body.get("former_key"):
        parts.append(Text(ROTATING))
    elif any(row.get("knows_broker") is False for row in read_rows(body.get("members"))):
        parts.append(Text(LOCKED_OUT))
    if problem := body.get("problem"):
        parts.append(Text(f"machines' keys are unknown: {problem}"))
    elif body.get("locked") is False:
        parts.append(Text("this broker serves its own machine only, and needs no keys for that"))
    return Group(*parts)


ROTATING = (
    "the broker's key is being rotated: machines without the new one (knows broker: no) get it when they connect; the "
    "old one stays valid until then, or until swarmctl keys rotate --broker --now"
)
LOCKED_OUT = "machines without the broker's key (knows broker: no) can't connect: revoke them, and invite them again"


def _columns_with_normal_values(rows: Sequence[Body]) -> set[str]:
    """Return the columns in which all rows have the normal value."""
    usual = {"knows_broker": True, "expired": False}
    return {name for name, value in usual.items() if all(row.get(name, value) is value for row in rows)}


def broker_key(body: Body) -> str:
    """Describe the progress of the broker's key rotation."""
    shut_out, behind = join_names(body.get("shut_out")), join_names(body.get("behind"))
    lines = [f"the broker's key is now {body.get('key')}"]
    if shut_out:
        lines.append(f"locked out, because they have only the old one: {shut_out}; revoke them, and invite them again")
    elif body.get("is_over"):
        lines.append("all members have it; the old one is retired")
    else:
        lines.append(f"the old one stays valid until these have the new one: {behind}")
        lines.append("(swarmctl keys rotate --broker shows the progress; with --now, they are locked out)")
    return "\n".join(lines)


def memberships(body: Body) -> RenderableType:
    """Render the broker's public key and the swarms that this machine has joined."""
    nothing = body.get("problem") or "this broker serves its own machine only, and has none"
    parts: list[RenderableType] = [Text(f"the broker's public key: {body.get('key') or nothing}")]
    rows = read_rows(body.get("joined"))
    parts += (
        [Text("joined from here, the last first:"), *map(fields, rows)] if rows else [Text("joined from here: none")]
    )
    return Group(*parts)
