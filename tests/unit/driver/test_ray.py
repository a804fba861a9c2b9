"""Engines on a Ray cluster: started where there is room, replaced when lost, refused with the reason; Ray is played."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.driver import delivery, pump, ray_host
from sglang_hs_capture.driver import pool as pool_module
from sglang_hs_capture.driver.delivery import DeliverySettings
from sglang_hs_capture.driver.launch import LaunchPlan
from sglang_hs_capture.driver.pump import PumpSettings
from sglang_hs_capture.driver.ray_cluster import RayEngines, RayPlan, default_resources, replicas_of
from sglang_hs_capture.driver.ray_host import EngineHost, EngineRequest
from sglang_hs_capture.driver.run import CaptureRun, RunSettings
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.errors import ConfigError, EngineError, GuardError
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.session import read_sessions
from tests.unit.fake_ray import FakeCluster
from tests.unit.fake_server import FakeServer, Lines, make_sample

SAMPLES = 60


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(delivery, "RESEND_PAUSE_S", 0.01)
    monkeypatch.setattr(pool_module, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(pool_module, "SETTLE_S", 0.01)
    monkeypatch.setattr(pump, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(pump, "SESSION_INTERVAL_S", 0.02)


def request_for(directory: Path, **given: Any) -> EngineRequest:
    capture = CaptureConfig(output_dir=str(directory))
    settings = {"sglang_args": (), "cpu": True, "nodes": 1, "start_timeout_s": 5.0, "marker": "run-1", **given}
    return EngineRequest("model", capture, **settings)


def run(
    directory: Path,
    cluster: FakeCluster,
    during: Callable[[], Any],
    *,
    engines: int | None,
    nodes: int = 1,
    resources: Mapping[str, float] | None = None,
    replicas: int = 1,
) -> tuple[Summary, list[str]]:
    """A whole run on a cluster that ``cluster`` plays; ``during`` runs beside it."""
    lines = Lines()

    async def main() -> Summary:
        plan = RayPlan("auto", engines, resources or {"CPU": 1}, replicas)
        target = RayEngines(plan, request_for(directory, nodes=nodes))
        settings = RunSettings(
            directory,
            delivery=DeliverySettings(attempts=3, ack_timeout_s=60.0, grace_s=10.0),
            pump=PumpSettings(max_prompts=2),
        )
        samples = [make_sample(f"s{number}", line=number + 1) for number in range(SAMPLES)]
        beside = asyncio.ensure_future(during())
        summary = await asyncio.wait_for(CaptureRun(target, samples, settings, lines).run(), 60)
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        return summary

    return asyncio.run(main()), lines.said


async def requests(cluster: FakeCluster, replica: int, count: int) -> FakeServer:
    """Wait until an engine has had so many requests."""
    while replica not in cluster.servers or len(cluster.servers[replica].requests) < count:
        await asyncio.sleep(0.001)
    return cluster.servers[replica]


async def nothing() -> None:
    """Nothing happens beside the run."""


def check_whole(directory: Path, summary: Summary, cluster: FakeCluster) -> set[str]:
    """Every sample is there once, and nothing of the run is left on the cluster; the writers."""
    assert (summary.captured, summary.dropped, summary.exit_code) == (SAMPLES, [], 0), summary.ended
    index = load_index(directory)
    assert sorted(sample.id for sample in index.samples) == sorted(f"s{number}" for number in range(SAMPLES))
    assert cluster.asked == [], "placement groups were left"
    assert all(handle.dead for handle in cluster.actors), "actors were left"
    assert not list(directory.glob("run-*"))
    assert {record.state for record in read_sessions(directory)} == {"closed"}
    return {sample.parts[0].writer for sample in index.samples}


def test_an_engine_that_is_lost_is_replaced_and_its_work_is_done_by_others(tmp_path, monkeypatch):
    cluster = FakeCluster(room=2, behave=lambda number, rid: "slow" if number % 10 == 9 else "ok")
    cluster.install(monkeypatch)

    async def during() -> None:
        await requests(cluster, 1, 1)
        await requests(cluster, 0, 5)
        cluster.lose(0)
        await requests(cluster, 2, 1)

    summary, said = run(tmp_path, cluster, during, engines=2)
    assert check_whole(tmp_path, summary, cluster) == {"dp0-pp0", "dp1-pp0", "dp2-pp0"}
    (lost,) = [line for line in said if line.startswith("Lost the engine")]
    assert "ActorDiedError: The actor died unexpectedly." in lost
    assert [start[0] for start in cluster.started] == [0, 1, 2], "a lost engine's number is not used again"


def test_an_engine_whose_server_ends_is_replaced(tmp_path, monkeypatch):
    cluster = FakeCluster(room=1)
    cluster.install(monkeypatch)

    async def during() -> None:
        server = await requests(cluster, 0, 5)
        server.behave = lambda number, rid: "silent"
        cluster.actors[0].host.ended = EngineError("the server ended with exit code 3: out of luck")

    summary, said = run(tmp_path, cluster, during, engines=1)
    assert check_whole(tmp_path, summary, cluster) == {"dp0-pp0", "dp1-pp0"}
    assert any("exit code 3: out of luck" in line for line in said)


def test_as_many_engines_are_started_as_there_comes_to_be_room_for(tmp_path, monkeypatch):
    cluster = FakeCluster(room=1, behave=lambda number, rid: "slow" if number % 5 == 4 else "ok")
    cluster.install(monkeypatch)

    async def during() -> None:
        await requests(cluster, 0, 5)
        assert len(cluster.servers) == 1
        assert len(cluster.asked) == 2, "one more is asked for, and it waits"
        cluster.room = 3

    summary, _ = run(tmp_path, cluster, during, engines=None)
    assert len(check_whole(tmp_path, summary, cluster)) == 3


def test_what_an_engine_takes_of_each_node_is_set_aside(tmp_path, monkeypatch):
    cluster = FakeCluster(room=1)
    cluster.install(monkeypatch)
    resources = {"GPU": 8, "CPU": 4, "rack": 1}
    summary, _ = run(tmp_path, cluster, nothing, engines=1, nodes=2, resources=resources, replicas=2)
    check_whole(tmp_path, summary, cluster)
    assert cluster.started == [(0, "10.0.0.1", 1, "10.0.0.1:2", 0), (0, "10.0.0.1", 1, "10.0.0.1:2", 1)]
    for rank, options in enumerate(cluster.options):
        group, index = options.pop("scheduling_strategy")
        assert (group.bundles, group.strategy) == ([resources] * 2, "STRICT_SPREAD")
        assert index == {"placement_group_bundle_index": rank}
        assert options == {"num_cpus": 4, "num_gpus": 8, "resources": {"rack": 1}}


def test_replicas_of_engines_have_numbers_of_their_own(tmp_path, monkeypatch):
    cluster = FakeCluster(room=2)
    cluster.install(monkeypatch)
    summary, _ = run(tmp_path, cluster, lambda: requests(cluster, 4, 1), engines=2, replicas=4)
    check_whole(tmp_path, summary, cluster)
    assert [start[0] for start in cluster.started] == [0, 4]


def test_an_engine_that_is_refused_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    cluster = FakeCluster(room=1)
    cluster.install(monkeypatch)
    cluster.refuse = GuardError("the server refused to capture: remove --enable-lora")
    summary, _ = run(tmp_path, cluster, nothing, engines=1)
    assert (summary.captured, summary.exit_code) == (0, GuardError.exit_code)
    assert "remove --enable-lora" in summary.ended
    assert len(cluster.started) == 1
    assert cluster.asked == []


def test_engines_that_cannot_be_started_are_tried_a_few_times(tmp_path, monkeypatch):
    cluster = FakeCluster(room=1)
    cluster.install(monkeypatch)
    cluster.refuse = OSError("no such node")
    summary, said = run(tmp_path, cluster, nothing, engines=1)
    assert summary.exit_code == EngineError.exit_code
    assert "no engine can be started on the Ray cluster: OSError: no such node" in summary.ended
    assert len(cluster.started) == 3
    assert "3 engines in a row did not start; no more are tried." in said


def test_a_run_goes_on_with_the_engines_that_are_up_when_others_do_not_start(tmp_path, monkeypatch):
    cluster = FakeCluster(room=1, behave=lambda number, rid: "slow" if number < 6 else "ok")
    cluster.install(monkeypatch)

    async def during() -> None:
        await requests(cluster, 0, 2)
        cluster.refuse = GuardError("not here")
        cluster.room = 9

    summary, said = run(tmp_path, cluster, during, engines=None)
    assert check_whole(tmp_path, summary, cluster) == {"dp0-pp0"}
    assert said.count("An engine did not start: not here") >= 3
    assert "3 engines in a row did not start; no more are tried." in said


def test_a_node_without_the_dataset_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_host, "SHARED_S", 0.0)
    with pytest.raises(EngineError, match=r"10\.0\.0\.7 does not see the dataset .*hs-capture merge"):
        EngineHost(request_for(tmp_path), "10.0.0.7")
    (tmp_path / "run-1").touch()
    EngineHost(request_for(tmp_path), "10.0.0.7")


def test_a_host_starts_its_part_of_an_engine(tmp_path, monkeypatch):
    plans: list[tuple[LaunchPlan, str]] = []

    class Managed:
        def __init__(self, plan: LaunchPlan, directory: Path, name: str) -> None:
            plans.append((plan, name))
            self.plan = plan

        def start(self) -> None:
            pass

        def check_alive(self) -> None:
            raise EngineError("it ended")

        async def wait_ready(self, client: Any, timeout_s: float) -> None:
            assert timeout_s == 5.0

        async def stop(self) -> None:
            pass

    monkeypatch.setattr(ray_host, "ManagedServer", Managed)
    (tmp_path / "run-1").touch()
    request = request_for(tmp_path, nodes=2, sglang_args=("--tp-size", "2", "--api-key", "k"))
    host = EngineHost(request, "10.0.0.7")
    assert host.ports()[0] == "10.0.0.7"
    capture = {**request.capture.to_mapping(), "replica": 3, "run_id": "r"}
    host.start(capture, "10.0.0.7", 30001, "10.0.0.7:40001", 0)
    host.start(capture, "10.0.0.6", 30001, "10.0.0.6:40001", 1)
    assert [name for _, name in plans] == ["server-dp3-node0.log", "server-dp3-node1.log"]
    for (plan, _), expected in zip(
        plans,
        [
            "--host 10.0.0.7 --port 30001 --nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.7:40001 --tp-size 2",
            "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.6:40001 --tp-size 2",
        ],
        strict=True,
    ):
        assert expected in " ".join(plan.command)
        assert (plan.capture.replica, plan.capture.run_id) == (3, "r")
        assert plan.host == "10.0.0.7", "each listens at its own address"
    host.start(capture, "10.0.0.7", 30001, "10.0.0.7:40001", 0)
    assert host.wait_ready() == ("http://10.0.0.7:30001", "k")
    assert str(host.check()) == "it ended"
    host.stop()


def test_a_host_that_started_nothing_says_so(tmp_path):
    (tmp_path / "run-1").touch()
    host = EngineHost(request_for(tmp_path), "10.0.0.7")
    assert "did not start" in str(host.check())
    host.stop()


@pytest.mark.parametrize(
    ("flags", "cpu", "nodes", "expected"),
    [
        ([], False, 1, {"GPU": 1}),
        (["--tp-size", "8", "--pp-size=2"], False, 2, {"GPU": 8}),
        (["--tp", "4", "--dp", "2"], False, 1, {"GPU": 8}),
        (["--tp-size", "8", "--dp-size", "8", "--enable-dp-attention"], False, 1, {"GPU": 8}),
        (["--tp-size", "2"], True, 1, {"CPU": 2}),
    ],
)
def test_an_engine_takes_a_gpu_for_each_of_its_ranks(flags, cpu, nodes, expected):
    assert default_resources(flags, cpu=cpu, nodes=nodes) == expected


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="--ray-nodes 3: an engine of 8 ranks"):
        default_resources(["--tp-size", "8"], cpu=False, nodes=3)
    with pytest.raises(ConfigError, match="--tp-size after '--': expected a number; got 'x'"):
        default_resources(["--tp-size", "x"], cpu=False, nodes=1)


def test_replicas_and_ranks_of_dp_attention_have_numbers():
    assert replicas_of([]) == 1
    assert replicas_of(["--dp-size", "4"]) == 4
    assert replicas_of(["--tp-size", "8", "--attn-dp-size", "8"]) == 8
