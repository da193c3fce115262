"""Checking a Megatron ``.bin``/``.idx`` pair before training starts.

megatron-core reads the index with memory maps and few checks: a truncated file is a crash in the
middle of a run, or silent garbage. The format: 9 bytes magic, 8 bytes version (1), 1 byte type
code, 8 bytes number of sequences, 8 bytes number of documents, then int32 lengths, int64 pointers
and int64 document indices, all little endian.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hp_muon_plugin.errors import ConfigError, DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # megatron-core's integer type codes


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A checked dataset.

    Attributes:
        path: The ``.bin`` file.
        lengths: ``(sequences,)`` int32, tokens of each sequence, memory-mapped.
        dtype: Type of the tokens, as numpy writes it.
    """

    path: Path
    lengths: np.ndarray
    dtype: str

    @property
    def num_tokens(self) -> int:
        """Tokens in the file."""
        return int(self.lengths.sum(dtype=np.int64))

    def first_tokens(self, count: int) -> np.ndarray:
        """Read the first tokens.

        Args:
            count: At most this many.

        Returns:
            ``(min(count, num_tokens),)`` token ids.
        """
        return np.fromfile(self.path, dtype=self.dtype, count=min(count, self.num_tokens))


def check_index(prefix: str) -> TokenFile:
    """Check that an index is whole and fits its data file.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Returns:
        What the index says.

    Raises:
        DataError: Naming the file, what is wrong with it, and the fix.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    size = index.stat().st_size
    if size < _HEADER.size:
        raise _damaged(index, f"it has {size} bytes, and the header alone has {_HEADER.size}")
    with index.open("rb") as stream:
        magic, version, code, sequences, documents = _HEADER.unpack(stream.read(_HEADER.size))
    if magic != MAGIC:
        raise _damaged(index, "it does not begin with MMIDIDX, so it is no Megatron index")
    if version != 1 or code not in _TOKEN_TYPES:
        raise _damaged(index, f"version {version} or token type {code} is not known")
    wanted = _HEADER.size + sequences * (4 + 8) + documents * 8
    if size < wanted:
        raise _damaged(index, f"it has {size} bytes, and {sequences} sequences in {documents} documents need {wanted}")
    if sequences == 0 or documents < 2:
        raise _damaged(index, "it holds no document")
    lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,))
    pointers = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,))
    if int(lengths.min()) < 0 or int(pointers.min()) < 0:
        raise _damaged(index, "it has negative lengths or offsets")
    ends = pointers + lengths.astype(np.int64) * np.dtype(_TOKEN_TYPES[code]).itemsize
    if int(ends.max()) > data.stat().st_size:
        raise _damaged(data, f"it has {data.stat().st_size} bytes, and its index points up to byte {int(ends.max())}")
    return TokenFile(data, lengths, _TOKEN_TYPES[code])


def check_parts(file: TokenFile, split: str, seq_length: int) -> None:
    """Check that the training and the held-out part hold at least one sample each.

    megatron-core divides the sequences, not the tokens, and looks for samples in too small a part
    without end.

    Args:
        file: A checked dataset.
        split: Three shares, as ``data.split``.
        seq_length: Tokens per sample.

    Raises:
        ConfigError: Naming the part that is too small.
    """
    shares = [float(share) for share in split.split(",")]
    bounds = [sum(shares[:i]) / sum(shares) for i in range(4)]
    places = [round(bound * len(file.lengths)) for bound in bounds]
    for part, name in enumerate(("training", "held-out")):
        tokens = int(file.lengths[places[part] : places[part + 1]].sum(dtype=np.int64))
        if tokens < seq_length + 1:
            raise ConfigError(
                "data.split",
                split,
                f"the {name} part has {places[part + 1] - places[part]} of {len(file.lengths)} sequences with "
                f"{tokens} tokens, and one sample has model.seq_length + 1 = {seq_length + 1}",
                'give it a larger share, e.g. data.split="90,10,0", or choose a smaller model.seq_length',
            )


def check_vocabulary(file: TokenFile, vocab_size: int, *, first: int) -> None:
    """Check that token ids are smaller than the vocabulary.

    Args:
        file: A checked dataset.
        vocab_size: Number of token ids.
        first: How many tokens to look at.

    Raises:
        ConfigError: If an id is too large.
    """
    tokens = file.first_tokens(first)
    if tokens.size and int(tokens.max()) >= vocab_size:
        raise ConfigError(
            "data.vocab_size",
            vocab_size,
            f"{file.path} holds token id {int(tokens.max())}",
            f"data.vocab_size={int(tokens.max()) + 1} or more: the size of the tokenizer's vocabulary",
        )


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is damaged: {why}\n  fix: write the dataset again with Megatron's tools/preprocess_data.py"
    )
