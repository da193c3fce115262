"""What measuring costs: reads by the host, and nothing at all in a run without it; and the shares of time."""

from typing import Any

import pytest
import torch
from dist_pool import run_ranks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Monitor, Topology, Train
from hp_muon_plugin.train.setup import Launch
from lane.harness import batches, build, moe, whole_weights
from lane.test_monitor import STEPS, config_of, run_steps


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a device: reads of values by Python and copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in (
            "aten::_local_scalar_dense",
            "aten::item",
            "aten::is_nonzero",
            "aten::equal",
        )
        return func(*args, **(kwargs or {}))


class PythonReads(TorchFunctionMode):
    """``tolist`` and ``cpu`` reach no dispatcher on CPU tensors."""

    NAMES = ("tolist", "cpu", "numpy")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


def _reads(launch: Launch, config: Train) -> list[int]:
    ready, counts = build(launch, config), []
    stream = batches(config, 0, 1)
    for step in (1, 2, 3, 4):
        with HostReads() as reads, PythonReads() as more:
            ready.trainer._monitor.begin(step)
            ready.trainer._step(stream)
        counts.append(reads.count + more.count)
    return counts


@pytest.mark.once
@pytest.mark.parametrize("dp", [None, HpFsdp()], ids=["ddp", "fsdp"])
def test_nothing_is_read_in_a_step_that_is_not_measured_and_one_transfer_in_one_that_is(dp: Any) -> None:
    """The loss is read once per step anyway, and the values travel with it."""
    options = HpMuon(qk_clip=100.0)

    def count(monitor: Monitor) -> list[int]:
        config = config_of(moe(), Topology(), dp, monitor=monitor, optimizer=options)
        config.run.steps = 100
        return run_ranks(1, _reads, config)[0]

    without, measured = count(Monitor()), count(Monitor(interval=2))
    assert min(without) >= 1  # the counter does see reads
    assert measured == without  # steps 1, 2 and 4 are measured


def _neither(launch: Launch) -> Any:
    ready = build(launch, config_of(moe(), Topology(), monitor=Monitor()))
    hooks = sum(len(module._forward_hooks) for module in ready.model.modules())
    return hooks, run_steps(ready, 2)


@pytest.mark.once
def test_off_is_off() -> None:
    hooks, metrics = run_ranks(1, _neither)[0]
    assert hooks == 0
    assert metrics == [{}, {}]


def _weights_after(launch: Launch, config: Train) -> Any:
    ready = build(launch, config)
    run_steps(ready, STEPS)
    return ready.losses, whole_weights(ready)


@pytest.mark.once
def test_measuring_changes_nothing() -> None:
    losses, weights = run_ranks(2, _weights_after, config_of(moe(), Topology(ep=2), monitor=Monitor()))[0]
    same, measured = run_ranks(2, _weights_after, config_of(moe(), Topology(ep=2)))[0]
    assert losses == same
    assert all(torch.equal(weights[name], measured[name]) for name in weights)


def _times(launch: Launch, dp: Any) -> Any:
    import torch.distributed as dist

    wait = dist.Work.wait
    ready = build(launch, config_of(moe(), Topology(ep=2), dp))
    metrics = run_steps(ready, 2)[-1]
    return metrics, dist.Work.wait is wait


@pytest.mark.once
@pytest.mark.parametrize("dp", [None, HpFsdp()], ids=["ddp", "fsdp"])
def test_shares_of_time(dp: Any) -> None:
    for metrics, is_restored in run_ranks(2, _times, dp):
        assert is_restored
        assert 0 < metrics["time/newton_schulz_ms"] < metrics["time/optimizer_ms"] < metrics["time/step_ms"]
        assert 0 < metrics["time/communication_ms"] < metrics["time/step_ms"]
        for name, share in metrics.items():
            assert not name.startswith("share/") or 0 < share < 1
        wanted = metrics["time/newton_schulz_ms"] / metrics["time/optimizer_ms"]
        assert metrics["share/newton_schulz_of_optimizer"] == pytest.approx(wanted)
