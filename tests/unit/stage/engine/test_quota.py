"""A container's limit of processor time, as the system writes it down."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.stage.engine import cpu_quota


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_least_limit_on_the_way_up(tmp_path: Path) -> None:
    """Version 2: a group's own limit, or that of a group around it, if that is less."""
    (tmp_path / "listing").write_text("0::/pod/worker\n")
    written(tmp_path / "pod", cpu__max="150000 100000\n")
    written(tmp_path / "pod/worker", cpu__max="max 100000\n")
    assert cpu_quota.read_cpu_limit(tmp_path / "listing", tmp_path) == 1.5
    written(tmp_path / "pod/worker", cpu__max="50000 100000\n")
    assert cpu_quota.read_cpu_limit(tmp_path / "listing", tmp_path) == 0.5


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_quotas_of_version_1_are_found(tmp_path: Path, controllers: str) -> None:
    """Each controller has a tree of its own; -1 is no limit."""
    (tmp_path / "listing").write_text(f"5:memory:/other\n4:{controllers}:/worker\n")
    written(tmp_path / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cpu_quota.read_cpu_limit(tmp_path / "listing", tmp_path) is None
    written(tmp_path / "cpu/worker", cpu__cfs_quota_us="2500\n", cpu__cfs_period_us="10000\n")
    assert cpu_quota.read_cpu_limit(tmp_path / "listing", tmp_path) == 0.25


def test_no_such_thing(tmp_path: Path) -> None:
    """Systems without control groups, and files that say nonsense, mean no limit."""
    assert cpu_quota.read_cpu_limit(tmp_path / "missing", tmp_path) is None
    (tmp_path / "listing").write_text("0::/\nnonsense\n")
    written(tmp_path, cpu__max="what?\n")
    assert cpu_quota.read_cpu_limit(tmp_path / "listing", tmp_path) is None
