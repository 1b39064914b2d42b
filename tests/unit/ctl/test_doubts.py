"""``swarmctl nodes`` names workers that are doubted."""

from __future__ import annotations

from rich.console import Console

from swarm.ctl import render


def shown(*workers: dict[str, object]) -> list[str]:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(render.nodes({"workers": list(workers)}))
    return capture.get().splitlines()


def worker(name: str, lies: int = 0, **disagreed_with: int) -> dict[str, object]:
    return {"name": name, "state": "member", "lies": lies, "confirmed": 3, "disagreed_with": disagreed_with}


def test_no_doubts_no_words() -> None:
    """Nothing is said, and there is no column, where nobody is doubted."""
    text = "\n".join(shown(worker("w0"), worker("w1")))
    for word in ("lies", "confirmed", "differed", "finite"):
        assert word not in text


def test_doubts_are_told_with_both_names() -> None:
    """A disagreement is a matter of two, and is told once; what was proven is told of the one that it was proven of."""
    lines = shown(worker("w0", 2, w1=1, w2=3), worker("w1", 0, w0=1), worker("w2", 1, w0=3))
    assert [line for line in lines if line.startswith("·")] == [
        "· w0 sent hidden states that are not finite, 2 times",
        "· w0 and w1 computed the same and differed once: one of them is wrong",
        "· w0 and w2 computed the same and differed 3 times: one of them is wrong",
        "· w2 sent hidden states that are not finite, once",
    ]
