import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The few tests of two threads would spin where three test processes share two cores. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Test processes import much, and ranks, which are forked from them, live for seconds: by default a quarter of the one
# and a twentieth of the other is collecting.
gc.set_threshold(50_000, 20, 100)
sys.path.insert(0, str(Path(__file__).parent))

from made_once import share_in  # noqa: E402  # found by the line above

try:
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
    settings.load_profile("ci")
except ImportError:  # lane environments have no hypothesis
    pass


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several test processes cores of its own, or one core where there are fewer cores than processes.

    Ranks mostly wake each other. On one core, and without preempting who wakes them, that takes a tenth less time
    of the processor: 52 s of it became 46 to 47 s in two files of lane tests.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cores, number = sorted(os.sched_getaffinity(0)), int(worker["workerid"].removeprefix("gw"))
    with contextlib.suppress(OSError):  # a container may forbid it
        os.sched_setaffinity(0, cores[number :: worker["workercount"]] or [cores[number % len(cores)]])
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/lane needs megatron-core and runs once per lane."""
    for item in items:
        if "lane" in Path(str(item.fspath)).relative_to(Path(__file__).parent).parts[:1]:
            item.add_marker(pytest.mark.lane)
        elif item.get_closest_marker("lane"):
            raise pytest.UsageError(f"{item.nodeid} is marked as of lanes, which collect tests/lane alone")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Ranks are forked from this process, and a pool of OpenMP threads does not survive a fork."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard_again() -> Iterator[None]:
    """An interrupted command ignores Ctrl-C while it ends; programs of later tests would be born with that."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _one_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    share_in(tmp_path_factory)


@pytest.fixture(scope="session", autouse=True)
def _done_once_for_ranks(request: pytest.FixtureRequest) -> None:
    """What every rank would do for itself, for ranks without megatron-core, which is imported before all of it."""
    if any(item.get_closest_marker("lane") for item in request.session.items):
        return
    from hp_muon_plugin.fsdp.guards import note_parts

    importlib.import_module("torch._dynamo")  # torch's optimizers import it when the first one is built
    note_parts(())  # hp_fully_shard replaces functions of torch once in a process, and looks for them in all modules


@pytest.fixture(scope="session")
def megatron_on_cpu() -> str:
    """megatron-core imported with the stand-in on; returns its version. Forked ranks inherit it."""
    if importlib.util.find_spec("megatron") is None:  # to import it here would be to import it before its fixes
        pytest.skip("megatron-core is not installed in this environment")
    from hp_muon_plugin.megatron.versions import core_version
    from hp_muon_plugin.train.import_ahead import import_ahead
    from hp_muon_plugin.train.worker import quiet_logging

    import_ahead()  # every rank is a fork of this process, and would import for itself what only ranks import
    quiet_logging(is_first_rank=False)
    return str(core_version())
