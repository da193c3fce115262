"""From the command line of ``python -m hp_muon_plugin.run`` to the plugin's options, composed by Hydra."""

from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hp_muon_plugin.cli.explain import ALL_OPTIONS, explain
from hp_muon_plugin.cli.hydra_app import hydra_version_options
from hp_muon_plugin.cli.script_args import Request
from hp_muon_plugin.config.options import plain
from hp_muon_plugin.config.script import OPTIMIZER, Choice, choose
from hp_muon_plugin.config.store import register_schemas
from hp_muon_plugin.errors import ConfigError

_BASE = "hp_muon_run"
_FROM_FILE = "hp_muon_run_file"
_GROUPS = ("optimizer", "dp", "platform")


def composed_choice(request: Request) -> Choice:
    """Compose and check the plugin's options.

    Args:
        request: The command line.

    Returns:
        What was chosen.

    Raises:
        ConfigError: If one thing is wrong.
        ConfigErrors: If several are.
    """
    content = {} if request.config is None else _content(request.config)
    overrides = list(request.overrides)
    try:
        config = _compose(request.config, content, overrides)
        for path, value in request.values.items():
            OmegaConf.update(config, path, value, merge=False)
    except (HydraException, OmegaConfBaseException) as error:
        what, _, fix = explain(error, [*overrides, *(f"{path}=" for path in request.values)]).partition("\n  fix: ")
        option, _, why = what.partition(": ")
        fix = fix.replace(ALL_OPTIONS, "`python -m hp_muon_plugin.run --help` prints every option")
        raise _Composition(option, why or what, fix) from error
    named = {*request.values, *_names(content.get(OPTIMIZER), f"{OPTIMIZER}."), *_override_names(overrides)}
    return choose(config, frozenset(named))


class _Composition(ConfigError):
    """Hydra's own message, which names option and value by itself."""

    def __init__(self, option: str, why: str, fix: str) -> None:
        super().__init__(option, "", why, fix)
        self.args = (f"{option}: {why}\n  fix: {fix}" if why != option else f"{option}\n  fix: {fix}",)


def _content(config: str) -> dict[str, Any]:
    """What stands in the user's file; nothing for a name on Hydra's search path."""
    path = Path(config)
    if path.suffix not in (".yaml", ".yml"):
        if path.exists():
            raise ConfigError("--hp-config", config, "is no YAML file", "name a file that ends with .yaml")
        return {}
    if not path.is_file():
        raise ConfigError("--hp-config", config, "there is no such file", "give the path of a YAML file, or a name")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise ConfigError("--hp-config", config, f"cannot be read ({why})", "write a YAML mapping") from error
    if not isinstance(content, dict):
        raise ConfigError("--hp-config", config, "is no mapping", "write lines such as `optimizer: {lr: 0.01}`")
    return content


def _compose(config: str | None, content: dict[str, Any], overrides: list[str]) -> DictConfig:
    register_schemas()
    name = _BASE if config is None else config
    if content or (config is not None and config.endswith((".yaml", ".yml"))):
        name = _FROM_FILE
        ConfigStore.instance().store(name=name, node=_with_defaults(content, Path(str(config)).resolve().parent))
    GlobalHydra.instance().clear()
    with initialize_config_module("hp_muon_plugin.conf", **hydra_version_options()):
        return compose(name, overrides=overrides)


def _with_defaults(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A file as Hydra composes it: on top of our own configuration, with its neighbours at hand."""
    node = dict(content)
    defaults: list[Any] = list(node.pop("defaults", ["_self_"]))
    chosen = [{f"override {group}": node.pop(group)} for group in _GROUPS if isinstance(node.get(group), str)]
    if _BASE not in defaults:
        defaults.insert(0, _BASE)
    if "_self_" not in defaults:
        defaults.append("_self_")
    return {**node, "defaults": [*defaults, *chosen], "hydra": {"searchpath": [f"file://{folder}"]}}


def _names(values: Any, prefix: str) -> set[str]:
    if not isinstance(values, dict):
        return set()
    found = set()
    for name, value in values.items():
        found |= _names(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
    return found


def _override_names(overrides: list[str]) -> set[str]:
    """Dotted names that overrides set, those inside of mappings included."""
    found = set()
    for override in OverridesParser.create().parse_overrides(overrides):
        value = override.value()
        if isinstance(value, dict):
            found |= _names(plain(value), f"{override.key_or_group}.")
        else:
            found.add(override.key_or_group)
    return found
