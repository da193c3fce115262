"""Real text on every machine: the language reference that CPython ships, as a byte-level dataset."""

import hashlib
import math
import os
import pydoc_data.topics
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_BYTES = 256
END_OF_DOCUMENT = 256
VOCAB_SIZE = 257


class ByteTokenizer:
    """What megatron-core's datasets ask of a tokenizer, for tokens that are bytes or your own ids.

    Args:
        vocab_size: Number of token ids.
        eod: Token id that ends a document.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE, eod: int = END_OF_DOCUMENT) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.pad = -1  # no token: megatron-core blanks out whatever equals it
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict(
            {"class": "hp_muon_plugin.ids", "vocab_size": vocab_size, "eod": eod}
        )


def pydoc_documents() -> list[bytes]:
    """The topics of the language reference, one document each, in the order of their names."""
    topics = pydoc_data.topics.topics
    return [topics[name].encode() for name in sorted(topics)]


def build_pydoc_dataset(folder: str) -> str:
    """Write the dataset once; later calls find it.

    Only one rank may call it. It is written beside its final name and renamed when whole.

    Args:
        folder: Where to put it.

    Returns:
        Prefix of the ``.bin`` and ``.idx`` files.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = pydoc_prefix(folder)
    if Path(f"{prefix}.bin").is_file() and Path(f"{prefix}.idx").is_file():
        return prefix
    Path(folder).mkdir(parents=True, exist_ok=True)
    part = f"{prefix}.partial{os.getpid()}"
    builder = IndexedDatasetBuilder(f"{part}.bin", dtype=np.uint16)
    for document in pydoc_documents():
        builder.add_item(torch.tensor([*document, END_OF_DOCUMENT]))
        builder.end_document()
    builder.finalize(f"{part}.idx")
    for ending in (".bin", ".idx"):
        os.replace(part + ending, prefix + ending)
    return prefix


def pydoc_prefix(folder: str) -> str:
    """Name of the dataset; it contains a hash of the text, which differs between Python versions.

    Args:
        folder: Where it is kept.

    Returns:
        Prefix of the ``.bin`` and ``.idx`` files.
    """
    digest = hashlib.sha256(b"\0".join(pydoc_documents())).hexdigest()[:12]
    return str(Path(folder) / f"pydoc-{digest}")


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy of single tokens, in nats: the loss of a model that knows only how often each occurs.

    Args:
        tokens: Token ids, any integer type.

    Returns:
        ``-sum p log p``.
    """
    counts = np.bincount(tokens.astype(np.int64).ravel())
    shares = counts[counts > 0] / counts.sum()
    return -math.fsum(float(share) * math.log(float(share)) for share in shares)
