"""``docs/how-to/running.md`` and its files in ``examples/running``: commands exist in the real command line, Kubernetes
objects fit the published schemas, and related things have the same name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from swarm.config import load
from swarm.stage.shell import shutdown
from tests.documents import PROGRAMS, Command, commands, parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "running"
CONTAINER, SLURM = FOLDER / "Containerfile", FOLDER / "swarm.slurm"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
OBJECTS = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
OLDEST, NEWEST = "1.31", "1.37"  # of Kubernetes


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for thing in OBJECTS:
        pod = thing["spec"].get("template", {}).get("spec")
        if pod:
            yield from ((pod, each) for each in [*pod["containers"], *pod.get("initContainers", [])])


def lines() -> Iterator[tuple[str, Command]]:
    """Every call of our programs in the files: (where, command). Those on the page: test_documents."""
    for line in _code(SLURM).replace("\\\n", " ").splitlines():
        yield from ((SLURM.name, command) for command in commands(line) if command.words[0] in PROGRAMS)
    (start,) = re.findall(r"^CMD (.*)$", CONTAINER.read_text(), re.MULTILINE)
    yield CONTAINER.name, Command(tuple(yaml.safe_load(start)))
    for service in COMPOSE["services"].values():
        yield "compose.yaml", Command(tuple(service["command"]))
        yield from _probes("compose.yaml", service["healthcheck"]["test"][1:] if "healthcheck" in service else [])
    for _, container in containers():
        yield from _probes("kubernetes.yaml", container["command"])
        for hook in ("livenessProbe", "readinessProbe"):
            yield from _probes("kubernetes.yaml", container.get(hook, {}).get("exec", {}).get("command", []))


def _probes(where: str, words: list[str]) -> Iterator[tuple[str, Command]]:
    if words and words[0] in PROGRAMS:
        yield where, Command(tuple(words))


def _code(path: Path) -> str:
    return "\n".join(re.split(r"(?:^|\s)# ", line)[0] for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("where", "command"), [pytest.param(*each, id=" ".join(each[1].words)[:60]) for each in lines()]
)
def test_every_command_is_one(where: str, command: Command) -> None:
    assert where
    parse(command)


def test_commands_are_found() -> None:
    found = [where for where, _ in lines()]
    assert set(found) == {SLURM.name, CONTAINER.name, "compose.yaml", "kubernetes.yaml"}
    assert [command.name for where, command in lines() if where == SLURM.name] == [
        "swarm broker",
        "swarmctl status",
        "swarmctl invite",
        "swarm worker",
        "swarmctl status",
    ]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("thing", OBJECTS, ids=lambda thing: f"{thing['kind']}-{thing['metadata']['name']}")
def test_the_manifest_fits_kubernetes_schemas(thing: dict[str, Any], version: str) -> None:
    assert kubernetes_validate.validate(thing, version, strict=True) == version


def test_the_schemas_refuse_what_is_wrong() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**OBJECTS[0], "spec": {"cluster": "None"}}, NEWEST, strict=True)


def test_the_manifest_belongs_together() -> None:
    """Selectors choose the pods that are meant, mounts have volumes, probes a port; no settings come by chance."""
    sets = {thing["metadata"]["name"]: thing["spec"] for thing in OBJECTS if thing["kind"] == "StatefulSet"}
    services = {thing["metadata"]["name"]: thing["spec"] for thing in OBJECTS if thing["kind"] == "Service"}
    assert set(sets) == {"swarm-broker", "swarm-worker", "swarm-gateway"}
    for spec in sets.values():
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels == services[spec["serviceName"]]["selector"]
    for pod, container in containers():
        volumes = {each["name"] for each in pod.get("volumes", [])} | {"state"}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        # Kubernetes would put SWARM_PORT and SWARM_SERVICE_HOST there, and we refuse settings that don't exist.
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    (gateway,) = sets["swarm-gateway"]["template"]["spec"]["containers"]
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/ready", "port": gateway["ports"][0]["name"]}
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/health"
    assert sets["swarm-worker"]["template"]["spec"]["terminationGracePeriodSeconds"] > 3 * shutdown.RELEASE_TIMEOUT_S


def test_compose_belongs_together() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        assert set(service.get("depends_on", [])) <= set(services)
        assert service.get("network_mode", "service:broker").removeprefix("service:") in services
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"] or volume.startswith("${MODEL:?")
    build = services["broker"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).resolve() == CONTAINER


def test_settings_in_the_environment_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [*COMPOSE["x-swarm"]["environment"].items()]
    given += [
        (each["name"], each["value"]) for _, one in containers() for each in one.get("env", []) if "value" in each
    ]
    for name, value in given:
        monkeypatch.setenv(name, value)
    assert load(os.devnull).log.format == "json"


def test_the_slurm_script() -> None:
    """bash can parse it; its lines for Slurm stand before the first command, each option known and given once."""
    subprocess.run(["bash", "-n", str(SLURM)], check=True, timeout=10)
    head, _, rest = SLURM.read_text().partition("\nset -euo pipefail\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "#SBATCH" not in rest
    options = dict(
        re.fullmatch(r"#SBATCH --([a-z-]+)=(\S+)", line).groups() for line in head.splitlines() if "#SB" in line
    )  # type: ignore[union-attr,misc]
    assert set(options) == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "mem", "time", "output"}
    assert options["ntasks-per-node"] == "1"
    assert re.fullmatch(r"(\d+-)?\d\d:\d\d:\d\d", options["time"])
    assert re.fullmatch(r"\d+[KMGT]", options["mem"])


def test_the_container_file() -> None:
    """Instructions are known, what it copies is there, and plain image names have no host in them."""
    text = re.sub(r"^#.*\n", "", CONTAINER.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    text = re.sub(r"\n+", "\n", text)
    known = ("FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "USER", "VOLUME", "STOPSIGNAL", "CMD")
    stages: set[str] = set()
    for line in text.strip().splitlines():
        word, rest = line.split(maxsplit=1)
        assert word in known, line
        if word == "FROM":
            image, *more = rest.split()
            assert "/" not in image
            stages |= set(more[1:])
        if word == "COPY":
            *sources, _ = rest.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages
            else:
                assert all((ROOT / source).exists() for source in sources)


@pytest.mark.timeout(1800)
def test_the_container_file_can_be_built() -> None:
    """Where there is a builder that works, and only where it is asked for: it fetches torch."""
    builder = next((found for name in ("podman", "buildah", "docker") if (found := shutil.which(name))), None)
    if builder is None:
        pytest.skip("needs podman, buildah or docker")
    if subprocess.run([builder, "info"], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip(f"{builder} is there, but can't build: {builder} info fails (no daemon?)")
    if not os.environ.get("BUILD_IMAGES"):
        pytest.skip("building fetches gigabytes: BUILD_IMAGES=1 has it done")
    build = [builder, "build", "-f", str(CONTAINER), "-t", "swarm-tried", str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False, timeout=1600)
    assert done.returncode == 0, done.stderr[-2000:]
    asked = ["swarm", "--version"]
    said = subprocess.run(_runs(builder, asked), capture_output=True, text=True, check=True, timeout=100)
    assert said.stdout.startswith("swarm ")


def _runs(builder: str, words: list[str]) -> list[str]:
    """A command in the image that was built; buildah makes a container first."""
    if not builder.endswith("buildah"):
        return [builder, "run", "--rm", "swarm-tried", *words]
    made = subprocess.run([builder, "from", "swarm-tried"], capture_output=True, text=True, check=True, timeout=100)
    return [builder, "run", made.stdout.strip(), "--", *words]
