"""GGUF models on a hub: the real package against a stand-in hub on loopback."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, snapshot_download

from swarm.errors import ModelError
from swarm.hub import gguf_snapshot as snapshot_module
from swarm.hub import partial_file
from swarm.hub.gguf import parse_gguf, read_gguf
from swarm.hub.gguf_snapshot import GgufSnapshot
from swarm.hub.headers import StoredTensor
from swarm.hub.lookup import ModelSnapshot, look_up
from swarm.hub.names import parse_name
from swarm.hub.presence import check_present
from tests.files_of_models import TINY_CONFIG, gguf, safetensors
from tests.standin_hub import COMMIT, NAME, Hub, standin

MiB = 1 << 20
LAYERS = {f"blk.{layer}.weight": 200_000 + layer for layer in range(6)}
FILE, OTHER = "tiny-Q4_0.gguf", "tiny-Q8_0.gguf"
PARTS = [f"Q6_K/tiny-Q6_K-0000{number}-of-00002.gguf" for number in (1, 2)]


def repository() -> dict[str, bytes]:
    return {
        "README.md": b"# tiny",
        FILE: gguf(LAYERS),
        OTHER: gguf(LAYERS, seed=1),
        PARTS[0]: gguf({"blk.0.weight": 300_000}),
        PARTS[1]: gguf({"blk.1.weight": 300_000}, seed=1),
        "mmproj-f16.gguf": b"no language model",
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with standin(repository()) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        template = f"{served.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served


def open_model(name: str = f"{NAME}:Q4_0", report: list[str] | None = None) -> GgufSnapshot:
    parsed = parse_name(name)
    assert parsed is not None
    snapshot = look_up(parsed, None if report is None else report.append)
    assert isinstance(snapshot, GgufSnapshot)
    return snapshot


def tensors_in(snapshot: GgufSnapshot, *layers: int) -> list[StoredTensor]:
    """The tensors of these layers, as the header in the cache describes them."""
    tensors = {tensor.name: tensor for path in paths_of(snapshot) for tensor in read_file(path)}
    return [tensors[f"blk.{layer}.weight"] for layer in layers]


def paths_of(snapshot: GgufSnapshot) -> list[Path]:
    return [snapshot.path.with_name(file.path.rpartition("/")[2]) for file in snapshot.files]


def read_file(path: Path) -> tuple[StoredTensor, ...]:
    with path.open("rb") as file:

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        return parse_gguf(path, path.stat().st_size, read).tensors


def assert_right(hub: Hub, snapshot: GgufSnapshot, *layers: int) -> None:
    """The bytes of the layers in the cache are those of the hub."""
    for tensor in tensors_in(snapshot, *layers):
        (name,) = [file.path for file in snapshot.files if file.path.endswith(tensor.path.name)]
        stop = tensor.offset + tensor.num_bytes
        assert tensor.path.read_bytes()[tensor.offset : stop] == hub.files[name][tensor.offset : stop]


# --- which model is meant --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (f"{NAME}:Q4_0", [FILE]),
        (f"{NAME}:q8_0", [OTHER]),
        (f"{NAME}/{OTHER}", [OTHER]),
        (f"{NAME}/{PARTS[1]}", PARTS),
        (f"{NAME}:Q6_K@main", PARTS),
    ],
)
def test_a_name_chooses_a_model_and_only_its_headers_are_fetched(hub: Hub, name: str, files: list[str]) -> None:
    snapshot = open_model(name)
    assert [file.path for file in snapshot.files] == files
    assert set(hub.parts()) == set(files)
    assert hub.fetched() == []
    assert snapshot.name == f"{NAME}/{files[0]}@{COMMIT}"
    hub.asked.clear()
    again = open_model(snapshot.name)
    assert (again.files, again.path) == (snapshot.files, snapshot.path)
    assert open_model(name) == snapshot
    assert hub.asked == []


def test_a_repository_with_several_needs_a_choice(hub: Hub) -> None:
    with pytest.raises(ModelError, match=rf"several GGUF models; choose one of Q4_0, Q6_K, Q8_0, as in {NAME}:Q4_0$"):
        open_model(NAME)
    assert not (Path(constants.HF_HUB_CACHE)).exists()


def test_the_only_model_needs_no_choice(hub: Hub) -> None:
    for name in (OTHER, *PARTS):
        del hub.files[name]
    snapshot = open_model(NAME)
    assert [file.path for file in snapshot.files] == [FILE]
    hub.asked.clear()
    assert open_model(NAME) == snapshot
    assert hub.asked == []


def test_a_quantization_that_is_not_there_names_those_that_are(hub: Hub) -> None:
    with pytest.raises(ModelError, match=f"{NAME} has no GGUF model Q2_K; choose one of Q4_0, Q6_K, Q8_0, as in"):
        open_model(f"{NAME}:Q2_K")


def test_a_file_that_another_program_has_downloaded_is_used(hub: Hub) -> None:
    """Also if no hub can be reached."""
    path = Path(snapshot_download(NAME, allow_patterns=[FILE]), FILE)
    hub.refusal = (500, "")
    hub.asked.clear()
    snapshot = open_model()
    assert snapshot.path == path
    assert snapshot.missing(tensors_in(snapshot, 0)) == {}
    assert hub.asked == []


def test_a_hub_that_is_gone_leaves_what_was_described(hub: Hub) -> None:
    """One model is known, another can't be looked up."""
    snapshot = open_model()
    hub.refusal = (503, "")
    assert open_model() == snapshot
    with pytest.raises(ModelError, match="it answers 503; try again later"):
        open_model(f"{NAME}:Q8_0")
    hub.refusal = None
    assert [file.path for file in open_model(f"{NAME}:Q8_0").files] == [OTHER]


