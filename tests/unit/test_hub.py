"""Models by name: the real package against a stand-in hub on loopback."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from swarm.errors import ModelError
from swarm.stage.checkpoint import Checkpoint, resolve

ROOT = Path(__file__).parents[2]
NAME = "somebody/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

PROGRAM = """
import sys
from swarm.errors import ModelError
from swarm.hub import fetch
repository, _, revision = sys.argv[1].partition("@")
try:
    print(fetch(repository, revision or None, sys.argv[2:] or None, lambda line: print(line, file=sys.stderr)))
except ModelError as error:
    sys.exit(f"error: {error}")
finally:
    assert "torch" not in sys.modules
"""


def safetensors(*names: str) -> bytes:
    """A file with these tensors, 4 × 4, float32."""
    header = {
        name: {"dtype": "F32", "shape": [4, 4], "data_offsets": [64 * i, 64 * i + 64]} for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64 * len(names))


def sharded() -> dict[str, bytes]:
    """A repository with two shards, and with much that nobody here needs."""
    homes = {"embed.weight": 1, "model.layers.0.q": 1, "model.layers.1.q": 2, "head.weight": 2}
    shards = {name: f"model-{home:05}-of-00002.safetensors" for name, home in homes.items()}
    config = {
        "architectures": ["TinyForCausalLM"],
        "num_hidden_layers": 2,
        "vocab_size": 4,
        "hidden_size": 4,
        "num_attention_heads": 1,
        "max_position_embeddings": 64,
    }
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{ }",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps({"weight_map": shards}).encode(),
        **{shard: safetensors(*(n for n, home in shards.items() if home == shard)) for shard in set(shards.values())},
        "README.md": b"# tiny",
        "pytorch_model.bin": b"a pickle",
        "original/model.pt": b"a pickle",
        "onnx/model.safetensors": b"the same again",
    }


@dataclass
class Hub:
    """What the stand-in serves and how it misbehaves; ``asked`` is what it was asked for."""

    files: dict[str, bytes] = field(default_factory=sharded)
    refusal: tuple[int, str] | None = None  # status and error code for everything
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)  # bytes of a file after which it ends
    cut_once: set[str] = field(default_factory=set)  # files that are cut in the middle, the first time only
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""


class Handler(BaseHTTPRequestHandler):
    """The endpoints that the package uses: a repository's description, its tree, and its files."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *rest: object) -> None:
        self.hub = hub
        super().__init__(*rest)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if self.hub.refusal is not None:
            self.reply(self.hub.refusal[0], b"", {"X-Error-Code": self.hub.refusal[1]} if self.hub.refusal[1] else {})
        elif path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main"):
            self.reply_json({"id": NAME, "sha": COMMIT, "siblings": [self.sibling(name) for name in self.hub.files]})
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            self.reply_json([self.entry(name) for name in self.hub.files])
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            self.reply_file(path.removeprefix(f"/{NAME}/resolve/{COMMIT}/"))
        elif path.startswith(f"/api/models/{NAME}/revision/"):
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})

    def sibling(self, name: str) -> dict[str, object]:
        return {"rfilename": name, "size": self.hub.claimed_sizes.get(name, len(self.hub.files[name]))}

    def entry(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(self.hub.files[name]), "oid": self.etag(name)}

    def etag(self, name: str) -> str:
        return hashlib.sha1(self.hub.files[name]).hexdigest()

    def reply_file(self, name: str) -> None:
        if name not in self.hub.files:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        whole = self.hub.files[name]
        headers = {"ETag": f'"{self.etag(name)}"', "X-Repo-Commit": COMMIT}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
        content = whole[start : self.hub.cut.get(name, len(whole)) if self.command == "GET" else len(whole)]
        if self.command == "GET" and name in self.hub.cut_once:
            self.hub.cut_once.remove(name)
            self.reply(206 if start else 200, content, headers, num_sent=len(content) // 2)
        else:
            self.reply(206 if start else 200, content, headers)

    def reply_json(self, data: object) -> None:
        self.reply(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, content: bytes, headers: dict[str, str], num_sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:num_sent])
        if num_sent is not None:
            self.close_connection = True


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub that listens on loopback."""
    served = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, served)) as server:
        served.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        server.shutdown()
        thread.join()


Fetched = subprocess.CompletedProcess[str]
Run = Callable[..., Fetched]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Look a name up in a process of its own: the package reads its variables once."""

    def run(*arguments: str, endpoint: str = "http://127.0.0.1:9", **variables: str) -> Fetched:
        ours = {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**clean, **ours, "HF_ENDPOINT": endpoint, **variables},
        )

    return run


def folder_of(process: Fetched) -> Path:
    assert process.returncode == 0, process.stderr
    return Path(process.stdout.strip())


