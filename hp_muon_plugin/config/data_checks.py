"""Whether the options of the data agree with each other, and the named files are there."""

import math
import os.path
from collections.abc import Iterator

from hp_muon_plugin.config.blend import read_blend, shown_path
from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.trainer import Data
from hp_muon_plugin.errors import ConfigError


def data_errors(data: Data, *, is_plan: bool = False) -> Iterator[ConfigError]:
    """Check the options of the data.

    Args:
        data: Options, every number in its range.
        is_plan: Whether nothing is read: files need not be there, nor be named.

    Yields:
        One error for each thing that is wrong.
    """
    yield from _split_errors(data.split)
    if not data.cache_dir.strip():
        yield ConfigError("data.cache_dir", "''", "is empty", "e.g. data.cache_dir=outputs/data")
    if data.kind is DataKind.pydoc:
        yield from _ignored_errors(data)
        return
    yield from _path_errors(data.path, is_plan=is_plan)
    if data.vocab_size is None:
        yield ConfigError("data.vocab_size", None, "is not known for your own dataset", "e.g. data.vocab_size=32000")
    yield from _end_of_document_errors(data)


def missing_files(prefix: str) -> list[str]:
    """Files of a dataset that are not there.

    Args:
        prefix: Of its ``.bin`` and ``.idx`` files.

    Returns:
        Their paths.
    """
    return [f"{prefix}{ending}" for ending in (".bin", ".idx") if not os.path.isfile(f"{prefix}{ending}")]


def is_named(path: object) -> bool:
    """Whether a ``data.path`` names anything.

    Args:
        path: The option's value.
    """
    return not (path is None or path == [] or (isinstance(path, str) and not path.strip()))


def split_shares(split: str) -> list[float]:
    """The shares of a ``data.split``.

    Args:
        split: Numbers between commas.

    Returns:
        The numbers, or nothing if it is not made of finite numbers.
    """
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        return []
    return shares if all(math.isfinite(share) for share in shares) else []


def shell_split(split: str) -> str:
    """How a shares' option is written in a shell: Hydra would take bare commas for a sweep.

    Args:
        split: The shares.

    Returns:
        The override in quotes.
    """
    return f"'data.split=\"{split}\"'"


def _split_errors(split: str) -> Iterator[ConfigError]:
    shares = split_shares(split)
    if len(shares) != 3 or min(shares) < 0 or shares[0] <= 0 or shares[1] <= 0:
        yield ConfigError(
            "data.split",
            split,
            "needs three shares for train, validation and test, the first two above 0",
            f"e.g. {shell_split('90,10,0')}",
        )


def _ignored_errors(data: Data) -> Iterator[ConfigError]:
    """What the built-in text would ignore: most likely the user's own text was meant."""
    if data.path is not None:
        vocabulary = "" if data.vocab_size is not None else " data.vocab_size=N"
        yield ConfigError(
            "data.path",
            shown_path(data.path),
            "data=pydoc trains on the text that CPython ships, and would ignore it",
            f"add data=megatron{vocabulary} for your dataset, or leave data.path out",
        )
        return
    known = {"vocab_size": "256 bytes and an end-of-document mark", "eod_id": "its own end-of-document mark, 256"}
    for name, what in known.items():
        if getattr(data, name) is not None:
            yield ConfigError(
                f"data.{name}",
                getattr(data, name),
                f"the text of data=pydoc has {what}, and this would be ignored",
                f"leave data.{name} out, or give your dataset with data=megatron data.path=/prefix",
            )


def _path_errors(path: object, *, is_plan: bool) -> Iterator[ConfigError]:
    if not is_named(path):
        if not is_plan:
            yield ConfigError("data.path", path, "data=megatron needs your dataset", "data.path=/prefix/of/your/data")
        return
    try:
        blend = read_blend(path)
    except ConfigError as error:
        yield error
        return
    for prefix in blend.names:
        yield from _file_errors(prefix, has_spaces=isinstance(path, str) and len(path.split()) > 1, is_plan=is_plan)


def _file_errors(prefix: str, *, has_spaces: bool, is_plan: bool) -> Iterator[ConfigError]:
    if prefix.endswith((".bin", ".idx")):
        yield ConfigError("data.path", prefix, "is a file, and a prefix is wanted", f"data.path={prefix[:-4]}")
        return
    missing = missing_files(prefix)
    if missing and not is_plan:
        yield ConfigError(
            "data.path",
            prefix,
            f"there is no file {' and no file '.join(missing)}",
            "give the prefix of a dataset that Megatron's tools/preprocess_data.py wrote, without .bin or .idx"
            + (" (a prefix with spaces stands in a list: 'data.path=[\"/my data/text\"]')" if has_spaces else ""),
        )


def _end_of_document_errors(data: Data) -> Iterator[ConfigError]:
    if data.eod_id is None:
        return
    if data.vocab_size is not None and data.eod_id >= data.vocab_size:
        yield ConfigError(
            "data.eod_id",
            data.eod_id,
            f"is no token id: there are data.vocab_size={data.vocab_size}",
            f"choose 0 to {data.vocab_size - 1}",
        )
    if not (data.eod_mask_loss or data.reset_attention_mask):
        yield ConfigError(
            "data.eod_id",
            data.eod_id,
            "has no effect unless documents are told apart",
            "set data.eod_mask_loss=true or data.reset_attention_mask=true, or leave data.eod_id out",
        )
