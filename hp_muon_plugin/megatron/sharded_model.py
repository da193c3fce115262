"""HP-FSDP in the place of Megatron's DistributedDataParallel.

Each transformer layer, the embedding and the output layer is a unit, and what is left is the root.
Dense weights are sharded over the data-parallel ranks (with context-parallel ones), routed experts
over theirs. ``main_grad`` of a shard is its reduced gradient, so that megatron-core's
``finalize_model_grads`` adds up what tensor-parallel and pipeline ranks owe each other shard by shard:
these ranks have equal layouts.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel

from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.api import hp_fully_shard
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.mesh import ShardMesh
from hp_muon_plugin.fsdp.parameter import Parameter
from hp_muon_plugin.fsdp.policy import MixedPrecision
from hp_muon_plugin.fsdp.roots import no_sync, schedule_of
from hp_muon_plugin.megatron.groups import megatron_groups
from hp_muon_plugin.megatron.refusals import refuse_split_latent
from hp_muon_plugin.megatron.sharded_checkpoint import answer_checkpoints
from hp_muon_plugin.megatron.units import granularities, never_resharded, show_experts, unit_modules
from hp_muon_plugin.platform.wire import C10dWire, Wire


class HpFsdpModel(DistributedDataParallel):  # type: ignore[misc]  # megatron-core is untyped
    """A model chunk whose weights, gradients and optimizer state are sharded.

    It is a DistributedDataParallel by type only, so that Megatron's trainers find what is inside;
    nothing of that class runs. Set ``config.no_sync_func`` to :meth:`no_sync`, as
    :func:`wrap_model_chunks` does, to reduce gradients once per step and not once per micro-batch.

    Args:
        config: megatron-core's ``TransformerConfig``.
        ddp_config: megatron-core's ``DistributedDataParallelConfig``; None takes its defaults.
        module: The chunk, on its device. Its parameters are replaced by shards.
        disable_bucketing: Ignored; accepted as DistributedDataParallel does.
        pg_collection: megatron-core's ``ProcessGroupCollection``, or None for the global parallel state.
        options: Options.
        wire: Collectives; None takes torch.distributed.
        **unused: Ignored, likewise.

    Raises:
        ConfigError: If Megatron's configuration asks for what cannot work.
    """

    first_sync: Callable[[Any], None] | None = None
    """Called once, when the gradients of the first step are reduced."""

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        *,
        options: HpFsdp | None = None,
        wire: Wire | None = None,
        **unused: Any,
    ) -> None:
        _BaseDataParallel.__init__(self, config, module)
        self.ddp_config = ddp_config or DistributedDataParallelConfig()
        _refuse(config, self.ddp_config)
        refuse_split_latent([module])
        self.options = options or HpFsdp()
        self.groups = megatron_groups(pg_collection)
        self.dense_mesh = ShardMesh.divided(self.groups.dp, self.options.replicas)
        experts = {p for p in module.parameters() if not getattr(p, "allreduce", True)}
        self.expert_mesh = ShardMesh.divided(self.groups.expert_dp, self.options.replicas) if experts else None
        self._shard(config, experts, wire or C10dWire())
        self.schedule = schedule_of(module)
        self.schedule.reducer.leaves_unused_alone = False  # Megatron's gradients are buffers, zero where nothing came
        answer_checkpoints(self)
        for bucket, parameter in self.sharded():
            if bucket.is_trainable:
                parameter.sharded.main_grad = bucket.grad_view(parameter)  # type: ignore[attr-defined]
                parameter.sharded.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def _shard(self, config: Any, experts: set[torch.nn.Parameter], wire: Wire) -> None:
        options, module = self.options, self.module
        show_experts(module, experts)
        atoms = granularities(module, self.groups)
        units, kept = unit_modules(module), never_resharded(module)
        least = options.outer_bucket_mib
        others = {} if self.expert_mesh is None else dict.fromkeys(experts, self.expert_mesh)
        for unit in [*units, module]:
            hp_fully_shard(
                unit,
                self.dense_mesh,
                reshard_after_forward=False if unit in kept else options.reshard_after_forward,
                mp_policy=MixedPrecision(reduce_dtype=getattr(torch, options.reduce_dtype), cast_forward_inputs=False),
                other_meshes=others,
                granularity=lambda name, parameter: atoms[parameter],
                divisor=1.0 if config.calculate_per_token_loss else float(self.groups.dp.size),
                max_padding=options.max_padding,
                shard_layout=options.shard_layout,
                prefetch=options.prefetch,
                outer=options.outer,
                outer_bucket_bytes=None if least is None else int(least * 2**20),
                wire=wire,
            )

    def sharded(self) -> Iterator[tuple[Bucket, Parameter]]:
        """Every parameter of the chunk in its two forms, with its bucket, in the order of the units."""
        for unit in self.schedule.units:
            for bucket in unit.buckets:
                for parameter in bucket.parameters:
                    yield bucket, parameter

    def is_owned(self, bucket: Bucket, parameter: Parameter) -> bool:
        """Whether this replica updates a trainable parameter.

        Args:
            bucket: Its bucket.
            parameter: The parameter.

        Returns:
            True for every parameter with ``outer=replicate``, for one replica's with other modes.
        """
        owners = self.schedule.reducer.group_of(bucket).owners(bucket)
        return owners is None or owners[bucket.parameters.index(parameter)] == bucket.mesh.replicate.index

    @property
    def has_owners(self) -> bool:
        """Whether each parameter is updated by one replica alone."""
        return any(group.segments for group in self.schedule.reducer.groups)

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[dict[torch.nn.Parameter, tuple[Bucket, Parameter]]]:
        """Register parameters with their whole shapes and Megatron's marks, for code that reads these.

        Yields:
            Where each of them belongs. Their values are undefined.
        """
        self.schedule.reshard()
        pairs = list(self.sharded())
        for _, parameter in pairs:
            parameter.register(parameter.full)
        try:
            yield {parameter.full: (bucket, parameter) for bucket, parameter in pairs}
        finally:
            for _, parameter in pairs:
                parameter.register(parameter.sharded)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave out what a later micro-batch of the step can do, as ``options.shard_accumulated`` says."""
        if not self.options.shard_accumulated:
            with no_sync(self.module):
                yield
            return
        reducer = self.schedule.reducer
        before, reducer.all_reduces = reducer.all_reduces, False
        try:
            yield
        finally:
            reducer.all_reduces = before

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing to start: backward reduces each unit as it is done."""

    def finish_grad_sync(self, *unused: Any, **also_unused: Any) -> None:
        """Nothing to wait for: backward has ended with all gradients reduced.

        Raises:
            RuntimeError: If the last micro-batch ran under ``no_sync`` as well.
        """
        check, self.first_sync = self.first_sync, None
        if check is not None:
            check(self)
        waiting = [unit.name for unit in self.schedule.units if unit.grads is not None]
        waiting += [
            bucket.parameters[0].name for g in self.schedule.reducer.groups if g.is_partial for bucket in g.buckets
        ]
        if waiting:
            raise RuntimeError(
                f"{waiting[0]}: gradients of this step are not reduced\n"
                "  fix: leave no_sync() before the backward pass of the last micro-batch"
            )

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiply all gradients.

        Args:
            scaling_factor: A number or a 0-dim tensor.
        """
        self.schedule.reducer.forget()
        for group in self.schedule.reducer.groups:
            group.grad.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Begin a step: the next gradients replace the old ones."""
        self.schedule.reducer.forget()
        for group in self.schedule.reducer.groups:
            group.grad.zero_()
        for _, parameter in self.sharded():
            parameter.sharded.grad = None

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Let all replicas begin with the first one's shards. Shard ranks hold different parts anyway."""
        for unit in self.schedule.units:
            for bucket in unit.buckets:
                bucket.copy_from_replica(0)

    def start_param_sync(self, *unused: Any, **also_unused: Any) -> None:
        """Nothing to start: forward gathers weights by itself."""

    def enable_forward_pre_hook(self) -> None:
        """Nothing to enable: forward gathers weights by itself."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Nothing to disable, likewise."""

    def reset_param_sync_dispatch_state(self) -> None:
        """Nothing to reset, likewise."""

    def free_overlap_buffers(self) -> None:
        """Nothing to free: buffers of gathered weights are bounded and used again."""

    def offload_grad_buffers(self, *unused: Any, **also_unused: Any) -> None:
        """Give up the memory of gradients until :meth:`restore_grad_buffers`; their values are lost, as in Megatron."""
        self.schedule.reducer.release()

    def restore_grad_buffers(self, *unused: Any, **also_unused: Any) -> None:
        """Take it again, zeros."""
        self.schedule.reducer.restore()


