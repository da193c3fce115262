import math

import numpy as np
import pytest

from hp_muon_plugin.train.text import END_OF_DOCUMENT, ByteTokenizer, pydoc_documents, pydoc_prefix, unigram_entropy


def test_the_text_is_real_and_the_same_every_time() -> None:
    documents = pydoc_documents()
    assert len(documents) > 50
    assert sum(map(len, documents)) > 400_000
    assert b"statement" in documents[0] or b"assert" in documents[0]
    assert pydoc_prefix("x") == pydoc_prefix("x")


def test_entropy_of_known_distributions() -> None:
    assert unigram_entropy(np.array([3, 3, 3])) == pytest.approx(0.0)
    assert unigram_entropy(np.arange(256, dtype=np.uint16)) == pytest.approx(math.log(256))


def test_no_token_is_taken_for_padding() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.eod == END_OF_DOCUMENT
    assert tokenizer.pad not in range(tokenizer.vocab_size)
