"""``swarmctl stats --prometheus``: the swarm's metrics in Prometheus' text format, for swarms without a gateway."""

from __future__ import annotations

import sys
from collections.abc import Callable

from swarm.client.blocking import Client
from swarm.errors import ConfigError, RequestTimeout, Unavailable
from swarm.wire.messages import Json

INSTALL_COMMAND = "pip install 'swarm[gateway]'"


def print_metrics(connect: Callable[[], Client]) -> None:
    """Query and print the metrics. An unreachable broker is a metric, too (``swarm_up 0``), not a failure: the
    collector needs to see it."""
    try:
        from swarm.metrics.exposition import QUERIES, render_swarm  # its package is an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--prometheus needs a package that is not installed ({error.name}): {INSTALL_COMMAND}"
        ) from error
    answers: dict[str, Json] | None = None
    try:
        with connect() as client:
            answers = {what: client.query(what) for what in QUERIES}
    except (Unavailable, RequestTimeout) as error:
        print(error, file=sys.stderr)
    sys.stdout.write(render_swarm(answers).decode())