def _refuse(config: Any, ddp_config: Any) -> None:
    why = "writes into or shards gradient buffers of Megatron's, which dp=hp_fsdp does not have"
    for owner, name in (
        (config, "gradient_accumulation_fusion"),
        (ddp_config, "use_distributed_optimizer"),
        (ddp_config, "use_megatron_fsdp"),
        (ddp_config, "use_custom_fsdp"),
    ):
        if getattr(owner, name, False):
            raise ConfigError(name, True, why, f"set {name}=False")


def wrap_model_chunks(
    chunks: Sequence[torch.nn.Module],
    config: Any,
    *,
    options: HpFsdp | None = None,
    ddp_config: Any = None,
    pg_collection: Any = None,
) -> list[HpFsdpModel]:
    """Wrap all model chunks of this pipeline stage, for trainers that build their model themselves.

    Build the optimizer with ``hp_muon_plugin.megatron.build`` afterwards: Megatron's own would not
    know that gradients are shards.

    Args:
        chunks: Chunks on their device, one per virtual stage.
        config: megatron-core's ``TransformerConfig``; its ``no_sync_func`` is set unless it has one.
        options: Options; None takes the defaults.
        ddp_config: megatron-core's ``DistributedDataParallelConfig`` or None.
        pg_collection: megatron-core's ``ProcessGroupCollection`` or None.

    Returns:
        The wrapped chunks.
    """
    wrapped = [HpFsdpModel(config, ddp_config, chunk, pg_collection=pg_collection, options=options) for chunk in chunks]
    for chunk in wrapped:
        add_no_sync(config, chunk)
    return wrapped


def add_no_sync(config: Any, chunk: HpFsdpModel) -> None:
    """Let Megatron's schedules accumulate gradients of one more chunk, unless the trainer has its own way.

    Args:
        config: megatron-core's ``TransformerConfig``.
        chunk: A wrapped chunk.
    """
    given = config.no_sync_func
    known = [] if given is None else given if isinstance(given, list) else [given]
    if all(isinstance(getattr(function, "__self__", None), HpFsdpModel) for function in known):
        functions = [*known, chunk.no_sync]
        config.no_sync_func = functions[0] if len(functions) == 1 else functions  # schedules want no list of one
