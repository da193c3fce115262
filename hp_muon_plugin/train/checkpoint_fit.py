"""Whether a run can go on from a checkpoint, by its manifest and the options alone. No torch.

What cannot be read here is told by the ranks that load it, who also compare tensor by tensor.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hp_muon_plugin.checkpoint.folders import MANIFEST
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Model, Train
from hp_muon_plugin.errors import ConfigError, raise_all
from hp_muon_plugin.models.gpt_specs import gpt_specs, padded_vocab_size
from hp_muon_plugin.muon.routing import Algorithm, route_parameters
from hp_muon_plugin.train.text import vocabulary_size

_OWN = "vocab_multiple"  # an option that only we have
# Options that decide which weights there are and what shapes they have.
_SHAPES = {
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "qk_layernorm",
    "tie_embeddings",
    "moe.num_experts",
    "moe.ffn_hidden_size",
    "moe.shared_ffn_hidden_size",
    "moe.first_dense_layers",
    "mla.q_lora_rank",
    "mla.kv_lora_rank",
    "mla.qk_head_dim",
    "mla.qk_pos_emb_head_dim",
    "mla.v_head_dim",
}
_NEEDED = {Algorithm.muon: "momentum_buffer", Algorithm.adamw: "exp_avg"}
_PATTERNS = ("muon_params", "adamw_params")
_WEIGHT = "weight/"
_FRESH = "set checkpoint.load_optimizer=false to begin with fresh optimizer state"


def check_fit(config: Train, folder: Path) -> None:
    """Refuse a checkpoint that ranks would refuse.

    Args:
        config: Options that agree with each other.
        folder: The checkpoint.

    Raises:
        ConfigError: If it is of a later step than the run's last, or another optimizer updated a weight.
        ConfigErrors: If it is of a model of other shapes, or several things are wrong.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        state, names = manifest["state"], [str(name) for name in manifest.get("tensors", ())]
        iteration = int(state.get("iteration", 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    options = config.checkpoint
    errors = list(_model_errors(config.model, state, folder))
    if options.load_position:
        errors += _position_errors(config.run.steps, iteration, folder)
    if options.load_optimizer and not errors:
        errors += _optimizer_errors(config, state, names, folder)
    raise_all(errors)


def too_late(steps: int, done: int, folder: Path) -> ConfigError:
    """What to say of a checkpoint of a later step than the run's last.

    Args:
        steps: Of the run.
        done: Of the checkpoint.
        folder: The checkpoint.

    Returns:
        The error to raise.
    """
    return ConfigError(
        "run.steps",
        steps,
        f"{folder} has done {done} steps already, and run.steps counts from the first",
        f"run.steps={done + steps} for {steps} more, name an earlier checkpoint with checkpoint.resume=FOLDER, or "
        "set checkpoint.load_position=false to train its weights from step 0",
    )


def _position_errors(steps: int, done: int, folder: Path) -> Iterator[ConfigError]:
    if done > steps:
        yield too_late(steps, done, folder)


def _model_errors(model: Model, state: Mapping[str, Any], folder: Path) -> Iterator[ConfigError]:
    saved = state.get("model")
    if not isinstance(saved, Mapping) or _OWN not in saved:  # converted: other programs' options have other meanings
        return
    told = dict(_flat(saved, ""))
    kinds = {"moe", "mla"} & saved.keys()
    compared = _SHAPES - _unused(model)
    for name, value in _flat(asdict(model), ""):
        option = f"model.{name}"
        if name in compared and name in told and told[name] != value:
            was = json.dumps(told[name])
            yield ConfigError(option, value, f"{folder} was saved with {was}", f"{option}={was}")
    for kind in sorted(kinds):
        if (saved[kind] is None) != (getattr(model, kind) is None):
            has = "without" if saved[kind] is None else "with"
            fix = f"choose the model that the run had: model={saved.get('name')}"
            yield ConfigError(f"model.{kind}", getattr(model, kind), f"{folder} was saved {has} it", fix)


def _unused(model: Model) -> set[str]:
    """Options that make no weight of this model."""
    unused = set() if model.mla is None else {"num_query_groups"}
    if model.moe is not None and model.moe.first_dense_layers == 0:
        unused.add("ffn_hidden_size")
    return unused


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _optimizer_errors(config: Train, state: Mapping[str, Any], names: list[str], folder: Path) -> Iterator[ConfigError]:
    """Compare the algorithm of each weight with what the checkpoint holds of it."""
    held = defaultdict(set)
    for name in names:
        kind, _, weight = name.partition("/")
        held[weight].add(kind)
    wanted = _algorithms(config, [name.removeprefix(_WEIGHT) for name in names if name.startswith(_WEIGHT)])
    wrong = [weight for weight, algorithm in wanted.items() if _NEEDED[algorithm] not in held[weight]]
    if not wrong:
        return
    first, more = wrong[0], f" and of {len(wrong) - 1} more" if len(wrong) > 1 else ""
    others = sorted(held[first] & set(_NEEDED.values()))
    why = f"needs {_NEEDED[wanted[first]]} of {first}{more}, and {folder} has"
    yield ConfigError(
        "optimizer",
        config.optimizer.name,
        f"{why} {', '.join(others)}: another optimizer updated it" if others else f"{why} no state of an optimizer",
        f"{_other_choice(config, state)}, or {_FRESH}" if others else _FRESH,
    )


def _algorithms(config: Train, weights: list[str]) -> dict[str, Algorithm]:
    """Of each weight that the checkpoint holds and options tell the algorithm of."""
    if not isinstance(config.optimizer, HpMuon):
        return dict.fromkeys(weights, Algorithm.adamw)
    options, model, held = config.optimizer, config.model, set(weights)
    is_grouped = model.moe is not None and model.moe.grouped_gemm
    if is_grouped and (options.muon_params or options.adamw_params):  # patterns are of names that ranks alone know
        return {}
    vocabulary = padded_vocab_size(vocabulary_size(config.data), model, config.topology)
    specs = gpt_specs(model, config.topology, vocabulary, options)
    routes = route_parameters(specs, muon_params=options.muon_params, adamw_params=options.adamw_params)
    return {route.spec.name: route.algorithm for route in routes if route.spec.name in held}


def _other_choice(config: Train, state: Mapping[str, Any]) -> str:
    """How the run that saved it has chosen."""
    try:
        saved = state["other"]["config"]["optimizer"]
        name, patterns = str(saved["name"]), {key: saved[key] for key in _PATTERNS if key in saved}
    except (KeyError, TypeError, AttributeError):
        return "take that optimizer"
    if name != config.optimizer.name:
        return f"take that optimizer: optimizer={name}"
    told = [
        f"'optimizer.{key}={json.dumps(value)}'"
        for key, value in patterns.items()
        if value != getattr(config.optimizer, key, value)
    ]
    return f"choose as that run did: {' '.join(told)}" if told else "take that optimizer"
