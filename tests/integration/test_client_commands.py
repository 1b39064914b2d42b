"""``swarm generate``, ``swarm chat`` and ``swarmctl`` against a scripted broker: what they print, and how they end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from swarm import AsyncClient, Client
from swarm.admin.orders import standby_report
from swarm.admin.report_rows import read_rows
from swarm.cli.main import run as run_swarm
from swarm.ctl.main import run as swarmctl
from swarm.ctl.stats import describe_rates, render_stats, watch_stats
from swarm.demo import model_path
from swarm.params import Grammar
from swarm.wire.messages import (
    Cancel,
    Join,
    Json,
    PlanCommand,
    Query,
    Rejected,
    Report,
    Revoke,
    RotateBroker,
    RotateMember,
    ShowSettings,
    StopWorker,
    Submit,
)
from tests.integration.fake_broker import EOS, FakeBroker, manifest_of, say, tiny_tokenizer
from tests.integration.processes import Processes

SWARM = [sys.executable, "-m", "swarm"]
SWARMCTL = [sys.executable, "-c", "from swarm.ctl.main import main; main()"]


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def parrot(submit: Submit, index: int) -> list[int]:
    """Repeats the last line of the prompt that is not the template's own."""
    text = tiny_tokenizer().decode(list(submit.prompt)).removesuffix("assistant: ")
    return [*say(f"{text.splitlines()[-1]}#{index}"), EOS]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBroker]:
    with FakeBroker(parrot).in_thread() as broker:
        monkeypatch.setenv("SWARM_URL", broker.url)
        yield broker


def swarm(*arguments: str) -> int:
    return run_swarm(arguments)


# --- swarm generate ---------------------------------------------------------------------------------------------------


def test_generate_prints_the_answer(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """The text and nothing else on stdout; options reach the broker."""
    assert swarm("generate", "hello €", "--max-tokens", "50", "--temperature", "0.5", "--seed", "9") == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("hello €#0\n", "")
    [submit] = broker.heard_of(Submit)
    assert isinstance(submit, Submit)
    assert (submit.params.max_tokens, submit.params.temperature, submit.seed) == (50, 0.5, 9)


def test_generate_from_token_ids(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """--tokens stands in for a text."""
    ids = ",".join(map(str, say("abc")))
    assert swarm("generate", "--tokens", ids, "--stop", "c") == 0
    assert capsys.readouterr().out == "ab\n"


@pytest.mark.parametrize(("more", "out"), [((), "5,6,7\n"), (("--n", "2"), "[0] 5,6,7\n[1] 5,6,7\n")])
def test_generate_without_a_tokenizer(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], out: str
) -> None:
    """Token ids in, token ids out, as --tokens takes them."""
    broker.files.clear()
    broker.manifest = manifest_of({})
    broker.answer = lambda submit, index: [5, 6, 7]
    assert swarm("generate", "--tokens", "1,2,3", "--max-tokens", "3", *more) == 0
    assert capsys.readouterr().out == out


def test_generate_in_json(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """One object with everything, hops and all choices included."""
    assert swarm("generate", "hello", "--json", "--hops", "--n", "2") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["text"] == "hello#0"
    assert [choice["text"] for choice in data["choices"]] == ["hello#0", "hello#1"]
    assert data["usage"]["num_tokens"] == sum(len(choice["tokens"]) for choice in data["choices"])
    assert data["hops"][0][0]["layers"] == [0, 2]
    assert data["finish_reason"] == "stop"
    assert {"seed", "request_id", "timing"} <= data.keys()


def test_generate_several(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Several answers are told apart."""
    assert swarm("generate", "x", "--n", "2") == 0
    assert capsys.readouterr().out == "[0] x#0\n[1] x#1\n"


def test_generate_shows_the_hops(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Which layers ran where and how long they took, on stderr: stdout has only the answer. Then a line per token,
    with its milliseconds at each stage and a bar: waiting, then computing."""
    assert swarm("generate", "hello", "--hops") == 0
    shown = capsys.readouterr()
    assert shown.out == "hello#0\n"
    [line] = [line for line in shown.err.splitlines() if "w0" in line]
    assert line.split() == ["w0", "0–1", "2.00", "2.00", "1.00", "0.00"]
    tokens = [line.split() for line in shown.err.splitlines() if "█" in line and line.split()[0].isdecimal()]
    assert tokens[0] == ["0", "0–1", "3.00", "░" * 5 + "█" * 11]
    assert len(tokens) == len(say("hello#0")) + 1


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        (("--json-schema", "FILE"), Grammar("json_schema", '{"type": "object"}')),
        (("--regex", "[a-z]+ €"), Grammar("regex", "[a-z]+ €")),
        (("--choice", "yes", "--choice", "nö"), Grammar("choice", '["yes", "nö"]')),
        (("--grammar", "FILE"), Grammar("ebnf", 'start: "a"')),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_generate_by_a_grammar(broker: FakeBroker, tmp_path: Path, options: tuple[str, ...], grammar: Grammar) -> None:
    """From a file or the command line, it is part of the request."""
    file = tmp_path / "grammar"
    file.write_text(grammar.text, "utf-8")
    assert swarm("generate", "hello", *(str(file) if option == "FILE" else option for option in options)) == 0
    [submit] = broker.heard_of(Submit)
    assert isinstance(submit, Submit)
    assert submit.params.grammar == grammar


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--regex", "a", "--choice", "b"), "give only one of --regex, --choice"),
        (("--json-schema", "/nowhere/schema.json"), "--json-schema /nowhere/schema.json can't be read"),
        (("--regex", "(a"), "grammar (regex): "),
    ],
)
def test_a_grammar_that_is_none(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], complaint: str
) -> None:
    """One line says what is wrong with it; no request is made."""
    assert swarm("generate", "hello", *options) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
    assert broker.heard_of(Submit) == []


