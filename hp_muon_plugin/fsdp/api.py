"""``hp_fully_shard``: shard a module's parameters over the ranks of a mesh."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_muon_plugin.config.choices import OuterMode, ShardLayout
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.hooks import Hooks
from hp_muon_plugin.fsdp.mesh import ShardMesh
from hp_muon_plugin.fsdp.parameter import Original
from hp_muon_plugin.fsdp.placed import placed_shards
from hp_muon_plugin.fsdp.policy import MixedPrecision, ScheduleOptions, UnitOptions
from hp_muon_plugin.fsdp.roots import is_unit, join_unit, schedule_of, units_of
from hp_muon_plugin.fsdp.stale import IGNORED, REPLACED, note_replaced
from hp_muon_plugin.fsdp.unfit import refuse_unfit
from hp_muon_plugin.fsdp.unit import Unit
from hp_muon_plugin.layout.bucket import Piece
from hp_muon_plugin.layout.per_param import plan_layouts
from hp_muon_plugin.muon.distributed.shards import LISTEN, SHARDS, GradientListener, ShardOf
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.wire import C10dWire, Wire

Granularity = Callable[[str, nn.Parameter], tuple[int, bool]]
_Kind = tuple[torch.dtype, bool, ShardMesh, AxisGroup]  # type, whether trainable, ranks, those of them that shard it


def default_granularity(name: str, parameter: nn.Parameter) -> tuple[int, bool]:
    """What of a parameter stays whole on one rank.

    Args:
        name: Its name in the unit's module.
        parameter: The whole parameter.

    Returns:
        Elements, and whether they are never cut: a whole matrix of a stack of matrices is never,
        a row of a matrix only if padding would grow past the limit, all else may be.
    """
    if parameter.dim() == 3:
        return max(1, parameter.shape[1:].numel()), True
    return (max(1, parameter.shape[1:].numel()) if parameter.dim() > 1 else 1), False


def hp_fully_shard(
    module: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh | ShardMesh,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecision | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    replicate_params: set[nn.Parameter] | None = None,
    other_meshes: Mapping[nn.Parameter, ShardMesh] | None = None,
    granularity: Granularity = default_granularity,
    divisor: float | None = None,
    max_padding: float = 0.01,
    shard_layout: ShardLayout | str = ShardLayout.flat,
    prefetch: int = 1,
    outer: OuterMode | str = OuterMode.replicate,
    outer_bucket_bytes: int | None = None,
    wire: Wire | None = None,
) -> nn.Module | Sequence[nn.Module]:
    """Shard the parameters of a module that are not in units inside it, as ``fully_shard`` of PyTorch does.

    Apply it to the layers first and to the whole model last; the outermost module is the root. All ranks of the mesh
    must call it with the same arguments and hold the same parameters. Afterwards ``module.parameters()`` are this
    rank's shards, plain tensors, for any optimizer; while the module runs, its attributes are the gathered weights.

    Every unit is reduced in each backward pass that synchronises, so that a parameter may be used by
    some ranks alone; one that no rank used keeps the ``grad`` that it has, None as a rule.

    Args:
        module: Any module. Parameters may be on the meta device; see :func:`initialize`. Several modules of one
            model, such as ``[model.norm, model.output]``, become one unit: gathered when the first one runs, given
            up after the last one, and reduced together. The root is one module.
        mesh: One axis, or two (replicate, shard).
        reshard_after_forward: Whether to give up gathered weights after forward. None: yes, except for
            the root. A number: sharded over so many neighbours between forward and backward, as over the
            ranks of one machine.
        mp_policy: Types; see :class:`MixedPrecision`.
        ignored_params: Left as they are; nothing is done to their gradients.
        replicate_params: Kept whole on every rank; their gradients are summed over all ranks of the mesh.
        other_meshes: Parameters that lie on other ranks than ``mesh``, such as routed experts, and their mesh.
            Give ``divisor`` then, which holds for them too.
        granularity: What of a parameter stays whole: ``(elements, is_never_cut)``.
        divisor: By what summed gradients are divided. None: the number of ranks of the mesh.
        max_padding: Share of padding above which rows may be cut.
        shard_layout: ``flat``: contiguous ranges of all parameters, no copy around collectives. ``per_param``: equal
            chunks of dim 0 of each parameter, as ``fully_shard`` has them; copied around every collective.
        prefetch: For the root: units that are gathered ahead.
        outer: For the root: what replicas do with the sum of their gradients. ``replicate``: all of them
            update all weights. ``broadcast``: the same sum, but each weight is updated by one replica, which
            sends it to the others before the next forward. ``shard``: the same, and gradients are summed
            only where they are used.
        outer_bucket_bytes: For the root: least size of one reduction between replicas. None: an eighth of the
            model's shard, but 1 MiB at least and 32 MiB at most.
        wire: Collectives; None takes torch.distributed.

    Returns:
        ``module``.

    Raises:
        ConfigError: If an argument does not fit the module or the mesh.
    """
    axes = mesh if isinstance(mesh, ShardMesh) else ShardMesh.from_device_mesh(mesh)
    options = UnitOptions(
        reshard_after_forward, mp_policy or MixedPrecision(), divisor, max_padding, ShardLayout(shard_layout)
    )
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    _check(modules, prefetch)
    originals = _originals(modules, ignored_params or set())
    wire, ahead = wire or C10dWire(), ScheduleOptions(prefetch, outer_bucket_bytes)
    kinds = _kinds(originals, axes, replicate_params or set(), other_meshes or {})
    buckets = [
        bucket
        for (_, _, own, axis), members in kinds.items()
        for bucket in _buckets(members, own, axis, options, wire, granularity)
    ]
    near = axes.near(reshard_after_forward) if type(reshard_after_forward) is int else None  # True is another choice
    unit = Unit(modules, buckets, options, near)
    note_replaced(original.parameter for original in originals)
    for parameter in (parameter for bucket in buckets for parameter in bucket.parameters):
        parameter.register(parameter.sharded)
    join_unit(unit, ahead, OuterMode(outer), wire)
    for part in modules:
        setattr(part, SHARDS, partial(_placed, part))
        setattr(part, LISTEN, partial(_listen, part))
        Hooks(unit, part, schedule_of)
    return module


def _placed(module: nn.Module) -> list[ShardOf]:
    return placed_shards(schedule_of(module))


def _listen(module: nn.Module, listener: GradientListener) -> None:
    schedule_of(module).reducer.listen(listener)


def _check(modules: Sequence[nn.Module], prefetch: int) -> None:
    names = [type(module).__name__ for module in modules]
    wrong = [name for module, name in zip(modules, names, strict=True) if not isinstance(module, nn.Module)]
    if wrong or not modules:
        raise ConfigError("module", wrong, "are no modules", "pass a module, or a list of modules")
    for module, name in zip(modules, names, strict=True):
        if is_unit(module):
            raise ConfigError("module", name, "is sharded already", "call hp_fully_shard once per module")
    inner = [id(child) for module in modules for child in module.modules()]
    if len(modules) > 1 and len(inner) > len(set(inner)):
        raise ConfigError("module", names, "have modules in common", "list each module once, and none inside another")
    if prefetch < 0:
        raise ConfigError("prefetch", prefetch, "is negative", "use 0 or more units")


def _named(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """All modules inside, those of several by their place in the list."""
    for place, module in enumerate(modules):
        yield from module.named_modules(prefix="" if len(modules) == 1 else str(place))


def _originals(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Original]:
    units = [unit for module in modules for unit in units_of(module)]
    inner = {id(child) for unit in units for module in unit.modules for child in module.modules()}
    found: dict[int, Original] = {}
    for prefix, child in _named(modules):
        if id(child) in inner:
            continue
        for attribute, parameter in child._parameters.items():
            if parameter is None:
                continue
            if parameter in ignored:
                setattr(parameter, IGNORED, True)
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if hasattr(parameter, "hp_shard"):
                raise ConfigError(
                    "module",
                    name,
                    "is in another unit already",
                    "call hp_fully_shard on the layers first and on the whole model last, and tie weights before",
                )
            if hasattr(parameter, REPLACED):
                raise ConfigError(
                    "module",
                    name,
                    "is tied to a parameter of another unit",
                    "leave both modules out of inner units, so that they belong to the same outer one",
                )
            refuse_unfit(name, parameter)
            found.setdefault(id(parameter), Original(name, parameter, [])).places.append((child, attribute))
    return list(found.values())


def _kinds(
    originals: Sequence[Original],
    mesh: ShardMesh,
    replicated: set[nn.Parameter],
    others: Mapping[nn.Parameter, ShardMesh],
) -> dict[_Kind, list[Original]]:
    """Parameters that may share a bucket."""
    kinds: dict[_Kind, list[Original]] = {}
    for original in originals:
        parameter = original.parameter
        own = others.get(parameter, mesh)
        axis = AxisGroup.single(own.shard.axis) if parameter in replicated else own.shard
        kinds.setdefault((parameter.dtype, parameter.requires_grad, own, axis), []).append(original)
    return kinds


def _buckets(
    members: Sequence[Original],
    mesh: ShardMesh,
    axis: AxisGroup,
    options: UnitOptions,
    wire: Wire,
    granularity: Granularity,
) -> Iterator[Bucket]:
    pieces = [
        Piece(member.name, tuple(member.parameter.shape), *granularity(member.name, member.parameter))
        for member in members
    ]
    for layout in plan_layouts(pieces, axis.size, options.shard_layout, max_padding=options.max_padding):
        names = {placement.name for placement in layout.placements}
        yield Bucket(
            layout,
            [member for member in members if member.name in names],
            mesh,
            wire,
            shard_axis=axis,
            param_dtype=options.precision.param_dtype,
            reduce_dtype=options.precision.reduce_dtype,
            divisor=options.divisor,
        )