def error_of(process: Fetched) -> str:
    """The one line that says why."""
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("error: "), process.stderr
    assert len(process.stderr.splitlines()) == 1, process.stderr
    return process.stderr


NEEDED = {name for name in sharded() if "/" not in name and not name.endswith((".md", ".bin"))}


def test_what_is_needed_is_fetched_and_nothing_else(hub: Hub, run: Run) -> None:
    """Small files, then the shards, one line each; no pickle, no second copy. The folder is a checkpoint."""
    process = run(NAME, endpoint=hub.endpoint)
    folder = folder_of(process)
    assert {path.name for path in folder.iterdir()} == NEEDED
    asked = [path.rsplit("/", 1)[1] for path in hub.asked if path.startswith("GET /somebody/")]
    assert sorted(asked) == sorted(NEEDED)
    assert asked[-2:] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    lines = process.stderr.splitlines()
    assert lines[0].startswith("fetching somebody/tiny: model-00001-of-00002.safetensors (1 of 2, ")
    assert len(lines) == 2
    manifest = Checkpoint(folder).manifest("float32")
    assert (manifest.name, manifest.num_layers) == ("tiny", 2)


def test_a_single_file_of_weights(hub: Hub, run: Run) -> None:
    """Without an index there is one file."""
    hub.files = {"config.json": b"{}", "model.safetensors": safetensors("a"), "tokenizer.json": b"{}"}
    assert {path.name for path in folder_of(run(NAME, endpoint=hub.endpoint)).iterdir()} == set(hub.files)


@pytest.mark.parametrize("offline", ["0", "1"])
def test_the_second_time_nobody_is_asked(hub: Hub, run: Run, offline: str) -> None:
    """What the cache holds complete needs no network: neither a hub that is gone nor one that is forbidden matters."""
    folder = folder_of(run(NAME, endpoint=hub.endpoint))
    again = run(NAME, HF_HUB_OFFLINE=offline)
    assert folder_of(again) == folder
    assert again.stderr == ""
    hub.asked.clear()
    assert folder_of(run(f"{NAME}@{COMMIT}", endpoint=hub.endpoint)) == folder
    assert hub.asked == []


def test_only_the_weights_that_are_asked_for(hub: Hub, run: Run) -> None:
    """One shard of two; the other comes when it is asked for, and only that one. A name that is none is refused."""
    first, second = sorted(name for name in NEEDED if name.endswith(".safetensors"))
    folder = folder_of(run(NAME, first, endpoint=hub.endpoint))
    assert {path.name for path in folder.iterdir()} == NEEDED - {second}
    hub.asked.clear()
    assert folder_of(run(NAME, endpoint=hub.endpoint)) == folder
    assert {path.name for path in folder.iterdir()} == NEEDED
    assert [path for path in hub.asked if path.startswith("GET /somebody/")] == [
        f"GET /{NAME}/resolve/{COMMIT}/{second}"
    ]
    assert "has no file of weights named other.safetensors" in error_of(run(NAME, "other.safetensors"))


def test_offline_with_an_incomplete_cache(hub: Hub, run: Run) -> None:
    """Half a model is none; the error says where was looked and what forbids more."""
    folder_of(run(NAME, "model-00001-of-00002.safetensors", endpoint=hub.endpoint))
    error = error_of(run(NAME, HF_HUB_OFFLINE="1"))
    assert "cache" in error
    assert "HF_HUB_OFFLINE" in error
    assert "name a local directory" in error


def test_a_hub_that_cannot_be_reached(run: Run) -> None:
    """The error says what was tried: directory, cache, hub; and what may be done."""
    error = error_of(run(NAME))
    assert "there is no directory somebody/tiny, the cache " in error
    assert "the hub at http://127.0.0.1:9 can't be reached (" in error
    assert "HF_ENDPOINT, or name a local directory" in error


@pytest.mark.parametrize(
    ("name", "refusal", "words"),
    [
        ("somebody/else", None, "shows no such model (404): check the name"),
        (f"{NAME}@v9", None, "somebody/tiny has no revision v9"),
        (NAME, (401, "GatedRepo"), "is gated (401): accept its terms"),
        (NAME, (403, "GatedRepo"), "is gated (403): accept its terms"),
        (NAME, (401, ""), "refuses access to somebody/tiny (401); set HF_TOKEN"),
        (NAME, (401, "RepoNotFound"), "shows no such model (401): check the name, or, if it is private, set HF_TOKEN"),
        (NAME, (403, ""), "refuses access to somebody/tiny (403); set HF_TOKEN"),
        (NAME, (500, ""), "it answers 500; try again later"),
    ],
)
def test_refusals(hub: Hub, run: Run, name: str, refusal: tuple[int, str] | None, words: str) -> None:
    """Unknown, gated, private, broken: each has its own sentence with what to do."""
    hub.refusal = refusal
    assert words in error_of(run(name, endpoint=hub.endpoint))


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "has no config.json; is it a language model"),
        ("model.safetensors.index.json", "has no model.safetensors and no index of shards"),
    ],
)
def test_a_repository_without_what_is_needed(hub: Hub, run: Run, missing: str, words: str) -> None:
    """Refused before a byte is loaded."""
    del hub.files[missing]
    assert words in error_of(run(NAME, endpoint=hub.endpoint))
    assert not [path for path in hub.asked if path.startswith("GET /somebody/")]


