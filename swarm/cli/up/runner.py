"""Shell around the supervisor's decisions: processes, signals, timers and log files of ``swarm up``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from swarm.cli.output import ConsoleProgress
from swarm.cli.up.forkserver.client import ForkedProcess, ForkServer, RestartBudget
from swarm.cli.up.processes import Lifeline, LogFile, Process, describe_line, reap_orphans
from swarm.cli.up.supervisor import (
    GATEWAY,
    GRACE_S,
    Action,
    AnswerRequest,
    ChildExited,
    ChildNotStarted,
    EndSupervisor,
    Event,
    KillChild,
    ModelRefused,
    ShowGivenUp,
    ShowLeft,
    ShowRestart,
    StartChild,
    StopRequested,
    Supervisor,
    SupervisorStarted,
    SupervisorTick,
    TerminateChild,
    is_worker,
)

CommandOf = Callable[[str, int | None, str], Sequence[str]]  # (child's name, memory limit, device) → command line
Feed = Callable[[Event], None]

LOG_POLL_S = 0.2  # how far --verbose lags behind
LOG_CHECK_S = 2.0  # interval of checks of the logs' sizes
CRASH_LINES = 8  # last lines of a log that are shown after a crash
CRASH_COLUMNS = 160  # of a log event: enough to recognise it; the log has the rest
CRASH_TEXT_COLUMNS = 600  # of a message for people, whose end is the remedy


class BrokerHost(Protocol):
    """Connection to the broker: receives its requests for workers, and shows what the swarm waits for."""

    async def run(self, feed: Feed) -> None:
        """Receive messages from the broker until cancelled."""

    def answer(self, answer: AnswerRequest) -> None:
        """Send an answer, without waiting."""


class GatewayWatch(Protocol):
    """Observer that reports when the gateway serves."""

    async def run(self) -> None:
        """Watch the gateway until cancelled."""

    def on_started(self) -> None:
        """Handle the start of its process."""


class Runner:
    """Runs children until a signal, or until a child that can never work."""

    def __init__(
        self,
        command_of: CommandOf,
        logs: Path,
        progress: ConsoleProgress,
        host: Callable[[], BrokerHost],
        *,
        gateway_watch: GatewayWatch | None = None,
        forkserver: Sequence[str] | None = None,
        verbose: bool = False,
    ) -> None:
        """``host`` creates the connection to the broker, after the children's start, because its imports take time.

        ``forkserver`` is the fork server's command line; without it, workers are started as separate processes.
        """
        self._command_of = command_of
        self._logs_dir = logs
        self._progress = progress
        self._make_host = host
        self._host: BrokerHost | None = None
        self._gateway_watch = gateway_watch  # without it, no gateway is run
        self._verbose = verbose
        self._policy = Supervisor()  # decides; this class acts
        self._lifeline = Lifeline()
        self._forkserver_command = forkserver
        self._forkserver: ForkServer | None = None
        self._restart_budget = RestartBudget()
        self._adopts_orphans = os.getpid() == 1  # as process 1 of a container, and once a fork server was used
        self._processes: dict[str, Process | ForkedProcess] = {}
        self._logs: dict[str, LogFile] = {}
        self._changed = asyncio.Event()  # wakes ``_run_timer`` after an event
        # set to the error, or None, when all is over
        self._ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._num_interrupts = 0

    @property
    def was_interrupted_twice(self) -> bool:
        """Whether a second signal asked for an immediate end."""
        return self._num_interrupts > 1

    async def run(
        self, num_workers: int, device: str, swarms: tuple[str, ...] = (), gpus: tuple[str, ...] = ()
    ) -> str | None:
        """Run until the end, with this number of workers on this device, or one on each of these GPUs, and with these
        further swarms.

        Return the error, or None after a requested stop. No child survives in any case.
        """
        try:
            self._add_signal_handlers()
            if num_workers:
                self._start_forkserver()  # first, because it takes the longest
            self.feed(SupervisorStarted(num_workers, self._gateway_watch is not None, swarms, device, gpus))
            self._host = self._make_host()
            async with asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(self._run_timer()),
                    group.create_task(self._watch_logs()),
                    group.create_task(self._host.run(self.feed)),
                ]
                if self._gateway_watch is not None:
                    loops.append(group.create_task(self._gateway_watch.run()))
                error = await self._ended
                for task in loops:
                    task.cancel()
        finally:
            # otherwise a signal may come while the loop is being closed
            asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
            if self._forkserver is not None:
                self._forkserver.close()
                self._forkserver = None
            self._kill_rest()
            self._lifeline.close()
        return error

    def feed(self, event: Event) -> None:
        """Pass an event to the policy and execute its actions. Called in the loop's thread only."""
        for action in self._policy.handle(event, time.monotonic()):
            self._execute(action)
        self._changed.set()

    # doing

    def _execute(self, action: Action) -> None:
        match action:
            case StartChild():
                self._start(action)
            case TerminateChild(name):
                self._end(name, at_once=False)
            case KillChild(name):
                self._end(name, at_once=True)
            case AnswerRequest() if self._host is not None:
                self._host.answer(action)
            case ShowRestart(name, reason, delay_s):
                self._report_crash(name, reason, delay_s)
            case ShowGivenUp(name, reason):
                text = f"{name} can't work: {reason}"
                self._progress.report([text], {"event": "note", "text": text, "given_up": name})
            case ShowLeft(name):
                self._progress.print_line(f"{name} left")
            case EndSupervisor(error):
                self._ended.set_result(error)

    def _start(self, child: StartChild) -> None:
        name = child.name
        log = self._logs.setdefault(name, LogFile(self._logs_dir / f"{name}.log"))
        command = self._command_of(name, child.memory_limit, child.device)
        try:
            is_forkable = is_worker(name) and child.device in ("", "cpu")  # a GPU's driver does not survive a fork
            self._processes[name] = self._start_process(command, log, is_forkable=is_forkable)
            if name == GATEWAY and self._gateway_watch is not None:
                self._gateway_watch.on_started()
        except OSError as error:
            # Not immediately: the policy is still in the middle of its answer.
            asyncio.get_running_loop().call_soon(self.feed, ChildNotStarted(name, str(error)))

    def _start_forkserver(self) -> None:
        if self._forkserver_command is None:
            return
        log = LogFile(self._logs_dir / "nursery.log")
        try:
            self._forkserver = ForkServer(
                self._forkserver_command,
                self._lifeline,
                log,
                self._check_children,
                lambda reason: self.feed(ModelRefused(reason)),
            )
            self._adopts_orphans = True
            self._restart_budget.record_start(time.monotonic())
        except OSError as error:
            self._give_up_forkserver(f"there is no fork server ({error})")

    def _restart_forkserver(self) -> None:
        """Restart a fork server that has ended, so that the next restart of a worker is fast, too; unless it is
        useless."""
        former = self._forkserver
        if former is None or former.is_running or self._policy.is_stopping:
            return
        former.stop()
        self._forkserver = None
        if former.is_hopeless or not self._restart_budget.record_end(time.monotonic()):
            self._give_up_forkserver(
                f"the fork server {former.exit_description} (its log: {self._logs_dir / 'nursery.log'})"
            )
            return
        self._progress.print_line(f"the fork server {former.exit_description}; restarting it")
        self._start_forkserver()

    def _give_up_forkserver(self, reason: str) -> None:
        self._forkserver_command = None
        self._progress.print_line(
            f"workers start as separate processes from now on, a few seconds more slowly: {reason}"
        )

    def _start_process(self, command: Sequence[str], log: LogFile, *, is_forkable: bool) -> Process | ForkedProcess:
        if is_forkable:
            self._restart_forkserver()
            if self._forkserver is not None and self._forkserver.is_outdated:
                self._forkserver.stop()
                self._forkserver = None
            if self._forkserver is None:
                self._start_forkserver()
            if self._forkserver is not None and self._forkserver.is_running:
                return self._forkserver.fork(command, log)
        return Process(command, log, self._lifeline)

    def _end(self, name: str, *, at_once: bool) -> None:
        process = self._processes.get(name)  # None: it could not be started, and the policy is informed in a moment
        if process is not None:
            process.kill() if at_once else process.terminate()
            # there is no signal for the end of a process that is not forked yet
            asyncio.get_running_loop().call_soon(self._check_children)

    def _report_crash(self, name: str, reason: str, delay_s: float) -> None:
        self._progress.print_line(f"{name} {reason}; restarting it in {delay_s:g} s")
        log = self._logs[name]
        if not self._verbose:
            for line in log.tail(CRASH_LINES):
                self._progress.print_line(f"  {name} | {shorten_log_line(line)}")
        self._progress.print_line(f"  (its log: {log.path})")

    # watching

    def _add_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._on_interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # set by nohup
            loop.add_signal_handler(signal.SIGHUP, self._on_interrupt)
        loop.add_signal_handler(signal.SIGCHLD, self._check_children)
        loop.set_exception_handler(self._on_loop_error)

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """End everything on an error in a callback, because a supervisor that lost an event must not continue."""
        error = context.get("exception")
        if not self._ended.done():
            self._ended.set_exception(error if isinstance(error, Exception) else RuntimeError(str(context["message"])))

    def _on_interrupt(self) -> None:
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            hint = "; press Ctrl-C again to kill" if sys.stdin and sys.stdin.isatty() else ""
            self._progress.print_line(f"stopping (at most {GRACE_S:g} s{hint})")
        self.feed(StopRequested())

    def _check_children(self) -> None:
        """Check every child, because signals that come together are delivered once."""
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                del self._processes[name]
                self.feed(self._describe_end(name, process, code))
        if self._forkserver is not None:
            self._forkserver.check()  # may deliver ids of children that are unknown until now
        # An unknown orphan may be a worker whose id is still to be read: its exit status must be kept.
        if self._adopts_orphans and not (self._forkserver is not None and self._forkserver.has_pending_forks):
            reap_orphans(self._own_pids())
        self._restart_forkserver()

    def _describe_end(self, name: str, process: Process | ForkedProcess, code: int) -> ChildExited | ChildNotStarted:
        if isinstance(process, ForkedProcess) and process.problem:
            return ChildNotStarted(name, process.problem)
        return ChildExited(name, code, self._logs[name].last_error())

    def _own_pids(self) -> set[int]:
        own = {process.pid for process in self._processes.values() if process.pid is not None}
        return own if self._forkserver is None else own | {self._forkserver.pid}

    async def _run_timer(self) -> None:
        while True:
            self._changed.clear()
            due = self._policy.wake_at()
            delay_s = None if due is None else max(0.0, due - time.monotonic())
            try:
                # Not wait_for: in Python 3.11 it loses a cancellation that arrives together with the result.
                async with asyncio.timeout(delay_s):
                    await self._changed.wait()
            except TimeoutError:
                self.feed(SupervisorTick())

    async def _watch_logs(self) -> None:
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(LOG_POLL_S if self._verbose else LOG_CHECK_S)
            if self._verbose:
                self._show_logs()
            if time.monotonic() - checked_at >= LOG_CHECK_S:
                checked_at = time.monotonic()
                for log in self._logs.values():
                    log.truncate_if_long()

    def _show_logs(self) -> None:
        for name, log in self._logs.items():
            for line in log.new_lines():
                self._progress.print_line(f"{name} | {line}")

    # the end

    def _kill_rest(self) -> None:
        """Kill the children that are left: none after an orderly end, all after an error in the supervisor itself."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(GRACE_S)
        if self._verbose:
            self._show_logs()


def shorten_log_line(line: str) -> str:
    """Return a line of a log as text of limited length. The log has the whole line."""
    text = describe_line(line)
    most = CRASH_TEXT_COLUMNS if text == line else CRASH_COLUMNS
    return text if len(text) <= most else text[: most - 1] + "…"
