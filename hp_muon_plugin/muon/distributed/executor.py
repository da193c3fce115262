"""Running a share plan: local matrices, and the batches of shared ones with two under way at a time."""

from collections.abc import Generator, Mapping, Set
from dataclasses import dataclass, replace

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.muon.distributed.factored import FactoredBatch
from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.messages import Messages
from hp_muon_plugin.muon.distributed.parts import Parts, in_param
from hp_muon_plugin.muon.distributed.plan import UNDER_WAY, Route, SharePlan
from hp_muon_plugin.muon.distributed.whole import WholeBatch
from hp_muon_plugin.muon.executor import Executor, ParamStep
from hp_muon_plugin.muon.plan import build_plan
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.protocol import Handle, Wire
from hp_muon_plugin.platform.wire import wait_for

_ADDS_UP_GRAMS = (Route.GRAM, Route.GATHERED_GRAM)


@dataclass(slots=True)
class _Running:
    """A batch under way.

    Attributes:
        stages: What is left of it.
        handles: What it waits for next.
        num_stages: How often it has sent.
    """

    stages: Generator[list[Handle]]
    handles: list[Handle]
    num_stages: int = 1

    def advance(self) -> bool:
        """Run it up to its next messages; False if it is done."""
        found = next(self.stages, None)
        self.handles = found or []
        self.num_stages += 1
        return found is not None


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
        self._parts = Parts(plan, axis.index, {}, config.nesterov, workspace)
        self._begun: dict[int, _Running] = {}  # before their step, by number
        self._needs = [frozenset(plan.items[index].param for index in batch.items) for batch in plan.batches]
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

    def next_of(self, params: Set[int]) -> frozenset[int] | None:
        """What :meth:`begin` can begin.

        Args:
            params: Parameters of the plan whose gradients are there.

        Returns:
            Parameters of the first batch that needs no others, or None if there is none, or no buffers for it.
        """
        return None if (number := self._next(params)) is None else self._needs[number]

    def _next(self, params: Set[int]) -> int | None:
        if len(self._begun) == UNDER_WAY:
            return None
        ready = (n for n, needed in enumerate(self._needs) if n not in self._begun and needed <= params)
        return next(ready, None)

    @property
    def has_begun(self) -> bool:
        """Whether batches of the next step are under way."""
        return bool(self._begun)

    def begin(self, params: Set[int], steps: Mapping[int, ParamStep | None]) -> None:
        """Begin a batch before its step. All ranks of the axis do so at the same moments.

        Args:
            params: As of :meth:`next_of`.
            steps: As of :meth:`run`, for what that told; momenta as they will be.
        """
        number = self._next(params)
        assert number is not None
        self._parts.steps, self._parts.is_ahead = steps, True
        self._begun[number] = self._start(self._batches[number], len(self._begun))
        self._parts.steps = {}

    def go_on(self) -> None:
        """Let batches that have begun early send all that needs neither weights nor momenta: sums of Gram matrices.

        All ranks of the axis do so at the same moments.
        """
        for number, running in self._begun.items():
            if self.plan.batches[number].route in _ADDS_UP_GRAMS and running.num_stages == 1:
                running.advance()

    def withdraw(self) -> None:
        """Forget the batches that have begun early: their step does not come. Waits for their messages."""
        begun, self._begun = self._begun, {}
        for running in begun.values():
            wait_for(running.handles, "exchange of a step that does not come over {}", self._axis.axis)
            running.stages.close()

    def run(self, steps: Mapping[int, ParamStep | None]) -> None:
        """Update the weights of one step.

        Args:
            steps: By parameter of the plan, for those of which this rank holds something; its tensors are
                one-dimensional. None for a parameter that is left alone. Momenta are up to date.
        """
        self._parts.steps, self._parts.is_ahead = steps, False
        begun, self._begun = self._begun, {}
        waiting = [batch for number, batch in enumerate(self._batches) if number not in begun]
        running = dict(enumerate(begun.values()))  # by set of buffers
        self._fill(waiting, running)
        self._run_local(steps)  # while the first messages travel
        while running:
            for slot, batch in list(running.items()):
                if not batch.advance():
                    del running[slot]
            self._fill(waiting, running)
        self._parts.steps = {}

    def _fill(self, waiting: list[WholeBatch | FactoredBatch], running: dict[int, _Running]) -> None:
        """Begin batches while there are buffers for them; every rank does so at the same moments."""
        for slot in range(UNDER_WAY):
            if waiting and slot not in running:
                running[slot] = self._start(waiting.pop(0), slot)

    def _start(self, batch: WholeBatch | FactoredBatch, slot: int) -> _Running:
        stages = batch.steps(self._parts, slot)
        return _Running(stages, next(stages))

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
