"""One rank of ``hp-muon bench optimizer``: it does what its driver says, line by line, over a socket.

A line is JSON: ``{"do": "step", "name": ...}``. Each is answered by one line, ``{"error": ...}`` if it failed.
A socket in a folder reaches ranks in other network namespaces, too.
"""

import contextlib
import json
import os
import socket
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_muon_plugin.bench.fsdp_traffic import CountCalls, private_interfaces, sent_bytes
from hp_muon_plugin.bench.opt_cases import parse_case
from hp_muon_plugin.bench.opt_contenders import OURS, Builder, Contender, Setting
from hp_muon_plugin.bench.opt_convention import JUDGED_STEPS
from hp_muon_plugin.bench.opt_memory import return_memory
from hp_muon_plugin.train.environment import Launch
from hp_muon_plugin.train.rank_main import LAUNCHER, die_with

_LEAVES_HOLES = ("case", "build", "judge", "count")
_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What the ranks of one interpreter share.

    Attributes:
        socket: Where the driver listens.
        replicas: Size of the replicate axis.
        nodes: Nodes of the testbed, 0 without it.
        timeout_s: How long a collective may take.
    """

    socket: str
    replicas: int
    nodes: int
    timeout_s: float


class Rank:
    """Contenders of one interpreter on one rank.

    Args:
        plan: What all ranks share.
        mesh: The mesh.
    """

    def __init__(self, plan: LanePlan, mesh: DeviceMesh) -> None:
        self._plan, self._mesh = plan, mesh
        self._setting: Setting | None = None
        self._running: dict[str, Contender] = {}

    def do(self, message: dict[str, Any]) -> dict[str, Any]:
        """Carry out a line.

        Args:
            message: The line.

        Returns:
            The answer.
        """
        name = message.pop("do")
        answer = getattr(self, f"_{name}")(**message) or {}
        if name in _LEAVES_HOLES:
            return_memory()
        return answer

    def _case(self, case: str) -> None:
        self._running.clear()
        self._setting = Setting(parse_case(case, "case"), self._mesh)

    def _build(self, name: str) -> None:
        assert self._setting is not None
        self._running[name] = builder_of(name)(self._setting)

    def _drop(self, name: str) -> None:
        self._running.pop(name, None)

    def _judge(self, name: str, path: str) -> None:
        contender = self._running[name]
        for step in range(JUDGED_STEPS):
            contender.prepare(step)
            contender.step()
        contender.finish()
        torch.save(contender.weights(), path.format(dist.get_rank()))
        dist.barrier()

    def _count(self, name: str) -> dict[str, Any]:
        self._running[name].prepare(JUDGED_STEPS)
        with CountCalls() as counter:
            self._running[name].step()
        calls = counter.calls
        return {"calls": {kind: (number, calls.num_bytes[kind]) for kind, number in calls.num_calls.items()}}

    def _step(self, name: str) -> dict[str, Any]:
        contender = self._running[name]
        contender.prepare(JUDGED_STEPS)
        dist.barrier()
        before = {interface: sent_bytes(interface) for interface in private_interfaces(self._plan.nodes)}
        cpu, wall = time.process_time(), time.perf_counter()
        contender.step()
        took = time.perf_counter() - wall
        dist.barrier()  # what this rank still sends to slower ones is its work too
        spent = time.process_time() - cpu
        sent = {name: (sent_bytes(name) or 0) - (count or 0) for name, count in before.items()}
        return {"cpu": spent, "wall": took, "sent": sent}

    def _rates(self, budget_s: float) -> dict[str, Any]:
        from hp_muon_plugin.bench.machine import measure_rates

        dist.barrier()  # all at once: ranks share the cores as in a step
        device = torch.device("cpu")
        return {clock: asdict(rates) for clock, rates in measure_rates(device, budget_s=budget_s).items()}

    def _link(self) -> dict[str, Any]:
        from hp_muon_plugin.bench.fsdp_race import measure_link

        return dict(zip(("cpu", "wall"), measure_link(), strict=True))


def builder_of(name: str) -> Builder:
    """Who builds a contender; nobody else's library is imported.

    Args:
        name: The contender.

    Returns:
        Its builder.
    """
    if name.startswith(OURS):
        from hp_muon_plugin.bench.opt_ours import STRATEGIES, contenders

        return contenders(STRATEGIES, replicas=2)[name]
    from hp_muon_plugin.bench.opt_everyone import peers

    return peers()[name].build


def join(launch: Launch, *, timeout_s: float) -> None:
    """Join the job.

    Args:
        launch: This process's place.
        timeout_s: How long a collective may take.
    """
    dist.init_process_group(
        "gloo",
        init_method=launch.init_method,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def make_mesh(replicas: int) -> DeviceMesh:
    """The mesh of all ranks: one axis, or (replicate, shard).

    Args:
        replicas: Size of the replicate axis.

    Returns:
        The mesh.
    """
    size = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (size,), mesh_dim_names=_AXES[1:])
    return init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=_AXES)


def main() -> None:
    """Entry point of a rank."""
    if LAUNCHER in os.environ:  # not under the testbed's torchrun
        die_with(int(os.environ[LAUNCHER]))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    plan = LanePlan(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    launch = Launch.from_environment()
    line = socket.socket(socket.AF_UNIX)
    line.connect(plan.socket)
    with line, line.makefile("rw", encoding="utf-8") as stream:
        _say(stream, {"rank": launch.rank})
        try:
            join(launch, timeout_s=plan.timeout_s)
            rank = Rank(plan, make_mesh(plan.replicas))
            for text in stream:
                _say(stream, rank.do(json.loads(text)))
        except Exception as error:  # the driver decides what to do without this rank
            traceback.print_exc()
            _say(stream, {"error": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # others may be inside a collective: no destructors


def _say(stream: Any, answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the driver has given this lane up
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


if __name__ == "__main__":
    main()
