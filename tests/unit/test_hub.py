"""Models by name: the real package against a stand-in hub on loopback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from swarm.errors import ModelError
from swarm.hub import cache as cache_module
from swarm.hub import download as download_module
from swarm.hub import errors as hub_errors
from swarm.hub import lookup as hub_module
from swarm.hub.headers import RemoteFile
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.location import ModelLocation, locate_model
from swarm.wire.messages import Manifest
from tests.files_of_models import TINY_CONFIG, as_file, entry, safetensors
from tests.standin_hub import COMMIT, NAME, Hub, standin

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # each test starts a process

# Looks a name up and fetches files of weights: those that are named, all if none is, with "-" none at all. Prints the
# folder, the model's manifest as it was before anything was fetched, and after it.
PROGRAM = """
import sys
from swarm.errors import ModelError
from swarm.hub.lookup import look_up
from swarm.hub.names import parse_name
from swarm.stage.model.checkpoint import Checkpoint
import msgspec

def show(snapshot):
    return msgspec.json.encode(Checkpoint(snapshot.folder, snapshot).manifest("float32")).decode()

def report(line):
    print(line, file=sys.stderr)

name = parse_name(sys.argv[1])
try:
    snapshot = look_up(name, report)
    before = show(snapshot)
    snapshot.fetch([] if sys.argv[2:] == ["-"] else sys.argv[2:] or snapshot.files, None, report)
    print(snapshot.folder, before, show(look_up(name)), sep="\\n")
except ModelError as error:
    sys.exit(f"error: {error}")
finally:
    assert "torch" not in sys.modules
"""


def sharded() -> dict[str, bytes]:
    """A repository with two shards, and with much that nobody here needs."""
    homes = {"embed.weight": 1, "model.layers.0.q": 1, "model.layers.1.q": 2, "head.weight": 2}
    shards = {name: f"model-{home:05}-of-00002.safetensors" for name, home in homes.items()}
    return {
        "config.json": json.dumps(TINY_CONFIG).encode(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{ }",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps({"weight_map": shards}).encode(),
        **{shard: safetensors(*(n for n, home in shards.items() if home == shard)) for shard in set(shards.values())},
        "README.md": b"# tiny",
        "modeling_tiny.py": b"raise SystemExit",
        "pytorch_model.bin": b"a pickle",
        "original/model.pt": b"a pickle",
        "onnx/model.safetensors": b"the same again",
    }


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub that has the model."""
    with standin(sharded()) as served:
        yield served


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
    return Path(process.stdout.splitlines()[0])


def manifests_of(process: Fetched) -> list[str]:
    """As known before weights were fetched, and after."""
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[1:]


def manifest_in(folder: Path) -> str:
    return msgspec.json.encode(Checkpoint(folder).manifest("float32")).decode()


def error_of(process: Fetched) -> str:
    """The one line that says why, after what was said of the work."""
    assert (process.returncode, process.stdout) == (1, "")
    *work, error = process.stderr.splitlines()
    assert all(line.startswith("fetching ") for line in work), process.stderr
    assert error.startswith("error: "), process.stderr
    return error


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NEEDED = {name for name in sharded() if "/" not in name and not name.endswith((".md", ".bin", ".py"))}
SMALL = NEEDED - set(SHARDS)


# --- what is fetched, and when ---------------------------------------------------------------------------------------


def test_a_look_up_fetches_no_weights(hub: Hub, run: Run) -> None:
    """Small files, and one part of each shard: that is enough to describe the model. No pickle, no second copy."""
    process = run(NAME, "-", endpoint=hub.endpoint)
    assert names_in(folder_of(process)) == SMALL
    assert set(hub.fetched()) == SMALL
    assert sorted(hub.parts()) == SHARDS
    assert process.stderr == ""


