"""What the installed megatron-core version gets wrong or cannot do, refused before training starts."""

from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError, raise_all
from hp_muon_plugin.megatron.versions import core_version


def check_lane(config: Train) -> None:
    """Refuse what the installed megatron-core gets wrong or cannot do.

    Args:
        config: Options that are valid in themselves.

    Raises:
        ConfigError: If this version cannot train it rightly.
        ConfigErrors: If several things are wrong.
    """
    version, model, topology = core_version(), config.model, config.topology
    errors = []
    if model.moe and topology.ep == 1 and topology.etp != topology.tp and version.lane < (0, 19):
        errors.append(
            ConfigError(
                "topology.etp",
                topology.etp,
                f"megatron-core {version} does not add up expert gradients over tensor-parallel ranks "
                f"unless topology.ep > 1 or etp = tp (here ep=1, tp={topology.tp}); experts would drift apart",
                f"set topology.ep=2 or more, or topology.etp={topology.tp}, or install megatron-core 0.19",
            )
        )
    if model.num_query_groups % topology.tp and version.lane < (0, 16) and model.mla is None:
        errors.append(
            ConfigError(
                "model.num_query_groups",
                model.num_query_groups,
                f"megatron-core {version} cannot split a query group over topology.tp={topology.tp} ranks",
                f"choose a multiple of {topology.tp}, or install megatron-core 0.16 or newer",
            )
        )
    raise_all(errors)
