"""What takes a step in ``hp-muon bench optimizer``: a sharded model with gradients, and its optimizer."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hp_muon_plugin.bench.opt_cases import Case, Model, Weight, gradient, parts_of
from hp_muon_plugin.bench.opt_convention import Convention
from hp_muon_plugin.bench.opt_memory import SHARDED

OURS = "ours"


class Stepper(Protocol):
    """An optimizer."""

    def step(self) -> Any:
        """Update all parameters from their gradients."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders of a case share.

    Attributes:
        case: The model.
        mesh: One axis, or (replicate, shard).
    """

    case: Case
    mesh: DeviceMesh

    @property
    def num_shards(self) -> int:
        """Ranks over which a weight is sharded."""
        return self.mesh.size(self.mesh.ndim - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """What this rank holds of a parameter.

    Attributes:
        weight: The parameter's.
        first: First element.
        value: Elements from there, of any shape; shares memory with the parameter.
        parameter: The parameter.
    """

    weight: Weight
    first: int
    value: torch.Tensor
    parameter: nn.Parameter


class Contender:
    """A sharded model whose gradients are set, not computed.

    Args:
        model: Sharded.
        setting: Case and mesh.
        is_stacked: As the model was made.
        make: The optimizer, from the model.
    """

    def __init__(
        self, model: nn.Module, setting: Setting, make: Callable[[nn.Module], Stepper], *, is_stacked: bool = True
    ) -> None:
        self.model, self._case, self._is_stacked = model, setting.case, is_stacked
        self._step, self._grads = -1, list[torch.Tensor]()  # of the last step only
        self.optimizer = make(model)
        self.runs = list(self._runs())  # after the optimizer, which may lay parameters out anew

    def step(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()

    def prepare(self, step: int) -> None:
        """Set this rank's part of all gradients; an optimizer may spoil them.

        Args:
            step: Which gradients.
        """
        if step != self._step:
            self._step, self._grads = step, list(self._own(step))
        for run, grad in zip(self.runs, self._grads, strict=True):
            self.set_gradient(run, grad)

    def _own(self, step: int) -> Iterator[torch.Tensor]:
        """This rank's part of every gradient; one whole gradient at a time is in memory."""
        for weight, runs in itertools.groupby(self.runs, key=lambda run: run.weight):
            whole = gradient(weight, step).view(-1)
            for run in runs:
                yield whole[run.first : run.first + run.value.numel()].clone()

    def set_gradient(self, run: Run, grad: torch.Tensor) -> None:
        """Set the gradient of one parameter.

        Args:
            run: What this rank holds of it.
            grad: Elements of the gradient, flat; not to be changed.
        """
        local = grad.to(run.value.dtype, copy=True).view(run.value.shape)
        parameter = run.parameter
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        else:
            parameter.grad = local

    def finish(self) -> None:
        """Wait until weights are up to date everywhere."""

    def weights(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """This rank's runs of the weights.

        Returns:
            By name of the weight: first element, and values.
        """
        found: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for run in self._runs():
            found.setdefault(run.weight.full_name, []).append((run.first, run.value.detach().float().clone().view(-1)))
        return found

    def _runs(self) -> Iterator[Run]:
        named = dict(self.model.named_parameters())
        for weight in self._case.weights:
            for name, start, _ in parts_of(
                weight, torch.empty(weight.shape, device="meta"), is_stacked=self._is_stacked
            ):
                parameter = named[f"layers.{weight.layer}.{name}"]
                first, value = _local(parameter)
                yield Run(weight, start + first, value, parameter)


def _local(parameter: nn.Parameter) -> tuple[int, torch.Tensor]:
    info = getattr(parameter, "hp_shard", None)
    if info is not None:
        return info.start, parameter.detach()
    if not isinstance(parameter, DTensor):
        return 0, parameter.detach()
    mesh, first = parameter.device_mesh, 0
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "fully_shard cuts rows"
            length = -(-parameter.shape[0] // mesh.size(axis))
            first = min(length * mesh.get_local_rank(axis), parameter.shape[0]) * parameter[0].numel()
    local: torch.Tensor = parameter.to_local()
    return first, local.detach()


Builder = Callable[[Setting], Contender]


def torch_sharded(
    setting: Setting,
    make: Callable[[nn.Module], Stepper],
    *,
    is_stacked: bool = True,
    kind: type[Contender] = Contender,
    dtype: torch.dtype = torch.float32,
) -> Contender:
    """A model under torch's ``fully_shard``: every layer, and the root.

    Args:
        setting: Case and mesh.
        make: The optimizer, from the model.
        is_stacked: Whether experts are stacked.
        kind: Class of the contender.
        dtype: Of the parameters.

    Returns:
        The contender.
    """
    model = Model(setting.case, is_stacked=is_stacked, dtype=dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=setting.mesh)
    fully_shard(model, mesh=setting.mesh)
    return kind(model, setting, make, is_stacked=is_stacked)


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's optimizer.

    Attributes:
        build: Makes the contender, where the library is installed.
        convention: What its step is.
        module: What is imported.
        requirements: What pip installs for it; empty if torch has it, or if pip cannot.
        no_dependencies: Whether pip leaves out what the requirements require: a library's other parts need more.
        needs_python: Least Python, as (3, 12).
        has_replicas: Whether it runs on a mesh with replicas.
        about: How to get it where pip does not know it, and how it is run here.
        environment: Variables of its ranks.
        venv: Environment that pip makes for it; peers with one name share it.
        copies: Whole float32 models that a rank holds of it, at most.
    """

    build: Builder
    convention: Convention
    module: str
    requirements: tuple[str, ...] = ()
    no_dependencies: tuple[str, ...] = ()
    needs_python: tuple[int, int] = (3, 11)
    has_replicas: bool = True
    about: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    venv: str = "torch"
    copies: float = SHARDED

    @property
    def how_to_get(self) -> str:
        """For a reader who lacks it."""
        wanted = [*self.requirements, *self.no_dependencies]
        command = f"pip install {' '.join(wanted)}, or --install-peers FOLDER" if wanted else ""
        return "; ".join(text for text in (command, self.about) if text)


def parameters_of(model: nn.Module) -> Sequence[nn.Parameter]:
    """Parameters in the order of the model.

    Args:
        model: Whose.

    Returns:
        The parameters.
    """
    return list(model.parameters())
