"""The errors that users of the plugin can meet.

A user's mistake is a :class:`ConfigError` or one of its siblings: it names the option, its value,
why it cannot work and what to write instead. The command line turns every one of them into a
single message and exit code 2; a :class:`RunError` is a failure of the run itself, exit code 1. Our
own invariants are plain ``assert``.
"""

from collections.abc import Sequence
from typing import Any


class HpMuonError(Exception):
    """Base of every error that the plugin raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle sends to another rank, which makes no call of ``__init__``; values of options go as text."""
        state = {name: found if isinstance(found, str | tuple) else str(found) for name, found in vars(self).items()}
        return _received, (type(self), self.args), state


def _received(kind: type[HpMuonError], args: tuple[object, ...]) -> HpMuonError:
    return kind.__new__(kind, *args)


class ConfigError(HpMuonError, ValueError):
    """An option has a value that cannot work.

    Args:
        option: Dotted name of the option as the user writes it, for example ``topology.tp``.
        value: The value that was given.
        why: What is wrong with it, without a final full stop.
        fix: What to write instead.
    """

    def __init__(self, option: str, value: object, why: str, fix: str) -> None:
        self.option = option
        self.value = value
        self.why = why
        self.fix = fix
        super().__init__(f"{option}={value}: {why}\n  fix: {fix}")


class ConfigErrors(HpMuonError, ValueError):
    """Several options are wrong; all of them are named at once.

    Args:
        errors: The single errors, in the order in which they were found. At least one.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))


class DataError(HpMuonError):
    """A dataset is missing or damaged. The message names the file and the fix."""


class RoutingError(HpMuonError, ValueError):
    """A parameter has no optimizer, or two; or a pattern names no parameter."""


class RunError(HpMuonError, RuntimeError):
    """A run failed although nothing was wrong with what the user wrote: exit code 1, not 2."""


class GradientError(RunError):
    """A gradient is missing or not finite where the configuration says that this is an error."""


class DivergenceError(RunError):
    """The loss is NaN or infinite, and stays so."""


class CheckpointError(RunError):
    """A checkpoint is damaged, incomplete, of an unknown format, or would be written where it must not be."""


class DamageError(CheckpointError):
    """What a checkpoint holds is not what was written: exit code 3 of ``hp-muon ckpt``."""


class VerifyError(CheckpointError):
    """What was written, read again, is not what it was made from: exit code 3."""


class HookError(HpMuonError, RuntimeError):
    """A Megatron hook cannot be installed, or was bypassed."""


class PlatformError(HpMuonError, RuntimeError):
    """The chosen platform is not available on this machine."""


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise nothing, the one error, or all errors together.

    Args:
        errors: What the checks found.

    Raises:
        ConfigError: If there is exactly one.
        ConfigErrors: If there are several.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigErrors(errors)
