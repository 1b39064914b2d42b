"""The display on a terminal during a run: the load, its progress, the current rates, and the points so far."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarm.bench.document import PointResult
from swarm.bench.figures import percentile
from swarm.bench.processes.pipe_messages import ShareProgress
from swarm.bench.report.format import format_number, format_time
from swarm.bench.report.table import summarise_point

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60  # of the curve, in half seconds


class LiveView:
    """View on a terminal. Use ``with``."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._stage = "starting"
        self._load = ""
        self._seconds: float | None = None
        self._count: int | None = None
        self._began_at = 0.0
        self._rates: deque[float] = deque(maxlen=WIDTH)
        self._last: tuple[float, int] = (0.0, 0)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def stage(self, text: str) -> None:
        self._stage, self._load = text, ""
        self._show(Text(f"… {text}", style="dim"))

    def begin(self, load: str, seconds: float | None, count: int | None) -> None:
        self._load, self._seconds, self._count = load, seconds, count
        self._began_at = time.monotonic()
        self._rates.clear()
        self._last = (self._began_at, 0)
        self.progress(ShareProgress(0, 0, 0, 0))

    def progress(self, progress: ShareProgress) -> None:
        now = time.monotonic()
        since, pieces = self._last
        if now - since >= 0.5:
            self._rates.append(max(0, progress.num_pieces - pieces) / (now - since))
            self._last = (now, progress.num_pieces)
        self._show(self._render(progress, now - self._began_at))

    def on_point_measured(self, result: PointResult) -> None:
        self._live.console.print(Text("✓ ", style="green") + Text(summarise_point(result)))

    def _render(self, progress: ShareProgress, elapsed: float) -> RenderableType:
        done = progress.num_ok + progress.num_failed
        share = elapsed / self._seconds if self._seconds else done / self._count if self._count else 0.0
        head = Table.grid(padding=(0, 2))
        left = f"{max(0.0, self._seconds - elapsed):.0f} s left" if self._seconds else f"{done} of {self._count}"
        bar = ProgressBar(total=1.0, completed=min(1.0, share), width=30)
        head.add_row(Text(self._load, style="bold"), bar, Text(left, style="dim"))
        row = Table.grid(padding=(0, 3))
        ttfts = sorted(progress.ttfts)
        first = format_time(percentile(ttfts, 50) * 1000) if ttfts else "–"
        failed = Text(f"{progress.num_failed} failed", style="red" if progress.num_failed else "dim")
        rate = format_number(self._rates[-1]) if self._rates else "–"
        row.add_row(
            f"{rate} tokens/s",
            f"first token {first}",
            f"{progress.num_in_flight} in flight",
            f"{progress.num_ok} ok",
            failed,
        )
        return Group(head, Text(spark(self._rates), style="cyan"), row)

    def _show(self, renderable: RenderableType) -> None:
        self._live.update(renderable, refresh=True)


def spark(values: deque[float]) -> str:
    """Draw values as a row of bars, relative to the largest."""
    most = max(values, default=0.0)
    if most <= 0:
        return ""
    return "".join(BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] for value in values)