def test_settings_of_quantized_weights_are_fetched_and_read(hub: Hub, run: Run) -> None:
    """Older GPTQ repositories have them in a file of their own."""
    hub.files |= {"quantize_config.json": b"{", "hf_quant_config.json": b"{  }"}
    assert "quantize_config.json can't be read as JSON" in error_of(run(NAME, "-", endpoint=hub.endpoint))
    assert set(hub.fetched()) == SMALL | {"quantize_config.json", "hf_quant_config.json"}


def test_what_is_needed_is_fetched_and_nothing_else(hub: Hub, run: Run) -> None:
    """Small files, then the shards, one line each. The folder is a checkpoint, and the one that was described."""
    process = run(NAME, endpoint=hub.endpoint)
    folder = folder_of(process)
    assert names_in(folder) == NEEDED
    assert sorted(hub.fetched()) == sorted(NEEDED)
    assert hub.fetched()[-2:] == SHARDS
    lines = process.stderr.splitlines()
    assert lines[0].startswith("fetching somebody/tiny: model-00001-of-00002.safetensors (1 of 2, ")
    assert len(lines) == 2
    before, after = manifests_of(process)
    assert before == after == manifest_in(folder)
    assert json.loads(after)["name"] == "tiny"
    assert json.loads(after)["layer_bytes"] == [64, 64]


def test_a_single_file_of_weights(hub: Hub, run: Run) -> None:
    """Without an index there is one file."""
    tensors = ("embed.weight", "model.layers.0.q", "model.layers.1.q")
    hub.files = {
        "config.json": hub.files["config.json"],
        "model.safetensors": safetensors(*tensors),
        "tokenizer.json": b"{}",
    }
    assert names_in(folder_of(run(NAME, "-", endpoint=hub.endpoint))) == {"config.json", "tokenizer.json"}
    assert names_in(folder_of(run(NAME, endpoint=hub.endpoint))) == set(hub.files)


@pytest.mark.parametrize("offline", ["0", "1"])
@pytest.mark.parametrize("files", [(), ("-",)])
def test_the_second_time_nobody_is_asked(hub: Hub, run: Run, offline: str, files: tuple[str, ...]) -> None:
    """What the cache knows needs no network: neither a hub that is gone nor one that is forbidden matters. Whether the
    weights are there, or only known, makes no difference."""
    first = run(NAME, *files, endpoint=hub.endpoint)
    again = run(NAME, *files, HF_HUB_OFFLINE=offline)
    assert again.stdout == first.stdout
    assert again.stderr == ""
    hub.asked.clear()
    assert folder_of(run(f"{NAME}@{COMMIT}", *files, endpoint=hub.endpoint)) == folder_of(first)
    assert hub.asked == []


def test_without_a_tokenizer_the_hub_is_asked_once(hub: Hub, run: Run) -> None:
    """A repository may have none; that is known from the first look-up on."""
    del hub.files["tokenizer.json"]
    first = run(NAME, "-", endpoint=hub.endpoint)
    assert folder_of(run(NAME, "-")) == folder_of(first)


def test_only_the_weights_that_are_asked_for(hub: Hub, run: Run) -> None:
    """One shard of two; the other comes when it is asked for, and only that one."""
    first, second = SHARDS
    folder = folder_of(run(NAME, first, endpoint=hub.endpoint))
    assert names_in(folder) == NEEDED - {second}
    hub.asked.clear()
    assert folder_of(run(NAME, endpoint=hub.endpoint)) == folder
    assert names_in(folder) == NEEDED
    assert hub.fetched() == [second]


def test_a_header_that_is_longer_than_one_part(hub: Hub, run: Run) -> None:
    """A second part is asked for, and no more."""
    header = {"__metadata__": {"note": "x" * 300_000}, "model.layers.1.q": entry(0), "head.weight": entry(1)}
    hub.files[SHARDS[1]] = as_file(header, 128)
    before, after = manifests_of(run(NAME, endpoint=hub.endpoint))
    assert before == after
    assert sorted(hub.parts()) == [SHARDS[0], SHARDS[1], SHARDS[1]]


