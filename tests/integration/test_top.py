"""``swarmctl top`` on a terminal: of a real swarm, and while a broker is away. The terminal is a pty, and a VT52, whose
few commands are understood here: so what is compared is what somebody would see."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import pytest

from swarm import AsyncClient, Client, failpoints
from swarm.demo import model_path
from swarm.errors import RequestCancelled
from swarm.wire.messages import Report
from tests.faults.zygote import Zygote
from tests.integration.fake_broker import FakeBroker
from tests.integration.processes import Processes

SWARMCTL = [sys.executable, "-c", "from swarm.ctl.main import main; main()"]
PATIENCE_S = 30.0


def knows_vt52() -> bool:
    tool = shutil.which("infocmp")
    return tool is not None and subprocess.run([tool, "vt52"], check=False, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.skipif(not knows_vt52(), reason="no description of a vt52 is here (infocmp, ncurses-base)"),
]


class Terminal:
    """A process on a terminal of its own; ``shown`` is what stands there."""

    def __init__(self, arguments: list[str], columns: int = 80, lines: int = 24, **environment: str) -> None:
        self._main, side = os.openpty()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._cells: dict[tuple[int, int], str] = {}
        self._row = self._column = 0
        self._pending = ""
        self.raw = b""
        self._size(columns, lines)
        plain = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            arguments,
            stdin=side,
            stdout=side,
            stderr=side,
            env=plain | {"TERM": "vt52", "LC_ALL": "C.UTF-8"} | environment,
            start_new_session=True,
        )
        os.close(side)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)

    def _size(self, columns: int, lines: int) -> None:
        self._columns, self._lines = columns, lines
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        self._cells.clear()
        self._size(columns, lines)
        self.process.send_signal(signal.SIGWINCH)  # a pty tells it its foreground group only if it controls the session

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    @property
    def shown(self) -> list[str]:
        rows = range(self._lines)
        return ["".join(self._cells.get((row, at), " ") for at in range(self._columns)).rstrip() for row in rows]

    def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        give_up_at = time.monotonic() + PATIENCE_S
        while not condition(self.shown):
            if time.monotonic() > give_up_at or not self._read(1.0):
                raise AssertionError("\n".join([f"exit code {self.process.poll()}", *self.shown]))
        return self.shown

    def ends(self) -> int:
        """Read to the end; the exit code."""
        while self._read(PATIENCE_S):
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self, patience_s: float) -> bool:
        """Whether there may be more."""
        if not select.select([self._main], [], [], patience_s)[0]:
            return self.process.poll() is None
        with contextlib.suppress(OSError):  # the other side is closed
            data = os.read(self._main, 1 << 16)
            self.raw += data
            self._draw(self._pending + self._decoder.decode(data))
            return bool(data)
        return False

    def _draw(self, text: str) -> None:
        letters = iter(text)
        for letter in letters:
            if letter == "\x1b":
                rest = [next(letters, "")]
                rest += [next(letters, "") for _ in range(2 if rest[0] == "Y" else 0)]
                if not rest[-1]:
                    self._pending = letter + "".join(rest)
                    return
                self._command(rest)
            elif letter in "\r\n\b":
                self._row += letter == "\n"
                self._column = {"\r": 0, "\n": self._column, "\b": max(0, self._column - 1)}[letter]
            elif letter == "\t":
                self._column = (self._column // 8 + 1) * 8
            elif letter.isprintable():
                self._cells[self._row, self._column] = letter
                self._column = min(self._column + 1, self._columns - 1)
        self._pending = ""

    def _command(self, command: list[str]) -> None:
        match command:
            case ["Y", row, column]:
                self._row, self._column = ord(row) - 32, ord(column) - 32
            case ["H"]:
                self._row = self._column = 0
            case ["A" | "I"]:
                self._row -= 1
            case ["B"]:
                self._row += 1
            case ["C"]:
                self._column += 1
            case ["D"]:
                self._column -= 1
            case ["J"]:
                here = (self._row, self._column)
                self._cells = {place: letter for place, letter in self._cells.items() if place < here}
            case ["K"]:
                row, column = self._row, self._column
                self._cells = {p: letter for p, letter in self._cells.items() if p[0] != row or p[1] < column}
            case _:
                pass  # keypad and graphics modes


def holds(text: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(text in line for line in lines)


@pytest.fixture(scope="module")
def swarm(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two stages that compute a hundred tokens a second at most, so that an answer lasts while keys are pressed."""
    with Processes(model_path(), tmp_path_factory.mktemp("top"), launch=zygote) as swarm:
        swarm.start_broker(2, **{failpoints.VARIABLE: "broker.dispatch=stall:0.01@1+"})
        for name in ("w0", "w1"):
            swarm.start_worker(name)
        asyncio.run(two_stages(swarm))
        yield swarm


