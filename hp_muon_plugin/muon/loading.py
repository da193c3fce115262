"""What a saved state must have in common with the parameters that it is loaded for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.spec import ParamSpec


def refuse_other_shapes(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    specs: Mapping[torch.nn.Parameter, ParamSpec],
) -> None:
    """Refuse the state of another model, or of other shards, before anything of it is taken.

    torch loads it, and fails in the next step with the sizes of two tensors. Groups of other lengths torch itself
    refuses.

    Args:
        state_dict: What is to be loaded.
        groups: Parameter groups of the optimizer.
        specs: Of its parameters.

    Raises:
        ConfigError: If a buffer has another shape than its parameter.
    """
    params = [param for group in groups for param in group["params"]]
    saved_ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
    for saved_id, param in zip(saved_ids, params, strict=False):
        for key, value in state_dict["state"].get(saved_id, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != param.shape:
                raise ConfigError(
                    "state_dict",
                    f"{specs[param].name}: {key}",
                    f"has shape {tuple(value.shape)}, and the parameter {tuple(param.shape)}; nothing was loaded",
                    "load it for the model that it was saved from, of sharded ones on as many ranks; checkpoints of "
                    "hp-muon train go to any number (checkpoint.resume)",
                )
