"""Hosts of our own: network namespaces with an address each, joined by a bridge, and commands run on them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.linux import call
from tests.integration.reports import Reporter

_count = itertools.count()
_STOP_S = 10.0


@dataclass
class Host:
    """A machine, as far as the network goes. ``home``: what its user keeps. ``bridge``: the network's own namespace."""

    name: str
    namespace: str
    address: str
    home: Path
    bridge: str = ""
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    reporter: Reporter | None = None

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def environment(self, **more: str) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith("SWARM_")}
        return own | {"HOME": str(self.home), "XDG_STATE_HOME": str(self.home / "state"), "OMP_NUM_THREADS": "1"} | more

    def start(self, *words: str, log: Path, **environment: str) -> subprocess.Popen[str]:
        """Start ``swarm`` here; it is ended at the latest with the network."""
        return self.start_python("-m", "swarm", *words, log=log, **environment)

    def start_python(self, *words: str, log: Path, **environment: str) -> subprocess.Popen[str]:
        """Start Python here, as ``start`` does."""
        with log.open("a") as file:
            process = subprocess.Popen(
                self.command(sys.executable, *words),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment(**environment),
                text=True,
            )
        self.started.append(process)
        return process

    def run(self, *words: str, timeout_s: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``swarm`` here, to its end."""
        return self._run("-m", "swarm", *words, timeout_s=timeout_s, **environment)

    def ctl(self, *words: str, timeout_s: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``swarmctl`` here, to its end."""
        code = "from swarm.ctl.main import main; main()"
        return self._run("-c", code, *words, timeout_s=timeout_s, **environment)

    def _run(self, *words: str, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(sys.executable, *words),
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environment(**environment),
        )

    def report(self, what: str) -> Any:
        """What the broker that is known here reports: quicker than by a command, where it is asked again and again."""
        self.reporter = self.reporter or Reporter(self.environment(), self.command(sys.executable))
        return self.reporter(what)

    def vanish(self) -> None:
        """Pull the plug of its network."""
        call(*self.command("ip", "link", "set", "eth0", "down"))

    def return_(self) -> None:
        call(*self.command("ip", "link", "set", "eth0", "up"))

    def rules(self, *lines: str) -> None:
        """Packet filters of this host, instead of those before: ``("output", "ip daddr 10.0.0.1 drop")`` as text."""
        call(*self.command("nft", "flush", "ruleset"))
        for line in lines:
            hook, _, rule = line.partition(": ")
            chain = f"chain c {{ type filter hook {hook} priority 0; policy accept;\n{rule}\n}}"
            text = f"table inet {hook} {{\n{chain}\n}}\n"
            call(*self.command("nft", "-f", "-"), text=text)

    def end(self) -> None:
        if self.reporter is not None:
            self.reporter.close()
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.started:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def network(home: Path, *names: str) -> Iterator[dict[str, Host]]:
    """So many hosts, 10.77.0.1 and up, each with a directory of its own below ``home``."""
    run = f"sw{os.getpid() % 100000}x{next(_count)}"
    with ExitStack() as stack:
        bridge = f"{run}-net"
        _namespace(stack, bridge)
        inside = ["ip", "-n", bridge]
        call(*inside, "link", "add", "br0", "type", "bridge")
        call(*inside, "link", "set", "br0", "up")
        hosts = {}
        for number, name in enumerate(names, 1):
            host = Host(name, f"{run}-{name}", f"10.77.0.{number}", home / name, bridge)
            host.home.mkdir(parents=True)
            _namespace(stack, host.namespace)
            call(*inside, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            call(*inside, "link", "set", f"p{number}", "master", "br0", "up")
            call("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            call("ip", "-n", host.namespace, "link", "set", "eth0", "up")
            stack.callback(host.end)
            hosts[name] = host
        yield hosts


def _namespace(stack: ExitStack, name: str) -> None:
    call("ip", "netns", "add", name)
    stack.callback(call, "ip", "netns", "del", name)
    call("ip", "-n", name, "link", "set", "lo", "up")
