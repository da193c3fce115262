"""Too little text for a part, and tokens outside the vocabulary, are named with a fix that works."""

import re
from pathlib import Path

import numpy as np
import pytest

from hp_muon_plugin.errors import ConfigError, DataError
from hp_muon_plugin.train.index_file import TokenFile
from hp_muon_plugin.train.token_checks import check_ids, check_parts, check_vocabulary


def test_a_part_too_small_for_one_sample_is_named() -> None:
    """megatron-core itself would look for samples without end."""
    lengths = np.array([5, 3], dtype="<i4")
    check_parts(lengths, "50,50,0", seq_length=2)
    with pytest.raises(ConfigError, match=r"the held-out part has 1 of 2 sequences with 3 tokens"):
        check_parts(lengths, "50,50,0", seq_length=3)
    with pytest.raises(ConfigError, match=r"the held-out part has 0 of 2 sequences with 0 tokens"):
        check_parts(lengths, "99,1,0", seq_length=1)


@pytest.mark.parametrize("lengths", [[5, 3], [100, 2, 2, 2], [1, 1, 50, 9], [4] * 1000])
def test_the_suggested_division_works(lengths: list[int]) -> None:
    sizes = np.array(lengths, dtype="<i4")
    with pytest.raises(ConfigError) as caught:
        check_parts(sizes, "1,1e-9,0", seq_length=2)
    suggested = re.search(r'data\.split="([^"]+)"', caught.value.fix)
    assert suggested is not None, caught.value.fix
    check_parts(sizes, suggested[1], seq_length=2)


def test_one_document_is_not_asked_to_be_divided_the_same_way_again() -> None:
    """The fix of `data.split=90,10,0` was `data.split="90,10,0"`."""
    with pytest.raises(ConfigError, match="has 0 of 1 sequences") as caught:
        check_parts(np.array([10_000]), "90,10,0", seq_length=16)
    assert "data.split" not in caught.value.fix
    assert "write the text as several documents" in caught.value.fix


def test_too_little_text_at_all_suggests_shorter_samples() -> None:
    with pytest.raises(ConfigError) as caught:
        check_parts(np.array([60, 40]), "50,50,0", seq_length=64)
    assert caught.value.fix == "model.seq_length=39 or less, or a dataset with more text"
    check_parts(np.array([60, 40]), "50,50,0", seq_length=39)
    with pytest.raises(ConfigError, match="take a dataset with more text"):
        check_parts(np.array([1, 1]), "50,50,0", seq_length=64)


def token_file(folder: Path, tokens: list[int], dtype: str) -> TokenFile:
    path = folder / "text.bin"
    np.array(tokens).astype(dtype).tofile(path)
    return TokenFile(path, np.array([len(tokens)]), dtype)


def test_a_vocabulary_smaller_than_the_ids_is_named(tmp_path: Path) -> None:
    file = token_file(tmp_path, list(range(8)), "<u2")
    check_vocabulary(file, 8)
    with pytest.raises(ConfigError, match=r"data\.vocab_size=7: .*text\.bin holds token id 7") as caught:
        check_vocabulary(file, 7)
    assert caught.value.fix.startswith("data.vocab_size=8 or more")
    check_vocabulary(file, 7, first=7)


def test_a_negative_id_is_damage(tmp_path: Path) -> None:
    """It was a ValueError of numpy in a rank."""
    with pytest.raises(DataError, match=r"text\.bin is damaged: it holds token id -5\n  fix: write"):
        check_vocabulary(token_file(tmp_path, [1, -5, 2], "<i4"), 100)
    check_ids(0, 99, 100, where="x")