def test_safetensors_come_first_unless_a_gguf_model_is_chosen(hub: Hub) -> None:
    """Also when the cache has the GGUF model only."""
    weights = safetensors("embed.weight", "model.layers.0.q", "model.layers.1.q")
    hub.files |= {"config.json": json.dumps(TINY_CONFIG).encode(), "model.safetensors": weights}
    assert open_model().files[0].path == FILE
    name = parse_name(NAME)
    assert name is not None
    assert isinstance(look_up(name), ModelSnapshot)
    assert open_model().files[0].path == FILE


# --- what is fetched -------------------------------------------------------------------------------------------------


def test_only_the_ranges_of_the_needed_tensors_are_fetched(hub: Hub) -> None:
    snapshot = open_model()
    header = hub.bytes_of(FILE)
    assert header <= 1.1 * MiB
    tensors = tensors_in(snapshot, 3, 4)
    expected = sum(tensor.num_bytes for tensor in tensors)
    missing = snapshot.missing(tensors)[FILE]
    assert expected <= missing <= expected + 100
    counts: list[tuple[int, int]] = []
    report: list[str] = []
    snapshot.fetch_tensors(tensors, lambda *count: counts.append(count), report.append)
    assert hub.bytes_of(FILE) - header == missing
    assert counts[-1] == (missing, missing)
    assert report == [f"fetching {NAME}: {FILE} (1 of 1, 1.6 MB of 4.8 MB)"]
    assert snapshot.missing(tensors) == {}
    assert_right(hub, snapshot, 3, 4)
    assert not snapshot.path.resolve().stat().st_blocks * 512 > header + missing + 64 * 1024


