import math
import os
from pathlib import Path

import numpy as np
import pytest

from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.trainer import Data
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.index_file import check_index
from hp_muon_plugin.train.text import (
    END_OF_DOCUMENT,
    VOCAB_SIZE,
    ByteTokenizer,
    build_pydoc_dataset,
    pydoc_documents,
    pydoc_prefix,
    unigram_entropy,
    vocabulary_size,
)

WINDOW = 64


def test_the_text_is_real_and_the_same_every_time() -> None:
    documents = pydoc_documents()
    assert len(documents) > 50
    assert sum(map(len, documents)) > 300_000
    assert b"statement" in documents[0] or b"assert" in documents[0]
    assert pydoc_prefix("x") == pydoc_prefix("x")


def test_held_out_text_is_not_in_the_training_text() -> None:
    """`with` and `while` quote `compound`: a tenth of the held-out text stood in the training text verbatim."""
    documents = pydoc_documents()
    training, held_out = documents[: round(0.9 * len(documents))], documents[round(0.9 * len(documents)) :]
    assert sum(map(len, held_out)) > 20_000
    seen = {text[i : i + WINDOW] for text in training for i in range(len(text) - WINDOW + 1)}
    repeated = [
        text[i : i + WINDOW] for text in held_out for i in range(len(text) - WINDOW + 1) if text[i : i + WINDOW] in seen
    ]
    assert [piece for piece in repeated if piece.strip(b"+-=| \n")] == []  # the rules of tables are no text


def test_the_dataset_is_written_once(tmp_path: Path) -> None:
    prefix = build_pydoc_dataset(str(tmp_path))
    assert check_index(prefix).num_tokens == sum(len(document) + 1 for document in pydoc_documents())
    before = os.stat(f"{prefix}.bin").st_mtime_ns
    assert build_pydoc_dataset(str(tmp_path)) == prefix
    assert os.stat(f"{prefix}.bin").st_mtime_ns == before


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_damaged_copy_is_written_anew(ending: str, tmp_path: Path) -> None:
    """The message was to write it again with preprocess_data.py, which has not written it."""
    prefix = build_pydoc_dataset(str(tmp_path))
    whole = Path(prefix + ending).read_bytes()
    Path(prefix + ending).write_bytes(whole[:50] + b"\0" + whole[51:-1])
    build_pydoc_dataset(str(tmp_path))
    assert Path(prefix + ending).read_bytes() == whole
    assert sorted(os.listdir(tmp_path)) == sorted(Path(prefix + end).name for end in (".bin", ".idx"))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache_dir=.*file/data: cannot be written to .*Not a directory"):
        build_pydoc_dataset(str(tmp_path / "file" / "data"))


def test_the_vocabulary_is_the_texts_own() -> None:
    assert vocabulary_size(Data()) == VOCAB_SIZE == 257
    assert vocabulary_size(Data(kind=DataKind.megatron, vocab_size=9)) == 9


def test_entropy_of_known_distributions() -> None:
    assert unigram_entropy([np.array([3, 3, 3])], [9]) == pytest.approx(0.0)
    assert unigram_entropy([np.arange(256, dtype=np.uint16)], [0.5]) == pytest.approx(math.log(256))


def test_entropy_of_a_mixture_goes_by_shares_and_not_by_lengths() -> None:
    texts = [np.array([0] * 10), np.array([1, 1]), np.array([0, 5])]
    shares = [0.5, 0.25, 0.0]
    wanted = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert unigram_entropy(texts, shares) == pytest.approx(wanted)


def test_no_token_is_taken_for_padding() -> None:
    """megatron-core blanks out what equals the padding: -1 hid a damaged token."""
    tokenizer = ByteTokenizer()
    assert tokenizer.eod == END_OF_DOCUMENT
    assert tokenizer.pad < -(2**31)
