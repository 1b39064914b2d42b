"""Imports once what all who look at mutants need, and forks one of them for each order: a second of processor time less
for every mutant. An order is a line of JSON on stdin, its exit code a line on stdout.

    {"root": the copy to look at, "command": ["-m", "pytest", …] or [script, …], "output": a file, "limit_s": 200}

Nothing of the package itself, or of its tests, is in here when it forks: these are read from the copy.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

OTHERS = "pytest pytest_asyncio pytest_timeout hypothesis.strategies numpy msgspec zmq.asyncio pydantic_settings "
OTHERS += "structlog uvloop httpx torch safetensors.torch sqlite3"


def look(order: dict[str, Any]) -> NoReturn:
    """Be the process that was ordered, and end with its code."""
    with open(os.devnull, "rb") as nothing, open(order["output"], "wb") as output:
        os.dup2(nothing.fileno(), 0)
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    root, command = order["root"], order["command"]
    os.chdir(root)
    os.environ["PYTHONPATH"] = root
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # of what is broken now, and whole again a moment later
    sys.dont_write_bytecode = True
    sys.path[0] = root
    sys.argv = command if command[0] != "-m" else command[1:]
    code: object = 1
    try:
        if command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  # told; this process ends whatever it was
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def main() -> None:
    for name in OTHERS.split():
        importlib.import_module(name)
    assert not any(name.split(".")[0] in ("swarm", "tests") for name in sys.modules)
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            look(order)
        signal.signal(signal.SIGALRM, lambda *_, child=child: os.kill(child, signal.SIGKILL))
        signal.alarm(order["limit_s"])
        _, status = os.waitpid(child, 0)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