def test_a_long_range_comes_over_several_connections(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, each in slices; the record has all of it afterwards."""
    monkeypatch.setattr(snapshot_module, "PIECE_BYTES", 700_000)
    monkeypatch.setattr(snapshot_module, "SLICE_BYTES", 100_000)
    monkeypatch.setattr(partial_file, "RECORD_BYTES", 50_000)
    snapshot = open_model()
    tensors = tensors_in(snapshot, 2, 3, 4)
    missing = snapshot.missing(tensors)[FILE]
    hub.asked.clear()
    snapshot.fetch_tensors(tensors)
    assert hub.bytes_of(FILE) == missing
    assert missing / 100_000 <= len(hub.asked) <= missing / 100_000 + 4
    assert snapshot.missing(tensors) == {}
    assert_right(hub, snapshot, 2, 3, 4)


def test_ranges_behind_a_redirection_to_another_host(hub: Hub) -> None:
    """As large hubs do it; what identifies the file is in the redirection."""
    hub.redirects = True
    snapshot = open_model()
    snapshot.fetch_tensors(tensors_in(snapshot, 3))
    assert_right(hub, snapshot, 3)
    assert any(line.startswith(f"GET /cdn/{FILE} bytes=") for line in hub.asked)
    hub.files[FILE] = hub.files[FILE][:-1] + b"x"
    with pytest.raises(ModelError, match=r"sends another file than it described .*\(sha256 "):
        snapshot.fetch_tensors(tensors_in(snapshot, 5))


def test_both_parts_of_a_split_model_are_fetched(hub: Hub) -> None:
    snapshot = open_model(f"{NAME}:Q6_K")
    snapshot.fetch_tensors(tensors_in(snapshot, 0, 1))
    assert_right(hub, snapshot, 0, 1)
    assert all(snapshot.whole_path(file).is_file() for file in snapshot.files)


def test_a_whole_file_is_verified_and_becomes_the_hubs_own(hub: Hub) -> None:
    """Nothing is fetched twice, gaps between the tensors are fetched, and earlier paths stay valid."""
    snapshot = open_model()
    path, tensors = snapshot.path, tensors_in(snapshot, *range(6))
    for tensor in reversed(tensors):
        snapshot.fetch_tensors([tensor])
    assert hub.bytes_of(FILE) == len(hub.files[FILE])
    assert path.read_bytes() == hub.files[FILE]
    assert path.resolve().parent.name == "blobs"
    hub.asked.clear()
    again = open_model()
    assert again.path == Path(constants.HF_HUB_CACHE, "models--somebody--tiny", "snapshots", COMMIT, FILE)
    assert again.path.read_bytes() == hub.files[FILE]
    assert hub.asked == []


def test_wrong_bytes_are_found_when_the_file_is_whole(hub: Hub) -> None:
    """They are removed, because the wrong part can't be found out; another try fetches all."""
    snapshot = open_model()
    tensors, right = tensors_in(snapshot, *range(6)), hub.files[FILE]
    sha256 = snapshot.files[0].sha256
    hub.files[FILE] = right[:-100] + bytes(100)
    hub.tells_sha256 = False  # so that the parts look right
    with pytest.raises(ModelError, match=f"the whole does not have its sha256 {sha256}: the hub .* sent wrong bytes"):
        snapshot.fetch_tensors(tensors)
    hub.files[FILE], hub.tells_sha256 = right, True
    again = open_model()
    again.fetch_tensors(tensors_in(again, *range(6)))
    assert again.path.read_bytes() == right


def test_a_tensor_that_was_not_fetched_is_not_read_as_zeros(hub: Hub) -> None:
    snapshot = open_model()
    tensors = tensors_in(snapshot, 4, 5)
    snapshot.fetch_tensors(tensors[:1])
    check_present(tensors[0])
    with pytest.raises(ModelError, match=rf"{FILE} lacks 8000\d\d bytes of blk.5.weight; start again to fetch them"):
        check_present(tensors[1])
    snapshot.fetch_tensors(tensors_in(snapshot, *range(6)))
    check_present(tensors[1])


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_connection_that_breaks_is_resumed_where_it_broke(hub: Hub) -> None:
    snapshot = open_model()
    header = hub.bytes_of(FILE)
    hub.cut_ranges[FILE] = 300_000
    tensors = tensors_in(snapshot, 4)
    missing = snapshot.missing(tensors)[FILE]
    snapshot.fetch_tensors(tensors)
    assert_right(hub, snapshot, 4)
    lines = [line for line in hub.asked if FILE in line][-3:]
    starts = [int(line.rpartition("=")[2].partition("-")[0]) for line in lines]
    assert [start - starts[0] for start in starts] == [0, 300_000, 600_000]
    assert hub.bytes_of(FILE) - header == missing + (missing - 300_000) + (missing - 600_000)


def test_a_connection_that_never_brings_a_byte_is_given_up(hub: Hub) -> None:
    """What came before is kept, and the next try fetches the rest only."""
    snapshot = open_model()
    tensors = tensors_in(snapshot, 4, 5)
    snapshot.fetch_tensors(tensors[:1])
    hub.cut_ranges[FILE] = 0
    with pytest.raises(ModelError, match=rf"lacks parts of {FILE} of {NAME}@{COMMIT}, and fetching .* breaks off"):
        snapshot.fetch_tensors(tensors)
    hub.cut_ranges.clear()
    hub.asked.clear()
    missing = snapshot.missing(tensors)[FILE]
    assert missing <= tensors[1].num_bytes + 64
    snapshot.fetch_tensors(tensors)
    assert hub.bytes_of(FILE) == missing


@pytest.mark.parametrize("lack", ["answers_ranges", "tells_sha256"])
def test_without_ranges_or_sha256_the_file_is_downloaded_whole(hub: Hub, lack: str) -> None:
    setattr(hub, lack, False)
    report: list[str] = []
    snapshot = open_model(report=report)
    assert hub.fetched() == [FILE]
    assert report == [f"fetching {NAME}: {FILE} (1 of 1, 4.8 MB)"]
    assert snapshot.path.read_bytes() == hub.files[FILE]
    assert snapshot.missing(tensors_in(snapshot, *range(6))) == {}
    hub.asked.clear()
    assert open_model() == snapshot
    assert hub.asked == []


def test_a_hub_that_stops_supporting_ranges(hub: Hub) -> None:
    snapshot = open_model()
    hub.answers_ranges = False
    snapshot.fetch_tensors(tensors_in(snapshot, 5))
    assert hub.fetched() == [FILE]
    assert_right(hub, snapshot, *range(6))
    assert open_model().path.read_bytes() == hub.files[FILE]


@pytest.mark.parametrize("difference", ["has_other_sizes", "has_other_etags", "has_other_commits"])
def test_a_file_that_changed_is_refused(hub: Hub, difference: str) -> None:
    snapshot = open_model()
    setattr(hub, difference, True)
    with pytest.raises(ModelError, match="sends another file than it described"):
        snapshot.fetch_tensors(tensors_in(snapshot, 5))
    assert snapshot.missing(tensors_in(snapshot, 5))


def test_a_disk_without_room_is_not_begun_with(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room for the needed ranges counts, not for the file."""
    snapshot = open_model()
    tensors = tensors_in(snapshot, 5)
    missing = snapshot.missing(tensors)[FILE]
    hub.asked.clear()
    monkeypatch.setattr(snapshot_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=missing - 1))
    with pytest.raises(ModelError, match=r"needs 0\.8 MB more in the cache"):
        snapshot.fetch_tensors(tensors)
    assert hub.asked == []
    monkeypatch.setattr(snapshot_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=missing))
    snapshot.fetch_tensors(tensors)


def test_a_file_without_a_gguf_header_is_refused_at_lookup(hub: Hub) -> None:
    hub.files[FILE] = b"<html>" + bytes(5 * MiB)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        open_model()
    assert hub.bytes_of(FILE) <= 1.1 * MiB


def test_a_long_header_is_fetched_in_few_requests(hub: Hub) -> None:
    """A vocabulary takes megabytes."""
    hub.files[FILE] = gguf(LAYERS, note="x" * 7 * MiB)
    snapshot = open_model()
    assert 7 * MiB < hub.bytes_of(FILE) < 15 * MiB
    assert len(hub.parts()) <= 5
    snapshot.fetch_tensors(tensors_in(snapshot, 5))
    assert_right(hub, snapshot, 5)


# --- the record ------------------------------------------------------------------------------------------------------


def fetch_and_die(monkeypatch_after: int, name: str) -> None:
    """In a process of its own: end without any cleaning up after that many bytes."""
    written = 0
    write = partial_file.RangeWriter.write

    def write_and_die(self: partial_file.RangeWriter, offset: int, data: bytes) -> None:
        nonlocal written
        write(self, offset, data)
        written += len(data)
        if written > monkeypatch_after:
            os.kill(os.getpid(), signal.SIGKILL)

    snapshot = open_model(name)
    partial_file.RECORD_BYTES = 200_000
    partial_file.RangeWriter.write = write_and_die  # type: ignore[method-assign]
    snapshot.fetch_tensors(tensors_in(snapshot, *range(6)))


def test_a_killed_download_fetches_only_the_rest(hub: Hub) -> None:
    """No range is recorded that is not there, and few bytes are fetched a second time."""
    snapshot = open_model()
    process = multiprocessing.get_context("fork").Process(target=fetch_and_die, args=(1_500_000, f"{NAME}:Q4_0"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    present = snapshot.partial_file(snapshot.files[0]).present()
    content = snapshot.path.read_bytes()
    assert present.num_bytes > 1_300_000
    for first, stop in present.pairs:
        assert content[first:stop] == hub.files[FILE][first:stop]
    hub.asked.clear()
    again = open_model()
    again.fetch_tensors(tensors_in(again, *range(6)))
    assert hub.bytes_of(FILE) == len(content) - present.num_bytes
    assert again.path.read_bytes() == hub.files[FILE]


def test_a_process_that_is_killed_before_it_verifies_the_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one does it: everything is there, and nothing is fetched."""
    snapshot = open_model()
    with monkeypatch.context() as patched:
        patched.setattr(snapshot_module._Fetch, "_finish", lambda *_: None)
        snapshot.fetch_tensors(tensors_in(snapshot, *range(6)))
    assert not snapshot.whole_path(snapshot.files[0]).exists()
    hub.asked.clear()
    report: list[str] = []
    again = open_model()
    again.fetch_tensors(tensors_in(again, 0), report=report.append)
    assert (hub.asked, report) == ([], [])
    assert again.whole_path(again.files[0]).read_bytes() == hub.files[FILE]


def test_two_processes_share_a_file(hub: Hub) -> None:
    """Each fetches its layers, and what both need comes once."""
    snapshot = open_model()
    before = hub.bytes_of(FILE)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fetch_layers, args=layers) for layers in ((2, 3, 4), (3, 4, 5))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert_right(hub, snapshot, 2, 3, 4, 5)
    expected = sum(tensor.num_bytes for tensor in tensors_in(snapshot, 2, 3, 4, 5))
    assert hub.bytes_of(FILE) - before <= expected + 1000


def fetch_layers(*layers: int) -> None:
    snapshot = open_model()
    snapshot.fetch_tensors(tensors_in(snapshot, *layers))


def test_data_that_was_removed_is_fetched_again(hub: Hub) -> None:
    """The record does not outlive it. The same after a record that is damaged."""
    snapshot = open_model()
    tensors = tensors_in(snapshot, 5)
    snapshot.fetch_tensors(tensors)
    data = snapshot.partial_file(snapshot.files[0]).path
    data.unlink()
    again = open_model()
    assert set(again.missing(tensors)) == {FILE}
    again.fetch_tensors(tensors)
    assert_right(hub, again, 5)
    data.with_suffix(".json").write_bytes(b"{")
    again = open_model()
    assert set(again.missing(tensors)) == {FILE}
    again.fetch_tensors(tensors)
    assert_right(hub, again, 5)
    assert read_gguf(again.path).name == "tiny-Q4_0"
