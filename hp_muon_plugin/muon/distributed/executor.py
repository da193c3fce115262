"""Running a share plan: local matrices, and the batches of shared ones with two under way at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.muon.distributed.factored import FactoredBatch
from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.messages import Messages
from hp_muon_plugin.muon.distributed.parts import Parts, in_param
from hp_muon_plugin.muon.distributed.plan import SharePlan
from hp_muon_plugin.muon.distributed.whole import WholeBatch
from hp_muon_plugin.muon.executor import Executor, ParamStep
from hp_muon_plugin.muon.plan import build_plan
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.protocol import Wire

_UNDER_WAY = 2


class ShareExecutor:
    """Updates this rank's parts of the parameters of one shard axis. All ranks of the axis run it alike.

    Args:
        plan: The plan; equal on all ranks.
        axis: The axis.
        axes: Tensor-parallel axes by name.
        wire: Collectives.
        config: Options.
        workspace: Buffers.
    """

    def __init__(
        self,
        plan: SharePlan,
        axis: AxisGroup,
        axes: Mapping[str, AxisGroup],
        *,
        wire: Wire,
        config: HpMuon,
        workspace: Workspace,
    ) -> None:
        self.plan = plan
        self._axis, self._config, self._workspace = axis, config, workspace
        self._local = [plan.items[index] for index in plan.local(axis.index)]
        self._local_executor = Executor(
            build_plan([item.spec for item in self._local], config, device=workspace.device.type),
            axes,
            nesterov=config.nesterov,
            device=workspace.device,
            workspace=workspace,
        )
        self._batches: list[WholeBatch | FactoredBatch] = []
        for batch in plan.batches:
            messages = Messages(plan, batch)
            if batch.route.has_factors:
                self._batches.append(FactoredBatch(messages, axis, wire=wire, config=config, workspace=workspace))
            else:
                self._batches.append(WholeBatch(messages, axis, axes, wire=wire, config=config, workspace=workspace))

    @property
    def num_orthogonalized(self) -> int:
        """Matrices that this rank has orthogonalised since construction."""
        return self._local_executor.num_orthogonalized + sum(batch.num_orthogonalized for batch in self._batches)

    def run(self, steps: Mapping[int, ParamStep | None]) -> None:
        """Update the weights of one step.

        Args:
            steps: By parameter of the plan, for those of which this rank holds something; its tensors are
                one-dimensional. None for a parameter that is left alone. Momenta are up to date.
        """
        parts = Parts(self.plan, self._axis.index, steps, self._config.nesterov, self._workspace)
        waiting, running = list(self._batches), dict[int, Iterator[None]]()  # by set of buffers
        self._begin(waiting, running, parts)
        self._run_local(steps)  # while the first messages travel
        while running:
            for slot, batch in list(running.items()):
                if not _advance(batch):
                    del running[slot]
            self._begin(waiting, running, parts)

    def _begin(
        self, waiting: list[WholeBatch | FactoredBatch], running: dict[int, Iterator[None]], parts: Parts
    ) -> None:
        """Begin batches while there are buffers for them; every rank does so at the same moments."""
        for slot in range(_UNDER_WAY):
            if waiting and slot not in running:
                running[slot] = waiting.pop(0).steps(parts, slot)
                next(running[slot])

    def _run_local(self, steps: Mapping[int, ParamStep | None]) -> None:
        self._local_executor.run([self._local_step(item, steps.get(item.param)) for item in self._local])

    def _local_step(self, item: Item, step: ParamStep | None) -> ParamStep | None:
        if step is None:
            return None
        first = item.start - self.plan.params[item.param].cuts[self._axis.index]
        (run,) = item.runs(0, item.numel)
        tensors = (step.weight, step.grad, step.momentum)
        if item.stripe is None:
            weight, grad, momentum = (tensor[first : first + item.numel] for tensor in tensors)
        else:
            assert item.spec.view is not None
            run, factors = replace(run, start=first + run.start), item.spec.view.factors
            weight, grad, momentum = (in_param(tensor, run).view(factors) for tensor in tensors)
        return ParamStep(weight, grad, momentum, step.decay, step.lr, step.beta)


def _advance(batch: Iterator[None]) -> bool:
    """Run a batch up to its next messages; False if it is done."""
    try:
        next(batch)
    except StopIteration:
        return False
    return True
