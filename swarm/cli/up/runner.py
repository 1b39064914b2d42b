"""The shell around the supervisor's decisions: processes, signals, timers and log files of ``swarm up``."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from swarm.cli.output import Progress
from swarm.cli.up.nursery.ours import Forked, Nursery
from swarm.cli.up.nursery.renewal import Renewals
from swarm.cli.up.processes import Lifeline, LogFile, Process, reap_orphans
from swarm.cli.up.supervisor import (
    GATEWAY,
    GRACE_S,
    OURS,
    Action,
    Answer,
    Begun,
    End,
    Event,
    Exited,
    Kill,
    NotStarted,
    SayGivenUp,
    SayLeft,
    SayRestart,
    Start,
    StopAsked,
    Supervisor,
    Terminate,
    Tick,
)

CommandOf = Callable[[str, int | None], Sequence[str]]  # (child's name, memory limit) → command line
Feed = Callable[[Event], None]

LOG_POLL_S = 0.2  # how far --verbose lags behind
LOG_CHECK_S = 2.0  # how often a log's length is looked at
CRASH_LINES = 8
CRASH_COLUMNS = 160  # of a logged event: enough to know it; the whole is in the log
CRASH_WORDS = 600  # of what it said to people, which ends with what to do


class Host(Protocol):
    """Speak to the broker for us: report what it asks for and what the swarm waits for."""

    async def run(self, feed: Feed) -> None:
        """Listen to the broker until cancelled."""

    def answer(self, answer: Answer) -> None:
        """Send an answer, without waiting."""


class Door(Protocol):
    """Tell when the gateway serves."""

    async def run(self) -> None:
        """Watch it until cancelled."""

    def started(self) -> None:
        """Its process was started."""


class Runner:
    """Run children until told to stop, by a signal or by a child that can't ever work."""

    def __init__(
        self,
        command_of: CommandOf,
        logs: Path,
        progress: Progress,
        host: Callable[[], Host],
        *,
        door: Door | None = None,
        nursery: Sequence[str] | None = None,
        verbose: bool = False,
    ) -> None:
        """``host``: makes it, once children are under way: what it imports takes its time. ``nursery``: the command
        that runs one; without it, workers start by themselves."""
        self._command_of = command_of
        self._logs_dir = logs
        self._progress = progress
        self._make_host = host
        self._host: Host | None = None
        self._door = door  # without one, no gateway is run
        self._verbose = verbose
        self._policy = Supervisor()
        self._lifeline = Lifeline()
        self._nursery_command = nursery
        self._nursery: Nursery | None = None
        self._renewals = Renewals()
        self._takes_orphans_in = os.getpid() == 1  # in a container; and whoever has had a nursery
        self._processes: dict[str, Process | Forked] = {}
        self._logs: dict[str, LogFile] = {}
        self._changed = asyncio.Event()
        self._ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._num_interrupts = 0

    @property
    def was_impatient(self) -> bool:
        """Whether a second signal asked for an end at once."""
        return self._num_interrupts > 1

    async def run(self, num_workers: int) -> str | None:
        """Run until the end; return why it came, None if somebody asked for it. No child is left, whatever happens."""
        try:
            self._listen()
            if num_workers:
                self._open_nursery()  # first of all: it takes the longest
            self.feed(Begun(num_workers, gateway=self._door is not None))
            self._host = self._make_host()
            async with asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(self._keep_time()),
                    group.create_task(self._keep_logs()),
                    group.create_task(self._host.run(self.feed)),
                ]
                if self._door is not None:
                    loops.append(group.create_task(self._door.run()))
                error = await self._ended
                for task in loops:
                    task.cancel()
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)  # or one comes while the loop is closed
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None
            self._kill_rest()
            self._lifeline.close()
        return error

    def feed(self, event: Event) -> None:
        """Let the policy decide, and do what it says. Called in the loop's thread only."""
        for action in self._policy.handle(event, time.monotonic()):
            self._do(action)
        self._changed.set()

    # doing

    def _do(self, action: Action) -> None:
        match action:
            case Start(name, memory_limit):
                self._start(name, memory_limit)
            case Terminate(name):
                self._end(name, at_once=False)
            case Kill(name):
                self._end(name, at_once=True)
            case Answer() if self._host is not None:
                self._host.answer(action)
            case SayRestart(name, reason, delay_s):
                self._say_crash(name, reason, delay_s)
            case SayGivenUp(name, reason):
                self._progress.say(f"{name} gives up: {reason}")
            case SayLeft(name):
                self._progress.say(f"{name} left")
            case End(error):
                self._ended.set_result(error)

    def _start(self, name: str, memory_limit: int | None) -> None:
        log = self._logs.setdefault(name, LogFile(self._logs_dir / f"{name}.log"))
        command = self._command_of(name, memory_limit)
        try:
            self._processes[name] = self._begun(name, command, log)
            if name == GATEWAY and self._door is not None:
                self._door.started()
        except OSError as error:
            # Not at once: the policy is still in the middle of its answer.
            asyncio.get_running_loop().call_soon(self.feed, NotStarted(name, str(error)))

    def _open_nursery(self) -> None:
        if self._nursery_command is None:
            return
        log = LogFile(self._logs_dir / "nursery.log")
        try:
            self._nursery = Nursery(self._nursery_command, self._lifeline, log, self._reap)
            self._takes_orphans_in = True
            self._renewals.begun(time.monotonic())
        except OSError as error:
            self._give_nursery_up(f"there is no nursery ({error})")

    def _tend_nursery(self) -> None:
        """One that has ended is made anew, so that whoever dies next is back soon, too; unless that is of no use."""
        former = self._nursery
        if former is None or former.is_there or self._policy.stopping:
            return
        former.end()
        self._nursery = None
        if former.is_hopeless or not self._renewals.allow(time.monotonic()):
            self._give_nursery_up(f"the nursery {former.end_in_words} (its log: {self._logs_dir / 'nursery.log'})")
            return
        self._progress.say(f"the nursery {former.end_in_words}; starting it again")
        self._open_nursery()

    def _give_nursery_up(self, reason: str) -> None:
        self._nursery_command = None
        self._progress.say(f"workers start by themselves from now on, a few seconds later: {reason}")

    def _begun(self, name: str, command: Sequence[str], log: LogFile) -> Process | Forked:
        if name not in OURS:
            self._tend_nursery()
            if self._nursery is not None and self._nursery.is_outdated:
                self._nursery.end()
                self._nursery = None
            if self._nursery is None:
                self._open_nursery()
            if self._nursery is not None and self._nursery.is_there:
                return self._nursery.begin(command, log)
        return Process(command, log, self._lifeline)

    def _end(self, name: str, *, at_once: bool) -> None:
        process = self._processes.get(name)  # None: it could not be started, which the policy will hear in a moment
        if process is not None:
            process.kill() if at_once else process.terminate()
            asyncio.get_running_loop().call_soon(self._reap)  # nobody tells the end of one that isn't born yet

    def _say_crash(self, name: str, reason: str, delay_s: float) -> None:
        self._progress.say(f"{name} {reason}; starting it again in {delay_s:g} s")
        log = self._logs[name]
        if not self._verbose:
            for line in log.tail(CRASH_LINES):
                self._progress.say(f"  {name} | {_cut(line)}")
        self._progress.say(f"  (its log: {log.path})")

    # watching

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGTERM, self._interrupted)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
            loop.add_signal_handler(signal.SIGHUP, self._interrupted)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.set_exception_handler(self._failed)

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """End everything on an error in a callback: better no supervisor than one that forgot an event."""
        error = context.get("exception")
        if not self._ended.done():
            self._ended.set_exception(error if isinstance(error, Exception) else RuntimeError(str(context["message"])))

    def _interrupted(self) -> None:
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            self._progress.say(f"stopping (at most {GRACE_S:g} s; once more to stop at once)")
        self.feed(StopAsked())

    def _reap(self) -> None:
        """Look at every child: signals that come together are delivered once."""
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                del self._processes[name]
                self.feed(self._describe_end(name, process, code))
        if self._nursery is not None:
            self._nursery.look()  # whose children may be heard of only now
        # An orphan that is not among ours may be a worker whose number is still to be read: its end must be kept.
        if self._takes_orphans_in and not (self._nursery is not None and self._nursery.has_pending_births):
            reap_orphans(self._own_pids())
        self._tend_nursery()

    def _describe_end(self, name: str, process: Process | Forked, code: int) -> Exited | NotStarted:
        if isinstance(process, Forked) and process.problem:
            return NotStarted(name, process.problem)
        return Exited(name, code, self._logs[name].last_error())

    def _own_pids(self) -> set[int]:
        own = {process.pid for process in self._processes.values() if process.pid is not None}
        return own if self._nursery is None else own | {self._nursery.pid}

    async def _keep_time(self) -> None:
        while True:
            self._changed.clear()
            due = self._policy.wake_at()
            delay_s = None if due is None else max(0.0, due - time.monotonic())
            try:
                # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the result.
                async with asyncio.timeout(delay_s):
                    await self._changed.wait()
            except TimeoutError:
                self.feed(Tick())

    async def _keep_logs(self) -> None:
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(LOG_POLL_S if self._verbose else LOG_CHECK_S)
            if self._verbose:
                self._show_logs()
            if time.monotonic() - checked_at >= LOG_CHECK_S:
                checked_at = time.monotonic()
                for log in self._logs.values():
                    log.keep_small()

    def _show_logs(self) -> None:
        for name, log in self._logs.items():
            for line in log.new_lines():
                self._progress.say(f"{name} | {line}")

    # the end

    def _kill_rest(self) -> None:
        """Kill the children that are left: none after an orderly end, all after an error in the supervisor itself."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(GRACE_S)
        if self._verbose:
            self._show_logs()


def _cut(line: str) -> str:
    most = CRASH_COLUMNS if line.startswith("{") else CRASH_WORDS
    return line if len(line) <= most else line[: most - 1] + "…"
