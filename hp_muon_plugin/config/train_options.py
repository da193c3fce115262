"""From what Hydra composed, or a file that it wrote, to the typed training options."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hp_muon_plugin.config.data_parallel import DATA_PARALLEL, DataParallel, DpOptions
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.options import from_options, nearest
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError

OPTIMIZERS: dict[str, type[HpMuon] | type[AdamW]] = {"hp_muon": HpMuon, "adamw": AdamW}


def typed_train(config: DictConfig) -> Train:
    """Typed options of a run.

    Args:
        config: Composed configuration, without Hydra's own node.

    Returns:
        The options, every interpolation resolved.

    Raises:
        ConfigError: If a value is missing or of the wrong type.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(missing[0], "???", "has no default", f"add {missing[0]}=... to the command line")
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    chosen = plain.pop("optimizer", None) or {}
    name = chosen.get("name")
    if name not in OPTIMIZERS:
        guess = nearest(str(name), list(OPTIMIZERS)) or "hp_muon"
        raise ConfigError("optimizer.name", name, f"is none of {', '.join(OPTIMIZERS)}", f"optimizer={guess}")
    wrapper = plain.pop("dp", None) or {}
    train = from_options(Train, plain, prefix="")
    train.dp = _data_parallel(wrapper)
    train.optimizer = from_options(OPTIMIZERS[name], chosen, prefix="optimizer")
    return train


def _data_parallel(given: dict[str, Any]) -> DpOptions:
    name = str(given.get("name", DataParallel.name))
    cls = DATA_PARALLEL[name]
    names = {known: {field.name for field in fields(known)} for known in DATA_PARALLEL.values()}
    if not set(given) <= names[cls] and set(given) in names.values():
        raise ConfigError("dp.name", name, "was set beside the options of another wrapper", f"write dp={name} instead")
    return from_options(cls, given, prefix="dp")


def save_train(train: Train, path: Path) -> None:
    """Write options so that :func:`load_train` gives them back.

    Args:
        train: Options.
        path: File to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(train)), encoding="utf-8")


def load_train(path: Path) -> Train:
    """Read options that :func:`save_train` wrote.

    Args:
        path: The file.

    Returns:
        Typed options.
    """
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig), path
    return typed_train(loaded)
