"""Where a run's checkpoints are, and what can be seen there before ranks start. No torch."""

from pathlib import Path

from hp_muon_plugin.checkpoint.folders import MANIFEST, iterations, named_checkpoint, to_go_on_from
from hp_muon_plugin.config.checkpoint_checks import AUTO, is_saving
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import CheckpointError, ConfigError
from hp_muon_plugin.train.checkpoint_fit import check_fit
from hp_muon_plugin.train.probe import probe_folder

_DEFAULT = "checkpoints"


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
            nothing can be written there; or the checkpoint is of a later step than the run's last, or of another
            optimizer.
        ConfigErrors: If the checkpoint is of a model of other shapes.
    """
    options, save = config.checkpoint, save_folder(config, folder)
    if options.resume == AUTO:
        tried = next((folder for folder in to_go_on_from(save) if (folder / MANIFEST).is_file()), None)
        if tried is not None:
            check_fit(config, tried)
    elif options.resume is not None:
        check_fit(config, _named(Path(str(options.resume))))
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
