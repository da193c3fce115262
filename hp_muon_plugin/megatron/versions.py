"""Which megatron-core is installed, and whether it is one that we test."""

from dataclasses import dataclass
from functools import cache
from importlib import metadata

from hp_muon_plugin.errors import HookError

TESTED = ((0, 12), (0, 16), (0, 19))
"""Minor versions that run in our CI, each for real: 0.12.1, 0.16.1 and 0.19.x."""


@dataclass(frozen=True, order=True, slots=True)
class CoreVersion:
    """A megatron-core version, compared by its numbers.

    Attributes:
        major: First number.
        minor: Second number.
        patch: Third number.
    """

    major: int
    minor: int
    patch: int = 0

    @property
    def lane(self) -> tuple[int, int]:
        """``(major, minor)``."""
        return self.major, self.minor

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


def parse_version(text: str) -> CoreVersion:
    """Read a version string such as ``0.16.1`` or ``0.19.0rc2+abc``.

    Args:
        text: The string.

    Returns:
        Its three numbers; what follows a number is ignored.
    """
    numbers = []
    for piece in text.split("+")[0].split(".")[:3]:
        digits = ""
        for character in piece:
            if not character.isdigit():
                break
            digits += character
        numbers.append(int(digits or 0))
    return CoreVersion(*(numbers + [0, 0, 0])[:3])


@cache
def _installed() -> str | None:
    """What metadata say, which are asked for often and take milliseconds to read; None if there are none."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def core_version() -> CoreVersion:
    """The installed megatron-core.

    Returns:
        Its version, without importing it.

    Raises:
        HookError: If it is not installed.
    """
    text = _installed()
    if text is not None:
        return parse_version(text)
    try:  # a Megatron-LM checkout on PYTHONPATH has no metadata
        from megatron.core import __version__
    except ImportError:
        raise HookError(
            "megatron-core is not installed\n  fix: pip install 'hp_muon_plugin[megatron]'"
            " (Python 3.11: 0.12.1 or 0.16.1; Python 3.12: 0.19.x too)"
        ) from None
    return parse_version(__version__)


def check_tested(version: CoreVersion, *, allow_untested: bool) -> None:
    """Refuse versions that nobody has run the plugin on.

    Args:
        version: The installed version.
        allow_untested: Go on anyway, with the signature checks only.

    Raises:
        HookError: If the version's minor is not tested and not allowed.
    """
    if version.lane in TESTED or allow_untested:
        return
    tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
    raise HookError(
        f"megatron-core {version} is not tested with this plugin (tested: {tested})\n"
        "  fix: install a tested version, or pass allow_untested=True to rely on signature checks alone"
    )
