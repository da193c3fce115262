"""Module names of Megatron's two layer specifications for one canonical name."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Source, Target
from hp_muon_plugin.checkpoint.megatron_names import Style, is_expert, moe_layers_of, place

_GROUPED = re.compile(r"\.experts\.linear_fc[12]\.(weight|bias)\d+")
_LOCAL = re.compile(r"^(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
PREDICTION = "prediction"
LATER = "mtp_model_layer"
PREDICTIONS = ("transformer_layer", LATER)
_PREDICTION = re.compile(r"^(mtp\.layers\.\d+\.)transformer_layer\.")


def facts_of(module_names: Iterable[str]) -> dict[str, Any]:
    """What module names tell of the specification: for ``RunState.model``.

    Args:
        module_names: As a checkpoint of Megatron has them.
    """
    listed = list(module_names)
    found: dict[str, Any] = {}
    if any("layer_norm_weight" in name for name in listed):
        found["spec"] = "te"
    if any(_GROUPED.search(name) for name in listed):
        found["grouped_experts"] = True
    return {**found, **prediction_facts(listed)}


def prediction_facts(module_names: Iterable[str]) -> dict[str, Any]:
    """What module names tell of how layers that predict tokens are called: for ``RunState.model``."""
    return {PREDICTION: LATER} if any(f".{LATER}." in name for name in module_names) else {}


def prediction(source: Source, target: Target) -> Callable[[str], str]:
    """Gives names with the module of layers that predict tokens as the source, or option ``prediction``, calls it."""
    called = target.options.get(PREDICTION, source.state().model.get(PREDICTION))
    return lambda name: _PREDICTION.sub(rf"\1{called}.", name) if called else name


def spelling(source: Source, target: Target) -> Callable[[str], str]:
    """Gives the module name of a canonical one.

    Args:
        source: Its model says how it was spelt.
        target: Option ``spec`` is ``local`` or ``te`` (Transformer Engine keeps norms in the linear layer behind them),
            option ``experts`` is ``separate`` or ``grouped`` (``linear_fc1.weight<i>``).
    """
    model = source.state().model
    spec = target.options.get("spec", model.get("spec", "local"))
    experts = target.options.get("experts", "grouped" if model.get("grouped_experts") else "separate")
    listed = [key.name for key in source.tensors()]
    latent = any("linear_kv_up_proj" in name for name in listed)
    style = Style(stacked=False, fused_input=not latent, fused_mlp=True, fused_moe=False, fused_latent=latent)
    moe, predicted = moe_layers_of(listed), prediction(source, target)

    def spell(name: str) -> str:
        if is_expert(name):
            return predicted(_LOCAL.sub(r"\1.\3\2", name) if experts == "grouped" else name)
        return predicted(place(name, style, moe).key if spec == "te" else name)

    return spell
