"""What this rank holds of a model and its optimizer, and where it lies in the whole: what checkpoints are made of.

Nothing is gathered. A parameter is whole, a tensor-parallel part, or a range of one; the optimizer's state has
the layout of the parameter. Of ranks that hold the same, one writes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import param_is_not_shared

from hp_muon_plugin.checkpoint.ranges import Chunk, held_chunks
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import CheckpointError
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.parameter import Parameter
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.groups import MegatronGroups, megatron_groups
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
from hp_muon_plugin.megatron.sharded_model import HpFsdpModel
from hp_muon_plugin.megatron.specs import chunk_specs

_GROUPED = re.compile(r"\.experts\.\d+-\d+\.weight[12]$")
_RENAMED = (  # names of Transformer Engine or of a later version, and those of megatron-core's local layers
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r".input_layernorm.\1"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r".pre_mlp_layernorm.\1"),
    (re.compile(r"\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$"), r".\1_layernorm.\2"),
    (re.compile(r"\.experts\.linear_fc([12])\.(weight|bias)(\d+)$"), r".experts.local_experts.\3.linear_fc\1.\2"),
    (re.compile(r"^(mtp\.layers\.\d+\.)mtp_model_layer\."), r"\1transformer_layer."),
)


@dataclass(slots=True)
class Held:
    """What this rank holds of one parameter.

    Attributes:
        name: Canonical name.
        spec: The whole parameter.
        start: First element of the rank's tensor-parallel part that it holds.
        chunks: Where these elements lie in the whole.
        weight: The model's parameter, or its shard.
        main: Its float32 master if that is a tensor of its own and this rank updates it.
        state: Live optimizer state of this rank; None if it updates nothing of the parameter.
        group: Its parameter group; None likewise.
        is_written: Whether this rank writes it, of those that hold the same.
    """

    name: str
    spec: ParamSpec
    start: int
    chunks: tuple[Chunk, ...]
    weight: torch.Tensor
    main: torch.Tensor | None = None
    state: dict[str, Any] | None = None
    group: dict[str, Any] | None = None
    is_written: bool = False

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return self.weight.numel()


@dataclass(slots=True)
class _Place:
    """Where a parameter lies, before it is known who updates it.

    Attributes:
        spec: The whole parameter.
        weight: The model's parameter, or its shard.
        start: First element of it, of the tensor-parallel part.
        replicas: Ranks that hold the same and are alike, and this one's place among them; tensor-parallel ones not.
        is_owned: Whether it is up to date here, with all of its state.
    """

    spec: ParamSpec
    weight: torch.nn.Parameter
    start: int
    replicas: tuple[int, int]
    is_owned: bool


def canonical_name(name: str) -> str:
    """A parameter's name in checkpoints, whatever layer specification the model has.

    Args:
        name: Name of a spec.

    Returns:
        Its name in megatron-core's local layer specification.

    Raises:
        CheckpointError: For grouped experts that lie transposed in one weight.
    """
    if _GROUPED.search(name):
        raise CheckpointError(
            f"{name}: legacy grouped experts cannot be saved in this format\n  fix: set model.moe.grouped_gemm=false"
        )
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def held_params(chunks: Sequence[torch.nn.Module], optimizer: Any) -> list[Held]:
    """List what this rank holds.

    Args:
        chunks: Wrapped model chunks of this rank; no forward or backward pass is under way.
        optimizer: A MegatronOptimizer, ours or Megatron's, with all of its state.

    Returns:
        All parameters, frozen ones too, in module order; those of which this rank holds nothing are left out.
    """
    groups = optimizer.groups if isinstance(optimizer, HpMuonMegatronOptimizer) else megatron_groups()
    updated = _updated(optimizer)
    loads: dict[tuple[bool, bool, int], list[int]] = {}
    found = []
    for chunk in chunks:
        for place in _places(chunk, groups):
            split, axis = place.spec.split, groups.etp if place.spec.is_expert else groups.tp
            index = groups.axes[split.axis].index if split else 0
            held = Held(canonical_name(place.spec.name), place.spec, place.start, (), place.weight)
            stop = place.start + held.numel
            held.chunks = held_chunks(place.spec.shape, split, index, place.start, stop)
            main, held.state, held.group = updated.get(place.weight, (None, None, None))
            held.main = None if main is place.weight else main
            count, own = place.replicas
            if split is None:
                count, own = count * axis.size, own * axis.size + axis.index
            # The same decision on all ranks that hold the same: the one of them that writes least so far.
            load = loads.setdefault((place.spec.is_expert, split is None, count), [0] * count)
            if param_is_not_shared(place.weight) and place.is_owned:
                writer = load.index(min(load))
                load[writer] += held.numel
                held.is_written = writer == own
            if held.numel:
                found.append(held)
    return found


def _places(chunk: torch.nn.Module, groups: MegatronGroups) -> Iterator[_Place]:
    if not isinstance(chunk, HpFsdpModel):
        for param, spec in chunk_specs([chunk], HpMuon(), groups).items():
            axis = groups.expert_dp if spec.is_expert else groups.dp
            yield _Place(spec, param, 0, (axis.size, axis.index), True)
        return
    with chunk.whole_parameters() as homes:
        specs = chunk_specs([chunk], HpMuon(), groups)
    for whole, spec in specs.items():
        bucket, parameter = homes[whole]
        has_owner, is_owned = _owner(chunk, bucket, parameter)
        replicas = bucket.mesh.replicate
        yield _Place(
            spec,
            parameter.sharded,
            int(parameter.sharded.hp_shard.start),  # type: ignore[attr-defined]
            (1, 0) if has_owner else (replicas.size, replicas.index),
            is_owned,
        )


def _owner(chunk: HpFsdpModel, bucket: Bucket, parameter: Parameter) -> tuple[bool, bool]:
    """Whether one replica alone updates a parameter, and whether this one does."""
    if not bucket.is_trainable or chunk.schedule.reducer.group_of(bucket).owners(bucket) is None:
        return False, True
    return True, chunk.is_owned(bucket, parameter)


_Updated = tuple[torch.Tensor, dict[str, Any], dict[str, Any]]


def _updated(optimizer: Any) -> dict[torch.nn.Parameter, _Updated]:
    """What the optimizer updates of each of the model's parameters: main, state and group."""
    if isinstance(optimizer, HpMuonMegatronOptimizer):
        groups = {p: group for group in optimizer.optimizer.param_groups for p in group["params"]}
        return {
            pair.model: (pair.main, optimizer.optimizer.state[pair.main], groups[pair.main])
            for pair, _ in optimizer.parts
        }
    found: dict[torch.nn.Parameter, _Updated] = {}
    for single in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = single.optimizer
        if inner is None:  # a pipeline stage without parameters of this kind
            continue
        models = {id(main): model for model, main in _masters(single)}
        for group in inner.param_groups:
            for main in group["params"]:
                found[models.get(id(main), main)] = (main, inner.state[main], group)
    return found


def _masters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Parameters of a Megatron optimizer and their masters."""
    if hasattr(optimizer, "shard_fp32_from_float16_groups"):
        raise CheckpointError(
            "checkpoints of Megatron's DistributedOptimizer are not part of this version\n"
            "  fix: train with dp=hp_fsdp, or without use_distributed_optimizer"
        )
    halves = getattr(optimizer, "float16_groups", [])
    for models, mains in zip(halves, getattr(optimizer, "fp32_from_float16_groups", []), strict=True):
        yield from zip(models, mains, strict=True)
