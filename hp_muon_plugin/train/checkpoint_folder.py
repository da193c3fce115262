"""Where a run's checkpoints are, and what can be seen there before ranks start. No torch."""

from pathlib import Path

from hp_muon_plugin.checkpoint.folders import MANIFEST, TRACKER, folder_of, iterations, read_tracker
from hp_muon_plugin.config.checkpoint_checks import AUTO
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import CheckpointError, ConfigError

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
    """Check the folders that options of checkpoints name.

    Args:
        config: Options.
        folder: The run's folder.

    Raises:
        ConfigError: If there is nothing to resume from, another run's checkpoints are where new ones would go, or
            nothing can be written there.
    """
    options, save = config.checkpoint, save_folder(config, folder)
    if options.resume not in (None, AUTO):
        _check_named(Path(str(options.resume)))
    if options.every is None:
        return
    if options.resume is None:
        refuse_earlier(save)
    if options.save is not None:
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "checkpoint.save", save, f"cannot be made ({error.strerror})", "choose a folder that you may write to"
            ) from None


def _check_named(given: Path) -> None:
    """Refuse what is no checkpoint of ours, or a folder whose tracker names none."""
    why = ""
    if not (given / MANIFEST).is_file():
        try:
            iteration = read_tracker(given)
        except CheckpointError as error:
            why = str(error).partition("\n")[0]
        else:
            named = given if iteration is None else folder_of(given, iteration)
            if iteration is None:
                why = f"there is neither {MANIFEST} nor {TRACKER}"
            elif not (named / MANIFEST).is_file():
                why = f"{TRACKER} names {named.name}, which has no {MANIFEST}"
    if why:
        raise ConfigError(
            "checkpoint.resume",
            given,
            f"is no checkpoint of hp_muon_plugin: {why}",
            "name a folder such as .../checkpoints/iter_0000100, or convert it with hp-muon ckpt convert --to hp",
        )


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
