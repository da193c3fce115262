"""Muon over parameters that ranks share, and AdamW over their shards, as one torch optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import GradientError
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.clipping import GradNorms
from hp_muon_plugin.muon.distributed.agreement import check_plans
from hp_muon_plugin.muon.distributed.ahead import Ahead, Grads, Reductions, overlap_error
from hp_muon_plugin.muon.distributed.executor import ShareExecutor
from hp_muon_plugin.muon.distributed.measured import measured_rates
from hp_muon_plugin.muon.distributed.plan import SharePlan
from hp_muon_plugin.muon.distributed.planner import BATCH_BYTES, share_plan
from hp_muon_plugin.muon.distributed.replica_plan import ReplicaPlan
from hp_muon_plugin.muon.distributed.replicas import ReplicaExecutor, WeightBroadcast
from hp_muon_plugin.muon.distributed.shards import local_part
from hp_muon_plugin.muon.distributed.share import Share
from hp_muon_plugin.muon.executor import ParamStep
from hp_muon_plugin.muon.gradients import GradientCheck
from hp_muon_plugin.muon.momenta import update_momenta
from hp_muon_plugin.muon.optimizer import HpMuonOptimizer
from hp_muon_plugin.muon.rates import Rates
from hp_muon_plugin.muon.routing import Algorithm
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.protocol import Wire
from hp_muon_plugin.platform.wire import C10dWire


class ShardedMuonOptimizer(HpMuonOptimizer):
    """:class:`HpMuonOptimizer` over shards.

    State is kept for what this rank holds, and for nothing else.

    Args:
        groups: Groups of shards.
        specs: Specs of the whole parameters, by shard.
        config: Options.
        shares: Muon's shards by axis; all ranks of an axis must pass equal parameters.
        axes: Tensor-parallel axes by name that the specs' splits refer to.
        summed: Name of the axis over which parts of a gradient are summed for norms, by shard. None: norms are the
            caller's business.
        agree: As of :class:`HpMuonOptimizer`; where ranks update other parameters, these are ``not_owned``.
        not_owned: Parameters that another replica updates. They have no gradient, no state and no part here.
        device: Where shards lie.
        wire: Collectives; None takes torch.distributed.
        rates: By which ``strategy=auto`` chooses; None takes those of ``config``, or measures as it says.
        max_batch_bytes: See :func:`~hp_muon_plugin.muon.distributed.planner.share_plan`.
        reductions: Tells what backward has reduced, for ``overlap_backward``; None where nothing does.

    Raises:
        ConfigError: If an option is wrong, or ranks of an axis have different plans.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        specs: Mapping[torch.nn.Parameter, ParamSpec],
        config: HpMuon,
        *,
        shares: Sequence[Share],
        device: torch.device,
        axes: Mapping[str, AxisGroup] | None = None,
        summed: Mapping[torch.nn.Parameter, str] | None = None,
        agree: Sequence[AxisGroup] = (),
        not_owned: frozenset[torch.nn.Parameter] = frozenset(),
        wire: Wire | None = None,
        rates: Rates | None = None,
        max_batch_bytes: int = BATCH_BYTES,
        reductions: Reductions | None = None,
    ) -> None:
        self._ahead: Ahead | None = None
        if config.overlap_backward and reductions is None:
            raise overlap_error("this model", "nothing tells while backward runs which gradients are reduced")
        self._shared = {main for share in shares for main in share.mains if main is not None}
        self._shared |= {param for share in shares for param, _ in share.sent}
        self._summed = dict(summed or {})
        self._not_owned = not_owned
        super().__init__(groups, specs, config, axes=axes, agree=agree)
        if self._workspace.device.type != device.type:
            self._workspace = Workspace(device)  # this rank has no shard, and exchanges all the same
        options: dict[str, Any] = {"wire": wire or C10dWire(), "config": config, "workspace": self._workspace}
        sharded = [share for share in shares if not share.is_replicated]
        rates_of_axis = dict.fromkeys([share.axis for share in shares], rates)
        if rates is None and config.rates.measure:
            found = measured_rates(list(rates_of_axis), config.rates, device=device, wire=options["wire"], agree=agree)
            rates_of_axis = dict(zip(rates_of_axis, found, strict=True))
        plans = [
            share_plan(
                s.params,
                config,
                axis=s.axis.axis,
                size=s.axis.size,
                device=device.type,
                rates=rates_of_axis[s.axis],
                max_batch_bytes=max_batch_bytes,
            )
            for s in sharded
        ]
        check_plans([(share.axis, plan) for share, plan in zip(sharded, plans, strict=True)])
        self._shares: list[tuple[Share, ShareExecutor | ReplicaExecutor]] = [
            (share, ShareExecutor(plan, share.axis, dict(axes or {}), **options))
            for share, plan in zip(sharded, plans, strict=True)
        ]
        for share in shares:
            if share.is_replicated:
                specs_of = [param.spec for param in share.params]
                replicated = ReplicaExecutor(
                    specs_of, share.axis, dict(axes or {}), rates=rates_of_axis[share.axis], **options
                )
                self._shares.append((share, replicated))
        self._broadcasts = [
            (
                share,
                WeightBroadcast(
                    share.replicas, [owner for _, owner in share.sent], wire=options["wire"], workspace=self._workspace
                ),
            )
            for share in shares
            if share.replicas is not None
        ]
        if config.overlap_backward and reductions is not None:
            self._begin_early(reductions)

    def _begin_early(self, reductions: Reductions) -> None:
        """Let backward begin the first exchanges; not where this rank's matrices all lie whole on a rank."""
        for share, executor in self._shares:
            if isinstance(executor, ShareExecutor) and executor.plan.batches:
                self._ahead = Ahead(
                    executor,
                    share,
                    look_ahead=partial(self._look_ahead, share),
                    betas=self._betas,
                    name_of=lambda param: self.specs[param].name,
                    reductions=reductions,
                )
                return

    @property
    def has_begun(self) -> bool:
        """Whether exchanges of the next step are under way."""
        return any(isinstance(executor, ShareExecutor) and executor.has_begun for _, executor in self._shares)

    @property
    def share_plans(self) -> tuple[SharePlan, ...]:
        """The plans, one for each shard axis."""
        return tuple(executor.plan for _, executor in self._shares if isinstance(executor, ShareExecutor))

    @property
    def replica_plans(self) -> tuple[ReplicaPlan, ...]:
        """Who updates what of the weights that all ranks of an axis hold, one for each such axis."""
        return tuple(executor.plan for _, executor in self._shares if isinstance(executor, ReplicaExecutor))

    @property
    def num_orthogonalized(self) -> int:
        """Matrices that this rank has orthogonalised since construction."""
        return super().num_orthogonalized + sum(executor.num_orthogonalized for _, executor in self._shares)

    def exchange(self, masters: Mapping[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Go on with other parameters of the same shapes, which somebody has put into the groups.

        Args:
            masters: What to update from now on, by what was updated before; not where replicas send each other weights.
        """
        assert not self._broadcasts, "what is sent would stay the old parameters"
        assert self._ahead is None, "backward would begin with the old parameters"
        self.specs = {masters.get(param, param): spec for param, spec in self.specs.items()}
        self._in_plan = [masters.get(param, param) for param in self._in_plan]
        self._shared = {masters.get(param, param) for param in self._shared}
        self._shares = [
            (
                replace(share, mains=tuple(main if main is None else masters.get(main, main) for main in share.mains)),
                run,
            )
            for share, run in self._shares
        ]

    def withdraw(self) -> None:
        """Forget the exchanges that backward has begun: their step does not come, or not with these gradients."""
        if self._ahead is not None:
            self._ahead.withdraw()

    @contextmanager
    def own_clipping(self) -> Iterator[None]:
        """Gradients of AdamW are scaled inside, and others checked before: they may lie in one buffer."""
        if self._ahead is None:
            yield
            return
        self._ahead.check()
        yield
        self._ahead.note_clipped()

    def check_gradients(self) -> GradientCheck:
        """See :meth:`HpMuonOptimizer.check_gradients`."""
        try:
            return super().check_gradients()
        except GradientError:
            self.withdraw()
            raise

    @torch.no_grad()
    def update(self) -> None:
        """See :meth:`HpMuonOptimizer.update`."""
        if self._ahead is not None:
            self._ahead.check()
        super().update()
        if self._ahead is not None:
            self._ahead.ended()

    def note_skipped(self, why: str) -> None:
        """See :meth:`HpMuonOptimizer.note_skipped`."""
        super().note_skipped(why)
        self.withdraw()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients.

        Args:
            set_to_none: As in torch.
        """
        self.withdraw()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`HpMuonOptimizer.load_state_dict`."""
        self.withdraw()
        super().load_state_dict(state_dict)

    def _clip(self, norms: GradNorms) -> None:
        with self.own_clipping():
            super()._clip(norms)

    def _betas(self) -> dict[torch.nn.Parameter, float]:
        groups = [group for group in self.param_groups if group["algorithm"] == Algorithm.muon]
        return {param: float(group["momentum"]) for group in groups for param in group["params"]}

    def _look_ahead(self, share: Share, grads: Grads) -> dict[int, ParamStep | None]:
        """What parameters bring to the next step, with copies of momenta as they will be."""
        steps: dict[torch.nn.Parameter, ParamStep] = {}
        for group in self.param_groups:
            for param in group["params"] if group["algorithm"] == Algorithm.muon else ():
                if param in grads:
                    momentum = self.state.get(param, {}).get("momentum_buffer")
                    if momentum is None:
                        momentum = torch.zeros_like(param, dtype=self._momentum_dtype)
                    beta = float(group["momentum"])
                    steps[param] = ParamStep(param.detach(), grads[param], momentum.clone(), 1.0, 0.0, beta)
        update_momenta(list(steps.values()))
        return {index: _flat(steps[main]) for index, main in enumerate(share.mains) if main in steps}

    def _planned(self) -> list[torch.nn.Parameter]:
        elsewhere = self._shared | self._not_owned
        return [param for param in self._muon_params() if param not in elsewhere and local_part(param).numel()]

    def _orthogonalize(self, steps: Mapping[torch.nn.Parameter, ParamStep | None]) -> None:
        super()._orthogonalize(steps)
        for share, executor in self._shares:
            executor.run({index: _flat(steps.get(main)) for index, main in enumerate(share.mains) if main is not None})
        for share, broadcast in self._broadcasts:
            broadcast.run([local_part(param.detach()).view(-1) for param, _ in share.sent])

    def _param_step(self, param: torch.nn.Parameter, group: dict[str, Any]) -> ParamStep | None:
        step = super()._param_step(param, group)
        if step is not None:
            step.weight, step.grad, step.momentum = map(local_part, (step.weight, step.grad, step.momentum))
        return step

    def _local(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else local_part(tensor)

    def _is_expected(self, param: torch.nn.Parameter) -> bool:
        return super()._is_expected(param) and local_part(param).numel() > 0

    def _summed_over(self, param: torch.nn.Parameter) -> str | None:
        return self._summed.get(param) or super()._summed_over(param)


def _flat(step: ParamStep | None) -> ParamStep | None:
    if step is None:
        return None
    weight, grad, momentum = (tensor.view(-1) for tensor in (step.weight, step.grad, step.momentum))
    return ParamStep(weight, grad, momentum, step.decay, step.lr, step.beta)
