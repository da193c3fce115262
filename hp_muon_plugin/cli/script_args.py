"""The command line of ``python -m hp_muon_plugin.run``: our flags, the script and its arguments, overrides."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.flags import Flag, flags_of
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.options import nearest
from hp_muon_plugin.config.script import OPTIMIZER, WRAPPER
from hp_muon_plugin.errors import ConfigError

_DESCRIPTION = """Run a Megatron-LM training script with the plugin, without a change to the script.

Options of the plugin stand anywhere on the line and are taken from it, all else is the script's own:
flags as below, or Hydra overrides after `--`, e.g. -- optimizer=hp_muon dp=hp_hsdp dp.replicas=4
Without `--optimizer` the script's model is updated by hp_muon. What no option of ours says comes from
Megatron's own arguments (--lr, --weight-decay, --clip-grad, --muon-momentum, ...)."""
_USAGE = "python -m hp_muon_plugin.run SCRIPT.py [ARGUMENT ...] [FLAG ...] [-- OVERRIDE ...]"
_PREFIXES = ("--hp-", "--no-hp-")
_MUON = flags_of(HpMuon, prefix="--hp-muon", path=OPTIMIZER)
_FSDP = flags_of(HpFsdp, prefix="--hp-fsdp", path=WRAPPER)
_SINGLE = {"--hp-config": "config", "--hp-dp": WRAPPER, "--hp-platform": "platform"}


@dataclass(frozen=True, slots=True)
class Request:
    """A command line, taken apart.

    Attributes:
        script: Path of the script, or name of the module.
        is_module: Whether it was given as ``-m MODULE``.
        arguments: Its arguments, in order.
        config: File or name of our configuration, or None.
        overrides: Hydra overrides, those that choose a group first.
        values: Options that flags set, by dotted name.
        wants_help: Whether ``--help`` was among the arguments.
    """

    script: str | None = None
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    config: str | None = None
    overrides: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    wants_help: bool = False


def parser() -> argparse.ArgumentParser:
    """The parser of our flags."""
    made = argparse.ArgumentParser(
        usage=_USAGE,
        description=_DESCRIPTION,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = made.add_argument_group("what is chosen")
    common.add_argument("--hp-config", metavar="FILE_OR_NAME", help="a Hydra config of the plugin's options")
    common.add_argument("--hp-dp", metavar="{megatron_ddp,hp_fsdp,hp_hsdp}", help="data-parallel wrapper, as dp=...")
    common.add_argument("--hp-platform", metavar="{auto,cpu,cuda,npu}", help="device, as platform=...")
    muon = made.add_argument_group("hp_muon", "as Hydra's optimizer.NAME, for example optimizer.adamw.lr")
    fsdp = made.add_argument_group("hp_fsdp and hp_hsdp", "as Hydra's dp.NAME; any of them chooses hp_fsdp")
    for group, flags in ((muon, _MUON), (fsdp, _FSDP)):
        for flag in flags:
            flag.add_to(group)
    return made


def parse(arguments: Sequence[str]) -> Request:
    """Take a command line apart.

    Args:
        arguments: After ``-m hp_muon_plugin.run``.

    Returns:
        The request. ``script`` is None where only help was asked for.

    Raises:
        ConfigError: If a flag of ours does not exist or lacks its value, or no script is named.
    """
    before, overrides = _split(arguments)
    ours, rest = _divide(before)
    given = vars(parser().parse_args(ours))
    flags = {flag.path: flag for flag in (*_MUON, *_FSDP)}
    values = {path: flags[path].value(value) for path, value in given.items() if path in flags}
    chosen = [f"{name}={given[f'hp_{name}']}" for name in (WRAPPER, "platform") if given[f"hp_{name}"] is not None]
    is_chosen = given["hp_dp"] is not None or any(
        word.startswith((f"{WRAPPER}=", f"+{WRAPPER}=")) for word in overrides
    )
    if not is_chosen and any(path.startswith(f"{WRAPPER}.") for path in values):
        chosen.append(f"{WRAPPER}=hp_fsdp")
    is_module = rest[:1] == ["-m"]
    script = rest[1 if is_module else 0 :][:1]
    wants_help = any(word in ("-h", "--help") for word in rest)
    if not script or (script[0].startswith("-") and not wants_help):
        if not wants_help:
            raise ConfigError("SCRIPT", script[0] if script else "", "no script to run is named", _USAGE)
        script = []
    return Request(
        script=script[0] if script and not script[0].startswith("-") else None,
        is_module=is_module,
        arguments=tuple(rest[2 if is_module else 1 :]),
        config=given["hp_config"],
        overrides=(*chosen, *overrides),
        values=values,
        wants_help=wants_help,
    )


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(arguments)
    if "--" not in words:
        return words, []
    place = words.index("--")
    before, overrides = words[:place], words[place + 1 :]
    for word in overrides:
        if word.startswith("-"):
            why = "is a flag, and behind -- there are Hydra overrides"
            raise ConfigError("overrides", word, why, "write it before --, or as an override such as dp=hp_fsdp")
    return before, overrides


def _divide(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our flags with their values, and the rest in order."""
    counts: dict[str, int | None] = dict.fromkeys(_SINGLE, 1)
    counts |= {name: flag.num_values for flag in (*_MUON, *_FSDP) for name in flag.names}
    ours: list[str] = []
    rest: list[str] = []
    place = 0
    while place < len(words):
        name, equals, _ = words[place].partition("=")
        if not name.startswith(_PREFIXES):
            rest.append(words[place])
            place += 1
            continue
        if name not in counts:
            guess = nearest(name, list(counts))
            fix = f"did you mean {guess}?" if guess else "`python -m hp_muon_plugin.run --help` lists them"
            raise ConfigError(name, "...", "there is no such option", fix)
        stop = _end(words, place, 0 if equals else counts[name])
        if stop is None:
            raise ConfigError(name, "", "has no value", f"write {name} VALUE")
        ours += words[place:stop]
        place = stop
    return ours, rest


def _end(words: Sequence[str], place: int, count: int | None) -> int | None:
    """Where the values of a flag end, or None if they are missing."""
    if count is not None:
        stop = place + 1 + count
        return (
            stop if stop <= len(words) and not any(word.startswith("--") for word in words[place + 1 : stop]) else None
        )
    stop = place + 1
    while stop < len(words) and not words[stop].startswith("--"):
        stop += 1
    return stop if stop > place + 1 else None


def flag_of(path: str) -> Flag | None:
    """The flag of an option.

    Args:
        path: Dotted name of the option.

    Returns:
        The flag, or None if the option has none.
    """
    return next((flag for flag in (*_MUON, *_FSDP) if flag.path == path), None)
