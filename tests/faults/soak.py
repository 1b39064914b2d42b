"""The soak's engine: workers with appointments, deaths that are noticed and made good, figures of who lives on."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swarm import AsyncClient
from tests.faults.bench import Fault, Swarm
from tests.faults.soak_load import Known, Load
from tests.faults.soak_table import Appointment, Table

NAMES = ("w0", "w1", "w2", "w3")
ARMED = 2  # workers that carry a fault; the others live on, to be watched
PATIENCE_S = 5.0  # until an appointment that can't come about is given up
SAMPLE_S = 2.0
# Short patience with what hangs: an hour of waiting would show nothing that a few seconds don't.
OPTIONS = {
    "SWARM_HEALTH__HANG_MIN_S": "0.5",
    "SWARM_BROKER__SETTLE_S": "0.1",
    "SWARM_BROKER__RETAIN_S": "2",
    "SWARM_BROKER__TRACE_STEPS": "64",
}


@dataclass
class SoakResult:
    faults: tuple[str, ...]
    table: Counter[tuple[str, str]]
    injections: int
    answers: int
    quarantined: int
    took_s: float
    longest_gap_s: float
    slopes: dict[str, str]
    violations: list[str]
    brokers: int = 0

    @property
    def upper_bound(self) -> float:
        """Bound the rate of violations with 95 % confidence, had there been none: three in so many."""
        return (3 + len(self.violations)) / max(1, self.injections + self.brokers)

    def body(self) -> dict[str, object]:
        table: dict[str, dict[str, int]] = {}
        for (fault, phase), count in self.table.items():
            table.setdefault(fault, {})[phase] = count
        return {
            "injections": self.injections,
            "brokers": self.brokers,
            "answers": self.answers,
            "quarantined": self.quarantined,
            "took_s": round(self.took_s, 1),
            "longest_gap_s": round(self.longest_gap_s, 2),
            "table": table,
            "slopes": self.slopes,
            "violations": self.violations,
            "upper_bound": self.upper_bound,
        }


@dataclass
class Life:
    """One process of a worker: what awaits it, since when it runs, when it is to be woken or ended."""

    process: Any
    appointment: Appointment | None
    began_at: float
    struck: int = 0
    wake_at: float | None = None
    end_at: float | None = None


@dataclass
class Soak:
    swarm: Swarm
    seed: int
    faults: tuple[str, ...]
    names: tuple[str, ...] = NAMES
    lives: dict[str, Life] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    num_blames: int = 0  # deaths and losses of steps, each of which may be put down to the requests in flight
    num_injections: int = 0
    broker_every_s: float = 0.0  # between two deaths of the broker, on average; 0: it lives
    num_brokers: int = 0
    _broker_at: float = 0.0

    def __post_init__(self) -> None:
        self.table = Table(self.faults, self.seed)
        self._chance = random.Random(self.seed + 1)
        self._samples: dict[str, list[tuple[float, float, float, float]]] = {}
        self._num_read = 0

    async def run(
        self,
        client: AsyncClient,
        known: Known,
        *,
        minutes: float,
        injections: int,
        requests: int,
        say: Callable[[str], None],
    ) -> SoakResult:
        """Harm until the time is over or the number reached; then all must be well again."""
        load = Load(client, known, self.seed, lambda: self.num_blames, self._violated)
        began = time.monotonic()
        for name, process in self.swarm.workers.items():
            self.lives[name] = Life(process, None, began)
        answering = asyncio.create_task(load.run(requests))
        said_at = sampled_at = began
        try:
            while (now := time.monotonic()) < began + 60 * minutes and self.num_injections < injections:
                self._turn(now)
                if now >= sampled_at + SAMPLE_S:
                    sampled_at = now
                    self._sample(now - began)
                if now >= said_at + 15:
                    said_at = now
                    say(
                        f"{now - began:6.0f} s  {self.num_injections:5} faults  {load.num_answers:6} answers  "
                        f"{len(self.violations)} violations  {len(self.table.empty())} cells empty"
                    )
                if answering.done():
                    break  # a bug in the load itself: its exception is told below
                await asyncio.sleep(0.02)
            await self._end_well(client, load)
        finally:
            answering.cancel()
            await asyncio.wait([answering])
        if not answering.cancelled() and answering.exception() is not None:
            raise RuntimeError("the load broke") from answering.exception()
        return SoakResult(
            self.faults,
            self.table.counts,
            self.num_injections,
            load.num_answers,
            load.num_quarantined,
            time.monotonic() - began,
            load.longest_gap_s,
            self._slopes(),
            self.violations,
            self.num_brokers,
        )

    # --- faults ------------------------------------------------------------------------------------------------------

    def _turn(self, now: float) -> None:
        """Notice what struck and who died; start again; wake who sleeps."""
        struck = self.swarm.happened()
        for fault in struck[self._num_read :]:
            self._struck(fault, now)
        self._num_read = len(struck)
        if self.swarm.broker.poll() is not None:
            raise RuntimeError("the broker ended")
        if self.broker_every_s and now >= self._broker_at:
            self._kill_broker(now)
        for name, life in list(self.lives.items()):
            self._look_after(name, life, now)
        while sum(life.appointment is not None for life in self.lives.values()) < ARMED:
            self._begin(self._chance.choice([n for n, life in self.lives.items() if life.appointment is None]), now)

    def _kill_broker(self, now: float) -> None:
        """Killed, and started again on its journal; the next time is as far away as chance wants it (Poisson)."""
        if self._broker_at:
            self.swarm.kill_broker()
            self.swarm.start_broker(len(self.names))
            self.num_brokers += 1
        self._broker_at = now + self._chance.expovariate(1 / self.broker_every_s)

    def _struck(self, fault: Fault, now: float) -> None:
        name, life = next(((n, x) for n, x in self.lives.items() if x.process.pid == fault.pid), ("", None))
        if life is None or life.appointment is None:
            return  # it was started again meanwhile
        part = next((p for p in life.appointment.parts() if p.place == fault.place), life.appointment)
        self.table.counts[part.fault, part.phase] += 1
        self.num_injections += 1
        life.struck += 1
        match part.fault:
            case "two":
                other = self._chance.choice([n for n in self.lives if n != name])
                self.lives[other].process.kill()
                self.lives[other].end_at = now
            case "stop":
                life.wake_at = now + self._chance.choice((0.05, 0.4, 1.0, 2.0))
            case "hang":
                life.end_at = now + 4.0
                self.num_blames += 1
            case "memory":
                self.num_blames += 1
            case "crash" if fault.action == "raise":  # the step is lost, and the process lives until it is ended
                self.num_blames += 1

    def _look_after(self, name: str, life: Life, now: float) -> None:
        if life.wake_at is not None and now >= life.wake_at:
            life.process.send_signal(signal.SIGCONT)
            life.wake_at, life.end_at = None, now + self._chance.choice((0.1, 0.5, 2.0))
        if life.process.poll() is not None:
            self.num_blames += not (life.struck and life.appointment and life.appointment.fault == "hang")
            if life.appointment is None and life.end_at is None:
                self._violated(f"{name} ended though nothing was to befall it")
            self._start(name, now)
        elif life.end_at is not None and now >= life.end_at:
            life.process.kill()
        elif life.appointment is not None and now > life.began_at + PATIENCE_S and life.wake_at is None:
            life.end_at = now  # what was to strike can't come about as things are: another one

    def _start(self, name: str, now: float) -> None:
        """Start a worker in the place of one that ended: with a fault, if too few carry one."""
        del self.lives[name]
        carrying = sum(life.appointment is not None for life in self.lives.values())
        self._begin(name, now, armed=carrying < ARMED)

    def _begin(self, name: str, now: float, *, armed: bool = True) -> None:
        appointment = self.table.appoint() if armed else None
        if name in self.lives:
            self.num_blames += 1
        self.swarm.start_again(name, "" if appointment is None else appointment.specs)
        self.lives[name] = Life(self.swarm.workers[name], appointment, now)

    async def _end_well(self, client: AsyncClient, load: Load) -> None:
        """No more faults: all workers serve again, and requests are answered."""
        for name in self.names:
            if self.lives[name].appointment is not None or self.lives[name].process.poll() is not None:
                self.num_blames += 1
                self.swarm.start_again(name)
        answered = load.num_answers
        try:
            await self.swarm.until_serving(client, len(self.names))
        except AssertionError as error:
            self._violated(f"capacity did not come back: {str(error)[:300]}")
        give_up_at = time.monotonic() + 30.0
        while load.num_answers < answered + 10:
            if time.monotonic() > give_up_at:
                self._violated("requests are not answered after the last fault")
                return
            await asyncio.sleep(0.05)

    def _violated(self, what: str) -> None:
        """Told at once: whoever watches may want to look while it is fresh."""
        self.violations.append(what)
        print(f"violation: {what}", file=sys.stderr, flush=True)

    # --- figures -----------------------------------------------------------------------------------------------------

    def _sample(self, at_s: float) -> None:
        """Measure the broker, and workers that carry no fault and have lived for a while."""
        processes = {"broker": self.swarm.broker}
        processes |= {
            f"{name} ({life.process.pid})": life.process for name, life in self.lives.items() if not life.appointment
        }
        for name, process in processes.items():
            try:
                of = psutil.Process(process.pid)
                found = (at_s, own_memory(process.pid), float(of.num_fds()), float(of.num_threads()))
            except (psutil.Error, OSError, StopIteration):
                continue  # it has just ended
            self._samples.setdefault(name, []).append(found)

    def _slopes(self) -> dict[str, str]:
        """Tell the growth of the broker and of the two workers that lived longest, over the second half of the run."""
        longest = sorted((n for n in self._samples if n != "broker"), key=lambda n: -len(self._samples[n]))[:2]
        return {name: describe(self._samples[name]) for name in ("broker", *longest) if len(self._samples[name]) > 3}


def own_memory(pid: int) -> float:
    """MiB that are no pages of files: those come and go as code is run for the first time."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def describe(samples: list[tuple[float, float, float, float]]) -> str:
    """Say in words how memory, descriptors and threads went."""
    later = samples[len(samples) // 2 :]
    minutes = (samples[-1][0] - samples[0][0]) / 60
    parts = [f"seen for {minutes:.1f} min"]
    for column, unit in ((1, "MiB"), (2, "descriptors"), (3, "threads")):
        first, last = samples[0][column], samples[-1][column]
        parts.append(f"{first:.0f} → {last:.0f} {unit} ({slope(later, column) * 3600:+.1f} an hour)")
    return ", ".join(parts)


def slope(samples: list[tuple[float, float, float, float]], column: int) -> float:
    """Per second, by least squares."""
    times, values = [s[0] for s in samples], [s[column] for s in samples]
    at, value = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - at) ** 2 for t in times)
    return sum((t - at) * (v - value) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0
