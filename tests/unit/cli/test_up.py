"""What ``swarm up`` checks and prepares before it starts anything."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.cli.up import devices
from swarm.cli.up.command import ChildCommands, OtherSwarm, check_ports, divide_memory, num_cores
from swarm.cli.up.devices import FoundDevices, Gpu, gpu_memory_share, with_device, with_gpus, worker_memory_share
from swarm.cli.up.http import unavailable_reason
from swarm.cli.up.models import resolve_model, resolve_models, with_adapters
from swarm.cli.up.processes import LogFile
from swarm.cli.up.statedir import BROKER_LOCK, PREFIX, SUPERVISOR_LOCK, hold_lock, remove_stale, state_directory
from swarm.cli.up.summary import DEFAULT_URL, format_loading, format_plan, format_serving
from swarm.config import GatewaySettings, Settings, load
from swarm.errors import ConfigError, ModelError
from swarm.hub import adapter_lookup
from swarm.wire.messages import Json
from tests.files_of_models import TINY_CONFIG, safetensors
from tests.standin_hub import COMMIT

ROOT = Path(__file__).parents[3]
TINY_NAMES = ("model.embed_tokens.weight", "model.layers.0.norm.weight", "model.layers.1.norm.weight")


def run_swarm(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarm", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        cwd="/",
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port below the ephemeral range on which somebody listens."""
    for port in range(12000, 19000):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            listener.listen()
            yield port
            return


