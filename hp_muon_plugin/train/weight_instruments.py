"""Measurements of weights and of what a step adds to them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.megatron.measured import MeasuredParam, summed
from hp_muon_plugin.muon.matrix_view import local_slice, part_tensor
from hp_muon_plugin.muon.scale import update_scale
from hp_muon_plugin.platform.collectives import gathered_objects, sum_over_ranks
from hp_muon_plugin.train.instruments import root

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class WeightRms:
    """RMS of weights, and of what a step changes of them, decay included, by role or by layer and role.

    For updates the weights of this rank are copied before the step and held until it is measured.

    Args:
        params: Parameters of this rank.
        groups: Groups over which they add up.
        device: Where they live.
        has_weights: Whether weights are measured.
        has_updates: Whether updates are measured.
        per_layer: Whether layers are told apart.
    """

    def __init__(
        self,
        params: Sequence[MeasuredParam],
        groups: MegatronGroups,
        device: torch.device,
        *,
        has_weights: bool,
        has_updates: bool,
        per_layer: bool,
    ) -> None:
        self._groups, self._has_weights, self._has_updates = groups, has_weights, has_updates
        counted = [param for param in params if param.is_counted]
        names = [_kind(param.spec, per_layer=per_layer) for param in counted]
        self._kinds = sorted(_union(set(names)))
        self._mains = [param.main for param in counted]
        places = [self._kinds.index(name) for name in names]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._is_expert = torch.tensor([param.spec.is_expert for param in counted], dtype=torch.bool, device=device)
        sizes = torch.tensor([float(main.numel()) for main in self._mains], device=device)
        self._sizes = self._by_kind(sizes).tolist()
        self._before: list[torch.Tensor] = []

    def begin(self) -> None:
        """Nothing."""

    def before_update(self) -> None:
        """Copy the weights."""
        if self._has_updates:
            self._before = [main.detach().clone() for main in self._mains]

    @torch.no_grad()
    def measure(self) -> torch.Tensor:
        """``(kinds,)`` or ``(2 kinds,)``: sums of squares of weights, then of updates."""
        found = []
        if self._has_weights:
            found.append(self._by_kind(self._squares(self._mains)))
        if self._has_updates:
            if self._before:
                torch._foreach_sub_(self._before, [main.detach() for main in self._mains])
            found.append(self._by_kind(self._squares(self._before)))
            self._before = []
        return torch.cat(found)

    def _squares(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if not tensors:
            return self._places.new_zeros(0, dtype=torch.float32)
        return torch.stack(torch._foreach_norm([tensor.detach() for tensor in tensors])).square()

    def _by_kind(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over parameters of one kind, of all ranks."""
        zeros = values.new_zeros(len(self._kinds))
        dense = zeros.index_add(0, self._places, values.masked_fill(self._is_expert, 0.0))
        expert = zeros.index_add(0, self._places, values.masked_fill(~self._is_expert, 0.0))
        return summed(dense, expert, self._groups)

    def metrics(self, values: Sequence[float]) -> dict[str, float]:
        """``rms/weight/ROLE`` and ``rms/update/ROLE``, with ``layer000/`` before the role if asked for."""
        groups = [name for name, is_on in (("weight", self._has_weights), ("update", self._has_updates)) if is_on]
        found = {}
        for index, group in enumerate(groups):
            squares = values[index * len(self._kinds) : (index + 1) * len(self._kinds)]
            for kind, square, size in zip(self._kinds, squares, self._sizes, strict=True):
                found[f"rms/{group}/{kind}"] = root(square, size)
        return found


