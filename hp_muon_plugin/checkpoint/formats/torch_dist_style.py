"""In which form a ``torch_dist`` checkpoint is written: its optimizer state, and the names of its keys."""

from collections.abc import Mapping
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, Source, Target
from hp_muon_plugin.checkpoint.megatron_names import Style
from hp_muon_plugin.errors import ConfigError

BUCKETS = "dp_reshardable"
SHARDINGS = ("fully_reshardable", "none", "chained", BUCKETS, "layer_wise", "layer_wise_fully_reshardable")


def sharding_of(source: Source, target: Target) -> str:
    """The form in which optimizer state is written.

    Args:
        source: The checkpoint.
        target: What is asked for.

    Raises:
        ConfigError: If it is unknown, or does not fit the optimizer or megatron-core's version.
    """
    has_momentum = any(key.kind == Kind.momentum for key in source.tensors())
    before = source.state().model.get("sharding")
    default = "none" if has_momentum else "fully_reshardable"
    allowed = [name for name in SHARDINGS if has_momentum or not name.startswith("layer_wise")]
    if has_momentum:
        allowed = [name for name in allowed if name not in ("fully_reshardable", "chained", BUCKETS)]
    # Buckets are for one mesh, so that they are written where they are asked for, whatever the source had.
    wanted = target.sharding or (before if before in allowed and before != BUCKETS else default)
    if wanted not in allowed:
        raise ConfigError("--sharding", wanted, "not written for this optimizer", f"one of {', '.join(allowed)}")
    has_state = any(key.kind not in (Kind.weight, Kind.buffer) for key in source.tensors())
    if target.megatron is not None and target.megatron < (0, 14) and wanted not in ("none", "chained") and has_state:
        raise ConfigError(
            "--megatron",
            ".".join(map(str, target.megatron)),
            f"this version does not load optimizer state in the form {wanted}",
            "use --to torch, which every version loads, or --sharding chained without --use-distributed-optimizer",
        )
    return wanted


def style_of_target(source: Source, target: Target) -> Style:
    """How keys are written: as the source had them if it was Megatron, else for the local layer specification.

    Args:
        source: The checkpoint.
        target: Its options ``layers`` (stacked or separate) and ``spec`` (local or te) overrule.

    Raises:
        ConfigError: If layers differ and cannot be stacked.
    """
    model = source.state().model
    infos = source.tensors()
    homogeneous = _are_homogeneous(infos)
    layers = target.options.get("layers")
    if layers == "stacked" and not homogeneous:
        raise ConfigError(
            "--option layers", layers, "layers of this model differ", "leave it out, or --option layers=separate"
        )
    default = "separate" if _freq_is_list(source.state().args) else "stacked"
    layers = layers or model.get("layers") or default
    if layers == "stacked" and not homogeneous:
        layers = "separate"
    spec = target.options.get("spec")
    latent = any(".linear_kv_down_proj." in key.name for key in infos)
    norms = model.get("norms_with_linear")
    if spec is not None or norms is None:
        is_te = spec == "te"
        norms = [
            name
            for name, fused in (("input", not latent), ("mlp", True), ("moe", not is_te), ("latent", is_te and latent))
            if fused
        ]
    return Style(layers == "stacked", "input" in norms, "mlp" in norms, "moe" in norms, "latent" in norms)


def _freq_is_list(args: Mapping[str, Any]) -> bool:
    freq = args.get("moe_layer_freq")
    return isinstance(freq, list) or (isinstance(freq, int) and freq > 1)


def _are_homogeneous(infos: Mapping[Key, Info]) -> bool:
    layers: dict[str, dict[str, set[tuple[str, Info]]]] = {}
    for key, info in infos.items():
        stack, found, rest = key.name.partition("decoder.layers.")
        if found and not stack:
            number, _, name = rest.partition(".")
            layers.setdefault(key.kind, {}).setdefault(number, set()).add((name, info))
    return all(len({frozenset(item) for item in kind.values()}) <= 1 for kind in layers.values())
