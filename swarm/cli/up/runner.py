"""Shell around the supervisor's decisions: processes, signals, timers and log files of ``swarm up``."""

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
LOG_CHECK_S = 2.0  # interval of checks of the logs' sizes
CRASH_LINES = 8  # last lines of a log that are shown after a crash
CRASH_COLUMNS = 160  # of a log event: enough to recognise it; the log has the rest
CRASH_WORDS = 600  # of a message for people, whose end is the remedy


class Host(Protocol):
    """Connection to the broker: receives its requests for workers, and shows what the swarm waits for."""

    async def run(self, feed: Feed) -> None:
        """Receive messages from the broker until cancelled."""

    def answer(self, answer: Answer) -> None:
        """Send an answer, without waiting."""


class Door(Protocol):
    """Observer that reports when the gateway serves."""

    async def run(self) -> None:
        """Watch the gateway until cancelled."""

    def started(self) -> None:
        """Handle the start of its process."""


class Runner:
    """Runs children until a signal, or until a child that can never work."""

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
        """``host`` creates the connection to the broker, after the children's start, because its imports take time.

        ``forkserver`` is the fork server's command line; without it, workers are started as separate processes.
        """
        self._command_of = command_of
        self._logs_dir = logs
        self._progress = progress
        self._make_host = host
        self._host: Host | None = None
        self._door = door  # without it, no gateway is run
        self._verbose = verbose
        self._policy = Supervisor()  # decides; this class acts
        self._lifeline = Lifeline()
        self._nursery_command = nursery
        self._nursery: Nursery | None = None
        self._renewals = Renewals()
        self._takes_orphans_in = os.getpid() == 1  # as process 1 of a container, and once a fork server was used
        self._processes: dict[str, Process | Forked] = {}
        self._logs: dict[str, LogFile] = {}
        self._changed = asyncio.Event()  # wakes ``_keep_time`` after an event
        # set to the error, or None, when all is over
        self._ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._num_interrupts = 0

    @property
    def was_impatient(self) -> bool:
        """Whether a second signal asked for an immediate end."""
        return self._num_interrupts > 1

    async def run(self, num_workers: int) -> str | None:
        """Run until the end; return the error, or None after a requested stop. No child survives in any case."""
        try:
            self._listen()
            if num_workers:
                self._open_nursery()  # first, because it takes the longest
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
            # otherwise a signal may come while the loop is being closed
            asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None
            self._kill_rest()
            self._lifeline.close()
        return error

    def feed(self, event: Event) -> None:
        """Pass an event to the policy and execute its actions. Called in the loop's thread only."""
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
                self._progress.say(f"{name} can't work: {reason}")
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
            # Not immediately: the policy is still in the middle of its answer.
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
            self._give_nursery_up(f"there is no fork server ({error})")

    def _tend_nursery(self) -> None:
        """Restart a fork server that has ended, so that the next restart of a worker is fast, too; unless it is
        useless."""
        former = self._nursery
        if former is None or former.is_there or self._policy.stopping:
            return
        former.end()
        self._nursery = None
        if former.is_hopeless or not self._renewals.allow(time.monotonic()):
            self._give_nursery_up(f"the fork server {former.end_in_words} (its log: {self._logs_dir / 'nursery.log'})")
            return
        self._progress.say(f"the fork server {former.end_in_words}; restarting it")
        self._open_nursery()

    def _give_nursery_up(self, reason: str) -> None:
        self._nursery_command = None
        self._progress.say(f"workers start as separate processes from now on, a few seconds more slowly: {reason}")

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
        process = self._processes.get(name)  # None: it could not be started, and the policy is informed in a moment
        if process is not None:
            process.kill() if at_once else process.terminate()
            # there is no signal for the end of a process that is not forked yet
            asyncio.get_running_loop().call_soon(self._reap)

    def _say_crash(self, name: str, reason: str, delay_s: float) -> None:
        self._progress.say(f"{name} {reason}; restarting it in {delay_s:g} s")
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
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # set by nohup
            loop.add_signal_handler(signal.SIGHUP, self._interrupted)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.set_exception_handler(self._failed)

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """End everything on an error in a callback: no supervisor is better than one that lost an event."""
        error = context.get("exception")
        if not self._ended.done():
            self._ended.set_exception(error if isinstance(error, Exception) else RuntimeError(str(context["message"])))

    def _interrupted(self) -> None:
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            self._progress.say(f"stopping (at most {GRACE_S:g} s; press Ctrl-C again to kill)")
        self.feed(StopAsked())

    def _reap(self) -> None:
        """Check every child, because signals that come together are delivered once."""
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                del self._processes[name]
                self.feed(self._describe_end(name, process, code))
        if self._nursery is not None:
            self._nursery.look()  # may deliver ids of children that are unknown until now
        # An unknown orphan may be a worker whose id is still to be read: its exit status must be kept.
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
                # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the result.
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
