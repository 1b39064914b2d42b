"""``swarm discover``: brokers on the local network that allow discovery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.options import ConfigOption, JsonOption, load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarm.auth.discovery import Announcement
    from swarm.auth.memberships import JoinedSwarm
    from swarm.wire.messages import Json


def discover(
    context: typer.Context,
    *,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=60, help="How long to wait for answers.")] = 2.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find brokers on the local network that allow it (broker.discoverable).

    Answers are not trusted: any device on the network can send anything. To join a swarm, you need an invitation.
    """
    import asyncio

    from swarm.auth import discovery
    from swarm.auth import memberships as known
    from swarm.cli.output import print_json

    settings = load_settings(context, config, {})
    joined = known.read_all(settings.state_dir or known.default_state_dir())
    brokers = asyncio.run(discovery.discover(seconds))
    if as_json:
        print_json({"found": [_as_json(each, joined) for each in brokers]})
        return
    for each in brokers:
        addresses = "\n      ".join(each.addresses)
        print(f"{each.name}\n  key {each.key[:16]}\n  at  {addresses}\n  {_advice(each, joined)}")
    if not brokers:
        print("no broker on this network allows discovery (swarm up --discoverable)")


def _as_json(found: Announcement, joined: Sequence[JoinedSwarm]) -> Json:
    names: list[Json | str] = [each.name for each in joined if each.broker == found.key]
    return {"name": found.name, "key": found.key[:16], "addresses": list(found.addresses), "joined_as": names}


def _advice(found: Announcement, joined: Sequence[JoinedSwarm]) -> str:
    """Return what the user can do with it. Only the key shows whether this swarm was joined; the address does not."""
    memberships = [each for each in joined if each.broker == found.key]
    if not memberships:
        return "not joined: get an invitation there (swarmctl invite), and pass it with --join"
    names, addresses = ", ".join(each.name for each in memberships), {a for each in memberships for a in each.addresses}
    if addresses & set(found.addresses):
        return f"joined as {names}"
    return f"joined as {names} at {', '.join(sorted(addresses))}; it reports other addresses now"
