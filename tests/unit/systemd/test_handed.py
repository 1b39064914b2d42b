"""Doors that systemd hands over are taken by where they listen; what is not for this process is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

CODE = """
import os, socket
from swarm.systemd import socket_activation
from swarm.systemd.socket_activation import take_socket
from swarm.wire.sockets import bind
os.environ["LISTEN_PID"] = str(os.getpid())
print(socket_activation.adopt_sockets(os.environ), "LISTEN_FDS" in os.environ)
taken = bind("127.0.0.1", {port})
print(taken.fileno(), taken.getblocking(), take_socket("127.0.0.1", {port}), take_socket("localhost", 1))
print(socket_activation.close_unused())
"""


def test_a_door_is_taken_by_where_it_listens() -> None:
    first, second = socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6)
    port, other = first.getsockname()[1], second.getsockname()[1]

    def hand_over() -> None:
        os.dup2(first.fileno(), 3)
        os.dup2(second.fileno(), 4)

    done = subprocess.run(
        [sys.executable, "-c", CODE.format(port=port)],
        env=os.environ | {"LISTEN_FDS": "2"},
        pass_fds=(3, 4),
        preexec_fn=hand_over,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines == [
        f"['127.0.0.1 port {port}', '::1 port {other}'] False",
        "3 False None None",
        f"['::1 port {other}']",
    ]
    first.close()
    second.close()


def test_what_is_for_another_process_is_left() -> None:
    from swarm.systemd import socket_activation

    environment = {"LISTEN_FDS": "1", "LISTEN_PID": "1", "LISTEN_FDNAMES": "x"}
    assert socket_activation.adopt_sockets(environment) == []
    assert environment == {}
