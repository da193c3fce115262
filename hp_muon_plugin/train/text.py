"""Real text on every machine: the language reference that CPython ships, as a byte-level dataset."""

import functools
import hashlib
import math
import pydoc_data.topics
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.trainer import Data
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.index_file import dataset_bytes, write_dataset

NUM_BYTES = 256
END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
_LONG_LINE = 30
_NO_TOKEN = -(1 << 63)


class ByteTokenizer:
    """What megatron-core's datasets ask of a tokenizer, for tokens that are bytes or your own ids.

    Args:
        vocab_size: Number of token ids.
        eod: Token id that ends a document.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE, eod: int = END_OF_DOCUMENT) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.pad = _NO_TOKEN  # megatron-core blanks out whatever equals it; -1 hid damaged data
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict(
            {"class": "hp_muon_plugin.ids", "vocab_size": vocab_size, "eod": eod}
        )


def vocabulary_size(data: Data) -> int:
    """Number of token ids before padding.

    Args:
        data: Checked options.

    Returns:
        What the built-in text has, or what the user says.
    """
    if data.kind is DataKind.pydoc:
        return VOCAB_SIZE
    assert data.vocab_size is not None
    return data.vocab_size


@functools.cache
def pydoc_documents() -> tuple[bytes, ...]:
    """The topics of the language reference, one document each, in the order of their names.

    Topics quote each other at length, so that text of the last ones, which are held out, would
    stand in the training part as well. What an earlier topic has is left out: whole paragraphs,
    and lines of 30 characters or more.
    """
    topics = pydoc_data.topics.topics
    seen: set[str] = set()
    documents = []
    for name in sorted(topics):
        kept, found = _without(topics[name], seen)
        seen |= found
        if kept.strip():
            documents.append(kept.encode())
    return tuple(documents)


def _without(topic: str, seen: set[str]) -> tuple[str, set[str]]:
    """A topic without what was seen before, and what it adds to that; spacing does not count."""
    paragraphs, found = [], set()
    for paragraph in topic.split("\n\n"):
        words = " ".join(paragraph.split())
        found.add(words)
        if words in seen:
            continue
        lines = []
        for line in paragraph.split("\n"):
            text = " ".join(line.split())
            if len(text) >= _LONG_LINE:
                found.add(text)
                if text in seen:
                    continue
            lines.append(line)
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs), found


def pydoc_tokens() -> list[np.ndarray]:
    """Tokens of each document, its end included; uint16."""
    return [np.array([*document, END_OF_DOCUMENT], dtype=np.uint16) for document in pydoc_documents()]


def build_pydoc_dataset(folder: str) -> str:
    """Write the dataset, or find it; one that is not what it should be is written anew.

    Several processes may call it at once: files are renamed into place when they are whole.

    Args:
        folder: Where to put it.

    Returns:
        Prefix of the ``.bin`` and ``.idx`` files.

    Raises:
        ConfigError: If the folder cannot be written to.
    """
    prefix, tokens = pydoc_prefix(folder), pydoc_tokens()
    try:
        if not all(_holds(Path(prefix + ending), content) for ending, content in dataset_bytes(tokens).items()):
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_dataset(prefix, tokens)
    except OSError as error:
        raise unwritable_cache(folder, error) from None
    return prefix


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def unwritable_cache(folder: str, error: OSError) -> ConfigError:
    """What to say where the dataset's folder cannot be written to.

    Args:
        folder: ``data.cache_dir``.
        error: What the system said.

    Returns:
        The error to raise.
    """
    return ConfigError(
        "data.cache_dir",
        folder,
        f"cannot be written to ({error.filename}: {error.strerror})",
        "choose a folder that you may write to, e.g. data.cache_dir=outputs/data",
    )


def pydoc_prefix(folder: str) -> str:
    """Name of the dataset; it contains a hash of the text, which differs between Python versions.

    Args:
        folder: Where it is kept.

    Returns:
        Prefix of the ``.bin`` and ``.idx`` files.
    """
    digest = hashlib.sha256(b"\0".join(pydoc_documents())).hexdigest()[:12]
    return str(Path(folder) / f"pydoc-{digest}")


def unigram_entropy(texts: Sequence[np.ndarray], shares: Sequence[float]) -> float:
    """Entropy of single tokens, in nats: the loss of a model that knows only how often each occurs.

    Args:
        texts: Token ids of each text, any integer type.
        shares: How much of what is read is of each text, in any unit.

    Returns:
        ``-sum p log p``.
    """
    counts = [np.bincount(tokens.astype(np.int64).ravel()) for tokens in texts]
    mixed = np.zeros(max(map(len, counts)))
    for count, share in zip(counts, shares, strict=True):
        mixed[: len(count)] += count / count.sum() * (share / sum(shares))
    return -math.fsum(float(share) * math.log(float(share)) for share in mixed[mixed > 0])
