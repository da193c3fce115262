"""Blends of datasets are what megatron-core itself makes of the same ``--data-path``."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dist_pool import RankError, run_ranks

from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Checkpoint, Data, Train
from hp_muon_plugin.train.index_file import write_dataset
from hp_muon_plugin.train.setup import Launch
from lane.harness import SEQ, VOCAB, dense, start, train_config

STEPS, GLOBAL_BATCH = 6, 4


def write_texts(folder: Path, names: str, *, documents: int = 40) -> dict[str, str]:
    """Each text has a first token of its own in every document, by which its samples are told apart."""
    generator = np.random.default_rng(0)
    prefixes = {}
    for place, name in enumerate(names):
        texts = [generator.integers(len(names), VOCAB, 30 + place).astype(np.uint16) for _ in range(documents)]
        for text in texts:
            text[::5] = place
        prefixes[name] = str(folder / name)
        write_dataset(prefixes[name], texts)
    return prefixes


def config(folder: Path, path: Any, **data: Any) -> Train:
    train = train_config(dense(num_layers=1), optimizer=HpMuon(lr=0.01), steps=STEPS, global_batch=GLOBAL_BATCH)
    options = {"kind": DataKind.megatron, "vocab_size": VOCAB, "split": "70,20,10", "cache_dir": str(folder / "cache")}
    train.data = Data(path=path, **(options | data))
    train.run.eval_batches, train.run.dir = 2, str(folder / "run")
    return train


def upstream(train: Train, words: Sequence[str], cache: Path) -> tuple[Any, Any]:
    """The datasets by megatron-core alone, from the words of a ``--data-path``."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    from hp_muon_plugin.train.text import ByteTokenizer

    options = GPTDatasetConfig(
        random_seed=train.run.seed,
        sequence_length=SEQ,
        blend=get_blend_from_list(list(words)),
        split=train.data.split,
        path_to_cache=str(cache),
        tokenizer=ByteTokenizer(VOCAB, VOCAB - 1),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [STEPS * GLOBAL_BATCH, train.run.eval_batches * GLOBAL_BATCH, 0]
    return tuple(BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, options).build()[:2])  # type: ignore[return-value]


def _compare(launch: Launch, train: Train, words: Sequence[str], cache: Path) -> tuple[list[int], list[int]]:
    """Lengths of both parts, and which text each training sample that a step reads is of."""
    from hp_muon_plugin.train.data import load_data, micro_batches

    start(launch, train)
    data, wanted = load_data(train), upstream(train, words, cache)
    for ours, theirs in zip((data.train, data.held_out), wanted, strict=True):
        assert len(ours) == len(theirs)
        for sample in range(len(theirs)):
            assert torch.equal(torch.as_tensor(ours[sample]["tokens"]), torch.as_tensor(theirs[sample]["tokens"]))
    device = torch.device("cpu")
    stream = micro_batches(data.train, train, first_sample=0, dp_rank=0, dp_size=1, device=device)
    texts = []
    for sample in range(STEPS * GLOBAL_BATCH):
        batch = next(stream)
        theirs = torch.as_tensor(wanted[0][sample % len(wanted[0])]["tokens"])
        assert torch.equal(batch.tokens[0], theirs)
        texts.append(int(torch.bincount(batch.tokens[0]).argmax()))
    return [len(data.train), len(data.held_out)], texts


@pytest.mark.parametrize("form", ["weights", "text", "prefixes", "one"])
def test_samples_and_their_order_are_megatrons(form: str, tmp_path: Path) -> None:
    a, b, c = write_texts(tmp_path, "abc").values()
    words = {
        "weights": ["0.5", a, "0.2", b, "0.3", c],
        "text": ["1", a, "3", b],
        "prefixes": [a, b, c],
        "one": ["7", b],
    }[form]
    path: Any = {"weights": [0.5, a, 0.2, b, 0.3, c], "text": " ".join(words), "one": f"7 {b}"}.get(form, words)
    (sizes, texts), second = run_ranks(2, _compare, config(tmp_path, path), words, tmp_path / "upstream")
    assert (sizes, texts) == second
    counts = np.bincount(texts, minlength=3)
    if form == "prefixes":  # as often as they are long, and this is less than one epoch
        assert sizes == [STEPS * GLOBAL_BATCH, 2 * GLOBAL_BATCH]
        assert counts.min() >= 7
    else:
        expected = {"weights": [12, 5, 7], "text": [6, 18, 0], "one": [0, 24, 0]}[form]
        assert np.abs(counts - expected).max() <= 1, counts


def _load(launch: Launch, train: Train) -> tuple[int, float]:
    from hp_muon_plugin.train.data import load_data

    start(launch, train)
    data = load_data(train)
    return data.num_tokens, data.unigram_nats


