#!/usr/bin/env python3
"""Measure what several machines bring: hosts of their own (network namespaces), each process on one, let in by keys.

First how long a machine takes from `swarm worker --join INVITATION` until its worker has its part in the plan that
serves. Then 2, 3 and 4 stages, each on a host of its own, against the whole model in one process on another, every
worker held to one core, in one run by turns (`bench_overlap.py --against one` does that by loopback).

A host here is a namespace: its network is a pair of virtual devices and a bridge, without the delay of a wire, and its
cores are this machine's. With more stages than cores no more can be won than there are cores. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench_cases import Bench
from bench_lib import ROOT, Row, add_model_options, model_of, numbers, run, tell
from bench_overlap import SEQUENCES, Pinned, against_one, bench_of

sys.path.insert(0, str(ROOT))
from swarm import AsyncClient
from swarm.errors import Unavailable
from tests.faults.linux import why_no_namespaces
from tests.faults.machines import at, invite_at, let_in
from tests.integration.hosts import Host, network

PORT = 5700
SOON_S = 120.0
MAX_STAGES = 4


class OnHosts(Pinned):
    """As ``Pinned``, but each process has a host: ``hosts[0]`` the broker, the others a worker each."""

    def __init__(self, hosts: Sequence[Host], client: Host, model: Path, num_stages: int, mode: str) -> None:
        super().__init__(model, num_stages, mode)
        self._broker, self._hosts, self._laptop = hosts[0], hosts[1:], client
        self.port, self.url = PORT, f"tcp://{hosts[0].address}:{PORT}"
        self._invitation = ""

    async def begin(self) -> None:
        options = ("--mode", self._mode, "--min-workers", str(self._num_stages), "--listen", self._broker.address)
        self.launch_broker(*options)
        self._invitation = await self._invited("worker", MAX_STAGES)
        await asyncio.to_thread(let_in, self._laptop, await self._invited("client", 1))
        self.client = AsyncClient(self.url, connect_timeout_s=SOON_S)
        await self.launch_workers()

    def launch(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        under: Sequence[str] = (),
    ) -> None:
        """Start it on its host, whose name it is told, too: who has one machine's name is taken to share it."""
        host = self._broker if name == "broker" else self._hosts[int(name[1:])]
        if name != "broker":  # the invitation says where to
            cut = arguments.index("--url")
            arguments = [*arguments[:cut], *arguments[cut + 2 :], "--join", self._invitation]
        own: dict[str, str] = {"XDG_STATE_HOME": str(host.home / "state"), "HOME": str(host.home)} | dict(
            environment or {}
        )
        own.pop("SWARM_STATE_DIR", None)  # as its user would have it
        enter = ("unshare", "--uts", "sh", "-c", f'hostname {host.namespace} && exec "$@"', "sh")
        super().launch(name, arguments, own, before, host.command(*under, *enter))

    async def _invited(self, role: Any, uses: int) -> str:
        give_up_at = time.monotonic() + SOON_S
        while True:
            try:
                return await asyncio.to_thread(invite_at, self._broker, role, uses)
            except Unavailable:
                if time.monotonic() > give_up_at:
                    raise


async def join_times(hosts: Mapping[str, Host], model: Path, rounds: int) -> Row:
    """Start a worker on a second host again and again: until it has its part, and until a plan without it is due."""
    took = []
    async with _on_hosts(hosts, model, 1, "overlapped") as swarm:
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            swarm.launch_worker("w1", model, 1)
            await swarm.until("plan", lambda plan: plan["state"] == "serving" and "w1" in _workers(plan))
            took.append(time.perf_counter() - begun)
            swarm.processes["w1"].terminate()
            await asyncio.to_thread(swarm.processes["w1"].wait, SOON_S)
            await swarm.until("plan", lambda plan: "w1" not in _workers(plan))
    return Row("a host joins: from the command to its part", "s", {"swarm": took[1:]})


def _workers(plan: Mapping[str, Any]) -> list[str]:
    return [stage["worker"] for stage in plan.get("stages") or []]


async def measure(
    bench: Bench, stages: tuple[int, ...], sequences: tuple[int, ...]
) -> tuple[list[Row], dict[str, object]]:
    rows: list[Row] = []
    facts: dict[str, object] = {}
    home = Path(tempfile.mkdtemp(prefix="swarm-hosts-"))
    names = [f"{kind}{number}" for kind in "ab" for number in range(MAX_STAGES + 1)]
    try:
        for num_stages in (1, *stages):  # each on hosts that know nothing yet
            with network(home / str(num_stages), "laptop", *names) as hosts, at(hosts["laptop"]):
                if num_stages == 1:
                    rows.append(await join_times(hosts, bench.model, bench.rounds))
                else:
                    more, facts = await against_one(bench, (num_stages,), sequences, partial(_on_hosts, hosts))
                    rows += more
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return rows, facts


def _on_hosts(hosts: Mapping[str, Host], model: Path, num_stages: int, mode: str) -> OnHosts:
    kind = "a" if num_stages == 1 else "b"
    return OnHosts(
        [hosts[f"{kind}{number}"] for number in range(MAX_STAGES + 1)], hosts["laptop"], model, num_stages, mode
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--stages", type=numbers, default=(2, 3, 4), metavar="N,N")
    parser.add_argument("--sequences", type=numbers, default=SEQUENCES, metavar="N,N")
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more warms up")
    parser.add_argument("--new-tokens", type=int, default=32, help="per sequence")
    parser.add_argument("--quick", action="store_true", help="one round of few tokens: to see whether it works")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    if why := why_no_namespaces():
        parser.error(why)
    model = model_of(arguments)
    rows, facts = run(measure(bench_of(model, arguments), arguments.stages, arguments.sequences))
    tell(rows, "machines of their own", {"model": str(model), **facts}, as_json=arguments.json)


if __name__ == "__main__":
    main()
