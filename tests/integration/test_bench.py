"""``swarm bench`` as a command, with its processes, against pretend servers, well-behaved and not."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.fake_openai import FakeOpenAI

ENDS_S = 60.0


@pytest.fixture(scope="module")
def served() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as server:
        yield server


@pytest.fixture
def server(served: FakeOpenAI) -> FakeOpenAI:
    served.bodies.clear()
    served.headers.clear()
    return served


def command(server: FakeOpenAI, *options: str) -> list[str]:
    return [sys.executable, "-m", "swarm", "bench", server.url, "--json", *options]


def run(server: FakeOpenAI, *options: str, code: int = 0, **environment: str) -> Any:
    """Run to its end; return the document, if it is printed."""
    done = subprocess.run(
        command(server, *options),
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def quick(server: FakeOpenAI, model: str, *options: str, code: int = 0, **environment: str) -> Any:
    """Six requests of eight tokens, and no ceiling."""
    some = ("--model", model, "-n", "6", "-c", "2", "--output", "8", "--prompt", "107", "--no-ceiling", "--warmup", "0")
    return run(server, *some, *options, code=code, **environment)


def test_a_run_reports_every_figure_of_a_well_behaved_server(server: FakeOpenAI) -> None:
    """The model is found, our words are calibrated, the server's usage is what counts."""
    document = run(server, "-n", "12", "-c", "3", "--output", "8", "--prompt", "107", "--warmup", "2", "--no-ceiling")
    assert document["model"] == "good"
    assert "2.00 tokens a word and 7 around them" in document["prompt_lengths"]
    assert document["ended"] == "done"
    (point,) = document["points"]
    figures = point["figures"]
    assert (figures["requests"], figures["succeeded"], figures["failed"]) == (12, 12, 0)
    assert figures["tokens"] == 12 * 8
    assert figures["counted_by"] == "usage"
    assert figures["prompt_tokens"] == 12 * 107
    assert figures["inter_token_ms"]["num"] == 12 * 7
    # It waits 8 ms for the first token and 2 ms for each other; how much more it takes is the machine's.
    assert figures["ttft_ms"]["p50"] >= 8
    assert figures["e2e_ms"]["p50"] >= 22
    assert figures["tpot_ms"]["p50"] >= 2
    assert figures["requests_per_s"] > 0
    assert document["wall_clock_s"] > figures["seconds"] > 0
    measured = [body for body in server.bodies if body["max_tokens"] == 8]
    assert len(measured) == 14  # the warm-up's two are not among the figures
    assert len({body["messages"][0]["content"] for body in measured}) == 14


def test_several_processes_share_the_load_and_their_results_are_one(server: FakeOpenAI) -> None:
    document = quick(server, "good", "--processes", "2", "-n", "9", "-c", "4", "--seed", "5")
    assert document["points"][0]["figures"]["succeeded"] == 9
    assert len(document["points"][0]["cpu"]) == 2
    together = {body["messages"][0]["content"] for body in server.bodies if body["max_tokens"] == 8}
    server.bodies.clear()
    quick(server, "good", "-n", "9", "-c", "4", "--seed", "5")
    assert together == {body["messages"][0]["content"] for body in server.bodies if body["max_tokens"] == 8}


def test_an_open_loop_sends_at_its_rate_whatever_comes(server: FakeOpenAI) -> None:
    options = ("--rate", "40", "-d", "1s", "--output", "4", "--no-ceiling", "--warmup", "0", "--goodput", "e2e=30s")
    figures = run(server, *options, "--model", "good")["points"][0]["figures"]
    assert 20 <= figures["succeeded"] <= 65  # seeded: always the same arrivals
    assert figures["goodput"]["share"] == 1.0
    assert figures["send_delay_ms"]["num"] == figures["requests"]


def test_plain_answers_have_no_first_token_but_all_else(server: FakeOpenAI) -> None:
    figures = quick(server, "good", "--no-stream")["points"][0]["figures"]
    assert (figures["succeeded"], figures["tokens"]) == (6, 48)
    assert figures["ttft_ms"] is None
    assert figures["inter_token_ms"] is None
    assert figures["e2e_ms"]["num"] == 6


