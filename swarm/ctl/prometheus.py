"""``swarmctl stats --prometheus``: the swarm's numbers as Prometheus reads them, where no gateway serves them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from swarm.client.blocking import Client
from swarm.errors import ConfigError, RequestTimeout, Unavailable
from swarm.wire.messages import Json

INSTALL = "pip install 'swarm[gateway]'"


def print_metrics(connect: Callable[[], Client]) -> None:
    """Ask, and print. A broker that does not answer is a number, too (``swarm_up 0``), and no failure: whoever collects
    the output wants to know."""
    try:
        from swarm.numbers.exposition import ASKED, written  # its package is an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--prometheus needs a package that is not installed ({error.name}): {INSTALL}") from error
    answers: dict[str, Json] | None = None
    try:
        with connect() as client:
            answers = {what: client.query(what) for what in ASKED}
    except (Unavailable, RequestTimeout) as error:
        print(error, file=sys.stderr)
    sys.stdout.write(written(answers).decode())