@pytest.mark.parametrize("lack", ["answers_ranges", "tells_sha256"])
def test_a_hub_that_cannot_describe(hub: Hub, run: Run, lack: str) -> None:
    """No parts of files, or no sha256: then the weights are fetched at look-up, with a line each, once; and the model
    is the same."""
    setattr(hub, lack, False)
    process = run(NAME, "-", endpoint=hub.endpoint)
    assert names_in(folder_of(process)) == NEEDED
    assert [line.split(" ")[2] for line in process.stderr.splitlines()] == SHARDS
    assert run(NAME, "-").stdout == process.stdout
    with standin(sharded()) as other:
        assert manifests_of(run(NAME, "-", endpoint=other.endpoint))[0] == manifests_of(process)[0]


def test_damaged_descriptions_are_made_again(hub: Hub, run: Run) -> None:
    """What others wrote into the cache, or half a file, is no error."""
    process = run(NAME, "-", endpoint=hub.endpoint)
    (descriptions,) = (folder_of(process).parent.parent / "swarm").iterdir()
    descriptions.write_bytes(descriptions.read_bytes()[:100])
    assert run(NAME, "-", endpoint=hub.endpoint).stdout == process.stdout


def test_a_file_that_is_not_as_described(hub: Hub, run: Run) -> None:
    """A description is held against the file that comes."""
    process = run(NAME, "-", endpoint=hub.endpoint)
    folder = folder_of(process)
    described = Swapped(NAME, folder, cache_module.read_descriptions(folder))
    checkpoint = Checkpoint(folder, described)
    with pytest.raises(ModelError, match=r"has another .* than the hub describes; remove the file"):
        checkpoint.fetch(["head.weight"])


class Swapped(hub_module.ModelSnapshot):
    """A model of which a file has its tensors in another order than it says."""

    def fetch(self, files: Collection[str], *_: object) -> None:
        assert list(files) == [SHARDS[1]]
        (self.folder / SHARDS[1]).write_bytes(safetensors("head.weight", "model.layers.1.q"))


# --- which models are the same ---------------------------------------------------------------------------------------


def test_a_copy_of_the_folder_is_the_same_model(hub: Hub, run: Run, tmp_path: Path) -> None:
    """The hub's snapshot, of which nothing was fetched, and a plain copy of the repository, bytes and all."""
    copy = tmp_path / "tiny"
    copy.mkdir()
    for name in NEEDED:
        (copy / name).write_bytes(hub.files[name])
    assert manifests_of(run(NAME, "-", endpoint=hub.endpoint))[0] == manifest_in(copy)


def test_other_weights_are_another_model(hub: Hub, run: Run, tmp_path: Path) -> None:
    """One byte of weights, with the same headers."""
    manifest = manifests_of(run(NAME, "-", endpoint=hub.endpoint))[0]
    hub.files[SHARDS[0]] = hub.files[SHARDS[0]][:-1] + b"\1"
    shutil.rmtree(tmp_path / "cache")
    other = manifests_of(run(NAME, "-", endpoint=hub.endpoint))[0]
    one, two = (msgspec.json.decode(text, type=Manifest) for text in (manifest, other))
    assert one.difference(two) == f"files: {SHARDS[0]} differ in size or content"


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_offline_with_weights_missing(hub: Hub, run: Run) -> None:
    """What is missing is named, and what forbids more."""
    folder_of(run(NAME, SHARDS[0], endpoint=hub.endpoint))
    error = error_of(run(NAME, HF_HUB_OFFLINE="1"))
    assert f"lacks {SHARDS[1]} of {NAME}@{COMMIT}, and HF_HUB_OFFLINE forbids" in error
    assert "name a local directory" in error


def test_offline_with_nothing_known(run: Run) -> None:
    """The error says where was looked and what forbids more."""
    error = error_of(run(NAME, HF_HUB_OFFLINE="1"))
    assert "there is no directory or file somebody/tiny, the cache " in error
    assert "HF_HUB_OFFLINE forbids to ask the hub; unset it, or name a local directory" in error