def test_completions_take_token_ids_extras_and_the_key_from_the_environment(server: FakeOpenAI) -> None:
    options = ("--api", "completions", "--token-ids", "5:9", "--extra", "ignore_eos=true", "--api-key-env", "MY_KEY")
    document = quick(server, "good", *options, MY_KEY="s3cret")
    assert document["points"][0]["figures"]["succeeded"] == 6
    body = server.bodies[-1]
    assert len(body["prompt"]) == 107
    assert set(body["prompt"]) <= {5, 6, 7, 8, 9}
    assert body["ignore_eos"] is True
    assert {headers.get("Authorization") for headers in server.headers} == {"Bearer s3cret"}
    assert "s3cret" not in json.dumps(document)


def test_a_server_without_usage_is_counted_by_pieces_and_the_report_says_so(server: FakeOpenAI) -> None:
    document = quick(server, "plain-stream")
    figures = document["points"][0]["figures"]
    assert (figures["succeeded"], figures["tokens"], figures["counted_by"]) == (6, 48, "pieces")
    assert any("pieces that carried text were counted" in note for note in document["notes"])


def test_pieces_of_several_tokens_count_as_the_servers_usage_says(server: FakeOpenAI) -> None:
    figures = quick(server, "usage-lies-not")["points"][0]["figures"]
    assert (figures["tokens"], figures["inter_token_ms"]["num"]) == (48, 18)


@pytest.mark.parametrize(
    ("model", "kind", "says"),
    [
        ("broken", "http_500", "burnt down"),
        ("always-busy", "http_429", "too many"),
        ("cut", "bad_stream", "cut after 4 pieces"),
        ("garbage", "bad_stream", "<html>oops"),
        ("silent", "timeout", "0.4 s"),
    ],
)
def test_each_kind_of_failure_is_counted_without_ending_the_run(
    server: FakeOpenAI, model: str, kind: str, says: str
) -> None:
    """And a run in which nothing succeeds ends with exit code 1."""
    document = quick(server, model, "--timeout", "400ms" if model == "silent" else "30s", code=1)
    figures = document["points"][0]["figures"]
    assert (figures["failed"], figures["succeeded"]) == (6, 0)
    assert figures["errors"][kind]["count"] == 6
    assert says in figures["errors"][kind]["example"]


def test_the_refused_come_again_and_are_counted(server: FakeOpenAI) -> None:
    figures = quick(server, "busy", "--retries", "2")["points"][0]["figures"]
    assert (figures["succeeded"], figures["failed"], figures["retries"]) == (6, 0, 6)
    assert quick(server, "always-busy", "--retries", "2", code=1)["points"][0]["figures"]["retries"] == 12


def test_a_sweep_finds_where_a_server_is_full_and_writes_its_page(server: FakeOpenAI, tmp_path: Path) -> None:
    """This one bears eight streams; twice as many are each half as fast. What it measures depends on the machine; that
    it ends, names a point it measured, and shows it, does not."""
    page = tmp_path / "report.html"
    options = ("--sweep", "-c", "4", "--max-concurrency", "32", "--gain", "40", "--output", "20", "--html", str(page))
    document = run(server, "--model", "crowded", "-d", "1s", *options)
    tried = [point["concurrency"] for point in document["points"]]
    assert tried == [4, 8, 16, 32][: len(tried)]
    assert document["sweep"]["concurrency"] in tried
    assert document["ceiling"]["tokens_per_s"] > 500
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "Throughput by load" in text


def interrupted(server: FakeOpenAI, *numbers: int) -> tuple[int, str, list[psutil.Process]]:
    """Interrupt a run in its middle; return its exit code, its stdout, and what it had started."""
    asked = command(server, "--model", "good", "-d", "50s", "--output", "8", "--no-ceiling", "--processes", "2")
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for text in process.stderr:  # until it is under load
            told = json.loads(text)
            if told["event"] == "progress" and told["num_ok"] > 0:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        for number in numbers:
            process.send_signal(number)
        out, _ = process.communicate(timeout=ENDS_S)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, out, children