class SingularValues:
    """Singular values of one matrix of each role that Muon updates: what Newton-Schulz made of it.

    It is the first matrix of the parameter in the last layer (for experts: of the first expert there). Its
    update, without decay, learning rate and scale, is put together from all ranks: every singular value
    should be near 1.

    Args:
        params: Parameters of this rank.
        groups: Groups over which they add up.
        options: Of Muon.
        rates: Parameter groups of the optimizer, for learning rate and decay.
        device: Where the parameters live.
    """

    def __init__(
        self,
        params: Sequence[MeasuredParam],
        groups: MegatronGroups,
        options: HpMuon,
        rates: Sequence[Mapping[str, Any]],
        device: torch.device,
    ) -> None:
        self._groups, self._options, self._device = groups, options, device
        held = {p.spec.name: p for p in params if p.is_counted and p.is_muon and p.spec.view is not None}
        everywhere = _gathered(_last_of_role(param.spec for param in held.values()))
        self.sample = list(_last_of_role(spec for specs in everywhere for spec in specs.values()).values())
        """Specs of the parameters, the same on every rank."""
        self._own = [held.get(spec.name) for spec in self.sample]
        self._rates = {param: group for group in rates for param in group["params"]}
        self._before: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """Nothing."""

    def before_update(self) -> None:
        """Copy this rank's parts of the sample."""
        self._before = [None if own is None else own.main.detach().clone() for own in self._own]

    @torch.no_grad()
    def measure(self) -> torch.Tensor:
        """``(3 sample,)``: smallest and largest singular value, stable rank."""
        sizes = [spec.numel for spec in self.sample]
        flat = torch.zeros(sum(sizes), device=self._device)
        experts = torch.zeros_like(flat)
        wholes = zip(torch.split(flat, sizes), torch.split(experts, sizes), self._own, self._before, strict=True)
        for dense, expert, own, before in wholes:
            if own is not None and before is not None:
                self._place(expert if own.spec.is_expert else dense, own, before)
        self._before = []
        updates = torch.split(summed(flat, experts, self._groups), sizes)
        values = torch.zeros(len(self.sample), 3, device=self._device)
        for index in range(dist.get_rank(), len(self.sample), dist.get_world_size()):
            values[index] = _spread(_first_matrix(self.sample[index], updates[index]))
        sum_over_ranks(values, "singular values")  # all ranks, 12 bytes per matrix; the host waits on CPU
        return values.flatten()

    def _place(self, whole: torch.Tensor, own: MeasuredParam, before: torch.Tensor) -> None:
        """Write this rank's part of ``O = (before * decay - after) / (lr * scale)``."""
        rate = self._rates[own.main]
        lr = float(rate["lr"])
        _, rows, cols = _first_shape(own.spec)
        scale = lr * update_scale(self._options.scale, rows, cols, factor=self._options.scale_factor)
        if scale == 0.0:
            return
        part = whole.new_zeros(own.spec.local_numel)
        moved = before.mul_(1 - lr * float(rate["weight_decay"])).sub_(own.main).div_(scale)
        part[own.start : own.start + moved.numel()] = moved.flatten()
        split = own.spec.split
        if split is None:
            whole.copy_(part)
        else:
            target = local_slice(whole, split, self._groups.axes[split.axis].index)
            target.copy_(part.view(target.shape))

    def metrics(self, values: Sequence[float]) -> dict[str, float]:
        """``singular/min/ROLE``, ``singular/max/ROLE`` and ``singular/stable_rank/ROLE``."""
        found = {}
        for index, spec in enumerate(self.sample):
            for name, value in zip(("min", "max", "stable_rank"), values[3 * index : 3 * index + 3], strict=True):
                found[f"singular/{name}/{spec.role}"] = value
        return found


def _kind(spec: ParamSpec, *, per_layer: bool) -> str:
    layer = _LAYER.search(spec.name) if per_layer else None
    return f"layer{int(layer[1]):03d}/{spec.role}" if layer else str(spec.role)


def _gathered(own: Any) -> list[Any]:
    """What every rank has, at the start of a run. Collective."""
    return gathered_objects(own, "what is measured")


def _union(own: set[str]) -> set[str]:
    return {name for names in _gathered(own) for name in names}


def _last_of_role(specs: Iterable[ParamSpec]) -> dict[str, ParamSpec]:
    """By role: the parameter of the last layer; of several there, the first by name and number."""
    found: dict[str, ParamSpec] = {}
    for spec in specs:
        known = found.get(spec.role)
        if known is None or _order(spec) < _order(known):
            found[spec.role] = spec
    return {role: found[role] for role in sorted(found)}


def _order(spec: ParamSpec) -> tuple[int, list[tuple[int, str]]]:
    layer = _LAYER.search(spec.name)
    pieces = [(int(piece) if piece.isdigit() else -1, piece) for piece in spec.name.split(".")]
    return -int(layer[1]) if layer else 0, pieces


def _first_shape(spec: ParamSpec) -> tuple[int, int, int]:
    assert spec.view is not None
    return spec.view.part_shape(spec.view.parts[0])


def _first_matrix(spec: ParamSpec, whole: torch.Tensor) -> torch.Tensor:
    assert spec.view is not None
    return part_tensor(whole, spec.view, spec.view.parts[0]).reshape(_first_shape(spec))[0]


def _spread(matrix: torch.Tensor) -> torch.Tensor:
    values = torch.linalg.svdvals(matrix)
    return torch.stack([values.min(), values.max(), values.square().sum() / values.max().square()])