def test_a_longer_run_reads_prefixes_without_weights_again(tmp_path: Path) -> None:
    """Megatron makes one epoch of them; what has no sample for its part is named before ranks start."""
    a, b = write_texts(tmp_path, "ab", documents=5).values()
    train = config(tmp_path, [a, b], split="60,40,0")
    words = [a, b]
    ((sizes, texts),) = run_ranks(1, _compare, train, words, tmp_path / "upstream")
    assert sizes[0] < len(texts)
    assert texts[: len(texts) - sizes[0]] == texts[sizes[0] :]


def test_a_blend_of_which_megatron_would_draw_too_much_is_named(tmp_path: Path) -> None:
    """It was an IndexError that asks for an issue to be filed; with indices in the cache one in the middle of a run."""
    heavy, *others = write_texts(tmp_path, "abcdefghijk", documents=6).values()
    write_dataset(heavy, [np.full(2 * SEQ, 9, dtype=np.uint16)] * 80)
    train = config(tmp_path, [90, heavy, *(word for other in others for word in (1, other))], split="70,30,0")
    train.run.steps = 30
    for _ in range(2):
        with pytest.raises(RankError, match=r"ConfigError: data\.path=\[90,.*\]: so few training or held-out samples"):
            run_ranks(1, _load, train)


def test_an_empty_test_part_is_not_looked_through_for_ever(tmp_path: Path) -> None:
    """With `data.split="80,19,1"` and 40 documents Megatron looked for a sample among none."""
    (a,) = write_texts(tmp_path, "a").values()
    run_ranks(1, _load, config(tmp_path, a, split="80,19,1"), timeout_s=30.0)


def test_entropy_and_tokens_are_of_all_texts(tmp_path: Path) -> None:
    prefixes = {name: str(tmp_path / name) for name in "ab"}
    for token, prefix in enumerate(prefixes.values()):
        write_dataset(prefix, [np.full(40, token, dtype=np.uint16)] * 20)
    path = [3, prefixes["a"], 1, prefixes["b"]]
    ((tokens, nats),) = run_ranks(1, _load, config(tmp_path, path))
    assert tokens == 1600
    assert nats == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))


def _train(launch: Launch, train: Train) -> tuple[list[float], list[str]]:
    from hp_muon_plugin.train.progress import Silent
    from hp_muon_plugin.train.worker import train_here

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hp_muon_plugin").addHandler(handler)
    platform = start(launch, train)
    result: Any = train_here(train, platform, None, Silent())
    return result.losses, told


@pytest.mark.slow  # three short runs on two ranks
def test_a_resumed_run_goes_on_where_it_was_in_the_blend(tmp_path: Path) -> None:
    a, b = write_texts(tmp_path, "ab").values()
    save = str(tmp_path / "saved")
    train = config(tmp_path, f"0.25 {a} 0.75 {b}")
    train.checkpoint = Checkpoint(save=save, every=3)
    (whole, _), _ = run_ranks(2, _train, train)
    go_on = replace(train, checkpoint=Checkpoint(resume=f"{save}/iter_0000003"))
    (rest, told), _ = run_ranks(2, _train, go_on)
    assert rest == whole[3:]
    assert not [line for line in told if "some may come again" in line]
    other = replace(go_on, data=replace(train.data, path=[0.75, a, 0.25, b]))
    (_, told), _ = run_ranks(2, _train, other)
    assert [line for line in told if "some may come again" in line]


def _late(launch: Launch, train: Train) -> None:
    from hp_muon_plugin.train import data, token_checks

    start(launch, train)
    token_checks.check_vocabulary = lambda *_, **__: None  # as behind the first 4 million
    stream = data.micro_batches(
        data.load_data(train).train, train, first_sample=0, dp_rank=0, dp_size=1, device=torch.device("cpu")
    )
    for _ in range(STEPS * GLOBAL_BATCH):
        next(stream)


def test_the_file_of_a_bad_token_is_named(tmp_path: Path) -> None:
    a, b = write_texts(tmp_path, "ab").values()
    write_dataset(b, [np.full(40, VOCAB + 1, dtype=np.uint16)] * 20)
    with pytest.raises(RankError, match=rf"data\.vocab_size={VOCAB}: {b}\.bin holds token id {VOCAB + 1}"):
        run_ranks(1, _load, config(tmp_path, [a, b]))
    with pytest.raises(RankError, match=rf"{b}\.bin \(in samples \d+ to \d+\) holds token id {VOCAB + 1}"):
        run_ranks(1, _late, config(tmp_path, [a, b]))


def test_a_part_of_one_text_that_is_too_small_is_named(tmp_path: Path) -> None:
    a, b = write_texts(tmp_path, "ab").values()
    write_dataset(b, [np.full(400, 9, dtype=np.uint16)])
    with pytest.raises(RankError, match=rf"the held-out part of {b} has 0 of 1 sequences .*\n.*leave {b} out"):
        run_ranks(1, _load, config(tmp_path, [a, b]))
