"""Dividing Newton-Schulz over ranks that all hold the same weights: each matrix is updated once, then sent.

Under DistributedDataParallel, and between the replicas of hybrid sharding, every rank has the same
gradients and the same momenta, and would compute the same polar factors. Here each matrix has one owner,
the longest first to whoever has least; it updates the weight, and broadcasts it. Momenta are kept up to
date on all ranks, so that each rank's state is whole, for checkpoints of one rank.
"""

from collections.abc import Mapping, Sequence

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.replica_plan import is_sent_alone, replica_plan
from hp_muon_plugin.muon.executor import Executor, ParamStep
from hp_muon_plugin.muon.plan import build_plan
from hp_muon_plugin.muon.rates import Rates
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.protocol import Wire
from hp_muon_plugin.platform.wire import wait_for


class WeightBroadcast:
    """Sends parts of weights from their owners to the other replicas: large ones from where they lie, into where they
    lie, and the others in one message per owner and dtype.

    Args:
        axis: The replicas; all of them run it alike.
        owners: Owner of each part.
        wire: Collectives.
        workspace: Buffers.
    """

    def __init__(self, axis: AxisGroup, owners: Sequence[int], *, wire: Wire, workspace: Workspace) -> None:
        self._axis, self._owners, self._wire, self._workspace = axis, tuple(owners), wire, workspace

    def run(self, parts: Sequence[torch.Tensor]) -> None:
        """Send, and wait.

        Args:
            parts: One-dimensional, of equal lengths and types on all replicas; changed where others own them.
        """
        told = list(zip(parts, self._owners, strict=True))
        # each large part from its owner to every replica; the next forward waits
        handles = [self._wire.broadcast(part, o, self._axis) for part, o in told if is_sent_alone(part.numel())]
        packed, arriving = [(part, o) for part, o in told if part.numel() and not is_sent_alone(part.numel())], []
        messages = dict.fromkeys((o, part.dtype) for part, o in packed)
        for owner, dtype in sorted(messages, key=lambda message: (message[0], str(message[1]))):
            mine = [part for part, o in packed if o == owner and part.dtype is dtype]
            numel = sum(part.numel() for part in mine)
            buffer = self._workspace.take(f"share_weights{owner}", (numel,), dtype)
            pieces = list(buffer.split([part.numel() for part in mine]))
            if owner == self._axis.index:
                torch._foreach_copy_(pieces, mine)
            else:
                arriving.append((mine, pieces))
            # an owner's new weights to every replica; the next forward waits
            handles.append(self._wire.broadcast(buffer, owner, self._axis))
        wait_for(handles, "new weights over {}", self._axis.axis)
        for mine, pieces in arriving:
            torch._foreach_copy_(mine, pieces)


class ReplicaExecutor:
    """Updates parameters that all ranks of an axis hold. All of them run it alike.

    Args:
        params: The parameters; none of them is cut over the axis.
        axis: The replicas.
        axes: Tensor-parallel axes by name.
        wire: Collectives.
        config: Options.
        workspace: Buffers.
        rates: By which it is decided what is divided; None takes those of ``config``.
    """

    def __init__(
        self,
        params: Sequence[ParamSpec],
        axis: AxisGroup,
        axes: Mapping[str, AxisGroup],
        *,
        wire: Wire,
        config: HpMuon,
        workspace: Workspace,
        rates: Rates | None = None,
    ) -> None:
        device = workspace.device.type
        self.plan = replica_plan(params, config, axis=axis.axis, size=axis.size, device=device, rates=rates)
        """Who updates what, and what is sent."""
        self._items = self.plan.updated(axis.index)
        self._executor = Executor(
            build_plan([item.spec for item in self._items], config, device=device),
            axes,
            nesterov=config.nesterov,
            device=workspace.device,
            workspace=workspace,
        )
        self._broadcast = WeightBroadcast(axis, self.plan.owners, wire=wire, workspace=workspace)

    @property
    def num_orthogonalized(self) -> int:
        """Matrices that this rank has orthogonalised since construction."""
        return self._executor.num_orthogonalized

    def run(self, steps: Mapping[int, ParamStep | None]) -> None:
        """Update the weights of one step.

        Args:
            steps: By parameter; its tensors are one-dimensional. None for one that is left alone, on all replicas.
        """
        self._executor.run([_stretch(item, steps.get(item.param)) for item in self._items])
        present = [(item, steps.get(item.param)) for item in self.plan.divided]
        self._broadcast.run(
            [step.weight[item.start : item.start + item.numel] if step is not None else _NONE for item, step in present]
        )


_NONE = torch.empty(0)


def _stretch(item: Item, step: ParamStep | None) -> ParamStep | None:
    if step is None:
        return None
    where = slice(item.start, item.start + item.numel)
    return ParamStep(step.weight[where], step.grad[where], step.momentum[where], step.decay, step.lr, step.beta)
