"""What the wrappers that ours is compared with cannot train, or would train wrong."""

from collections.abc import Iterator

from hp_muon_plugin.config.choices import MegatronSharding, MissingGrad
from hp_muon_plugin.config.data_parallel import MegatronFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError

_INSTEAD = "or take dp=hp_fsdp"


def _checkpoint_errors(config: Train) -> Iterator[ConfigError]:
    for name in ("every", "resume"):
        value = getattr(config.checkpoint, name)
        if value is not None:
            yield ConfigError(
                f"checkpoint.{name}",
                value,
                f"runs with dp={config.dp.name} are neither saved nor resumed in this version",
                f"leave it out, {_INSTEAD} or megatron_ddp",
            )


def torch_fsdp2_errors(config: Train) -> Iterator[ConfigError]:
    """Check a run with ``dp=torch_fsdp2``.

    Args:
        config: Options.

    Yields:
        One error for each thing that is wrong.
    """
    topology = config.topology
    if config.model.moe is not None and (topology.ep > 1 or topology.etp != topology.tp):
        option = "ep" if topology.ep > 1 else "etp"
        yield ConfigError(
            f"topology.{option}",
            getattr(topology, option),
            "dp=torch_fsdp2 shards every weight over all data-parallel ranks, routed experts too, of which these ranks "
            "hold different ones: it would mix them up, and megatron-core does not notice",
            f"set topology.ep=1 and topology.etp={topology.tp}, {_INSTEAD}",
        )
    if topology.pp > 1:
        yield ConfigError(
            "topology.pp",
            topology.pp,
            "megatron-core does not run dp=torch_fsdp2 with pipeline stages",
            f"set topology.pp=1, {_INSTEAD}",
        )
    if config.model.tie_embeddings:
        yield ConfigError(
            "model.tie_embeddings",
            True,
            "dp=torch_fsdp2 takes the embedding's weight away before the output layer reads it",
            f"set model.tie_embeddings=false, {_INSTEAD}",
        )
    yield from _checkpoint_errors(config)
    options = config.optimizer
    if not isinstance(options, HpMuon):
        return
    if options.missing_grad is MissingGrad.error:
        yield ConfigError(
            "optimizer.missing_grad",
            "error",
            "dp=torch_fsdp2 reduces a zero for a parameter without gradient, and cannot tell it from one",
            "set optimizer.missing_grad=leave, or take dp=megatron_ddp",
        )
    if options.qk_clip is not None:
        yield ConfigError(
            "optimizer.qk_clip",
            options.qk_clip,
            "scales rows of projections, which are DTensors with dp=torch_fsdp2",
            f"set optimizer.qk_clip=null, {_INSTEAD}",
        )


def megatron_fsdp_errors(config: Train, dp: MegatronFsdp) -> Iterator[ConfigError]:
    """Check a run with ``dp=megatron_fsdp``.

    Args:
        config: Options.
        dp: Its wrapper.

    Yields:
        One error for each thing that is wrong.
    """
    if isinstance(config.optimizer, HpMuon):
        yield ConfigError(
            "optimizer",
            "hp_muon",
            "dp=megatron_fsdp updates flat shards, in which matrices end anywhere, with adam or sgd only",
            f"set optimizer=adamw, {_INSTEAD}",
        )
    yield from _checkpoint_errors(config)
    if config.monitor.interval:
        yield ConfigError(
            "monitor.interval",
            config.monitor.interval,
            "dp=megatron_fsdp keeps weights where the monitor cannot see them",
            f"set monitor.interval=0, {_INSTEAD}",
        )
    if dp.sharding is MegatronSharding.optim:
        yield ConfigError(
            "dp.sharding",
            "optim",
            "megatron-core adds up gradients wrongly with it: 0.16 with dp.overlap=true, 0.19 with dp.overlap=false",
            "set dp.sharding=optim_grads or optim_grads_params",
        )
    if config.topology.pp > 1:
        yield ConfigError(
            "topology.pp",
            config.topology.pp,
            "Megatron-FSDP builds its mesh from the ranks of one pipeline stage alone, and fails (EinopsError)",
            f"set topology.pp=1, {_INSTEAD}",
        )
    if dp.replicas > 1:
        yield ConfigError(
            "dp.replicas",
            dp.replicas,
            "Megatron-FSDP with replicas never sums gradients between them unless dp.overlap=true, and reports a wrong "
            "gradient norm when it shards the optimizer over them",
            f"set dp.replicas=1, or take dp=hp_hsdp dp.replicas={dp.replicas}",
        )
