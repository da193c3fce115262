"""Batches from Megatron datasets, through megatron-core's own dataset classes."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.train.index_file import check_index, check_parts, check_vocabulary
from hp_muon_plugin.train.text import (
    END_OF_DOCUMENT,
    VOCAB_SIZE,
    ByteTokenizer,
    build_pydoc_dataset,
    unigram_entropy,
)

logger = logging.getLogger(__name__)
_ENTROPY_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank.

    Attributes:
        tokens: ``(B, S)`` int64 inputs.
        labels: ``(B, S)`` int64, the next tokens.
        loss_mask: ``(B, S)`` float32, 0 where a token does not count.
        position_ids: ``(B, S)`` int64.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Datasets of a run; every rank holds them, memory-mapped.

    Attributes:
        train: Training samples.
        held_out: Validation samples.
        vocab_size: Token ids before padding.
        num_tokens: Tokens in the files.
        unigram_nats: Entropy of single tokens, over the first tokens of the files.
    """

    train: Any
    held_out: Any
    vocab_size: int
    num_tokens: int
    unigram_nats: float


def load_data(config: Train) -> TrainingData:
    """Build or open the datasets. Collective: every rank calls it.

    Args:
        config: Options.

    Returns:
        The datasets.

    Raises:
        DataError: If a file is missing or damaged.
        ConfigError: If a part of the text is too small for one sample, or the vocabulary for it.
    """
    prefix, tokenizer = _source(config)
    file = check_index(prefix)
    check_parts(file, config.data.split, config.model.seq_length)
    check_vocabulary(file, tokenizer.vocab_size, first=_ENTROPY_TOKENS)
    run = config.run
    samples = [run.steps * run.global_batch_size, run.eval_batches * run.global_batch_size, 0]
    dataset_config = _dataset_config(config, prefix, tokenizer)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, dataset_config)
    train, held_out, _ = builder.build()
    entropy = unigram_entropy(file.first_tokens(_ENTROPY_TOKENS))
    return TrainingData(train, held_out, tokenizer.vocab_size, file.num_tokens, entropy)


def micro_batches(
    dataset: Any, config: Train, *, first_sample: int, dp_rank: int, dp_size: int, device: torch.device
) -> Iterator[Batch]:
    """This rank's micro-batches of one global batch, then of the next, without end.

    Global batch ``g`` covers samples ``g * global_batch_size`` onwards; micro-batch ``m`` takes
    ``micro_batch_size * dp_size`` of them, divided among the data-parallel ranks in order. So the
    samples of a step do not depend on how many ranks share them.

    Args:
        dataset: Samples.
        config: Options.
        first_sample: Where to begin.
        dp_rank: This rank's place among the data-parallel ranks.
        dp_size: Data-parallel ranks.
        device: Where the tensors go.

    Yields:
        Batches.
    """
    size, sample = config.run.micro_batch_size, first_sample
    while True:
        mine = range(sample + dp_rank * size, sample + (dp_rank + 1) * size)
        items = [dataset[index % len(dataset)] for index in mine]
        yield Batch(*(_stacked(items, field.name).to(device) for field in fields(Batch)))
        sample += size * dp_size


def _stacked(items: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.stack([torch.as_tensor(item[name]) for item in items])


def _source(config: Train) -> tuple[str, ByteTokenizer]:
    data = config.data
    if data.kind is DataKind.megatron:
        assert data.path is not None
        assert data.vocab_size is not None
        eod = data.vocab_size - 1 if data.eod_id is None else data.eod_id
        return data.path, ByteTokenizer(data.vocab_size, eod)
    # rank 0 writes the files; the others wait, then find them
    if dist.get_rank() == 0:
        build_pydoc_dataset(data.cache_dir)
    dist.barrier()
    return build_pydoc_dataset(data.cache_dir), ByteTokenizer(VOCAB_SIZE, END_OF_DOCUMENT)


def _dataset_config(config: Train, prefix: str, tokenizer: ByteTokenizer) -> GPTDatasetConfig:
    cache = Path(config.data.cache_dir) / "index"
    return GPTDatasetConfig(
        random_seed=config.run.seed,
        sequence_length=config.model.seq_length,
        blend=([prefix], None),
        split=config.data.split,
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
