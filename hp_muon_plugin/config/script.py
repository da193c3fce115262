"""Options of ``python -m hp_muon_plugin.run``: what the plugin does in somebody else's training script."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hp_muon_plugin.config.checks import check_optimizer
from hp_muon_plugin.config.choices import PlatformName, Precision
from hp_muon_plugin.config.data_parallel import DataParallel, HpFsdp
from hp_muon_plugin.config.dp_checks import lone_errors
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.options import from_options, plain
from hp_muon_plugin.config.ranges import check_ranges
from hp_muon_plugin.config.trainer import Platform
from hp_muon_plugin.errors import ConfigError, raise_all

OPTIMIZER = "optimizer"
WRAPPER = "dp"


@dataclass
class Script:
    """What ``conf/hp_muon_run.yaml`` composes."""

    optimizer: Any = None
    """``hp_muon``, or ``adamw`` for the script's own optimizer."""
    dp: Any = None
    """``megatron_ddp`` for the script's own wrapper, ``hp_fsdp`` or ``hp_hsdp``."""
    platform: Platform = field(default_factory=Platform)
    """Device; how the script computes is its own business."""
    hooks: list[str] | None = None
    """Hooks to install; null takes ``HP_MUON_HOOKS``, or all that this megatron-core needs."""
    strict: bool = True
    """Stop where a hook cannot be installed, or was not used by the script; false says so and goes on."""
    allow_untested: bool = False
    """Go on with a megatron-core that is not tested."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A checked configuration.

    Attributes:
        optimizer: Options of hp_muon that were given, by name; None leaves the script's optimizer.
        data_parallel: Options of the wrapper; None leaves the script's.
        platform: Device.
        hooks: Names of hooks, or None.
        strict: Whether what is not used is an error.
        allow_untested: Whether untested versions are taken.
    """

    optimizer: Mapping[str, Any] | None
    data_parallel: HpFsdp | None
    platform: PlatformName
    hooks: tuple[str, ...] | None
    strict: bool
    allow_untested: bool

    @property
    def is_ours(self) -> bool:
        """Whether the plugin's optimizer updates the model: Muon, or AdamW over shards."""
        return self.optimizer is not None or self.data_parallel is not None


def choose(composed: DictConfig, named: frozenset[str]) -> Choice:
    """Check a composed configuration, and keep of the optimizer's options what was given.

    Args:
        composed: Composed configuration; a :class:`Script`.
        named: Dotted names of the options that were written, by whatever way.

    Returns:
        The choice. Of options that were not given Megatron's own count.

    Raises:
        ConfigError: If one thing is wrong.
        ConfigErrors: If several are.
    """
    values = plain(composed)
    known = [option.name for option in fields(Script)]
    errors = [
        ConfigError(name, "...", "is the script's own business", f"leave it out; options here: {', '.join(known)}")
        for name in values
        if name not in known
    ]
    raise_all(errors)
    optimizer, wrapper = values[OPTIMIZER] or {}, values[WRAPPER] or {}
    script = from_options(Script, {name: values[name] for name in known if name not in (OPTIMIZER, WRAPPER)}, prefix="")
    if script.platform.precision is not Precision.fp32 or "platform.precision" in named:
        errors.append(ConfigError("platform.precision", script.platform.precision, "is the script's", "give it --bf16"))
    given, optimizer_errors = _optimizer(optimizer, named)
    data_parallel, wrapper_errors = _wrapper(wrapper)
    raise_all([*errors, *optimizer_errors, *wrapper_errors])
    hooks = None if script.hooks is None else tuple(script.hooks)
    return Choice(given, data_parallel, script.platform.name, hooks, script.strict, script.allow_untested)


def _optimizer(values: dict[str, Any], named: frozenset[str]) -> tuple[dict[str, Any] | None, list[ConfigError]]:
    """The options that were given; any that differs from its default was, be it by a file that a file includes."""
    prefix, name = f"{OPTIMIZER}.", values.get("name")
    options = AdamW() if name == "adamw" else HpMuon()
    if name not in (AdamW.name, HpMuon.name):
        raise ConfigError("optimizer.name", name, "is none of hp_muon, adamw", "optimizer=hp_muon")
    typed = from_options(type(options), values, prefix=OPTIMIZER)
    check_optimizer(typed)
    default = plain(OmegaConf.structured(type(options)))
    written = {option.removeprefix(prefix) for option in named if option.startswith(prefix)}
    given = _given(plain(OmegaConf.structured(typed)), default, written)
    if name == HpMuon.name:
        return given, []
    return None, [
        ConfigError(f"{prefix}{option}", value, "is the script's own optimizer's", "give Megatron's argument to it")
        for option, value in given.items()
    ]


def _given(values: dict[str, Any], default: dict[str, Any], written: set[str], above: str = "") -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in values.items():
        path = above + name
        if path in written and not isinstance(value, dict):
            given[name] = value
        elif isinstance(value, dict):
            if inner := _given(value, default[name], written, f"{path}."):
                given[name] = inner
        elif value != default[name]:
            given[name] = value
    return given


def _wrapper(values: dict[str, Any]) -> tuple[HpFsdp | None, list[ConfigError]]:
    name = str(values.get("name"))
    if name == HpFsdp.name:
        typed = from_options(HpFsdp, values, prefix=WRAPPER)
        return typed, [*check_ranges(typed, WRAPPER), *lone_errors(typed, WRAPPER)]
    if name != DataParallel.name:
        fix = "give the script Megatron's own argument for it, and leave dp out"
        return None, [ConfigError(WRAPPER, name, "is the script's own wrapper", fix)]
    default = plain(OmegaConf.structured(DataParallel))
    return None, [
        ConfigError(f"{WRAPPER}.{option}", value, "is the script's own wrapper's", "give Megatron's argument to it")
        for option, value in values.items()
        if value != default.get(option)
    ]
