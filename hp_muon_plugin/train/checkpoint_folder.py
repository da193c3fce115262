"""Where a run's checkpoints are, and what can be seen there before ranks start. No torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hp_muon_plugin.checkpoint.folders import MANIFEST, iterations, named_checkpoint, to_go_on_from
from hp_muon_plugin.config.checkpoint_checks import AUTO, is_saving
from hp_muon_plugin.config.trainer import Model, Train
from hp_muon_plugin.errors import CheckpointError, ConfigError, raise_all
from hp_muon_plugin.train.probe import probe_folder

_DEFAULT = "checkpoints"
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


def save_folder(config: Train, folder: Path) -> Path:
    """Where a run's checkpoints go.

    Args:
        config: Options.
        folder: The run's folder.

    Returns:
        The folder of all its checkpoints.
    """
    return folder / _DEFAULT if config.checkpoint.save is None else Path(config.checkpoint.save)


def check_checkpoints(config: Train, folder: Path) -> None:
    """Check the folders that options of checkpoints name, and leave nothing there.

    Args:
        config: Options.
        folder: The run's folder.

    Raises:
        ConfigError: If there is nothing to resume from, another run's checkpoints are where new ones would go, or
            nothing can be written there.
        ConfigErrors: If the checkpoint is of a model of other shapes.
    """
    options, save = config.checkpoint, save_folder(config, folder)
    if options.resume == AUTO:
        tried = next((folder for folder in to_go_on_from(save) if (folder / MANIFEST).is_file()), None)
        if tried is not None:
            _check_model(config.model, tried)
    elif options.resume is not None:
        _check_model(config.model, _named(Path(str(options.resume))))
    if not is_saving(options):
        return
    if options.resume is None:
        refuse_earlier(save)
    if options.save is not None:
        try:
            probe_folder(save)
        except OSError as error:
            raise ConfigError(
                "checkpoint.save",
                save,
                f"cannot be written to ({error.strerror})",
                "choose a folder that you may write to",
            ) from None


def _named(given: Path) -> Path:
    """The folder of a checkpoint of ours."""
    try:
        return named_checkpoint(given)
    except CheckpointError as error:
        what, _, fix = str(error).partition("\n  fix: ")
        raise ConfigError("checkpoint.resume", given, what.removeprefix(f"{given}: "), fix) from error


def _check_model(model: Model, folder: Path) -> None:
    """Refuse a checkpoint of a model of other shapes. What cannot be read is told by whoever loads it."""
    try:
        saved = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["state"]["model"]
        told = dict(_flat(saved, ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if _OWN not in saved:  # converted: other programs' options have other meanings
        return
    kinds = {"moe", "mla"} & saved.keys()
    wrong, compared = [], _SHAPES - _unused(model)
    for name, value in _flat(asdict(model), ""):
        option = f"model.{name}"
        if name in compared and name in told and told[name] != value:
            was = json.dumps(told[name])
            wrong.append(ConfigError(option, value, f"{folder} was saved with {was}", f"{option}={was}"))
    for kind in sorted(kinds):
        if (saved[kind] is None) != (getattr(model, kind) is None):
            has = "without" if saved[kind] is None else "with"
            fix = f"choose the model that the run had: model={saved.get('name')}"
            wrong.append(ConfigError(f"model.{kind}", getattr(model, kind), f"{folder} was saved {has} it", fix))
    raise_all(wrong)


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


def refuse_earlier(save: Path) -> None:
    """Refuse to begin anew where another run has left checkpoints.

    Args:
        save: Folder of all checkpoints of the run.

    Raises:
        ConfigError: If there are any.
    """
    there = iterations(save)
    if there:
        raise ConfigError(
            "checkpoint.save",
            save,
            f"holds checkpoints of an earlier run (the last one of step {there[-1]})",
            "go on from there with checkpoint.resume=auto, or choose another run.name or checkpoint.save",
        )
