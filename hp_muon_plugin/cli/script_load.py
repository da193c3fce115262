"""What a script is to go on from: looked at before it starts, where another optimizer's state could only fail later."""

from collections.abc import Sequence
from pathlib import Path

from hp_muon_plugin.checkpoint.dcp_files import METADATA, DcpFolder
from hp_muon_plugin.checkpoint.detect import TRACKER, find
from hp_muon_plugin.cli.script_line import CARRIER, optimizer_of, value_of
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.script import Choice
from hp_muon_plugin.errors import CheckpointError, ConfigError

_WITHOUT_STATE = ("--no-load-optim", "--finetune")
_MOST_BYTES = 256 * 2**20
"""Larger metadata are left to Megatron, which reads them on every rank in any case."""
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
