"""Parameters that ``hp_fully_shard`` cannot take."""

from torch import nn
from torch.distributed.tensor import DTensor

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.gradient_hooks import refuse_early_hooks


def refuse_unfit(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter whose place a shard is about to take.

    Args:
        name: Its name.
        parameter: The whole one.

    Raises:
        ConfigError: If somebody else has divided it, or it has a hook that nobody would call again.
    """
    if isinstance(parameter, DTensor):
        raise ConfigError(
            "module",
            name,
            "is a DTensor (torch's fully_shard or tensor parallelism), and hp_fully_shard divides plain tensors",
            "use one of the two for the whole model, or name it in ignored_params",
        )
    refuse_early_hooks(name, parameter)
