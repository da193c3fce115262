"""What runs around a module's forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.guards import note_parts
from hp_muon_plugin.fsdp.parts import note_shapes
from hp_muon_plugin.fsdp.schedule import Schedule
from hp_muon_plugin.fsdp.unit import Unit
from hp_muon_plugin.platform.untraced import untraced


class _Boundary(torch.autograd.Function):
    """Identity on a unit's inputs. Its backward runs when backward has left the unit."""

    @staticmethod
    def forward(ctx: Any, leave: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.leave = leave
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.leave()
        return (None, *grads)


class Hooks:
    """Hooks of one module of a unit.

    Args:
        unit: The unit.
        module: The module.
        schedule_of: The unit's schedule; made when a root runs for the first time.
    """

    def __init__(self, unit: Unit, module: nn.Module, schedule_of: Callable[[nn.Module], Schedule]) -> None:
        self._unit, self._schedule_of = unit, schedule_of
        self._boundary_nr = -1
        divided = [bucket for bucket in unit.buckets if bucket.shard_axis.size > 1]
        note_parts(divided)
        note_shapes(module, divided)
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after, prepend=False)

    @untraced  # torch.compile breaks its graph here: collectives and counters are not for a trace
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        unit, has_grad = self._unit, torch.is_grad_enabled()
        precision = unit.options.precision
        if precision.cast_forward_inputs and precision.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), precision.param_dtype)
        with _trainable_memory():
            schedule = self._schedule_of(module)
            unit.begin_run()
            schedule.enter_forward(unit, has_grad=has_grad)
        return self._bounded(schedule, args, kwargs) if has_grad else (args, kwargs)

    def _bounded(self, schedule: Schedule, args: Any, kwargs: Any) -> tuple[Any, Any]:
        flat, spec = tree_flatten((args, kwargs))
        places = [place for place, item in enumerate(flat) if isinstance(item, torch.Tensor) and item.requires_grad]
        self._unit.has_boundary = bool(places)
        self._boundary_nr = -1
        if not places:
            return args, kwargs
        passed = _Boundary.apply(lambda: schedule.leave_backward(self._unit), *(flat[place] for place in places))
        self._boundary_nr = passed[0].grad_fn._sequence_nr()
        for place, tensor in zip(places, passed, strict=True):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, spec)
        return args, kwargs

    @untraced
    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        unit, schedule = self._unit, self._schedule_of(module)
        has_grad = torch.is_grad_enabled()
        dtype = unit.options.precision.output_dtype
        if dtype is not None:
            output = _cast(output, dtype)
        if has_grad:
            for tensor in tree_flatten(output)[0]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._enter_backward(schedule))
                    self._enter_below_views(tensor, schedule)
        if unit.has_run(module):
            with _trainable_memory():
                schedule.leave_forward(unit, has_grad=has_grad)
        return output

    def _enter_below_views(self, output: torch.Tensor, schedule: Schedule) -> None:
        """Enter backward also where the caller changes an output in place: a view loses its hooks then, its base none.

        Args:
            output: May be a view of what the unit computed, or of one of its inputs, to which this does not apply.
            schedule: The unit's.
        """
        node = None if output._base is None else output._base.grad_fn
        if node is not None and node._sequence_nr() > self._boundary_nr:  # made after the boundary: inside the unit
            node.register_prehook(lambda grads: self._enter_backward(schedule))

    def _enter_backward(self, schedule: Schedule) -> None:
        if torch.is_grad_enabled():  # only where the pass makes a graph of itself
            raise ConfigError(
                "create_graph",
                True,
                f"{self._unit.name} is sharded by hp_fully_shard: a backward pass through this one would read weights "
                "that were given up by then",
                "leave out create_graph=True, or do not shard a model whose gradients are differentiated again",
            )
        schedule.enter_backward(self._unit)


@contextmanager
def _trainable_memory() -> Iterator[None]:
    """Buffers that are taken in ``inference_mode`` could not be used in training, which comes later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)