def test_ctrl_c_ends_a_run_with_what_was_measured_so_far(server: FakeOpenAI) -> None:
    begun = time.monotonic()
    code, out, children = interrupted(server, signal.SIGINT)
    assert code == 130
    document = json.loads(out)
    assert document["ended"] == "interrupted"
    assert document["points"][0]["figures"]["succeeded"] > 0
    assert document["points"][0]["figures"]["failed"] == 0
    assert document["points"][0]["figures"]["seconds"] < time.monotonic() - begun
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_a_killed_run_leaves_no_client_process_behind(server: FakeOpenAI) -> None:
    code, _, children = interrupted(server, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_a_second_ctrl_c_ends_it_at_once_and_leaves_nothing_behind(server: FakeOpenAI) -> None:
    code, _, children = interrupted(server, signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_a_client_process_that_dies_ends_the_run_with_one_clear_line(server: FakeOpenAI, tmp_path: Path) -> None:
    """Its share of the load is gone: figures of the rest would be of another load."""
    asked = command(server, "--model", "good", "-d", "50s", "--output", "8", "--no-ceiling", "--warmup", "0")
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=file)
    try:
        ends_at = time.monotonic() + ENDS_S
        while '"progress"' not in log.read_text() and time.monotonic() < ends_at:
            time.sleep(0.05)
        (child,) = psutil.Process(process.pid).children(recursive=True)
        child.kill()
        assert process.wait(ENDS_S) == 1
    finally:
        process.kill()
        process.wait()
    assert "ended with code -9" in log.read_text().splitlines()[-1]


def test_a_warm_up_of_some_seconds_is_the_same_load_and_not_measured(server: FakeOpenAI) -> None:
    some = ("--model", "good", "-c", "2", "--output", "8", "--no-ceiling", "--warmup", "1s", "-d", "1s")
    figures = run(server, *some)["points"][0]["figures"]
    asked = sum(1 for body in server.bodies if body["max_tokens"] == 8)
    assert 0 < figures["requests"] < asked
    assert figures["seconds"] == 1.0


def test_a_run_ends_at_its_deadline_whatever_the_server_does(server: FakeOpenAI) -> None:
    begun = time.monotonic()
    some = ("--model", "silent", "-n", "4", "--no-ceiling", "--deadline", "2s", "--warmup", "0")
    document = run(server, *some, code=1)
    assert document["ended"] == "deadline"
    assert document["points"][0]["figures"]["cut"] == 4
    assert time.monotonic() - begun < 30


def test_a_server_that_is_not_there_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarm", "bench", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("swarm: no server answers at http://127.0.0.1:9/v1")
    assert len(done.stderr.splitlines()) == 1


def test_a_model_that_can_not_answer_even_a_probe_is_one_clear_line(server: FakeOpenAI) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarm", "bench", f"{server.url}/nowhere", "--model", "x"],
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "can't answer even a short request: 404" in last
    assert "the right URL" in last


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rate", "3", "-c", "4"), "choose one"),
        (("-n", "3", "-d", "4s"), "give one of them"),
        (("--token-ids", "1:2"), "--api completions"),
        (("--prompt", "many"), "uniform:LOW:HIGH"),
        (("--output", "file:/nowhere"), "can't be read"),
        (("--api-key-env", "NO_SUCH_VARIABLE"), "no such variable"),
        (("--extra", "a=b c"), "not JSON"),
        (("--html", "/nowhere/x.html"), "can't be written"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(
    server: FakeOpenAI, options: tuple[str, ...], says: str
) -> None:
    done = subprocess.run(command(server, *options), capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert not server.bodies


def test_on_a_terminal_the_run_is_shown_live(server: FakeOpenAI, tmp_path: Path) -> None:
    """No JSON lines there, but the load, what comes and what is left."""
    ours, theirs = pty.openpty()
    asked = command(server, "--model", "good", "-d", "2s", "--output", "8", "--no-ceiling")
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(asked, stdout=out, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        shown = all_that_comes(ours)
        assert process.wait(ENDS_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert json.loads((tmp_path / "out").read_text())["ended"] == "done"
    for wanted in ("8 in flight for 2 s", "tokens/s", "s left", "✓"):
        assert wanted.encode() in shown
    assert b'"event"' not in shown


def all_that_comes(terminal: int) -> bytes:
    """Read a terminal until its other end is closed, or for so long."""
    shown, ends_at = b"", time.monotonic() + ENDS_S
    while time.monotonic() < ends_at:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # what Linux answers at the end
                break
            if not piece:
                break
            shown += piece
    return shown
