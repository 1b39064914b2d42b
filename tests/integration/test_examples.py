"""The examples, run as anybody would: each is a process that prints what it promises, ends by itself and tidies up."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarm import AsyncClient, Client
from swarm.demo import model_path
from swarm.wire.messages import Attach, Report, Submit
from tests.faults.zygote import Zygote
from tests.integration.fake_broker import FakeBroker, say, tiny_tokenizer
from tests.integration.processes import Processes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PATIENCE_S = 240.0  # a swarm of its own, three loads of torch, on a machine that others use


@pytest.fixture(scope="module")
def url(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A swarm of two that serves the demo model, for the examples that are content with anybody's."""
    with Processes(model_path(), tmp_path_factory.mktemp("logs"), launch=zygote) as swarm:
        swarm.start(2)
        asyncio.run(_until_serving(swarm))
        yield swarm.url


async def _until_serving(swarm: Processes) -> None:
    async with AsyncClient(swarm.url, connect_timeout_s=30.0) as client:
        await swarm.until_serving(client, 2)


def run(name: str, directory: Path, *arguments: str, url: str | None = None) -> str:
    """Run an example; return what it prints. It ends with 0, complains of nothing, leaves no process and no state."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    environment.pop("SWARM_URL", None)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=directory,
        env=environment | ({"SWARM_URL": url} if url else {}),
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert list(directory.glob("swarm-up-*")) == []
    assert processes_in(directory) == []
    return done.stdout


def processes_in(directory: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(directory) in process.cwd():
                found.append(" ".join(process.cmdline()))
    return found


def test_generate(tmp_path: Path) -> None:
    """Starts a swarm of its own; text, figures, and the same answer for token ids."""
    shown = run("generate", tmp_path)
    assert shown.startswith("Once upon a time there was a ")
    assert re.search(r"ended by: (stop|length); tokens: \d+ of prompt, [1-9]\d* of answer", shown)
    assert re.search(r"first token after \d+\.\d ms, all after \d+\.\d ms", shown)
    assert "the same from token ids: yes" in shown


def test_stream(tmp_path: Path, url: str) -> None:
    """The same seed gives the same text, another seed another; every stage says how long it computed; a stream that is
    left early is a beginning of the whole one."""
    shown = run("stream", tmp_path, "One day", url=url)
    *seeds, left = re.split(r"^== .*$\n", shown, flags=re.MULTILINE)[1:]
    texts = [re.split(r"^   w\d ", part, flags=re.MULTILINE) for part in seeds]
    assert [len(parts) for parts in texts] == [3, 3, 3]  # the text, and two stages
    first, second, again = (parts[0].strip() for parts in texts)
    assert first == again != second
    assert all(text.startswith("One day") for text in (first, second))
    beginning = left.strip().removesuffix(" …")
    assert len("One day") < len(beginning) < len(first)
    assert first.startswith(beginning)


def test_batch(tmp_path: Path, url: str) -> None:
    """Every prompt is answered once, and as it would be alone."""
    shown = run("batch", tmp_path, url=url)
    assert sorted(re.findall(r"^\[(\d)\] ['\"]\w", shown, flags=re.MULTILINE)) == [str(place) for place in range(8)]
    assert re.search(r"\d+ tokens: \d+/s as a batch, \d+/s one by one", shown)
    assert "the same tokens: yes" in shown


def test_chat(tmp_path: Path, url: str) -> None:
    """Each question has an answer; a stop string ends one, and is not in it; the template's prompt is shown."""
    shown = run("chat", tmp_path, url=url)
    assert "you:   What colour is the cat?\nmodel: The cat is black.\n" in shown
    assert len(re.findall(r"^model: \w", shown, flags=re.MULTILINE)) == 3
    story = re.search(r"a story of (\d+) tokens; its first sentence has (\d+): ([^.!]+)\.$", shown, re.MULTILINE)
    assert story is not None
    assert int(story[2]) < int(story[1])
    assert "<|user|>Tell me a story.<|end|><|assistant|>" in shown