def test_generate_through_the_chat_template(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """--chat asks the prompt as a user's message."""
    assert swarm("generate", "hello", "--chat") == 0
    assert capsys.readouterr().out == "user: hello#0\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "give either a prompt or --tokens"),
        (("x", "--tokens", "1"), 2, "give either a prompt or --tokens"),
        (("--tokens", "1,a"), 2, "--tokens takes numbers"),
        (("x", "--max-tokens", "many"), 2, "--max-tokens"),
        (("x", "--max-tokens", "0"), 2, "max_tokens must be between 1"),
        (("",), 2, "the prompt is empty"),
        (("x", "--temperature", "nan"), 2, "temperature must be between"),
        (("x", "--url", "tcp://127.0.0.1:20001"), 1, "no broker answers at tcp://127.0.0.1:20001"),
        (("x", "--url", "here"), 2, "client.url = 'here' from the command line is wrong: write it as tcp://HOST:PORT"),
    ],
)
def test_mistakes_are_one_line(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, text: str
) -> None:
    """On stderr, with 2 for usage and 1 for the rest; nothing was submitted."""
    assert swarm("generate", *arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("swarm: ")
    assert text in shown.err
    assert len(shown.err.splitlines()) == 1
    assert broker.heard_of(Submit) == []


def test_a_waiting_swarm_says_for_what(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the error, or the answer, comes."""
    broker.manifest = None
    assert swarm("generate", "x") == 1
    assert capsys.readouterr().err.splitlines() == [
        "swarm: not serving yet, it waits for a first worker",
        "swarm: the swarm has no model yet, it waits for a first worker",
    ]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_cancels(broker: FakeBroker) -> None:
    """Ctrl-C after the first words: the request is cancelled, the exit code is 130, nothing else is said."""
    broker.allowed = 3
    process = subprocess.Popen([*SWARM, "generate", "hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"hello"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (130, b"")
    broker.wait_in_thread(lambda: len(broker.heard_of(Cancel)) == 1)


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(
    "command", [[*SWARM, "generate", "hello"], [*SWARM, "chat"], [*SWARMCTL, "status"], [*SWARMCTL, "stop", "w0"]]
)
def test_an_interrupt_while_the_broker_says_nothing(broker: FakeBroker, command: list[str]) -> None:
    """130, and not a word."""
    broker.silent = True
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        broker.wait_in_thread(lambda: bool(broker.heard))
        process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, *shown) == (130, b"", b"")


@pytest.mark.parametrize(
    "command",
    [
        [*SWARM, "generate", "hello"],
        [*SWARM, "generate", "hello", "--json"],
        [*SWARM, "chat"],
        [*SWARMCTL, "status"],
        [*SWARMCTL, "status", "--json"],
        [*SWARMCTL, "stats", "--watch", "0.1"],
        [*SWARMCTL, "stats", "--watch", "0.1", "--json"],
        [*SWARMCTL, "events", "--follow"],
    ],
)
def test_a_reader_that_has_gone_is_noticed_quietly(broker: FakeBroker, command: list[str]) -> None:
    """``… | head -0``: exit code 1, without a traceback; nothing goes on for nobody."""
    broker.reports["stats"] = Report(what="stats", ok=True, body=REPORTS["stats"])
    broker.reports["status"] = Report(what="status", ok=True, body=REPORTS["status"])
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        process = subprocess.run(
            command, input=b"hello\n", stdout=write_fd, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(write_fd)
    assert (process.returncode, process.stderr) == (1, b"")


class Terminal(io.StringIO):
    """Somebody sits at it."""

    def isatty(self) -> bool:
        return True


def test_generate_at_a_terminal(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt comes before its answer, and figures come last; neither with --json, nor where one end is a file."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*options: str, out: io.StringIO, err: io.StringIO) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert swarm("generate", "hello", *options) == 0
        return out.getvalue(), err.getvalue()

    out, err = run(out=Terminal(), err=Terminal())
    assert out == "\x1b[2mhello\x1b[22mhello#0\n"
    assert re.fullmatch(r"4 tokens, \d+\.\d tokens/s, first token after \d+\.\d\d s\n", err)
    assert run(out=Terminal(), err=io.StringIO()) == ("hello#0\n", "")
    assert run(out=io.StringIO(), err=Terminal()) == ("hello#0\n", "")
    out, err = run("--json", out=Terminal(), err=Terminal())
    assert (json.loads(out)["text"], err) == ("hello#0", "")


async def _until_serving(processes: Processes) -> None:
    async with AsyncClient(processes.url, connect_timeout_s=30.0) as client:
        await processes.until_serving(client, 1)


def test_embeddings_are_printed(
    zygote: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each text, from arguments or stdin; --json has token counts."""
    with Processes(model_path(), tmp_path, launch=zygote) as processes:
        processes.start(1)
        asyncio.run(_until_serving(processes))
        arguments = ("embed", "--url", processes.url, "--timeout", "60", "--dimensions", "4")
        assert swarm(*arguments, "The cat.", "A dog barks.") == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [len(line) for line in lines] == [4, 4]
        monkeypatch.setattr(sys, "stdin", io.StringIO("The cat.\nA dog barks.\n"))
        assert swarm(*arguments, "--json", "-") == 0
        rows = json.loads(capsys.readouterr().out)["embeddings"]
        assert [row["embedding"] for row in rows] == lines
        assert [row["index"] for row in rows] == [0, 1]
        assert rows[0]["tokens"] > 0
        assert swarm(*arguments[:-1], "100000", "The cat.") == 2
        assert "dimensions must be between" in capsys.readouterr().err


# --- swarm chat -------------------------------------------------------------------------------------------------------


def test_chat_remembers(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is asked with all that was said before; /reset forgets; /quit leaves; the rest of stdin is not read."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\n/reset\nthree\n/quit\nfour\n"))
    assert swarm("chat", "--system", "be brief") == 0
    assert capsys.readouterr().out == "user: one#0\nuser: two#0\nuser: three#0\n"
    prompts = [tiny_tokenizer().decode(list(m.prompt)) for m in broker.heard_of(Submit) if isinstance(m, Submit)]
    told = "system: be brief\nuser: "
    assert prompts == [
        f"{told}one\nassistant: ",
        f"{told}one\nassistant: user: one#0\nuser: two\nassistant: ",
        f"{told}three\nassistant: ",
    ]


def test_a_chat_for_programs(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--json: each answer is one line, with all that generate would print."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert swarm("chat", "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["text"] for answer in answers] == ["user: one#0", "user: two#0"]
    assert all({"tokens", "finish_reason", "usage", "timing"} <= answer.keys() for answer in answers)


def test_a_chat_that_outgrows_the_context(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loses its oldest turn, says so, and goes on."""
    broker.refuse = lambda submit: (
        Rejected(request_id=submit.request_id, code="context", reason="too long") if len(submit.prompt) > 40 else None
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert swarm("chat") == 0
    shown = capsys.readouterr()
    assert shown.out == "user: one#0\nuser: two#0\n"
    assert "oldest turn was dropped" in shown.err


def test_a_chat_that_fails(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal, the first error ends it."""
    broker.refuse = lambda submit: Rejected(request_id=submit.request_id, code="overloaded", reason="the queue is full")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert swarm("chat") == 1
    assert capsys.readouterr().err == "swarm: the queue is full\n"


@pytest.mark.skipif(os.name == "nt", reason="terminals")
def test_chat_at_a_terminal(broker: FakeBroker) -> None:
    """Ctrl-C ends the answer, not the conversation; Ctrl-D leaves with exit code 0."""
    import pty
    import select

    broker.allowed = 6
    parent, child = pty.openpty()
    process = subprocess.Popen([*SWARM, "chat"], stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    seen = b""

    def read_until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            assert select.select([parent], [], [], 20)[0], seen
            seen += os.read(parent, 4096)
        seen = seen[seen.index(text) + len(text) :]

    try:
        read_until(b"> ")
        os.write(parent, b"hello\n")
        read_until(b"user: ")
        process.send_signal(signal.SIGINT)
        read_until(b"> ")
        broker.wait_in_thread(lambda: len(broker.heard_of(Cancel)) == 1)
        broker.allowed = None
        os.write(parent, b"again\n")
        read_until(b"again#0")
        read_until(b"> ")
        os.write(parent, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


# --- swarmctl ---------------------------------------------------------------------------------------------------------

WORKERS = [
    {
        "name": "w0",
        "incarnation": "abc",
        "host": "box",
        "pid": 7,
        "device": "cpu",
        "dtype": "float32",
        "state": "active",
        "layers": [0, 4],
        "verdict": "slow",
        "verdict_for_s": 3.5,
        "evidence": "idle, its steps take 4.0 times as long as predicted",
        "pace": 4.0,
        "beat_age_s": 0.05,
        "memory_bytes": 7 << 30,
        "resident_bytes": 3 << 30,
        "limit_bytes": 8 << 30,
        "kv_used": 32,
        "kv_capacity": 4096,
        "endpoint": "tcp://127.0.0.1:20000",
        "spin": "up",
    },
    {"name": "w1", "state": "loading", "layers": None},
]
REPORTS: dict[str, dict[str, object]] = {
    "status": {"state": "serving", "waits_for": "", "epoch": 3, "uptime_s": 7300.0, "num_running": 2, "colour": "red"},
    "nodes": {"workers": WORKERS, "quorum": True},
    "plan": {
        "epoch": 3,
        "state": "serving",
        "objective": "throughput",
        "stages": [{"worker": "w0", "layers": [0, 4], "weight_bytes": 2048, "predicted_s": 0.0021, "extra": 5}],
        "why": ["the head weighs as much as two layers"],
        "coming": {"epoch": 4, "stages": [{"worker": "w1", "layers": [0, 4]}]},
    },
    "stats": {
        "pipeline": {
            "steps": 12,
            "tokens": 3.0,
            "sizes": {"rows": {"total": 24, "last": 2, "average": 2.0, "most": 4}},
            "microseconds": {
                "bridge": {"total": 9000.0, "last": 700.0, "average": 750.0},
                "stages": {"w0": {"total": 2400.0, "last": 210.0, "average": 12345.5}},
            },
        },
        "stages": {
            "w0": {"steps": 12, "late": 1, "microseconds": {"head": {"total": 5.0, "last": 0.5, "average": 1.5}}},
            "w1": {"steps": 11},
        },
        "era": 7,
        "scheduler": {"mode": "batch", "tokens_per_s": 12.5},
    },
    "requests": {
        "requests": [{"request_id": "r1", "state": "running", "num_prompt": 3, "num_tokens": 5, "age_s": 0.5}]
    },
}
EXPECTED = {
    "status": ["serving", "epoch 3", "uptime 2.0 h", "running 2", "colour red"],
    "nodes": [
        "w0 active 0–3 cpu slow 3.5 s 4 1% 3.0 GiB of 8.0 GiB 7 on box up",
        "w1 loading",
        "w0 is slow: idle, its steps take 4.0 times as long as predicted",
        "quorum yes",
    ],
    "plan": [
        "objective throughput",
        "w0 0–3 2.0 KiB 2.1 ms 5",
        "the head weighs as much as two layers",
        "coming: epoch 4",
        "w1 0–3",
    ],
    "stats": [
        "steps 12 11",
        "late 1 –",
        "tokens 3",
        "pipeline, sizes: average / last / most / total",
        "rows 2 / 2 / 4 / 24",
        "bridge 750 / 700 / 9,000",
        "stages w0 12,346 / 210 / 2,400",
        "head 1.5 / 0.5 / 5",
        "era 7",
        "scheduler mode batch tokens/s 12.5",
    ],
    "requests": ["r1 running 3 5 500.0 ms"],
}


@pytest.mark.parametrize("what", list(REPORTS))
def test_reports_for_people_and_programs(broker: FakeBroker, capsys: pytest.CaptureFixture[str], what: str) -> None:
    """Everything in the report is shown, unknown keys too; --json prints it as it came, wherever it stands."""
    broker.reports[what] = Report(what=what, ok=True, body=REPORTS[what])
    assert swarmctl([what, *(["--all"] if what == "stats" else [])]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in EXPECTED[what]:
        assert text in shown
    for arguments in (["--json", what], [what, "--json"], ["--url", broker.url, what, "--json"]):
        assert swarmctl(arguments) == 0
        assert json.loads(capsys.readouterr().out) == REPORTS[what]


def test_empty_and_strange_reports(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing there is said in words; a report of another shape is no crash."""
    for what, words in (("nodes", "no workers"), ("plan", "no stages"), ("requests", "no requests under way")):
        broker.reports[what] = Report(what=what, ok=True, body={})
        assert swarmctl([what]) == 0
        assert words in capsys.readouterr().out
    for what, body in REPORTS.items():
        broker.reports[what] = Report(what=what, ok=True, body=dict.fromkeys(body, 5) | {"new": [{"a": 1}]})
        assert swarmctl([what, *(["--all"] if what == "stats" else [])]) == 0
        assert "new" in capsys.readouterr().out
    assert swarmctl(["stats"]) == 0
    assert capsys.readouterr().out.strip() == "swarmctl stats --all shows all figures"


TRACE = {
    "request_id": "r1",
    "state": "ended",
    "sequences": [
        {
            "index": 0,
            "num_tokens": 40,
            "num_traced": 40,
            "sums": {"total_s": 0.4, "queue_s": 0.1, "wire_s": 0.1, "compute_s": 0.2, "unaccounted_s": 0.0},
            "stages": [{"worker": "w0", "layers": [0, 4], "compute_s": 0.2, "wire_bytes": 2048}],
            "tokens": [
                {
                    "index": index,
                    "total_s": 0.01,
                    "queue_s": 0.0025,
                    "wire_s": 0.0025,
                    "compute_s": 0.005,
                    "stages": [{"worker": "w0", "layers": [0, 4], "compute_s": 0.005}],
                }
                for index in range(40)
            ],
        },
        {"index": 1, "num_tokens": 0, "num_traced": 0, "tokens": []},
    ],
}


def test_traces_for_people_and_programs(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares of the whole, what each stage did, and each token; of many, the first and the last. What is not known has
    no column."""
    broker.reports["trace"] = Report(what="trace", ok=True, body=TRACE)
    assert swarmctl(["trace", "r1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "queue 100.0 ms 25.0 % in no step",
        "compute 200.0 ms 50.0 %",
        "w0 0–3",
        "2.0 KiB",
        "15 10.00 2.50 2.50 5.00 5.00 24 10.00",
        "8 tokens between them are omitted",
        "no token is traced",
    ):
        assert text in shown, shown
    assert swarmctl(["trace", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == TRACE
    assert [m.request_id for m in broker.heard_of(Query) if isinstance(m, Query)] == ["r1", ""]


def test_a_trace_that_is_not_there(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """The broker's words, on stderr."""
    broker.reports["trace"] = Report(what="trace", ok=False, body={"error": "no request 'x' is known"})
    assert swarmctl(["trace", "x"]) == 1
    assert capsys.readouterr().err == "swarmctl: no request 'x' is known\n"


def test_stats_again_and_again(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Until an interrupt, which is no failure; from the second look on, with what was done per second."""
    broker.reports["stats"] = Report(what="stats", ok=True, body=REPORTS["stats"])
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    watch_stats(Client(broker.url), 1.5, render=render_stats, as_json=False, pause=pause)
    shown = capsys.readouterr().out
    assert pauses == [1.5, 1.5]
    assert shown.count("pipeline, sizes") == 2
    assert "since the last refresh: 0.0 steps/s, 0.0 positions/s, 0.0 tokens/s" in " ".join(shown.split())
    pauses.clear()
    watch_stats(Client(broker.url), 1.5, render=render_stats, as_json=True, pause=pause)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [REPORTS["stats"]] * 2


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_events_are_followed_over_a_restart_of_the_broker(broker: FakeBroker) -> None:
    """A line each, at once; Ctrl-C ends it, in good order. Nobody who reads any more ends it, too."""

    def say(uptime_s: float) -> None:
        body = {"state": "serving", "epoch": int(uptime_s), "uptime_s": uptime_s}
        broker.reports["status"] = Report(what="status", ok=True, body=body)

    def do(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, broker._loop).result(20)

    say(7.0)
    command = [*SWARMCTL, "events", "--follow", "--every", "0.1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    leaving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert leaving.stdout is not None
        names = [json.loads(process.stdout.readline())["event"]]
        assert json.loads(leaving.stdout.readline())["event"] == "serving"
        leaving.stdout.close()  # nothing happens that would be told
        assert leaving.wait(20) == 1
        do(broker.shut())
        names.append(json.loads(process.stdout.readline())["event"])
        say(2.0)
        do(broker.open())
        names += [json.loads(process.stdout.readline())["event"] for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        for each in (process, leaving):
            each.kill()
            each.wait()
    assert names == ["serving", "broker_away", "broker_started", "serving"]
    assert (process.returncode, err) == (0, b"")
    assert leaving.stderr is not None
    assert leaving.stderr.read() == b""
    leaving.stderr.close()


def test_rates_between_two_looks() -> None:
    """What was done in the time; nothing of a broker that is another one, whose figures began anew."""
    before, now = {"steps": 10, "positions": 100, "tokens": 10}, {"steps": 20, "positions": 300, "tokens": 15}
    assert describe_rates(before, now, 2.0) == "5.0 steps/s, 100.0 positions/s, 2.5 tokens/s"
    assert describe_rates(now, before, 2.0) == ""


def test_settings_of_who_runs(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """In the columns of ``swarm config show``; a refusal is an error in the broker's words."""
    assert swarmctl(["config", "show", "--worker", "w1", "--changed"]) == 0
    assert capsys.readouterr().out == 'log.level  "debug"  the command line\n'
    assert broker.heard_of(ShowSettings) == [ShowSettings(worker="w1")]
    assert swarmctl(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["process"] == "broker"
    broker.reports["settings"] = Report(what="settings", ok=False, body={"error": "no worker 'w9'"})
    assert swarmctl(["config", "show", "--worker", "w9"]) == 1
    assert capsys.readouterr().err == "swarmctl: no worker 'w9'\n"


def test_join_and_stop(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Options reach the broker; its refusals are errors in its words."""
    assert swarmctl(["join", "--count", "2", "--memory-limit", "1.5GiB"]) == 0
    assert capsys.readouterr().out.split() == ["started", "w0,", "w1"]
    assert broker.heard_of(Join) == [Join(count=2, memory_limit=3 << 29)]
    assert swarmctl(["stop", "w1", "--force"]) == 0
    assert broker.heard_of(StopWorker) == [StopWorker(worker="w1", force=True)]
    capsys.readouterr()
    broker.reports["stop"] = Report(what="stop", ok=False, body={"error": "no worker 'w9': the workers are w0, w1"})
    assert swarmctl(["stop", "w9"]) == 1
    assert capsys.readouterr().err == "swarmctl: no worker 'w9': the workers are w0, w1\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["stop", "w1"], "w1"),
        (["drain", "w1"], "w1"),
        (["cancel", "r1"], "r1"),
        (["upgrade", "--rolling", "w1"], "w1"),
        (["keys", "revoke", "anna", "--machine"], "anna"),
        (["keys", "rotate", "anna"], "anna"),
        (["keys", "rotate", "--broker", "--now"], "the broker's old key"),
    ],
)
def test_what_ends_something_asks_on_a_terminal(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    """Whoever says no has done nothing; --yes is not asked, nor is a script."""
    ends = (StopWorker, PlanCommand, Cancel, Revoke, RotateMember, RotateBroker)
    broker.reports["keys"] = Report(what="keys", ok=True, body={"members": [{"name": "anna"}]})
    body: Json = {"key": "ab" * 32, "is_over": True, "behind": [], "shut_out": []}
    broker.reports["rotate_broker"] = Report(what="rotate_broker", ok=True, body=body)
    asked: list[str] = []

    def confirm(question: str, *, err: bool) -> bool:
        asked.append(question)
        assert err  # stdout may be read by a program
        return False

    monkeypatch.setattr(typer, "confirm", confirm)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert swarmctl(arguments) == 1
    assert len(asked) == 1
    assert named in asked[0]
    assert not any(broker.heard_of(kind) for kind in ends)
    if arguments[0] in ("cancel", "upgrade"):
        return  # this broker has no such request or worker
    assert swarmctl([*arguments, "--yes"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert swarmctl(arguments) == 0
    assert len(asked) == 1
    assert sum(len(broker.heard_of(kind)) for kind in ends) == 2


def test_standby_names_what_nobody_keeps() -> None:
    """Of those that are here, the layers that no other has warm."""
    w0 = {"name": "w0", "state": "member", "layers": [0, 3], "standby": [[3, 5]]}
    w1 = {"name": "w1", "state": "member", "layers": [3, 6], "standby": []}
    gone = {"name": "w2", "state": "out", "layers": None, "standby": [[0, 6]]}
    found = standby_report({"workers": [w0, w1, gone]})
    assert [row["name"] for row in read_rows(found["workers"])] == ["w0", "w1"]
    assert found["not_kept"] == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["plan", "--cap", "w1=0"], 2, "--cap takes WORKER=N, at least 1"),
        (["plan", "--pin", "w1=5-2"], 2, "--pin takes WORKER=FIRST-LAST"),
        (["plan", "--apply", "--without", "w1"], 2, "only preview"),
        (["--url", "tcp://127.0.0.1:20001", "status"], 1, "no broker answers at tcp://127.0.0.1:20001"),
        (["join", "--count", "0"], 2, "--count"),
        (["join", "--memory-limit", "lots"], 2, "--memory-limit takes a size"),
        (["stop"], 2, "WORKER"),
        (["dance"], 2, "dance"),
    ],
)
def test_ctl_mistakes_are_one_line(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    """On stderr, with 2 for usage and 1 for the rest."""
    assert swarmctl(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("swarmctl: ")
    assert text.lower() in shown.err.lower()
    assert len(shown.err.splitlines()) == 1
