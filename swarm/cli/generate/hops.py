"""Display of hops: which layers ran where, how long each took, and each token's way through the stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.text import Text

from swarm.client.results import Choice
from swarm.screen import ReportConsole, ReportTable
from swarm.wire.messages import Hop

_BAR = 16  # characters of the longest bar
_MAX_LINES = 24  # of a longer answer, only the first and the last tokens are shown


def print_hops(choices: Sequence[Choice]) -> None:
    """Print a line per stage to stderr, and a line per token with a bar for each of its hops."""
    out = ReportConsole(stderr=True, highlight=False)
    table = ReportTable(
        "worker",
        "layers",
        box=box.SIMPLE,
        title="where the time went (milliseconds)",
        title_style="",
        title_justify="left",
    )
    for heading in ("first token", "per token", "waited", "sampling"):
        table.add_column(heading, justify="right")
    for row in hop_rows(choices):
        table.add_row(*row)
    out.print(table)
    for choice in choices:
        if choice.hops:
            of = f" of answer {choice.index}" if len(choices) > 1 else ""
            out.print(
                f"each token{of}, hop by hop: layers, then milliseconds (░ waiting, █ computing, ▒ sampling)",
                soft_wrap=True,
            )
            for line in timeline(choice.hops):
                out.print(Text(line), soft_wrap=True)


def hop_rows(choices: Sequence[Choice]) -> list[tuple[str, ...]]:
    """Return each stage's average milliseconds: computing the first token (the prompt), each later one, waiting,
    sampling.

    A stage is a worker with its layers. A worker whose layers changed during the answer counts as two stages.
    """
    firsts: dict[tuple[str, str], list[float]] = {}
    laters: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for choice in choices:
        for index, hops in enumerate(choice.hops):
            for hop in hops:
                stage = (hop.worker, str(hop.layers))
                firsts.setdefault(stage, [])
                laters.setdefault(stage, [])
                if index == 0:
                    firsts[stage].append(hop.compute_s)
                else:
                    laters[stage].append((hop.compute_s, hop.wait_s, hop.sample_s))
    rows = []
    for stage, first in firsts.items():
        means = [_milliseconds(column) for column in zip(*laters[stage], strict=True)] or ["–"] * 3
        rows.append((*stage, _milliseconds(first), *means))
    return rows


def timeline(hops: Sequence[Sequence[Hop]]) -> Iterator[str]:
    """Yield a line per token. All bars have one scale, except that the first token, whose prompt takes long, is cut
    off."""
    later = [_total_s(hop) for token in hops[1:] for hop in token]
    scale = max(later, default=0.0) or max((_total_s(hop) for token in hops for hop in token), default=0.0) or 1.0
    width = len(str(len(hops) - 1))
    half = _MAX_LINES // 2
    for index, token in enumerate(hops):
        if len(hops) > _MAX_LINES and index == half:
            yield f"{'…':>{width}}  {len(hops) - 2 * half} tokens between (--json has them)"
        if len(hops) <= _MAX_LINES or index < half or index >= len(hops) - half:
            parts = (f"{hop.layers} {1000 * _total_s(hop):6.2f} {_bar(hop, scale):<{_BAR}}" for hop in token)
            yield f"{index:>{width}}  {'  '.join(parts)}".rstrip()


def _total_s(hop: Hop) -> float:
    return hop.wait_s + hop.compute_s + hop.sample_s


def _bar(hop: Hop, scale: float) -> str:
    """Return a bar in proportion to the time spent, at most ``_BAR`` long. Parts above zero get a mark if there is
    space."""
    bar = ""
    for seconds, sign in ((hop.wait_s, "░"), (hop.compute_s, "█"), (hop.sample_s, "▒")):
        if seconds > scale / _BAR / 4:
            bar += sign * max(1, round(_BAR * seconds / scale))
    return bar if len(bar) <= _BAR else bar[: _BAR - 1] + "…"


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * sum(seconds) / len(seconds):.2f}" if seconds else "–"
