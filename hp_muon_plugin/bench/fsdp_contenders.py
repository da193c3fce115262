"""Who runs in ``hp-muon bench fsdp``: ours, torch's ``fully_shard``, and what they are judged and bounded by."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from hp_muon_plugin.bench.fsdp_cases import Case, build
from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.fsdp import MixedPrecision, hp_fully_shard
from hp_muon_plugin.platform.counting import CountingWire
from hp_muon_plugin.platform.wire import C10dWire

OURS, TORCH, ALONE = "ours", "fully_shard", "compute alone"
_LEARNING_RATE = 1e-3
_BETWEEN = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders of a case share.

    Attributes:
        case: The model.
        mesh: One axis, or (replicate, shard).
        has_optimizer: Whether AdamW steps.
    """

    case: Case
    mesh: DeviceMesh
    has_optimizer: bool

    @property
    def num_shards(self) -> int:
        """Ranks over which a weight is sharded."""
        return self.mesh.size(self.mesh.ndim - 1)


class Contender:
    """A model that trains.

    Attributes:
        model: The sharded model.
        counted: Our wire, None for others.
    """

    def __init__(self, model: nn.Module, *, has_optimizer: bool, counted: CountingWire | None = None) -> None:
        self.model, self.counted = model, counted
        # one kernel per parameter for everyone: torch's default on CPU is a loop of a dozen
        self._optimizer = (
            torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True) if has_optimizer else None
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One training step.

        Args:
            tokens: This rank's batch.

        Returns:
            This rank's loss.
        """
        for parameter in self.model.parameters():
            parameter.grad = None
        loss: torch.Tensor = self.model(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()
        return loss.detach()

    def gradients(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """This rank's parts of the gradients.

        Yields:
            Name, first element, and the elements from there, flat.
        """
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, *_part(parameter, parameter.grad)

    def weights(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """This rank's parts of the weights.

        Yields:
            Name, first element, and the elements from there, flat.
        """
        for name, parameter in self.model.named_parameters():
            yield name, *_part(parameter, parameter.detach())


def _part(parameter: nn.Parameter, value: torch.Tensor) -> tuple[int, torch.Tensor]:
    if isinstance(value, DTensor):  # every rank holds the whole after this
        return 0, value.full_tensor().reshape(-1)
    info = getattr(parameter, "hp_shard", None)
    return info.start if info is not None else 0, value.reshape(-1)


Builder = Callable[[Setting], Contender]


def build_ours(setting: Setting, **root: Any) -> Contender:
    """Ours.

    Args:
        setting: What to build.
        root: Options of the root.

    Returns:
        The contender.
    """
    model, wire = build(setting.case), CountingWire(C10dWire())
    policy = MixedPrecision(_BETWEEN, torch.float32) if setting.case.is_bf16 else None
    for layer in model.layers:
        hp_fully_shard(layer, setting.mesh, reshard_after_forward=True, mp_policy=policy, wire=wire)
    hp_fully_shard(model, setting.mesh, mp_policy=policy, wire=wire, **root)
    return Contender(model, has_optimizer=setting.has_optimizer, counted=wire)


def build_torch(setting: Setting) -> Contender:
    """torch's ``fully_shard``.

    Args:
        setting: What to build.

    Returns:
        The contender.
    """
    model = build(setting.case)
    policy = MixedPrecisionPolicy(_BETWEEN, torch.float32) if setting.case.is_bf16 else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=setting.mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=setting.mesh, mp_policy=policy)
    return Contender(model, has_optimizer=setting.has_optimizer)


class _Cast(nn.Module):
    """A model whose weights are used in another type: what mixed precision means, without sharding."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        if self.dtype is None:
            return self.inner(tokens)  # type: ignore[no-any-return]
        cast = {name: parameter.to(self.dtype) for name, parameter in self.inner.named_parameters()}
        return functional_call(self.inner, cast, (tokens,))  # type: ignore[no-any-return]


class Judge(Contender):
    """Unsharded training whose gradients are averaged over all ranks: what everyone has to compute."""

    def __init__(self, setting: Setting) -> None:
        inner = build(setting.case)
        super().__init__(_Cast(inner, _BETWEEN if setting.case.is_bf16 else None), has_optimizer=setting.has_optimizer)
        for parameter in inner.parameters():
            parameter.register_post_accumulate_grad_hook(_average)  # type: ignore[no-untyped-call]
        self.inner = inner


def _average(parameter: torch.Tensor) -> None:
    if dist.get_world_size() > 1:
        dist.all_reduce(parameter.grad)  # whole world, the whole gradient; blocks
    assert parameter.grad is not None
    parameter.grad.div_(dist.get_world_size())


class Alone(Contender):
    """This rank's share of the work without any communication: forward, backward, and AdamW on its shard."""

    def __init__(self, setting: Setting) -> None:
        inner = build(setting.case)
        if setting.case.is_bf16:
            inner.to(_BETWEEN)
        super().__init__(inner, has_optimizer=False)
        numel = sum(parameter.numel() for parameter in inner.parameters()) // setting.num_shards
        self._shard = nn.Parameter(torch.zeros(numel))
        self._shard.grad = torch.zeros(numel)
        self._update = torch.optim.AdamW([self._shard], lr=0.0, fused=True) if setting.has_optimizer else None

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See :meth:`Contender.step`."""
        loss = super().step(tokens)
        if self._update is not None:
            self._update.step()
        return loss


def contenders(replicas: int) -> dict[str, Builder]:
    """Everyone, by name.

    Args:
        replicas: Size of the replicate axis.

    Returns:
        Ours first; with replicas, one contender for each way of updating them.
    """
    if replicas == 1:
        return {OURS: build_ours, TORCH: build_torch}
    ours = {f"{OURS} {mode}": partial(build_ours, outer=mode) for mode in OuterMode}
    return {**ours, TORCH: build_torch}