def test_a_hub_that_is_gone_when_weights_are_needed(hub: Hub, run: Run) -> None:
    """The error names the files, the hub, and why it can't be had."""
    folder_of(run(NAME, "-", endpoint=hub.endpoint))
    error = error_of(run(NAME, SHARDS[0]))
    assert f"lacks {SHARDS[0]} of {NAME}@{COMMIT}, and fetching from the hub at http://127.0.0.1:9 failed (" in error
    assert "check the network or HF_ENDPOINT, or name a local directory" in error


def test_a_hub_that_cannot_be_reached(run: Run) -> None:
    """The error says what was tried: directory, cache, hub; and what may be done."""
    error = error_of(run(NAME))
    assert "there is no directory or file somebody/tiny, the cache " in error
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
    assert hub.fetched() == []


def test_a_shard_that_the_repository_lacks(hub: Hub, run: Run) -> None:
    """The index promises it: refused before weights are loaded."""
    del hub.files[SHARDS[1]]
    assert f"it lacks {SHARDS[1]}, which its index of shards names" in error_of(run(NAME, endpoint=hub.endpoint))
    assert hub.fetched_weights() == []


def test_an_index_cannot_name_what_it_likes(hub: Hub, run: Run) -> None:
    """Neither pickles nor files elsewhere are fetched because an index says so."""
    for name in ("pytorch_model.bin", "../../../stolen.safetensors", 7):
        hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": name}}).encode()
        assert "which is not a safetensors file in the same folder" in error_of(run(NAME, endpoint=hub.endpoint))


def test_a_download_that_is_cut_off(hub: Hub, run: Run) -> None:
    """An error, nothing half in the cache, and the next try takes only what is missing."""
    hub.cut = {SHARDS[1]: 100}
    assert f"lacks {', '.join(SHARDS)} of {NAME}@{COMMIT}, and fetching " in error_of(run(NAME, endpoint=hub.endpoint))
    assert error_of(run(NAME, HF_HUB_OFFLINE="1"))
    hub.cut = {}
    hub.asked.clear()
    assert names_in(folder_of(run(NAME, endpoint=hub.endpoint))) == NEEDED
    assert hub.fetched() == [SHARDS[1]]


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub, run: Run) -> None:
    """In the middle of a shard: the rest is fetched, from the last whole piece (10 MiB) on; and the file is right."""
    shard = SHARDS[1]
    hub.files[shard] += bytes(24 << 20)
    hub.cut_once = {shard}
    assert (folder_of(run(NAME, endpoint=hub.endpoint)) / shard).read_bytes() == hub.files[shard]
    assert hub.cut_once == set()
    assert hub.fetched().count(shard) == 1
    assert f"GET /{NAME}/resolve/{COMMIT}/{shard} bytes={10 << 20}-" in hub.asked


def test_a_disk_that_is_too_small(hub: Hub, run: Run) -> None:
    """Noticed before the weights are loaded."""
    hub.claimed_sizes = {"model-00001-of-00002.safetensors": 1 << 60}
    error = error_of(run(NAME, endpoint=hub.endpoint))
    assert "needs 1152921504.6 GB more in the cache" in error
    assert "make room, or have HF_HUB_CACHE name another disk" in error


def test_a_disk_that_fills_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Others write to the disk too: what had room when it began may still find none."""

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download_module, "hf_hub_download", full)
    monkeypatch.setattr(hub_errors.constants, "HF_HUB_CACHE", "/no/such/cache")
    with pytest.raises(ModelError, match="the disk is full: the cache /no/such/cache has no room for somebody/tiny@"):
        snapshot_in(tmp_path).fetch(["model.safetensors"])


def test_progress_while_nothing_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever watches a worker hears of a slow hub as of a fast one: a word every while, be it without a byte. The
    bytes are those that came, however many bars the package counts them with; and at the end all."""
    said: list[tuple[int, int]] = []
    waited_long = threading.Event()

    def progress(num_came: int, total: int) -> None:
        said.append((num_came, total))
        if said.count((40, 100)) >= 2:
            waited_long.set()

    def slow(*_: object, tqdm_class: type, **__: object) -> str:
        with tqdm_class(total=100) as written, tqdm_class(total=100) as bar:
            written.update(20)
            bar.update(30)
            bar.update(10)
            assert waited_long.wait(30)
        return ""

    monkeypatch.setattr(download_module, "hf_hub_download", slow)
    monkeypatch.setattr(download_module, "PROGRESS_INTERVAL_S", 0.001)
    snapshot_in(tmp_path).fetch(["model.safetensors"], progress)
    assert (40, 100) in said
    assert said[-1] == (100, 100)