def test_top_of_a_real_swarm(swarm: Processes) -> None:
    """Stages as a chain; a question that is not answered with yes does nothing; a request is cancelled; it fits when
    the terminal gets another size; q gives the terminal back."""
    url = swarm.url
    with Client(url) as client, Terminal([*SWARMCTL, "top", "--every", "0.2", "--url", url]) as terminal:
        terminal.until(lambda lines: lines[5].startswith("> w"))
        stream = client.stream("Once upon a time", max_tokens=1900, ignore_eos=True, tenant="somebody")
        next(stream)
        lines = terminal.until(holds("somebody"))
        assert lines[0].startswith("swarm  serving village")
        assert lines[3].count("→") == 1
        assert lines[5].startswith("> w")
        name = lines[5].split()[1]
        terminal.press("d")
        terminal.until(holds(f"drain worker {name}? y: yes, any other key: no"))
        terminal.press("n")
        terminal.until(holds("cancelled"))
        terminal.press("jj")
        line = terminal.until(lambda lines: lines[8].startswith("> ") and "somebody" in lines[8])[8]
        terminal.press("c")
        terminal.until(holds(f"cancel request {line.split()[1]}?"))
        terminal.press("y")
        terminal.until(lambda lines: not holds("somebody")(lines))
        with contextlib.suppress(RequestCancelled):
            for _ in stream:
                pass
        assert stream.completion is None or stream.completion.finish_reason == "cancelled"
        terminal.resize(60, 12)
        lines = terminal.until(lambda lines: lines[11].endswith(": done"))
        assert lines[0].startswith("swarm  serving village")
        terminal.press("q")
        assert terminal.ends() == 0
        assert b"Traceback" not in terminal.raw
        assert not any(row.get("steered") for row in client.query("nodes")["workers"])  # type: ignore[attr-defined]


def test_a_worker_is_drained_by_a_yes_and_comes_back(swarm: Processes) -> None:
    """d and y: the others take its layers while an answer goes on, and it is marked; u takes that back."""
    with (
        Client(swarm.url) as client,
        Terminal([*SWARMCTL, "top", "--every", "0.2", "--url", swarm.url]) as terminal,
    ):
        stream = client.stream("Once upon a time", max_tokens=200, ignore_eos=True)
        next(stream)
        name = terminal.until(lambda lines: lines[5].startswith("> w"))[5].split()[1]
        terminal.press("d")
        terminal.until(holds(f"drain worker {name}? y: yes"))
        terminal.press("y")

        def is_drained(lines: list[str]) -> bool:
            [line] = [line for line in lines if line.startswith(f"> {name} ")] or [""]
            is_without = lines[3].count("[") == 1 and f"[{name} " not in lines[3]
            return is_without and "drained" in line and lines[-1] == f"drain {name}: done"

        terminal.until(is_drained)
        terminal.press("u")
        lines = terminal.until(lambda lines: lines[-1] == f"uncordon {name}: done" and not holds("drained")(lines))
        assert holds(f"> {name} ")(lines)
        for _ in stream:
            pass
        assert stream.completion is not None
        assert stream.completion.finish_reason == "length"
        terminal.press("q")
        assert terminal.ends() == 0


async def two_stages(swarm: Processes) -> None:
    async with AsyncClient(swarm.url, connect_timeout_s=PATIENCE_S) as client:
        await swarm.until_serving(client, 2)


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker(lambda submit, index: []).in_thread() as broker:
        body = {"state": "serving", "model": "parrot"}
        broker.reports["status"] = Report(what="status", ok=True, body=body)
        yield broker


def test_top_goes_on_when_the_broker_is_back(broker: FakeBroker) -> None:
    """It says so, with the last figures; then the new ones are there. Ctrl-C ends it as q does."""
    with Terminal([*SWARMCTL, "top", "--every", "0.1", "--url", broker.url]) as terminal:
        terminal.until(holds("serving parrot"))
        asyncio.run_coroutine_threadsafe(broker.shut(), broker._loop).result(20)
        assert "serving parrot" in terminal.until(holds("the broker has not answered for"))[0]
        broker.reports["status"] = Report(what="status", ok=True, body={"state": "serving", "model": "raven"})
        asyncio.run_coroutine_threadsafe(broker.open(), broker._loop).result(20)
        terminal.until(lambda lines: holds("serving raven")(lines) and not holds("has not answered")(lines))
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ends() == 0
        assert b"Traceback" not in terminal.raw


@pytest.mark.parametrize(
    ("term", "no_color", "coloured"), [("xterm-256color", "1", False), ("xterm-256color", "", True)]
)
def test_colours_are_left_out_where_they_are_not_wanted(
    broker: FakeBroker, term: str, no_color: str, coloured: bool
) -> None:
    arguments = [*SWARMCTL, "top", "--url", broker.url]
    with Terminal(arguments, TERM=term, NO_COLOR=no_color) as terminal:
        while b"parrot" not in terminal.raw:
            assert terminal._read(PATIENCE_S)
        terminal.press("q")
        assert terminal.ends() == 0
        assert (b"\x1b[36m" in terminal.raw) is coloured


def test_a_locale_that_is_not_here_is_no_traceback(broker: FakeBroker) -> None:
    """As on a machine that is visited with another one's settings."""
    with Terminal([*SWARMCTL, "top", "--url", broker.url], LC_ALL="xx_XX.UTF-8") as terminal:
        terminal.until(holds("parrot"))
        terminal.press("q")
        assert terminal.ends() == 0
        assert b"Traceback" not in terminal.raw


@pytest.mark.parametrize("term", ["nonsense", "dumb"])
def test_a_terminal_that_cannot_be_drawn_on(broker: FakeBroker, term: str) -> None:
    """One line that says what to do, as for every failure."""
    with Terminal([*SWARMCTL, "top", "--url", broker.url], TERM=term) as terminal:
        assert terminal.ends() == 1
        [line] = terminal.raw.decode().split("\r\n")[:-1]
        assert line.startswith("swarmctl: this terminal can't be drawn on")
        assert line.endswith("set TERM, or take --json")
