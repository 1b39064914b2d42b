"""Which of a broker's requests ``swarmctl`` shows as under way."""

from __future__ import annotations

from rich.console import Console

from swarm.ctl import render


def shown(body: dict[str, object]) -> tuple[str, str]:
    """Return what stands in the first table and in the second."""
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(render.requests(body))
    under_way, _, ended = capture.get().partition("ended, the latest first:")
    return under_way, ended


def row(request_id: str, state: str, *, attached: bool = False, ended_age_s: float | None = None) -> dict[str, object]:
    return {"request_id": request_id, "state": state, "attached": attached, "ended_age_s": ended_age_s}


def test_what_nobody_reads_is_not_under_way() -> None:
    """After a restart of the broker, ended requests are in its memory for a while: they are shown among the ended, in
    the order of their ends. One whose reader hasn't got it all is still under way, and so is a detached one."""
    rows = [
        row("detached", "running"),
        row("read", "ended", attached=True, ended_age_s=1.0),
        row("older", "ended", ended_age_s=5.0),
        row("newest", "ended", ended_age_s=2.0),
    ]
    under_way, ended = shown({"requests": rows, "kept": [{"request_id": "journal", "ended_age_s": 3.0}]})
    assert "detached" in under_way
    assert "read" in under_way
    assert "older" not in under_way
    assert "newest" not in under_way
    names = [line.split()[0] for line in ended.splitlines() if line.split() and "─" not in line]
    assert names == ["request", "newest", "journal", "older"]


def test_without_a_journal() -> None:
    """What has ended is told from what is under way, too."""
    under_way, ended = shown({"requests": [row("over", "ended", ended_age_s=5.0)]})
    assert under_way.split() == ["no", "requests", "under", "way"]
    assert "over" in ended
