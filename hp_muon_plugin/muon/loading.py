"""What a saved state must have in common with the parameters that it is loaded for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.routing import Algorithm

_KINDS = {Algorithm.muon: ("momentum_buffer",), Algorithm.adamw: ("step", "exp_avg", "exp_avg_sq")}


def refuse_others(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    specs: Mapping[torch.nn.Parameter, ParamSpec],
) -> None:
    """Refuse the state of another model, of other shards or of another optimizer, before anything of it is taken.

    torch loads it, and fails in the next step with the sizes of two tensors; or it goes on without the momenta that the
    other optimizer has not, with its learning rates. Groups of other lengths torch itself refuses.

    Args:
        state_dict: What is to be loaded.
        groups: Parameter groups of the optimizer.
        specs: Of its parameters.

    Raises:
        ConfigError: If a buffer has another shape than its parameter, or a parameter has buffers of another optimizer.
    """
    params = [(param, Algorithm(group["algorithm"])) for group in groups for param in group["params"]]
    saved_ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
    for saved_id, (param, algorithm) in zip(saved_ids, params, strict=False):
        state = state_dict["state"].get(saved_id, {})
        missing = [kind for kind in _KINDS[algorithm] if state.get(kind) is None]
        if state and missing:
            raise ConfigError(
                "state_dict",
                f"{specs[param].name}: {', '.join(str(kind) for kind, value in state.items() if value is not None)}",
                f"has no {missing[0]}, which {algorithm} needs: another optimizer updated it; nothing was loaded",
                "load what this optimizer saved with the same options, or begin without a state",
            )
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != param.shape:
                raise ConfigError(
                    "state_dict",
                    f"{specs[param].name}: {key}",
                    f"has shape {tuple(value.shape)}, and the parameter {tuple(param.shape)}; nothing was loaded",
                    "load it for the model that it was saved from, of sharded ones on as many ranks; checkpoints of "
                    "hp-muon train go to any number (checkpoint.resume)",
                )
