"""What options of the data do to batches, through megatron-core's own datasets."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("megatron.core")

from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Data, Train
from hp_muon_plugin.errors import ConfigError, DataError
from hp_muon_plugin.train.data import Batch, load_data, micro_batches
from hp_muon_plugin.train.index_file import write_dataset

VOCAB = 50
SEPARATOR = 7


def config(folder: Path, **data: Any) -> Train:
    """Thirty documents of 20 tokens, each of which ends with the separator, 64 tokens a sample."""
    generator = np.random.default_rng(0)
    documents = []
    for _ in range(30):
        document = generator.integers(8, VOCAB, 20).astype(np.uint16)
        document[-1] = SEPARATOR
        documents.append(document)
    prefix, cache = str(folder / "text"), str(folder / "cache")
    if not Path(f"{prefix}.idx").exists():
        write_dataset(prefix, documents)
    options = {"kind": DataKind.megatron, "path": prefix, "vocab_size": VOCAB, "cache_dir": cache, "split": "50,50,0"}
    train = Train(optimizer=HpMuon(), data=Data(**(options | data)))
    train.model.seq_length = 64
    train.run.steps, train.run.global_batch_size, train.run.eval_batches = 1, 4, 1
    return train


def batch_of(train: Train) -> Batch:
    device = torch.device("cpu")
    return next(micro_batches(load_data(train).train, train, first_sample=0, dp_rank=0, dp_size=1, device=device))


def test_every_token_counts_and_sees_all_before_it_by_default(tmp_path: Path) -> None:
    batch = batch_of(config(tmp_path))
    assert batch.tokens.shape == (4, 64)
    assert bool((batch.loss_mask == 1).all())
    assert batch.attention_mask is None
    assert bool((batch.tokens == SEPARATOR).any())


def test_eod_id_says_which_losses_are_left_out(tmp_path: Path) -> None:
    """The option did nothing at all."""
    batch = batch_of(config(tmp_path, eod_id=SEPARATOR, eod_mask_loss=True))
    assert torch.equal(batch.loss_mask == 0, batch.tokens == SEPARATOR)
    last = batch_of(config(tmp_path, eod_mask_loss=True))  # null is the last id of the vocabulary
    assert torch.equal(last.loss_mask == 0, last.tokens == VOCAB - 1)
    assert not torch.equal(batch.loss_mask, last.loss_mask)


def test_tokens_see_their_own_document_only(tmp_path: Path) -> None:
    batch = batch_of(config(tmp_path, eod_id=SEPARATOR, reset_attention_mask=True))
    assert batch.attention_mask is not None
    assert batch.attention_mask.shape == (4, 1, 64, 64)
    ends = (batch.tokens == SEPARATOR).long()
    document = ends.cumsum(1) - ends  # (B, S), a separator belongs to what it ends
    is_same = document[:, :, None] == document[:, None, :]
    sees = is_same & torch.ones(64, 64, dtype=torch.bool).tril()
    assert torch.equal(~batch.attention_mask[:, 0], sees)


@pytest.mark.parametrize("kept", [0, 60])
def test_cut_off_indices_in_the_cache_are_named(kept: int, tmp_path: Path) -> None:
    """They were numpy's ValueError in every rank."""
    train = config(tmp_path)
    load_data(train)
    cached = list((tmp_path / "cache").rglob("*.npy"))
    assert cached
    for path in cached:
        path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"shuffled indices in .*cache.* cannot be used .*\n  fix: delete that folder"):
        load_data(train)


def test_a_dataset_that_was_written_anew_gets_new_indices(tmp_path: Path) -> None:
    """Megatron took the cached ones of the old text, whose sequences were others."""
    train = config(tmp_path)
    old = load_data(train)
    for ending in (".bin", ".idx"):
        os.unlink(f"{train.data.path}{ending}")
    assert train.data.path is not None
    write_dataset(train.data.path, [np.full(100, 9, dtype=np.uint16)] * 6)
    new = load_data(train)
    assert new.num_tokens == old.num_tokens == 600
    assert {int(token) for token in new.train[0]["tokens"]} == {9}


def test_a_token_that_is_read_late_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_muon_plugin.train import token_checks

    train = config(tmp_path, vocab_size=SEPARATOR)
    with pytest.raises(ConfigError, match=r"text\.bin holds token id"):
        load_data(train)
    monkeypatch.setattr(token_checks, "check_vocabulary", lambda *_, **__: None)  # as behind the first 4 million
    with pytest.raises(ConfigError, match=r"data\.vocab_size=7: .*text\.bin \(in samples 0 to 3\) holds token id"):
        batch_of(train)


def test_a_rank_that_does_not_see_what_rank_0_has_written_says_so(tmp_path: Path) -> None:
    """On another node: the folder was said to be damaged, and that its removal would help."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)  # rank 0 alone writes, and is elsewhere
    try:
        with pytest.raises(ConfigError, match=rf"data\.cache_dir={tmp_path}/cache: rank 0 has written") as caught:
            load_data(config(tmp_path))
    finally:
        dist.destroy_process_group()
    assert "fix: choose a folder that all nodes see" in str(caught.value)