@pytest.mark.slow
def test_help_is_light() -> None:
    """No command's help loads torch, transformers or zmq, and the whole command line is there."""
    program = (
        "import sys; from swarm.cli.main import run; code = run(sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'zmq') if m in sys.modules]); sys.exit(code)"
    )
    for arguments in ([], ["--help"], ["up", "--help"], ["worker", "--help"], ["generate", "--help"]):
        process = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout.endswith("[]\n")
        assert "Usage: swarm" in process.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["up", "--model", "/no/such/model"], 1, "there is no directory /no/such/model"),
        (["up", "--adapter", "red=/no/such/adapter"], 1, "there is no directory /no/such/adapter;"),
        (["up", "--adapter", "village=/"], 1, "an adapter is called village, as the model is"),
        (["up", "--adapter", "red=/", "--adapter", "red=/tmp"], 2, "requests select one by its name: rename one (try"),
        (["worker", "--adapter", "red=/", "--adapter", "red=/tmp"], 78, "two adapters are called red"),
        (["up", "--workers", "-1"], 2, "--workers"),
        (["up", "--device", "abacus", "--workers", "0"], 2, "worker.device = 'abacus'"),
        (["up", "--memory-limit", "plenty"], 2, "worker.memory_limit = 'plenty'"),
        (["broker", "--port", "70000"], 78, "broker.port = 70000"),
        (["broker", "--host", "0.0.0.0"], 78, "0.0.0.0"),
        (["worker", "--url", "nowhere"], 78, "client.url = 'nowhere'"),
        (["config", "check", "/no/such/file"], 1, "/no/such/file"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(arguments: list[str], code: int, words: str) -> None:
    """The line names what is wrong; services say with 78 that starting them again won't help."""
    process = run_swarm(*arguments)
    assert process.returncode == code
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert line.startswith("swarm: ")
    assert words in line


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_named(taken_port: int, offset: int) -> None:
    """Either of the two ports, with what to do about it."""
    with pytest.raises(ConfigError, match=rf"port {taken_port} is in use .* --port"):
        check_ports("127.0.0.1", taken_port - offset)


@pytest.mark.slow
def test_up_refuses_a_port_in_use(taken_port: int) -> None:
    """And so does the command, in one line."""
    process = run_swarm("up", "--workers", "0", "--port", str(taken_port))
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith(f"swarm: port {taken_port} is in use")


def test_models_are_checked_before_workers_see_them(tmp_path: Path) -> None:
    """A file, a directory without a model, one without weights, a hub name without a hub: each refused by name."""
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(ModelError, match=r"is neither a directory nor a \.gguf file"):
        resolve_model(Settings(model=str(file)))
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        resolve_model(Settings(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        resolve_model(Settings(model=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(safetensors("embed.weight"))
    with pytest.raises(ModelError, match=r"no usable vocab_size"):
        resolve_model(Settings(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ModelError, match=r"HQQ are not supported; use "):
        resolve_model(Settings(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    (tmp_path / "model.safetensors").write_bytes(safetensors(*TINY_NAMES[:-1]))
    with pytest.raises(ModelError, match=r"has no weights for layer 1; download the missing files again"):
        resolve_model(Settings(model=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(safetensors(*TINY_NAMES, "model.layers.2.norm.weight"))
    with pytest.raises(ModelError, match=r"has model\.layers\.2\.norm\.weight, but config\.json has 2 layers"):
        resolve_model(Settings(model=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(safetensors(*TINY_NAMES))
    assert resolve_model(Settings(model=str(tmp_path))) == str(tmp_path.resolve())


def settings_with(adapter: str) -> Settings:
    return Settings.model_validate({"worker": {"adapters": [adapter]}})


def test_adapters_are_checked_before_workers_see_them(tmp_path: Path) -> None:
    settings = settings_with(f"red={tmp_path}")
    with pytest.raises(ModelError, match=r"adapter_config\.json is missing; an adapter is a folder in peft's format"):
        with_adapters(settings, "m")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "use_dora": True}))
    with pytest.raises(ModelError, match="an adapter with DoRA"):
        with_adapters(settings, "m")
    config.write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        with_adapters(settings, "m")
    module = "base_model.model.model.layers.0.mlp.up_proj"
    intact = safetensors(f"{module}.lora_A.weight", f"{module}.lora_B.weight")
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(intact)
    assert with_adapters(settings, "m") == settings
    weights.write_bytes(intact[:-4] + struct.pack("<f", math.nan))
    message = rf"has NaN or infinite values in {module}\.lora_B\.weight; load another checkpoint of this adapter"
    with pytest.raises(ModelError, match=message):
        with_adapters(settings, "m")


def test_all_workers_get_the_commit_of_an_adapter_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / COMMIT
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (folder / "adapter_model.safetensors").write_bytes(safetensors("a"))
    monkeypatch.setattr(adapter_lookup, "look_up_adapter", lambda _: folder)
    settings = with_adapters(settings_with("red=owner/name@main"), "m")
    assert settings.worker.adapters == (f"red=owner/name@{COMMIT}",)
    commands = ChildCommands(settings, None, "m", tmp_path, 1, None, verbose=False)
    assert commands("w0")[commands("w0").index("--adapter") + 1] == f"red=owner/name@{COMMIT}"


@pytest.mark.slow
def test_a_hub_name_without_a_hub_is_one_error() -> None:
    """Offline, a name that is not in the cache is refused in one line."""
    process = run_swarm("up", "--model", "somebody/something", HF_HUB_OFFLINE="1")
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert line.startswith("swarm: there is no directory or file somebody/something, ")
    assert "HF_HUB_OFFLINE" in line


def test_children_get_what_is_peculiar_to_them(tmp_path: Path) -> None:
    """Settings become flags that the commands accept; a limit of their own beats the common one."""
    settings = load(None, {"broker.port": 6100, "broker.mode": "batch", "worker.threads": 3, "worker.dtype": "float32"})
    commands = ChildCommands(settings, None, str(tmp_path), tmp_path / "state", 2, 1000, verbose=False)
    broker, worker = " ".join(commands("broker", None)), " ".join(commands("w0", None))
    assert "-P -m swarm" in broker
    assert f"broker --port 6100 --mode batch --dtype float32 --min-workers 2 --state-dir {tmp_path}/state" in broker
    assert f"worker --url tcp://127.0.0.1:6100 --model {tmp_path} --name w0 --device cpu --dtype float32" in worker
    assert "--threads 3 --memory-limit 1000" in worker
    assert "--memory-limit 77" in " ".join(commands("w1", 77))
    on_gpu = " ".join(commands("w2", None, "cuda:1"))
    assert "--device cuda:1" in on_gpu
    assert "--memory-limit" not in on_gpu  # the common one is a share of the machine's memory


def test_several_models_have_a_swarm_each_and_one_gateway(tmp_path: Path) -> None:
    """On ports of their own, with a part of the memory and of the cores."""
    settings = load(None, {"broker.port": 6100, "worker.dtype": "float32"})
    other = OtherSwarm("swarm-b", "/models/b", 6102, 400)
    commands = ChildCommands(settings, None, "/models/a", tmp_path, 2, 600, verbose=False, others=(other,))
    swarm, gateway, worker = (" ".join(commands(name, None)) for name in ("swarm-b", "gateway", "w0"))
    assert "up --no-http --model /models/b --workers 2 --port 6102" in swarm
    assert f"--state-dir {tmp_path}/swarm-b" in swarm
    assert "--memory-limit 400" in swarm
    assert "--url tcp://127.0.0.1:6100 --url tcp://127.0.0.1:6102" in gateway
    assert "--model /models/a" in worker
    assert "--memory-limit 600" in worker
    shares = [int(text.partition("--threads ")[2].split()[0]) for text in (swarm, worker)]
    assert shares == [max(1, num_cores() // 4)] * 2


def test_models_divide_the_memory_in_proportion_to_their_weights() -> None:
    assert divide_memory(1000, [300, 100]) == [750, 250]
    assert divide_memory(1000, []) == [1000]
    assert divide_memory(None, [300, 100]) == [None, None]


@pytest.mark.slow
def test_auto_is_a_device_before_workers_start() -> None:
    """Their memory and the fork server depend on it."""
    assert with_device(load(None, {"worker.device": "auto"})).worker.device in ("cpu", "cuda")
    portable = load(None, {"worker.device": "auto", "worker.bits": "portable"})
    assert with_device(portable).worker.device == "cpu"


TWO_GPUS = (Gpu("cuda:0", "H100", 80 << 30), Gpu("cuda:1", "H100", 40 << 30))


def test_each_gpu_has_a_worker_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have the common limit, if there is one; a further swarm starts its own."""
    monkeypatch.setattr(devices, "find_devices", lambda _: FoundDevices("cuda", TWO_GPUS))
    settings, gpus = with_gpus(load(None))
    assert gpus == TWO_GPUS
    names = tuple(gpu.device for gpu in gpus)
    other = OtherSwarm("swarm-b", "/models/b", 6102, 400)
    commands = ChildCommands(settings, None, "/m", tmp_path, 2, 600, verbose=False, others=(other,), gpus=names)
    worker, swarm = " ".join(commands("gpu1", None, "cuda:1")), " ".join(commands("swarm-b"))
    assert "--name gpu1 --device cuda:1" in worker
    assert "--memory-limit 600" in worker
    assert "--model /models/b --gpu --port 6102" in swarm
    assert commands.forkserver_command() is None


def test_workers_on_a_gpu_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has the GPU for itself takes what is free there."""
    monkeypatch.setattr(devices, "find_devices", lambda _: FoundDevices("cuda", TWO_GPUS))
    on_second = load(None, {"worker.device": "cuda:1"})
    assert worker_memory_share(on_second, 1) is None
    assert worker_memory_share(on_second, 2) == int((40 << 30) * 0.9 / 2)
    assert worker_memory_share(on_second, 1, num_swarms=2) == int((40 << 30) * 0.9)
    assert worker_memory_share(load(None, {"worker.device": "mps"}), 2) is None
    assert gpu_memory_share(TWO_GPUS, 1) is None
    assert gpu_memory_share(TWO_GPUS, 2) == int((40 << 30) * 0.9)


@pytest.mark.slow
def test_gpus_that_are_not_there_are_one_error() -> None:
    """And the number of workers, or a device, contradicts a worker on each."""
    process = run_swarm("up", "--gpu", "--port", "19710", "--no-http", CUDA_VISIBLE_DEVICES="")
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert line.startswith("swarm: --gpu starts a worker on each GPU, and torch finds none on this machine; ")
    assert "give no --device and no --workers" in run_swarm("up", "--gpu", "--workers", "2").stderr


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    """Requests could not choose between them."""
    folders = [tmp_path / place / "tiny" for place in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
        (folder / "model.safetensors").write_bytes(safetensors(*TINY_NAMES))
    with pytest.raises(ConfigError, match="two models are called 'tiny'"):
        resolve_models(Settings(), [str(folder) for folder in folders])


def test_a_private_state_directory_goes_and_a_named_one_stays(tmp_path: Path) -> None:
    """What was named belongs to the user."""
    with state_directory(None) as private:
        assert (private / "logs").is_dir()
    assert not private.exists()
    with state_directory(tmp_path / "mine") as named:
        assert (named / "logs").is_dir()
    assert named.exists()


@pytest.mark.parametrize("has_parent", [True, False])
def test_a_state_directory_that_was_made_is_nobody_elses(tmp_path: Path, has_parent: bool) -> None:
    """Prompts and answers are in it. One that the user made stays as it was made."""
    new = tmp_path / "new" if has_parent else tmp_path / "parent" / "new"
    own = tmp_path / "own"
    before = os.umask(0o022)
    try:
        own.mkdir()
        with state_directory(new), state_directory(own):
            assert [stat.S_IMODE(each.stat().st_mode) for each in (new, new / "logs", own)] == [0o700, 0o700, 0o755]
    finally:
        os.umask(before)


def test_a_state_directory_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    """A path below a file, say."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't be written .* --state-dir"), state_directory(tmp_path / "file" / "x"):
        pass


@pytest.mark.slow
def test_a_state_directory_has_one_supervisor(tmp_path: Path) -> None:
    """A second one is refused, by the command too, with the first one's process in one line; then it is free again."""
    with state_directory(tmp_path):
        with pytest.raises(ConfigError, match=rf"in use by another swarm up \(process {os.getpid()}\)"):
            state_directory(tmp_path).__enter__()
        process = run_swarm("up", "--workers", "0", "--state-dir", str(tmp_path))
        assert (process.returncode, process.stdout) == (1, "")
        (line,) = process.stderr.splitlines()
        assert "in use by another swarm up" in line
    with state_directory(tmp_path):
        pass


@pytest.mark.slow
def test_a_state_directory_has_one_broker(tmp_path: Path) -> None:
    """A second broker is refused with the code that means: starting again won't help. A supervisor is no broker."""
    with hold_lock(tmp_path, BROKER_LOCK, "swarm broker"), state_directory(tmp_path):
        process = run_swarm("broker", "--state-dir", str(tmp_path))
        assert process.returncode == 78
        (line,) = process.stderr.splitlines()
        assert line.startswith(f"swarm: the state directory {tmp_path} is in use by another swarm broker")


def test_only_what_nobody_holds_is_tidied_up(tmp_path: Path) -> None:
    """Left by a killed supervisor: removed. Held by a living one, or without a lock: kept."""
    for name in ("dead", "alive", "young"):
        (tmp_path / (PREFIX + name)).mkdir()
    (tmp_path / (PREFIX + "dead") / SUPERVISOR_LOCK).touch()
    with (tmp_path / (PREFIX + "alive") / SUPERVISOR_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [PREFIX + "alive", PREFIX + "young"]


def test_a_log_tells_lives_apart_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail is the current life's; the error line is the one with the prefix; what is too long is cut, once kept."""
    log = LogFile(tmp_path / "w0.log")
    assert (log.tail(5), log.last_error(), log.new_lines()) == ([], "", [])
    fd = log.open()
    os.write(fd, b"first life\nswarm: the reason\nnoise\n")
    assert log.last_error() == "the reason"
    assert log.new_lines() == ["first life", "swarm: the reason", "noise"]
    os.close(fd)
    fd = log.open()
    os.write(fd, b"second life\nhalf a li")
    assert log.tail(5) == ["second life", "half a li"]
    assert log.new_lines() == ["second life"]
    monkeypatch.setattr("swarm.cli.up.processes.MAX_LOG_BYTES", 10)
    log.truncate_if_long()
    os.write(fd, b"after the cut\n")
    os.close(fd)
    assert (log.tail(5), log.new_lines()) == (["after the cut"], ["after the cut"])
    assert "first life" in (tmp_path / "w0.log.1").read_text()


STAGES: list[Json] = [
    {"worker": "w0", "layers": [0, 3], "weight_bytes": 1 << 20, "resident_bytes": 200 << 20, "kv_capacity": 4096},
    {"worker": "w10", "layers": [3, 8], "weight_bytes": 3 << 20},
]


def test_what_is_shown_while_loading() -> None:
    """Who is there, in natural order and without the lost; then either what is missing or how far loading has come."""
    nodes: Json = {
        "workers": [{"name": n, "state": s} for n, s in (("w10", "member"), ("w2", "member"), ("w1", "out"))]
    }
    assert format_loading({"waits_for": "a worker: none is here"}, {}) == "no worker is here"
    assert (
        format_loading({"waits_for": "2 more of 2 workers"}, {})
        == "no worker is here · waiting for 2 more of 2 workers"
    )
    loading = [{"loaded_bytes": 30, "total_bytes": 50}, {"loaded_bytes": 10, "total_bytes": 50}]
    assert format_loading({"loading": loading}, nodes) == "workers: w2, w10 · 40 % of 100 B loaded"


def test_the_summary_of_a_plan() -> None:
    """Layers are counted as people do, unknown values are marked, the url stands in the example only where needed."""
    assert format_plan({"stages": STAGES}) == [
        "  worker  layers  weights  memory   room",
        "  w0      0–2     1.0 MiB  200 MiB  4096 tokens",
        "  w10     3–7     3.0 MiB  ?        ?",
    ]
    lines = format_serving({"stages": STAGES}, {"model": "demo"}, "tcp://127.0.0.1:5700", "Ctrl-C stops it")
    assert lines[0] == "serving demo on 2 workers"
    assert 'try: swarm generate "Once upon a time"' in lines
    assert "tcp://127.0.0.1:9000" in format_serving({"stages": STAGES}, {}, "tcp://127.0.0.1:9000", "")[-2]


@pytest.mark.parametrize(
    ("architecture", "example"),
    [
        ("TinyForCausalLM", 'try: swarm generate "Once upon a time"'),
        ("TinyModel", 'try: swarm embed "Once upon a time"'),
        ("TinyForSequenceClassification", ""),
    ],
)
def test_what_to_try_is_what_the_model_can_do(architecture: str, example: str, tmp_path: Path) -> None:
    """A classifier serves /v1/rerank alone, which no command uses."""
    labels = {"num_labels": 1, "architectures": [architecture], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | labels))
    (tmp_path / "model.safetensors").write_bytes(
        safetensors(*TINY_NAMES, *(["lm_head.weight"] if "CausalLM" in architecture else []))
    )
    (model,) = resolve_models(Settings(model=str(tmp_path)))
    lines = format_serving({"stages": STAGES}, {}, DEFAULT_URL, "Ctrl-C stops it", model.example)
    assert [line for line in lines if line.startswith("try:")] == ([example] if example else [])


def test_the_private_directory_is_where_temporary_files_go() -> None:
    """So that TMPDIR counts."""
    with state_directory(None) as private:
        assert private.parent == Path(tempfile.gettempdir())


def test_without_its_packages_there_is_no_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says so, and what to install; a port that was chosen changes nothing about that."""
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "fastapi" else found(name))
    for settings in (GatewaySettings(), GatewaySettings(port=1234)):
        assert unavailable_reason(settings, range(5700, 5702)) == (
            "no HTTP: the gateway needs packages that are not installed (fastapi): pip install 'swarm-llm[gateway]'"
        )


def test_the_gateway_s_port_is_none_of_the_swarm_s_own_doors() -> None:
    """Whoever chose it is told before anything starts; who did not has a swarm without HTTP, and is told, too."""
    with pytest.raises(ConfigError, match=r"port 7701 is one of the swarm's own ports \(7700, 7701\); choose another"):
        unavailable_reason(GatewaySettings(port=7701), range(7700, 7702))
    assert unavailable_reason(GatewaySettings(), range(7999, 8001)).startswith("no HTTP: port 8000 is one of")
