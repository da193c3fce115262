"""One rank of ``hp-muon bench fsdp``: ``python -m hp_muon_plugin.bench.fsdp_rank PLAN FOLDER``.

The rank imports torch once and forks for each measurement, so that every contender's memory is that of
a process of its own, and nothing that one case leaves weighs on the next.
"""

import contextlib
import ctypes
import gc
import json
import os
import resource
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_muon_plugin.bench.fsdp_cases import batch, parse_case
from hp_muon_plugin.bench.fsdp_contenders import Builder, Setting, contenders
from hp_muon_plugin.bench.fsdp_race import measure_link, race
from hp_muon_plugin.train.environment import Launch
from hp_muon_plugin.train.rank_main import LAUNCHER, die_with
from hp_muon_plugin.train.worker import quiet_logging, run_and_report

REPLICATE, SHARD = "dp_replicate", "dp_shard"
_MEMORY_STEPS = 4
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks do.

    Attributes:
        cases: As :func:`parse_case` reads them.
        replicas: Size of the replicate axis.
        num_tokens: Tokens per rank and step.
        seconds: About how long to time one case.
        has_optimizer: Whether AdamW steps.
        has_memory: Whether memory is measured, too.
        nodes: Nodes of the testbed, 0 without it.
        timeout_s: How long a collective may take.
    """

    cases: list[str]
    replicas: int
    num_tokens: int
    seconds: float
    has_optimizer: bool
    has_memory: bool
    nodes: int
    timeout_s: float


def run_rank(plan: Plan, folder: Path) -> None:
    """Measure everything; every rank of the job calls it.

    Args:
        plan: What.
        folder: Receives ``found{rank}.{case}.{part}.json``.
    """
    launch = Launch.from_environment()
    quiet_logging(is_first_rank=launch.rank == 0)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    numbers = iter(range(1 << 30))
    everyone = contenders(plan.replicas)

    def fork(part: str, case: int, function: Callable[[Setting], Any]) -> None:
        job = _Job(plan, launch, folder, next(numbers))
        job.run(lambda: job.write(f"{case}.{part}", function(job.setting(plan.cases[case]))))

    for case in range(len(plan.cases)):
        fork("race", case, partial(_race, plan=plan))
        for number, builder in enumerate(everyone.values() if plan.has_memory else ()):
            fork(f"memory{number}", case, partial(peak_memory, builder=builder, num_tokens=plan.num_tokens))


def _race(setting: Setting, *, plan: Plan) -> Any:
    link = measure_link()
    found = race(setting, contenders(plan.replicas), num_tokens=plan.num_tokens, seconds=plan.seconds, nodes=plan.nodes)
    return {"link": link, "found": {name: asdict(entry) for name, entry in found.items()}}


@dataclass(frozen=True, slots=True)
class _Job:
    """One forked measurement."""

    plan: Plan
    launch: Launch
    folder: Path
    number: int

    def run(self, function: Callable[[], None]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            die_with(parent)
            run_and_report(function, self.folder)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            raise RuntimeError(f"measurement {self.number} was killed by signal {-code}")
        if code:
            os._exit(code)  # it has reported why

    def setting(self, case: str) -> Setting:
        """Join the job, and make the mesh."""
        self._join()
        return Setting(parse_case(case, "case"), make_mesh(self.plan.replicas), self.plan.has_optimizer)

    def _join(self) -> None:
        """Each measurement is a job of its own: keys of the last one's processes must not be found again."""
        method, size = self.launch.init_method, self.launch.world_size
        timeout = timedelta(seconds=self.plan.timeout_s)
        if method.startswith("file://"):
            store: Store = FileStore(f"{method.removeprefix('file://')}.{self.number}", size)
        else:  # torchrun's own store
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = PrefixStore(f"measurement{self.number}", TCPStore(host, port, size, False, timeout))
        dist.init_process_group("gloo", store=store, rank=self.launch.rank, world_size=size, timeout=timeout)

    def write(self, name: str, result: Any) -> None:
        """Leave a result for whoever launched the ranks."""
        dist.barrier()
        path = self.folder / f"found{self.launch.rank}.{name}.json"
        path.write_text(json.dumps(result), encoding="utf-8")


def make_mesh(replicas: int) -> DeviceMesh:
    """The mesh of all ranks.

    Args:
        replicas: Size of the replicate axis; 1 for a mesh of one axis.

    Returns:
        The mesh.
    """
    size = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (size,), mesh_dim_names=(SHARD,))
    return init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=(REPLICATE, SHARD))


def peak_memory(setting: Setting, *, builder: Builder, num_tokens: int) -> dict[str, float]:
    """Most resident memory that training takes of a process, above what torch and gloo take.

    Args:
        setting: Case and mesh.
        builder: The contender.
        num_tokens: Tokens per rank and step.

    Returns:
        MiB after construction, and at the peak of training.
    """
    dist.all_reduce(torch.zeros(1))
    dist.barrier()
    before = _resident()["VmRSS"]
    contender = builder(setting)
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    built = _resident()["VmRSS"]
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    for step in range(_MEMORY_STEPS):
        contender.step(batch(dist.get_rank(), step, num_tokens))
    return {"built": built - before, "peak": _resident()["VmHWM"] - before}


def _resident() -> dict[str, float]:
    """Resident memory now and at its peak, MiB. Where there is no /proc both are the peak since the start."""
    path = Path("/proc/self/status")
    if not path.is_file():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"VmRSS": peak, "VmHWM": peak}
    lines = (line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 / _MIB for words in lines if words and words[0] in ("VmRSS:", "VmHWM:")}


def main() -> None:
    """Entry point of a rank."""
    if LAUNCHER in os.environ:  # not under the testbed's torchrun
        die_with(int(os.environ[LAUNCHER]))
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    folder = Path(sys.argv[2])
    run_and_report(lambda: run_rank(plan, folder), folder)


if __name__ == "__main__":
    main()
