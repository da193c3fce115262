"""Whether datasets are whole, have enough text for their parts, and no token id outside the vocabulary."""

import itertools

import numpy as np

from hp_muon_plugin.config.blend import Blend
from hp_muon_plugin.config.data_checks import shell_split, split_shares
from hp_muon_plugin.errors import ConfigError, DataError
from hp_muon_plugin.train.index_file import TokenFile, check_index

CHECKED_TOKENS = 4_000_000
"""How many tokens are looked at before training; the others when they are read."""
_FEWEST = 1 << 16


def open_files(blend: Blend, split: str, *, seq_length: int, vocab_size: int) -> dict[str, TokenFile]:
    """Open and check all datasets of a run.

    Args:
        blend: What ``data.path`` names.
        split: Three shares, as ``data.split``.
        seq_length: Tokens per sample.
        vocab_size: Number of token ids.

    Returns:
        The files by prefix.

    Raises:
        DataError: If one is missing or damaged.
        ConfigError: If a part of one is too small for one sample, or the vocabulary for its tokens.
    """
    files = {prefix: check_index(prefix) for prefix in blend.names}
    for prefix, file in files.items():
        check_parts(file.lengths, split, seq_length, name=prefix if len(files) > 1 else None)
        check_vocabulary(file, vocab_size, first=tokens_to_check(len(files)))
    return files


def tokens_to_check(num_files: int) -> int:
    """How many tokens of each file are looked at before training.

    Args:
        num_files: Of the run.

    Returns:
        A share of ``CHECKED_TOKENS``, and not too few.
    """
    return max(_FEWEST, CHECKED_TOKENS // num_files)


def check_parts(lengths: np.ndarray, split: str, seq_length: int, *, name: str | None = None) -> None:
    """Check that the training and the held-out part hold at least one sample each.

    megatron-core divides the sequences, not the tokens, and looks for samples in too small a part
    without end.

    Args:
        lengths: ``(sequences,)`` tokens of each sequence.
        split: Three shares, as ``data.split``.
        seq_length: Tokens per sample.
        name: Of the dataset, where there are several.

    Raises:
        ConfigError: Naming the part that is too small, with a division that works.
    """
    shares = split_shares(split)
    bounds = itertools.accumulate(share / sum(shares) for share in shares)
    places = [0, *(round(bound * len(lengths)) for bound in bounds)]  # as megatron-core rounds them
    for part, title in enumerate(("training", "held-out")):
        tokens = int(lengths[places[part] : places[part + 1]].sum(dtype=np.int64))
        if tokens < seq_length + 1:
            raise ConfigError(
                "data.split",
                split,
                f"the {title} part{'' if name is None else f' of {name}'} has {places[part + 1] - places[part]} of "
                f"{len(lengths)} sequences with {tokens} tokens, and one sample has model.seq_length + 1 = "
                f"{seq_length + 1}",
                _division_that_works(lengths, seq_length + 1)
                if name is None
                else f"leave {name} out of data.path, give that part a larger share, or take smaller samples",
            )


def _division_that_works(lengths: np.ndarray, needed: int) -> str:
    """The smallest held-out part of whole sequences with ``needed`` tokens, if the rest has as many."""
    heads = np.cumsum(lengths, dtype=np.int64)[:-1]  # (sequences - 1,) tokens before each cut
    if not heads.size:
        return (
            "write the text as several documents: Megatron divides whole ones (preprocess_data.py makes one per line)"
        )
    smaller = np.minimum(heads, int(lengths.sum(dtype=np.int64)) - heads)
    cuts = np.flatnonzero(smaller >= needed)
    if cuts.size:
        training = int(cuts[-1]) + 1
        return f"{shell_split(f'{training},{len(lengths) - training},0')}, which counts sequences"
    longest = int(smaller.max()) - 1
    if longest < 1:
        return "take a dataset with more text"
    return f"model.seq_length={longest} or less, or a dataset with more text"


def check_vocabulary(file: TokenFile, vocab_size: int, *, first: int = CHECKED_TOKENS) -> None:
    """Check that token ids are in the vocabulary.

    Args:
        file: A checked dataset.
        vocab_size: Number of token ids.
        first: How many tokens to look at.

    Raises:
        ConfigError: If an id is too large.
        DataError: If an id is negative.
    """
    tokens = file.first_tokens(first)
    if tokens.size:
        check_ids(int(tokens.min()), int(tokens.max()), vocab_size, where=str(file.path))


def check_ids(smallest: int, largest: int, vocab_size: int, *, where: str) -> None:
    """Check the smallest and the largest of some token ids.

    Args:
        smallest: Smallest id.
        largest: Largest id.
        vocab_size: Number of token ids.
        where: What holds them.

    Raises:
        ConfigError: If the largest is too large.
        DataError: If the smallest is negative.
    """
    if smallest < 0:
        raise DataError(
            f"{where} is damaged: it holds token id {smallest}\n"
            "  fix: write the dataset again with Megatron's tools/preprocess_data.py"
        )
    if largest >= vocab_size:
        raise ConfigError(
            "data.vocab_size",
            vocab_size,
            f"{where} holds token id {largest}",
            f"data.vocab_size={largest + 1} or more: the size of the tokenizer's vocabulary",
        )
