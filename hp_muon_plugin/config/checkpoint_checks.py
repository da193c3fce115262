"""What options of checkpoints must be together."""

from collections.abc import Iterator

from hp_muon_plugin.config.trainer import Checkpoint
from hp_muon_plugin.errors import ConfigError

AUTO = "auto"


def is_saving(options: Checkpoint) -> bool:
    """Whether the run saves checkpoints: at intervals, or of its last step because a folder is named.

    Args:
        options: Options.
    """
    return options.every is not None or options.save is not None


def checkpoint_errors(options: Checkpoint) -> Iterator[ConfigError]:
    """Check options of checkpoints.

    Args:
        options: Options, every number in its range.

    Yields:
        What contradicts each other.
    """
    for name in ("save", "resume"):
        value = getattr(options, name)
        if value is not None and not value.strip():
            yield ConfigError(f"checkpoint.{name}", "''", "is empty", "name a folder, or leave it out")
    if not is_saving(options):
        for name in ("keep", "asynchronous", "on_interrupt"):
            value = getattr(options, name)
            if value:
                yield ConfigError(
                    f"checkpoint.{name}", value, "nothing is saved", "e.g. checkpoint.every=100, or leave it out"
                )
    if options.resume is None:
        for name in ("load_optimizer", "load_position", "load_random"):
            if not getattr(options, name):
                yield ConfigError(
                    f"checkpoint.{name}", False, "nothing is resumed", "e.g. checkpoint.resume=auto, or leave it out"
                )
