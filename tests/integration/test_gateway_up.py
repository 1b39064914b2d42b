"""``swarm up`` with its gateway: said, keyed, restarted, ended; and another gateway beside it that is stopped in the
middle of a stream."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm.cli.up.http import unavailable_reason
from swarm.config import GatewaySettings, load
from swarm.errors import ConfigError
from tests.integration.lines import MODULE, PATIENCE_S, Lines
from tests.integration.processes import free_ports


def ask(url: str, body: dict[str, Any] | None = None, key: str = "", **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def swarmctl(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from swarm.ctl.main import main; main()", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@contextlib.contextmanager
def another_gateway(broker: str, port: int, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*MODULE, "gateway", "--url", broker, "--http", str(port)]
    with subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until and process.poll() is None:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def broken_stream(url: str, body: dict[str, Any], key: str, gateway: subprocess.Popen[bytes]) -> list[str]:
    """The lines of a stream whose gateway is stopped in the middle of it."""
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
    )
    lines = []
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response, contextlib.suppress(OSError, ValueError):
        for line in response:
            lines.append(line.decode().rstrip("\n"))
            if len(lines) == 12:
                gateway.terminate()
                time.sleep(0.2)  # two signals at once are one
                gateway.terminate()  # without its grace
    return lines


def texts(lines: list[str]) -> str:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return "".join(json.loads(each)["choices"][0]["text"] for each in data)


def check_that_streams_outlive_their_gateway(url: str, port: int, key: str, environment: dict[str, str]) -> None:
    """A gateway that is stopped lets its streams go: another one goes on with them, each byte once."""
    long = {"model": "village", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "seed": 3, "stream": True}
    with another_gateway(f"tcp://127.0.0.1:{port}", port + 3, **environment) as other:
        begun = broken_stream(f"http://127.0.0.1:{port + 3}", long, key, other)
        assert other.wait(PATIENCE_S) == 0
    assert "data: [DONE]" not in begun
    while begun and begun[-1] != "":
        del begun[-1]  # an event of which only a part came
    last = [line.removeprefix("id: ") for line in begun if line.startswith("id: ")][-1]
    status, rest = ask(f"{url}/v1/streams/{last}", None, key)
    assert status == 200
    assert rest.endswith(b"data: [DONE]\n\n")
    whole = json.loads(ask(url + "/v1/completions", {**long, "stream": False}, key)[1])
    assert texts(begun) + texts(rest.decode().splitlines()) == whole["choices"][0]["text"]


def test_a_swarm_with_its_gateway(tmp_path: Path) -> None:
    port = free_ports(4)
    keys = tmp_path / "own" / "keys.json"
    key = swarmctl("keys", "add", "alice", "--keys-file", str(keys))["key"]
    environment = {"SWARM_GATEWAY__KEYS_FILE": str(keys), "OMP_NUM_THREADS": "1"}
    up = Lines(["up", "--port", str(port), "--http", str(port + 2), "--json"], tmp_path, **environment)
    try:
        url = up.wait_for("http")["url"]
        assert url == f"http://127.0.0.1:{port + 2}"
        assert ask(url + "/health")[0] == 200
        until = time.monotonic() + PATIENCE_S
        while ask(url + "/ready")[0] != 200 and time.monotonic() < until:
            time.sleep(0.2)

        # keys, without a restart
        body = {"model": "village", "prompt": "Once upon", "max_tokens": 4}
        assert ask(url + "/v1/completions", body)[0] == 401
        assert ask(url + "/v1/completions", body, key)[0] == 200
        thrifty = swarmctl("keys", "add", "bob", "--tokens-per-day", "5", "--keys-file", str(keys))["key"]
        renewed = swarmctl("keys", "rotate", "alice", "--keys-file", str(keys))["key"]
        time.sleep(1.0)
        assert ask(url + "/v1/completions", body, key)[0] == 401
        assert ask(url + "/v1/completions", body, renewed)[0] == 200
        # tokens are counted, of streams too
        assert ask(url + "/v1/completions", {**body, "stream": True}, thrifty)[0] == 200
        status, said = ask(url + "/v1/completions", body, thrifty)
        assert (status, json.loads(said)["error"]["code"]) == (429, "tokens_per_day")
        assert [row["name"] for row in swarmctl("keys", "list", "--keys-file", str(keys))["keys"]] == ["alice", "bob"]

        check_that_streams_outlive_their_gateway(url, port, renewed, environment)

        # one that dies comes back
        children = psutil.Process(up.process.pid).children()
        (gateway,) = [child for child in children if "gateway" in child.cmdline()]
        gateway.kill()
        up.wait_for("note", "gateway was ended by SIGKILL; restarting it")
        up.wait_for("http")
        assert ask(url + "/v1/completions", body, renewed)[0] == 200

        children = psutil.Process(up.process.pid).children(recursive=True)
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(PATIENCE_S) == 0
        assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
    finally:
        up.close()


def test_a_port_that_is_taken() -> None:
    """One that somebody chose is an error before anything starts; the default is left, with a word."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command in (["up", "--workers", "0", "--port", str(free_ports())], ["gateway"]):
            done = subprocess.run(
                [*MODULE, *command, "--http", str(port)],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
            assert done.returncode == (1 if command[0] == "up" else 78)
            (line,) = [line for line in done.stderr.splitlines() if line.startswith("swarm: ")]
            assert f"can't serve at port {port} of 127.0.0.1" in line
            assert "--http" in line
        with pytest.raises(ConfigError, match=r"--no-http"):
            unavailable_reason(load(overrides={"gateway.port": port}).gateway, range(5700, 5702))
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", GatewaySettings().port)):
        assert "no HTTP: can't serve at port 8000" in unavailable_reason(GatewaySettings(), range(5700, 5702))


def test_other_machines_need_keys(tmp_path: Path) -> None:
    """Without a setting for them it is no address at all; without a single key the gateway doesn't begin."""
    done = subprocess.run(
        [*MODULE, "gateway", "--host", "0.0.0.0"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 78
    assert "gateway.host = '0.0.0.0' from the command line is wrong" in done.stderr
    done = subprocess.run(
        [*MODULE, "gateway", "--host", "0.0.0.0", "--http", str(free_ports())],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "SWARM_GATEWAY__KEYS_FILE": str(tmp_path / "keys.json")},
    )
    assert done.returncode == 78
    assert "swarmctl keys add" in done.stderr