def test_an_error_nobody_expected_ends_the_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bug in the package must not let a worker load for ever."""

    def broken(*_: object, **__: object) -> str:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(download_module, "hf_hub_download", broken)
    with pytest.raises(ModelError, match="failed \\(out of luck\\)"):
        snapshot_in(tmp_path).fetch(["model.safetensors"])


def test_weights_are_of_the_commit_that_was_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the name stands for meanwhile."""
    asked: list[object] = []
    monkeypatch.setattr(
        download_module, "hf_hub_download", lambda *names, revision, **_: asked.append((*names, revision))
    )
    snapshot_in(tmp_path).fetch(["model.safetensors"])
    assert asked == [(NAME, "model.safetensors", tmp_path.name)]


def test_a_disk_without_room_is_not_begun_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is asked of the hub then."""
    monkeypatch.setattr(download_module, "hf_hub_download", lambda *_, **__: pytest.fail("it was begun"))
    monkeypatch.setattr(download_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=99))
    with pytest.raises(ModelError, match="more in the cache"):
        snapshot_in(tmp_path).fetch(["model.safetensors"])


def test_descriptions_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    """Another look-up may have described other files of the same commit."""
    folder = tmp_path / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    first, second = RemoteFile(1, "0" * 64, "{}"), RemoteFile(2, "1" * 64, "{}")
    cache_module.store_descriptions(folder, {"a.safetensors": first})
    cache_module.store_descriptions(folder, {"b.safetensors": second})
    assert cache_module.read_descriptions(folder) == {"a.safetensors": first, "b.safetensors": second}
    assert [path.suffix for path in (tmp_path / "swarm").iterdir()] == [".json"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../stolen.safetensors", "/etc/stolen.safetensors", 7])
def test_an_index_names_files_beside_it(tmp_path: Path, name: object) -> None:
    """And only those that are weights."""
    index = {"weight_map": {"a": "model.safetensors", "b": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a safetensors file in the same folder"):
        hub_module.shards_of(tmp_path)


def snapshot_in(folder: Path) -> hub_module.ModelSnapshot:
    """A model of one file, which is not there."""
    return hub_module.ModelSnapshot(NAME, folder, {"model.safetensors": RemoteFile(100, "0" * 64, "{}")})


def test_a_cache_that_cannot_be_written(hub: Hub, run: Run, tmp_path: Path) -> None:
    """The error names the cache."""
    (tmp_path / "cache").touch()
    assert f"the cache {tmp_path}/cache can't be used for somebody/tiny: " in error_of(run(NAME, endpoint=hub.endpoint))


def test_something_else_at_the_endpoint(hub: Hub, run: Run) -> None:
    """A web server that is no hub."""
    hub.refusal = (200, "")
    assert "is not a model hub; correct HF_ENDPOINT" in error_of(run(NAME, endpoint=hub.endpoint))


@pytest.mark.parametrize("model", ["/no/such/model", "./somebody/tiny", "a/b/c", "nobody", "some body/tiny", "a/b@"])
def test_paths_are_not_looked_up(model: str) -> None:
    """Only owner/name is a name on a hub; anything else is a path, and there is none."""
    with pytest.raises(ModelError, match="there is no directory"):
        locate_model(model)


def test_a_local_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it looks like a name on a hub."""
    (tmp_path / "somebody" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_model(NAME) == ModelLocation((tmp_path / NAME).resolve())
