"""One swarm computes in one type of weights: which, and what becomes of a worker that comes with another."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.broker.recovery.restart import REJOIN_S
from swarm.broker.state.journal_snapshot import JournalSnapshot
from swarm.testing import fake_manifest
from swarm.wire.messages import Denied, Hello, Manifest, Order, Setting, Welcome
from tests.unit.broker.bench import Bench, orders, settings

MakeBench = Callable[..., Bench]


def in_dtype(dtype: str, **fields: object) -> Manifest:
    """The same model, whose sizes follow from the type of its weights."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype] << 18
    manifest = fake_manifest()
    sizes = {"layer_bytes": (size,) * manifest.num_layers, "embed_bytes": size, "head_bytes": size}
    return msgspec.structs.replace(manifest, dtype=dtype, **(sizes | fields))


def hello_of(bench: Bench, name: str, dtype: str, setting: str = "auto", **fields: object) -> Hello:
    worker = bench.add(name, manifest=in_dtype(dtype, **fields))
    return worker.hello(dtype=dtype, settings=(Setting("worker.dtype", f'"{setting}"', "the default"),))


def knock(bench: Bench, name: str, dtype: str, setting: str = "auto", **fields: object) -> Order:
    """A worker says Hello; what it is told of whether it is let in."""
    told = orders(bench.tell(name, hello_of(bench, name, dtype, setting, **fields)))
    (answer,) = [order for _, order in told if isinstance(order, Welcome | Denied)]
    return answer


def test_the_first_worker_s_dtype_is_the_swarm_s(bench: Bench) -> None:
    """A worker that leaves the choice open is asked to come in it, is not reported as sent away, and comes."""
    assert isinstance(knock(bench, "w0", "bfloat16"), Welcome)
    denied = knock(bench, "w1", "float32")
    assert isinstance(denied, Denied)
    assert denied.dtype == "bfloat16"
    assert bench.state.newcomers.refused == {}
    assert isinstance(knock(bench, "w1", "bfloat16"), Welcome)


def test_a_worker_set_to_another_dtype_is_refused_and_told_what_to_set(bench: Bench) -> None:
    """It could not come in the swarm's, whatever it is asked."""
    knock(bench, "w0", "bfloat16")
    denied = knock(bench, "w1", "float32", "float32")
    assert denied == Denied(
        reason='this swarm computes in bfloat16, and this worker in float32: set worker.dtype = "bfloat16" there, or '
        'start all workers with worker.dtype = "float32", which every device can'
    )
    assert [each.name for each in bench.state.newcomers.refused.values()] == ["w1"]


def test_an_older_worker_is_refused_in_words(bench: Bench) -> None:
    """It doesn't say what its settings are."""
    knock(bench, "w0", "bfloat16")
    hello = msgspec.structs.replace(hello_of(bench, "w1", "float32"), settings=())
    ((_, denied),) = orders(bench.tell("w1", hello))
    assert isinstance(denied, Denied)
    assert (denied.dtype, denied.reason[:31]) == ("", "this swarm computes in bfloat16")


def test_float16_needs_a_gpu(bench: Bench) -> None:
    """A CPU, which does not compute in it, is not advised to."""
    knock(bench, "w0", "float16")
    denied = knock(bench, "w1", "float32", "float32")
    assert isinstance(denied, Denied)
    assert denied.reason.endswith(
        'set worker.dtype = "float16" there (on a GPU), or start all workers with '
        'worker.dtype = "float32", which every device can'
    )


@pytest.mark.parametrize("setting", ["auto", "bfloat16"])
def test_the_broker_s_setting_counts_from_the_first_worker_on(make_bench: MakeBench, setting: str) -> None:
    bench = make_bench(settings(dtype="float32"))
    denied = knock(bench, "w0", "bfloat16", setting)
    assert isinstance(denied, Denied)
    assert denied.dtype == ("float32" if setting == "auto" else "")
    assert bench.state.manifest is None
    assert isinstance(knock(bench, "w1", "float32"), Welcome)


ABLE = {"gpu": ("float32", "bfloat16", "float16"), "cpu": ("float32", "bfloat16"), "old": ()}


def introduce(bench: Bench, name: str, dtype: str, able: str) -> list[tuple[str, Order]]:
    """A worker that leaves its dtype open says Hello; who is told what of its membership."""
    told = orders(bench.tell(name, msgspec.structs.replace(hello_of(bench, name, dtype), dtypes=ABLE[able])))
    return [(who, order) for who, order in told if isinstance(order, Welcome | Denied)]


def test_workers_agree_on_a_dtype_that_all_can_compute_in(bench: Bench) -> None:
    """Before there is a plan: a GPU with float16, and then a CPU, for which the GPU changes to float32."""
    introduce(bench, "w0", "float16", "gpu")
    (_, denied), (_, welcome) = introduce(bench, "w1", "float32", "cpu")
    assert denied == Denied(
        reason="worker w1 can't compute in float16, so the swarm computes in float32", dtype="float32"
    )
    assert isinstance(welcome, Welcome)
    ((_, back),) = introduce(bench, "w0", "float32", "gpu")
    assert isinstance(back, Welcome)
    assert bench.state.manifest is not None
    assert bench.state.manifest.dtype == "float32"


@pytest.mark.parametrize(("first", "is_planned"), [("gpu", True), ("old", False)])
def test_a_dtype_stays_once_there_is_a_plan_or_if_a_member_can_t_change(
    bench: Bench, first: str, is_planned: bool
) -> None:
    introduce(bench, "w0", "float16", first)
    bench.state.plans.epoch = int(is_planned)
    ((_, denied),) = introduce(bench, "w1", "float32", "cpu")
    assert isinstance(denied, Denied)
    assert denied.dtype == "float16"


def test_another_model_in_another_dtype_is_another_model(bench: Bench) -> None:
    """Its worker would load all of it anew for nothing."""
    knock(bench, "w0", "bfloat16")
    denied = knock(bench, "w1", "float32", vocab_size=98)
    assert isinstance(denied, Denied)
    assert denied.dtype == ""
    assert denied.reason.startswith("this swarm serves another model: vocab_size")


def test_after_a_restart_the_swarm_s_dtype_stays(make_bench: MakeBench) -> None:
    """The worker that comes first may come in another one only because it was set so; nobody's request ends for a
    worker that leaves the choice open."""
    past = JournalSnapshot(9, ("w0", "w1"), manifest=in_dtype("bfloat16"))
    bench = make_bench(past=past)
    denied = knock(bench, "w0", "float32")
    assert isinstance(denied, Denied)
    assert denied.dtype == "bfloat16"
    assert bench.state.manifest == in_dtype("bfloat16")
    assert isinstance(knock(bench, "w1", "float32", "float32"), Welcome)
    assert bench.state.manifest == in_dtype("float32")
    bench.tick(REJOIN_S)
