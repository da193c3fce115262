"""Muon for matrices and AdamW for the rest, as one torch optimizer."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hp_muon_plugin.config.checks import check_optimizer
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.blockwise import warn_of_blockwise
from hp_muon_plugin.muon.clipping import GradNorms, clip_gradients
from hp_muon_plugin.muon.copying import Copyable
from hp_muon_plugin.muon.executor import Executor, ParamStep
from hp_muon_plugin.muon.gradients import (
    OF_ANOTHER_RANK,
    Gradient,
    GradientCheck,
    check_gradients,
    listed,
    refuse,
    unfrozen_names,
)
from hp_muon_plugin.muon.loading import refuse_others
from hp_muon_plugin.muon.momenta import update_momenta
from hp_muon_plugin.muon.plan import MuonPlan, build_plan
from hp_muon_plugin.muon.routing import Algorithm
from hp_muon_plugin.muon.scalar import SharedAdamW, adamw_defaults
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.untraced import untraced

logger = logging.getLogger(__name__)

MOVING_AVERAGE = "moving_average"
SUM = "sum"


class HpMuonOptimizer(Copyable):
    """Muon and AdamW over one list of parameter groups.

    Every group says which algorithm updates it (``algorithm``: ``muon`` or ``adamw``) and has its
    own ``lr`` and ``weight_decay``, and Muon's groups their ``momentum``; schedulers may write them at
    any time. Weight decay is decoupled: a weight shrinks by ``1 - lr * weight_decay`` whatever its
    shape. Muon keeps one momentum per weight and nothing else.

    Args:
        groups: Groups as torch takes them, each with ``params`` and ``algorithm``.
        specs: Spec of every parameter.
        config: Options.
        axes: Mesh axes by name that the specs' splits refer to.
        agree: Axes over which ranks must agree on missing and non-finite gradients. Every rank of
            them has the same parameter list.

    Raises:
        ConfigError: If an option is wrong.
    """

    _not_owned: frozenset[torch.nn.Parameter] = frozenset()  # other ranks have their gradients

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        specs: Mapping[torch.nn.Parameter, ParamSpec],
        config: HpMuon,
        *,
        axes: Mapping[str, AxisGroup] | None = None,
        agree: Sequence[AxisGroup] = (),
    ) -> None:
        check_optimizer(config)
        self.config = config
        self.specs = dict(specs)
        self.grad_norms_last: GradNorms | None = None
        """Norms of the last :meth:`step`, before clipping, for metrics."""
        self.skipped_steps = 0
        """Steps that were left out, for example because of a NaN or infinite gradient."""
        self._agree = tuple(agree)
        self._axes = {name: axis for name, axis in (axes or {}).items() if axis.size > 1}
        self._all_axes = dict(axes or {})
        self._adamw = SharedAdamW()
        super().__init__([self._complete(dict(group)) for group in groups], defaults={"algorithm": "muon"})
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        self._workspace = Workspace(device)
        self._in_plan = self._planned()
        self._is_built = True
        self._executor = self._make_executor([self.specs[p] for p in self._in_plan])
        warn_of_blockwise(config, self.specs.values())

    def _make_executor(self, specs: Sequence[ParamSpec]) -> Executor:
        device = self._workspace.device
        return Executor(
            build_plan(list(specs), self.config, device=device.type),
            self._all_axes,
            nesterov=self.config.nesterov,
            device=device,
            workspace=self._workspace,
        )

    @property
    def _is_of_several_ranks(self) -> bool:
        return bool(self._all_axes or self._agree)

    @property
    def plan(self) -> MuonPlan:
        """What a Muon step does on this rank."""
        return self._executor.plan

    @property
    def num_orthogonalized(self) -> int:
        """Matrices that this rank has orthogonalised since construction."""
        return self._executor.num_orthogonalized

    @untraced  # lists of kernels and messages on buffers of its own: a trace gains nothing
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters from their ``.grad``, or none of them.

        Gradients are clipped in place first, as ``clip_grad`` and ``clip_mode`` say.

        Args:
            closure: Computes the loss again, as torch's optimizers take it.

        Returns:
            What the closure returned, or None.

        Raises:
            GradientError: If gradients are missing on some ranks only, or as configured.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check = self.check_gradients()
        if check.is_finite:
            self._clip(check.norms)
            self.update()
        return loss

    def check_gradients(self) -> GradientCheck:
        """Decide whether this step's gradients are usable; count and report a step that is not.

        Returns:
            The finding, the same on every rank of ``agree``.

        Raises:
            GradientError: As :meth:`step` does.
        """
        gradients = [
            Gradient(self.specs[p].name, self._local(p.grad), algorithm, self._summed_over(p), self._is_expected(p))
            for algorithm, params in ((Algorithm(group["algorithm"]), group["params"]) for group in self.param_groups)
            for p in params
        ]
        check = check_gradients(gradients, agree=self._agree, axes=self._axes, unfrozen=self.unfrozen())
        names = [gradient.name for gradient in gradients]
        refuse(check, names, missing=self.config.missing_grad, non_finite=self.config.non_finite)
        self.grad_norms_last = check.norms
        if not check.is_finite:
            self.note_skipped(f"NaN or infinite gradient in {listed(check.non_finite) or OF_ANOTHER_RANK}")
        return check

    def unfrozen(self) -> list[str]:
        """Names of parameters that require a gradient now, and did not when the optimizer was built."""
        return unfrozen_names(self.specs)

    def note_skipped(self, why: str) -> None:
        """Count a skipped step and say why.

        Args:
            why: The reason, for the log.
        """
        self.skipped_steps += 1
        logger.warning("step skipped, nothing changed: %s", why)

    @torch.no_grad()
    def update(self) -> None:
        """Update from ``.grad`` as it stands, without looking at it or clipping it."""
        steps: dict[torch.nn.Parameter, ParamStep | None] = {}
        for group in self.param_groups:
            if group["algorithm"] == Algorithm.muon:
                steps |= {p: self._param_step(p, group) for p in group["params"]}
        update_momenta([step for step in steps.values() if step is not None])
        self._orthogonalize(steps)
        scalar = [group for group in self.param_groups if group["algorithm"] == Algorithm.adamw]
        self._adamw.step(scalar, self.state)

    def _orthogonalize(self, steps: Mapping[torch.nn.Parameter, ParamStep | None]) -> None:
        """Update Muon's weights, their momenta being up to date."""
        self._executor.run([steps.get(p) for p in self._in_plan])

    def _clip(self, norms: GradNorms) -> None:
        grads = [
            (Algorithm(group["algorithm"]), grad)
            for group in self.param_groups
            for p in group["params"]
            if (grad := self._local(p.grad)) is not None
        ]
        clip_gradients(grads, norms, clip_grad=self.config.clip_grad, mode=self.config.clip_mode)

    def _local(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's part of a gradient, as a plain tensor."""
        return tensor

    def _is_expected(self, param: torch.nn.Parameter) -> bool:
        """Whether this rank updates some of a parameter, so that it should have a gradient."""
        return param not in self._not_owned

    def _summed_over(self, param: torch.nn.Parameter) -> str | None:
        """The axis whose ranks hold parts of a parameter's gradient."""
        split = self.specs[param].split
        return split.axis if split else None

    def init_state(self) -> None:
        """Create all optimizer state now, zeros, as loading a distributed checkpoint needs it."""
        for group in self.param_groups:
            for param in group["params"]:
                if group["algorithm"] == Algorithm.muon:
                    self._momentum(param)
                elif not self.state[param]:
                    self.state[param].update(
                        step=torch.zeros((), dtype=torch.float32),
                        exp_avg=torch.zeros_like(param),
                        exp_avg_sq=torch.zeros_like(param),
                    )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave.

        Momentum keeps its saved value in the configured type, whatever the weight's is; its decay and the algorithm
        of each group are this run's. One that was accumulated as a sum (``m = momentum * m + grad``, as in dion or
        Moonlight) is converted to the moving average that this optimizer keeps.

        Args:
            state_dict: From this class, or from another Muon with the same groups.
        """
        refuse_others(state_dict, self.param_groups, self.specs)
        live = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            value = state_dict["state"].get(saved_id, {}).get("momentum_buffer")
            if value is not None:
                self.state[param]["momentum_buffer"] = value.detach().clone().to(param.device, self._momentum_dtype)
        for group, before in zip(self.param_groups, live, strict=True):
            self._adopt(group, before)

    def _adopt(self, group: dict[str, Any], before: dict[str, Any]) -> None:
        """Bring a loaded group to this run's algorithm, momentum and momentum convention."""
        group["algorithm"] = before["algorithm"]
        saved = float(group.get("momentum", self.config.momentum))
        if "momentum" in before:
            group["momentum"] = before["momentum"]
        for key, value in before.items():
            group.setdefault(key, value)
        if group["algorithm"] == Algorithm.muon and group.get("momentum_convention") == SUM:
            for param in group["params"]:
                if "momentum_buffer" in self.state[param]:
                    self.state[param]["momentum_buffer"].mul_(1 - saved)
            group["momentum_convention"] = MOVING_AVERAGE

    def _complete(self, group: dict[str, Any]) -> dict[str, Any]:
        algorithm = group.setdefault("algorithm", Algorithm.muon)
        group["algorithm"] = str(algorithm)
        if algorithm == Algorithm.muon:
            group.setdefault("lr", self.config.lr)
            group.setdefault("weight_decay", self.config.weight_decay)
            group.setdefault("momentum", self.config.momentum)
            group.setdefault("momentum_convention", MOVING_AVERAGE)
        else:
            for key, value in adamw_defaults(self.config).items():
                group.setdefault(key, value)
            self._adamw.complete(group)
        return group

    def _muon_params(self) -> list[torch.nn.Parameter]:
        return [p for group in self.param_groups if group["algorithm"] == Algorithm.muon for p in group["params"]]

    def _planned(self) -> list[torch.nn.Parameter]:
        """Parameters of the executor's plan, in its order."""
        return self._muon_params()

    @property
    def _momentum_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.momentum_dtype)
        return dtype

    def _momentum(self, param: torch.nn.Parameter) -> torch.Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param, dtype=self._momentum_dtype)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer

    def _param_step(self, param: torch.nn.Parameter, group: dict[str, Any]) -> ParamStep | None:
        if param.grad is None:
            return None
        lr = float(group["lr"])
        decay, beta = 1 - lr * float(group["weight_decay"]), float(group["momentum"])
        return ParamStep(param.detach(), param.grad, self._momentum(param), decay, lr, beta)
