"""From options to a model, an optimizer and a schedule that are ready to step."""

import datetime
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hp_muon_plugin.config.choices import Decay, PlatformName, Precision
from hp_muon_plugin.config.data_parallel import DpOptions, HpFsdp, MegatronFsdp, TorchFsdp2
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Topology, Train, default_warmup
from hp_muon_plugin.platform.base import Platform
from hp_muon_plugin.train.adaptor import adapt
from hp_muon_plugin.train.environment import Launch

_FILE = "file://"
_SEED_STEP_PER_STAGE = 100  # as in megatron.training: stages draw different weights


def start_ranks(
    platform: Platform, topology: Topology, launch: Launch, *, arguments: Mapping[str, Any] | None = None
) -> None:
    """Join the job and initialise Megatron's parallel state. Collective.

    Args:
        platform: Chosen platform.
        topology: Options.
        launch: This process's place.
        arguments: What Megatron's parser would have read, for MindSpeed; see :func:`~.adaptor.megatron_arguments`.
    """
    torch.set_num_threads(topology.threads)
    platform.prepare(launch.local_rank)
    adapt(platform, arguments or {})
    if platform.name is PlatformName.cpu:
        from hp_muon_plugin.megatron.cpu_fixes import apply_cpu_fixes

        apply_cpu_fixes()
    timeout = datetime.timedelta(seconds=topology.timeout_s)
    dist.init_process_group(
        platform.backend,
        **_meeting_place(launch, timeout),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.etp,
        distributed_timeout_minutes=topology.timeout_s / 60,  # becomes a timedelta, so a fraction is fine
    )


def _meeting_place(launch: Launch, timeout: datetime.timedelta) -> dict[str, Any]:
    """A file is opened by its name, which torch would read as a URL: ``?`` and ``#`` end a path there."""
    if not launch.init_method.startswith(_FILE):
        return {"init_method": launch.init_method}
    path = launch.init_method.removeprefix(_FILE)
    store = dist.FileStore(path, launch.world_size)  # type: ignore[attr-defined]  # torch exports it all the same
    store.set_timeout(timeout)
    return {"store": store}


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch and Megatron's random-state tracker as megatron.training does.

    Args:
        seed: The run's seed. Pipeline stages get different ones, data-parallel ranks the same.
    """
    from megatron.core import parallel_state, tensor_parallel

    seed += _SEED_STEP_PER_STAGE * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(config: Train, vocab_size: int, platform: Platform) -> tuple[torch.nn.Module, Any]:
    """The model inside its data-parallel wrapper.

    Args:
        config: Options.
        vocab_size: Token ids before padding.
        platform: Where it goes.

    Returns:
        The wrapped chunk of this pipeline stage, and its TransformerConfig.
    """
    from megatron.core.distributed import finalize_model_grads

    from hp_muon_plugin.models.gpt import build_gpt, transformer_config
    from hp_muon_plugin.models.gpt_specs import padded_vocab_size

    model, topology = config.model, config.topology
    core_config = transformer_config(model, topology, config.platform.precision)
    module = build_gpt(core_config, model, padded_vocab_size(vocab_size, model, topology)).to(platform.device())
    if config.run.canonical_init:
        from hp_muon_plugin.models.canonical_init import initialize_canonically

        initialize_canonically(module, seed=config.run.seed, std=model.init_std)
    core_config.finalize_model_grads_func = finalize_model_grads
    return _wrapped(config.dp, core_config, module), core_config


def _wrapped(options: DpOptions, core_config: Any, module: torch.nn.Module) -> torch.nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    if isinstance(options, HpFsdp):
        from hp_muon_plugin.megatron.sharded_model import wrap_model_chunks

        return wrap_model_chunks([module], core_config, options=options)[0]
    if isinstance(options, TorchFsdp2):
        from hp_muon_plugin.megatron.torch_fsdp2 import TorchFsdp2Model

        return TorchFsdp2Model(core_config, module, options)
    if isinstance(options, MegatronFsdp):
        from hp_muon_plugin.megatron.megatron_fsdp import wrap_in_megatron_fsdp

        return wrap_in_megatron_fsdp(core_config, module, options)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.grad_reduce_in_fp32,
        overlap_grad_reduce=options.overlap_grad_reduce,
        bucket_size=options.bucket_size,
    )
    wrapped: torch.nn.Module = DistributedDataParallel(core_config, ddp_config, module)
    if options.overlap_grad_reduce:
        core_config.no_sync_func = wrapped.no_sync
    return wrapped


def build_optimizer(config: Train, model: torch.nn.Module) -> Any:
    """The optimizer from Megatron's own factory: the plugin's through its hook, or Megatron's AdamW.

    AdamW over shards is the plugin's, because Megatron's would add up norms and choose decay by shards; over
    Megatron's own shards it is Megatron's.

    Args:
        config: Options.
        model: The wrapped model chunk.

    Returns:
        A MegatronOptimizer.
    """
    from megatron.core import optimizer as factory

    from hp_muon_plugin.megatron.param_groups import standard_overrides

    options: HpMuon | AdamW = config.optimizer
    adamw = options.adamw if isinstance(options, HpMuon) else options
    core_config = factory.OptimizerConfig(
        optimizer="hp_muon" if isinstance(options, HpMuon) else "adam",
        lr=options.lr,
        min_lr=options.lr * config.lr_schedule.min_ratio,
        weight_decay=options.weight_decay,
        adam_beta1=adamw.betas[0],
        adam_beta2=adamw.betas[1],
        adam_eps=adamw.eps,
        clip_grad=options.clip_grad,
        bf16=config.platform.precision is Precision.bf16,
        params_dtype=torch.bfloat16 if config.platform.precision is Precision.bf16 else torch.float32,
        use_distributed_optimizer=isinstance(config.dp, MegatronFsdp),
    )
    if isinstance(config.dp, TorchFsdp2):
        from hp_muon_plugin.megatron.torch_fsdp2 import build_over_dtensors

        return build_over_dtensors(core_config, [model], options)  # type: ignore[list-item]
    if isinstance(options, HpMuon):
        from hp_muon_plugin.megatron import install

        install(options)
    if isinstance(options, AdamW) and isinstance(config.dp, HpFsdp):
        from hp_muon_plugin.megatron.build import build_sharded_adamw

        return build_sharded_adamw(core_config, [model], options)  # type: ignore[list-item]
    return factory.get_megatron_optimizer(core_config, [model], **standard_overrides(core_config))


def build_schedule(config: Train, optimizer: Any) -> Any:
    """Megatron's own learning-rate schedule, counted in optimizer steps.

    Args:
        config: Options.
        optimizer: The optimizer whose groups it writes.

    Returns:
        An OptimizerParamScheduler.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    options, schedule = config.optimizer, config.lr_schedule
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.lr * (1.0 if schedule.decay is Decay.constant else schedule.min_ratio),
        lr_warmup_steps=default_warmup(config.run.steps) if schedule.warmup_steps is None else schedule.warmup_steps,
        lr_decay_steps=config.run.steps,
        lr_decay_style=str(schedule.decay),
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=config.run.steps,
        wd_incr_style="constant",
    )
