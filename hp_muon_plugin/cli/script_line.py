"""The script's own arguments: what the plugin reads of them, refuses in them and adds to them."""

import difflib
import importlib.util
from collections.abc import Mapping, Sequence

from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.config.mindspeed import CLASHES
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.script import Choice
from hp_muon_plugin.errors import ConfigError, raise_all
from hp_muon_plugin.megatron.options import REFUSED

CARRIER = "adam"
"""The name under which Megatron's parsers let our optimizer pass: they know a fixed set of names, and change other
options for any name but adam and sgd."""
_ALIKE = 0.75
"""Megatron's own ``muon`` is less alike."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_SPLIT = ("--tensor-model-parallel-size", "--context-parallel-size")
_OTHER_WRAPPERS = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")


def optimizer_of(arguments: Sequence[str]) -> str | None:
    """The value of ``--optimizer``.

    Args:
        arguments: The script's arguments.

    Returns:
        The last one, or None if there is none.
    """
    return value_of(arguments, "--optimizer")


def script_line(arguments: Sequence[str], choice: Choice, platform: PlatformName) -> tuple[list[str], list[str]]:
    """The arguments that the script gets, checked.

    Args:
        arguments: The script's arguments as given.
        choice: The plugin's options.
        platform: The device that is used.

    Returns:
        All arguments, and those that were added.

    Raises:
        ConfigError: If one of them cannot work with the plugin.
        ConfigErrors: If several cannot.
    """
    raise_all([*_optimizer_errors(arguments, choice), *_refused(arguments, choice)])
    kept = _without(arguments, "--optimizer") if choice.is_ours else list(arguments)
    added = _added(kept, choice, platform)
    return [*kept, *added], added


def added_variables(arguments: Sequence[str], platform: PlatformName, environment: Mapping[str, str]) -> dict[str, str]:
    """What Megatron's parser wants of the environment, and what means nothing on CPU.

    Args:
        arguments: The script's arguments.
        platform: The device that is used.
        environment: What is set.

    Returns:
        Variables to set.
    """
    names = {argument.partition("=")[0] for argument in arguments}
    if platform is not PlatformName.cpu or _CONNECTIONS in environment or names.intersection(_OTHER_WRAPPERS):
        return {}
    is_split = any(value_of(arguments, flag) not in (None, "1") for flag in _SPLIT)
    return {_CONNECTIONS: "1"} if is_split else {}


def _optimizer_errors(arguments: Sequence[str], choice: Choice) -> list[ConfigError]:
    name = optimizer_of(arguments)
    if name is None:
        return []
    plain = name.lower().replace("-", "_")
    if name != HpMuon.name and difflib.get_close_matches(plain, [HpMuon.name], cutoff=_ALIKE):
        return [ConfigError("--optimizer", name, "there is no such optimizer", f"did you mean {HpMuon.name}?")]
    if name == HpMuon.name and choice.optimizer is None:
        return [ConfigError("--optimizer", name, "another optimizer is chosen after `--`", "leave optimizer=... out")]
    if name != HpMuon.name and choice.optimizer is not None:
        fix = "leave --optimizer out, or leave options of hp_muon out"
        return [ConfigError("--optimizer", name, "hp_muon is chosen by the plugin's options", fix)]
    if name != HpMuon.name and name != CARRIER and choice.data_parallel is not None:
        fix = "choose adam or hp_muon, or leave dp=hp_fsdp out"
        return [ConfigError("--optimizer", name, "would take shards for whole weights", fix)]
    return []


def _refused(arguments: Sequence[str], choice: Choice) -> list[ConfigError]:
    """Options that the optimizer or the wrapper would refuse later, when all ranks have started."""
    if not choice.is_ours:
        return []
    names = {argument.partition("=")[0] for argument in arguments}
    errors = [
        ConfigError(flag, value_of(arguments, flag) or True, *reason)
        for name, reason in REFUSED.items()
        if (flag := f"--{name.replace('_', '-')}") in names
    ]
    fix = "leave it out; sharded data parallelism of ours is dp=hp_fsdp"
    errors += [
        ConfigError(flag, True, "shards parameters in a way that cuts matrices", fix)
        for flag in _OTHER_WRAPPERS
        if flag in names
    ]
    errors += [
        ConfigError(clash.flag, value_of(arguments, clash.flag) or True, clash.why, clash.fix)
        for clash in CLASHES
        if clash.flag in names
        and (choice.data_parallel is not None or not clash.sharded_only)
        and clash.value in (None, value_of(arguments, clash.flag))
    ]
    if choice.data_parallel is not None and value_of(arguments, "--ckpt-format") == "torch":
        fix = "take --ckpt-format torch_dist"
        errors.append(ConfigError("--ckpt-format", "torch", "keeps one data-parallel rank's shards alone", fix))
    return errors


def _added(arguments: Sequence[str], choice: Choice, platform: PlatformName) -> list[str]:
    wanted: list[tuple[str, tuple[str, ...]]] = []
    if choice.is_ours:
        wanted.append(("--optimizer", (CARRIER,)))
    if choice.optimizer is not None and "lr" in choice.optimizer:
        wanted.append(("--lr", (str(choice.optimizer["lr"]),)))
    if choice.data_parallel is not None or platform is PlatformName.cpu:
        wanted.append(("--no-gradient-accumulation-fusion", ()))
    if platform is PlatformName.cpu:
        wanted.append(("--distributed-backend", ("gloo",)))
        if importlib.util.find_spec("transformer_engine") is None:
            wanted.append(("--transformer-impl", ("local",)))
    names = {argument.partition("=")[0] for argument in arguments}
    return [word for flag, values in wanted if flag not in names for word in (flag, *values)]


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag among the script's arguments.

    Args:
        arguments: The script's arguments.
        flag: With its dashes.

    Returns:
        The last one given, or None.
    """
    found = None
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else next(iter(arguments[place + 1 : place + 2]), None)
    return None if found is not None and found.startswith("--") else found


def _without(arguments: Sequence[str], flag: str) -> list[str]:
    kept, skips = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if skips:
            skips = False
        elif name == flag:
            skips = not equals
        else:
            kept.append(argument)
    return kept