def test_a_shard_that_the_repository_lacks(hub: Hub, run: Run) -> None:
    """The index promises it."""
    del hub.files["model-00002-of-00002.safetensors"]
    process = run(NAME, endpoint=hub.endpoint)
    assert process.returncode == 1
    assert process.stderr.endswith("it lacks a file that its index of shards names\n")


def test_an_index_cannot_name_what_it_likes(hub: Hub, run: Run) -> None:
    """Neither pickles nor files elsewhere are fetched because an index says so."""
    for name in ("pytorch_model.bin", "../../../stolen.safetensors", 7):
        hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": name}}).encode()
        assert "which is not a safetensors file beside it" in error_of(run(NAME, endpoint=hub.endpoint))


def test_a_download_that_is_cut_off(hub: Hub, run: Run) -> None:
    """An error, nothing half in the cache, and the next try takes only what is missing."""
    hub.cut = {"model-00002-of-00002.safetensors": 100}
    process = run(NAME, endpoint=hub.endpoint)
    assert process.returncode == 1
    assert "the download of somebody/tiny broke off (" in process.stderr.splitlines()[-1]
    assert error_of(run(NAME, HF_HUB_OFFLINE="1"))
    hub.cut = {}
    hub.asked.clear()
    assert {path.name for path in folder_of(run(NAME, endpoint=hub.endpoint)).iterdir()} == NEEDED
    assert [path for path in hub.asked if path.startswith("GET /somebody/")] == [
        f"GET /{NAME}/resolve/{COMMIT}/model-00002-of-00002.safetensors"
    ]


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub, run: Run) -> None:
    """In the middle of a shard: the rest is fetched, and the file is right."""
    shard = "model-00002-of-00002.safetensors"
    hub.cut_once = {shard}
    assert (folder_of(run(NAME, endpoint=hub.endpoint)) / shard).read_bytes() == hub.files[shard]
    assert hub.cut_once == set()


def test_a_disk_that_is_too_small(hub: Hub, run: Run) -> None:
    """Noticed before the weights are loaded."""
    hub.claimed_sizes = {"model-00001-of-00002.safetensors": 1 << 60}
    error = error_of(run(NAME, endpoint=hub.endpoint))
    assert "needs 1152921504.6 GB more in the cache" in error
    assert "make room, or have HF_HUB_CACHE name another disk" in error


def test_a_disk_that_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others write to the disk too: what had room when it began may still find none."""
    from swarm import hub as module

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module._Fetch, "_sizes", lambda _: {"config.json": 1})
    monkeypatch.setattr(module, "snapshot_download", full)
    monkeypatch.setattr(module.constants, "HF_HUB_CACHE", "/no/such/cache")
    monkeypatch.setattr(module, "find_in_cache", lambda *_, **__: None)
    with pytest.raises(ModelError, match="the disk is full: the cache /no/such/cache has no room for somebody/tiny"):
        module.fetch(NAME)


def test_a_cache_that_cannot_be_written(hub: Hub, run: Run, tmp_path: Path) -> None:
    """The error names the cache."""
    (tmp_path / "cache").touch()
    assert f"the cache {tmp_path}/cache can't be used for somebody/tiny: " in error_of(run(NAME, endpoint=hub.endpoint))


def test_something_else_at_the_endpoint(hub: Hub, run: Run) -> None:
    """A web server that is no hub."""
    hub.refusal = (200, "")
    assert "is no model hub; correct HF_ENDPOINT" in error_of(run(NAME, endpoint=hub.endpoint))


@pytest.mark.parametrize("model", ["/no/such/model", "./somebody/tiny", "a/b/c", "nobody", "some body/tiny", "a/b@"])
def test_paths_are_not_looked_up(model: str) -> None:
    """Only owner/name is a name on a hub; anything else is a path, and there is none."""
    with pytest.raises(ModelError, match="there is no directory"):
        resolve(model)


def test_a_local_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it looks like a name on a hub."""
    (tmp_path / "somebody" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve(NAME) == (tmp_path / NAME).resolve()
