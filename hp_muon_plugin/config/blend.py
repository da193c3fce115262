"""What ``data.path`` names: what Megatron's ``--data-path`` takes.

One prefix; several, each of which is read as often as it is long; or weights and prefixes by turns.
Written as a list, or as one text with spaces between them.
"""

import math
import os.path
from typing import NamedTuple

from hp_muon_plugin.errors import ConfigError

_EXAMPLE = "'data.path=\"0.3 /first/prefix 0.7 /second/prefix\"'"


class Blend(NamedTuple):
    """Datasets and how much of each.

    Attributes:
        prefixes: Each of a ``.bin`` and an ``.idx`` file. At least one.
        weights: Shares of samples, above 0, in any unit; None where none were given.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The prefixes, each once."""
        return tuple(dict.fromkeys(self.prefixes))


def read_blend(path: object) -> Blend:
    """Read a ``data.path``.

    A text that as a whole names a file is one prefix, whatever spaces it has.

    Args:
        path: A text, or a list of texts and numbers; not empty.

    Returns:
        Prefixes and weights; whether their files are there is not looked at.

    Raises:
        ConfigError: If it can be read neither as prefixes nor as weights and prefixes.
    """
    words = _words(path)
    if len(words) == 1 or not any(map(_is_number, words)):
        return Blend(tuple(words))
    weights, prefixes = words[::2], words[1::2]
    _check_turns(path, words)
    for weight, prefix in zip(weights, prefixes, strict=True):
        if not 0 < float(weight) < math.inf:
            raise ConfigError(
                "data.path",
                shown_path(path),
                f"the weight {weight} of {prefix} is not above 0 and finite",
                f"leave {prefix} out, or give it a weight above 0",
            )
    return Blend(tuple(prefixes), tuple(map(float, weights)))


def shown_path(path: object) -> str:
    """A ``data.path`` as it is written on a command line.

    Args:
        path: The option's value.

    Returns:
        Lists in brackets without spaces; everything else as it is.
    """
    return f"[{','.join(map(str, path))}]" if isinstance(path, list | tuple) else str(path)


def _words(path: object) -> list[str]:
    if isinstance(path, str):
        is_whole = any(os.path.isfile(path + ending) for ending in ("", ".bin", ".idx"))
        return [path] if is_whole else path.split()
    parts = list(path) if isinstance(path, list | tuple) else [path]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int | float) or not str(part).strip():
            raise ConfigError(
                "data.path",
                shown_path(path),
                f"{part!r} is neither a prefix nor a weight",
                f"one prefix, a list of prefixes, or weights and prefixes by turns: {_EXAMPLE}",
            )
    return [str(part).strip() for part in parts]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_turns(path: object, words: list[str]) -> None:
    """Megatron itself would take a weight without a prefix for a prefix."""
    wrong = next((place for place in range(0, len(words), 2) if not _is_number(words[place])), None)
    if wrong is None and len(words) % 2 == 0:
        return
    if wrong is None:
        why = f"the weight {words[-1]} has no prefix behind it"
    else:
        why = f"part {wrong + 1} is {words[wrong]}, and a weight belongs there"
    count = f" (an odd number of parts, {len(words)})" if len(words) % 2 else ""
    raise ConfigError(
        "data.path",
        shown_path(path),
        f"weights and prefixes do not take turns: {why}{count}",
        f"write a weight before every prefix, as in {_EXAMPLE}, or before none (a prefix that is a number: ./2026)",
    )
