"""Files that a script is to read: looked at before it starts, where they could only fail when every rank has."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hp_muon_plugin.checkpoint.dcp_files import METADATA, DcpFolder
from hp_muon_plugin.checkpoint.detect import TRACKER, find
from hp_muon_plugin.cli.script_line import CARRIER, optimizer_of, value_of
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.script import Choice
from hp_muon_plugin.errors import CheckpointError, ConfigError, raise_all
from hp_muon_plugin.train.probe import probe_folder

_WITHOUT_STATE = ("--no-load-optim", "--finetune")
_MOST_BYTES = 256 * 2**20
"""Larger metadata are left to Megatron, which reads them on every rank in any case."""
_NUMBER = re.compile(r"^[0-9.eE+-]+$")  # weights of a blend stand between the prefixes
_MUON, _ADAM = "optimizer.state.momentum_buffer.", "optimizer.state.exp_avg."


def check_load(arguments: Sequence[str], choice: Choice) -> None:
    """Refuse ``--load`` of a checkpoint that another optimizer saved.

    Megatron would start all ranks, build the model, and stop with a list of all keys.

    Args:
        arguments: The script's arguments as given.
        choice: The plugin's options.

    Raises:
        ConfigError: With the flag that loads weights alone, and the optimizer that would go on.
    """
    folder, name = value_of(arguments, "--load"), optimizer_of(arguments)
    wants_muon = choice.optimizer is not None
    if folder is None or (not wants_muon and name not in (None, CARRIER)):
        return
    if any(flag in arguments for flag in _WITHOUT_STATE):
        return
    keys = _keys(Path(folder), value_of(arguments, "--ckpt-step"))
    has_muon = any(_MUON in key for key in keys)
    if not keys or has_muon is wants_muon:
        return
    other, own = (CARRIER, HpMuon.name) if wants_muon else (HpMuon.name, CARRIER)
    has_other = has_muon or any(_ADAM in key for key in keys)
    raise ConfigError(
        "--load",
        folder,
        f"the checkpoint holds {f'state of {other}' if has_other else f'no state of {own}'}, and this run has "
        f"--optimizer {own}",
        "give --no-load-optim to take the weights alone"
        + (f", or go on with --optimizer {other}" if has_other else ""),
    )


def check_data(arguments: Sequence[str]) -> None:
    """Refuse ``--data-path`` where nothing is, or one half of a dataset.

    Args:
        arguments: The script's arguments as given.

    Raises:
        ConfigError: If one prefix is wrong. What is no file's name on this machine is left to the script.
        ConfigErrors: If several are.
    """
    raise_all([error for prefix in _words_of(arguments, "--data-path") if (error := _data_error(prefix)) is not None])


def check_save(arguments: Sequence[str]) -> None:
    """Refuse a ``--save`` that cannot be written to, and leave nothing there.

    Args:
        arguments: The script's arguments as given.

    Raises:
        ConfigError: With what the system says.
    """
    folder = value_of(arguments, "--save")
    if folder is None or "://" in folder:
        return
    try:
        probe_folder(Path(folder))
    except OSError as error:
        why = f"cannot be written to ({error.strerror})"
        raise ConfigError("--save", folder, why, "choose a folder that you may write to") from None


def _data_error(prefix: str) -> ConfigError | None:
    if "://" in prefix or _NUMBER.match(prefix) or Path(prefix).exists():
        return None
    missing = [suffix for suffix in (".idx", ".bin") if not Path(f"{prefix}{suffix}").is_file()]
    if not missing:
        return None
    half = prefix.removesuffix(".bin").removesuffix(".idx")
    if len(missing) == 1:
        why, fix = (
            f"there is no {prefix}{missing[0]}",
            "both files of a dataset are needed: copy or preprocess it again",
        )
    elif half != prefix:
        why, fix = "is no prefix of an .idx and a .bin file", f"leave the ending out: {half}"
    else:
        why = f"there is neither {prefix}.idx nor {prefix}.bin"
        fix = "give the path of both files without .idx and .bin, or --mock-data"
    return ConfigError("--data-path", prefix, why, fix)


def _words_of(arguments: Sequence[str], flag: str) -> Iterator[str]:
    """All values of a flag that takes several."""
    is_open = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument.startswith("--"):
            is_open = argument == flag
            if name == flag and equals:
                yield value
        elif is_open:
            yield argument


def _keys(folder: Path, step: str | None) -> Sequence[str]:
    """Keys of a distributed checkpoint; none where there is none, or where Megatron says best what is wrong with it."""
    if step is not None and step.isdigit():
        folder = folder / f"iter_{int(step):07d}"
    elif not (folder / TRACKER).is_file():
        return ()  # Megatron begins a new run
    try:
        found = find(folder)
        if found.format != "torch_dist" or (found.folder / METADATA).stat().st_size > _MOST_BYTES:
            return ()
        return tuple(DcpFolder(found.folder).tensors)
    except (CheckpointError, OSError):
        return ()