def test_live(tmp_path: Path) -> None:
    """Three workers join one by one, one dies in the middle of an answer, and all four answers are the same. It does
    not touch the swarm that SWARM_URL names, which here is none at all."""
    shown = run("live", tmp_path, url="tcp://127.0.0.1:9")
    plans = re.findall(r"joins\n((?:  w\d has layers .*\n)+)", shown)
    assert [plan.count("has layers") for plan in plans] == [1, 2, 3]
    assert re.search(r" \[w\d is dead\]", shown)
    assert shown.endswith("4 answers, with 1, 2 and 3 workers and with one that died: the same\n")


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("name", ["generate", "live"])
def test_an_interrupt_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Ctrl-C at a terminal, which reaches the example and its swarm, while that starts: all of them end, well before
    the example would have lost its patience."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environment.pop("SWARM_URL", None)
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=tmp_path,
        env=environment,
    )
    try:
        give_up_at = time.monotonic() + PATIENCE_S
        while not list(tmp_path.glob("swarm-up-*")) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.glob("swarm-up-*")) == []
    assert processes_in(tmp_path) == []


def test_plain(tmp_path: Path, url: str) -> None:
    """Without our library, the answer that our library gets: the model, the status, the text, the end."""
    prompt = (0, 428, 431, 265, 430)
    with Client(url) as client:
        done = client.generate(prompt, max_tokens=60, temperature=0.8, seed=1)
    about, status, text = run("plain", tmp_path, *map(str, prompt), url=url).split("\n", 2)
    assert re.fullmatch(r"model village of swarm [\d.]+: 2048 positions", about)
    assert status == "serving: 2 stages, 0 sequences run"
    answer, _, end = text.rstrip().rpartition("\n")
    assert answer == done.text
    assert re.match(rf"{done.finish_reason}: {len(done.tokens)} tokens in \d+\.\d+ s", end)


async def test_plain_reads_on() -> None:
    """The broker goes away in the middle and comes back, and says all twice: nothing is told twice, nothing is missing.
    The request stays the same, and goes on behind the last token that came."""
    told = say("once there was a long story, ") * 4
    began = tiny_tokenizer().decode(told[:20])
    status = Report(what="status", ok=True, body={"state": "serving", "num_stages": 1, "num_running": 0})
    async with FakeBroker(lambda *_: told, allowed=20, repeat=True, reports={"status": status}) as broker:
        plain = await asyncio.create_subprocess_exec(
            sys.executable,
            *(str(EXAMPLES / "plain.py"), "0", "5"),
            env={**os.environ, "SWARM_URL": broker.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        await broker.wait_until(lambda: bool(broker.heard_of(Submit)), PATIENCE_S)
        assert plain.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            shown = await plain.stdout.readuntil(b" run\n") + await plain.stdout.readexactly(len(began))
            await broker.shut()
            await broker.open()
            broker.allow(None)
            rest, complaints = await plain.communicate()
        assert (plain.returncode, complaints) == (0, b"")
        *_, text, end = (shown + rest).decode().strip().split("\n")
        assert text == ("once there was a long story, " * 4)[: len(text)]
        assert end.startswith("length: 60 tokens in ")
        assert len({each.request_id for each in broker.heard if isinstance(each, Submit)}) == 1
        assert {each.next_index for each in broker.heard if isinstance(each, Attach)} == {(20,)}


def test_plain_needs_nothing_of_ours() -> None:
    """Beside Python's own modules: pyzmq and msgpack."""
    tree = ast.parse((EXAMPLES / "plain.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - sys.stdlib_module_names == {"msgpack", "zmq"}


def test_each_is_short() -> None:
    """An example is read in one go: five of them, none above sixty lines; and one that says all by itself."""
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("[!_]*.py")}
    assert sorted(lengths) == ["batch", "chat", "generate", "live", "plain", "stream"]
    assert lengths.pop("plain") <= 140
    assert max(lengths.values()) <= 60, lengths
