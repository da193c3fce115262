"""Batches from Megatron datasets, through megatron-core's own dataset classes."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.data_checks import split_shares
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import DataError
from hp_muon_plugin.train.index_file import TokenFile, check_index
from hp_muon_plugin.train.text import ByteTokenizer, build_pydoc_dataset, unigram_entropy, vocabulary_size
from hp_muon_plugin.train.token_checks import CHECKED_TOKENS, check_ids, check_parts, check_vocabulary

_HASHED_SEQUENCES = 1 << 18
_ORDER_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank.

    Attributes:
        tokens: ``(B, S)`` int64 inputs.
        labels: ``(B, S)`` int64, the next tokens.
        loss_mask: ``(B, S)`` float32, 0 where a token does not count.
        position_ids: ``(B, S)`` int64.
        attention_mask: ``(B, 1, S, S)`` bool, True where a token must not look; None for the plain causal mask.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None = None


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
    prefix, vocab_size = dataset_prefix(config), vocabulary_size(config.data)
    file = check_index(prefix)
    check_parts(file.lengths, config.data.split, config.model.seq_length)
    check_vocabulary(file, vocab_size)
    train, held_out = _built(config, prefix, _cache_folder(config, file))
    entropy = unigram_entropy(file.first_tokens(CHECKED_TOKENS))
    return TrainingData(train, held_out, vocab_size, file.num_tokens, entropy)


def dataset_prefix(config: Train) -> str:
    """Where the dataset lies; the built-in text is written first if it is not there.

    Args:
        config: Checked options.

    Returns:
        Prefix of the ``.bin`` and ``.idx`` files.
    """
    if config.data.kind is DataKind.pydoc:
        return build_pydoc_dataset(config.data.cache_dir)
    assert config.data.path is not None
    return config.data.path


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

    Raises:
        DataError: If a token id is negative.
        ConfigError: If one is outside the vocabulary.
    """
    size, sample, vocab_size = config.run.micro_batch_size, first_sample, vocabulary_size(config.data)
    while True:
        mine = range(sample + dp_rank * size, sample + (dp_rank + 1) * size)
        items = [dataset[index % len(dataset)] for index in mine]
        batch = {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}
        _check_batch(batch, vocab_size, config, mine)
        yield Batch(**{name: tensor.to(device) for name, tensor in batch.items()})
        sample += size * dp_size


def order_of_samples(dataset: Any, count: int) -> int | None:
    """A number that tells orders of samples apart.

    Args:
        dataset: Training samples.
        count: How many of the first ones matter.

    Returns:
        A checksum of where up to 1,000 of them lie; None for datasets that do not tell.
    """
    shuffled = getattr(dataset, "shuffle_index", None)
    if shuffled is None:
        return None
    length = len(dataset)
    places = [
        (int(document), int(offset))
        for index in sorted({number * count // _ORDER_SAMPLES for number in range(_ORDER_SAMPLES)})
        for first, offset in [dataset.sample_index[shuffled[index % length]]]
        for document in [dataset.document_index[first]]
    ]
    return zlib.crc32(repr(places).encode("ascii"))


def _check_batch(batch: dict[str, torch.Tensor], vocab_size: int, config: Train, samples: range) -> None:
    """Tensor-parallel embeddings take an id outside the vocabulary for another rank's, and say nothing.

    The tensors are on the CPU, so reading their extremes waits for no device.
    """
    smallest = min(int(batch[name].min()) for name in ("tokens", "labels"))
    largest = max(int(batch[name].max()) for name in ("tokens", "labels"))
    where = f"{config.data.path}.bin (in samples {samples.start} to {samples.stop - 1})"
    check_ids(smallest, largest, vocab_size, where=where)


def _built(config: Train, prefix: str, cache: Path) -> tuple[Any, Any]:
    """Training and held-out samples from megatron-core's builder, which keeps its shuffled indices in ``cache``."""
    run = config.run
    samples = [run.steps * run.global_batch_size, run.eval_batches * run.global_batch_size, 0]
    dataset_config = _dataset_config(config, prefix, cache)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, dataset_config)
    try:
        train, held_out, _ = builder.build()
    except (OSError, ValueError, EOFError) as error:  # numpy's, from a cached file that was cut off
        raise DataError(
            f"Megatron's shuffled indices in {cache} cannot be used ({type(error).__name__}: {error})\n"
            "  fix: delete that folder; it is made again"
        ) from error
    return train, held_out


def _cache_folder(config: Train, file: TokenFile) -> Path:
    """One folder per content: Megatron tells cached indices apart by path alone, and files get rewritten."""
    digest = zlib.crc32(file.lengths[:_HASHED_SEQUENCES].tobytes())
    return Path(config.data.cache_dir) / "index" / f"{len(file.lengths)}-{file.num_tokens}-{digest:08x}"


def _dataset_config(config: Train, prefix: str, cache: Path) -> GPTDatasetConfig:
    data, vocab_size = config.data, vocabulary_size(config.data)
    eod = vocab_size - 1 if data.eod_id is None else data.eod_id
    return GPTDatasetConfig(
        random_seed=config.run.seed,
        sequence_length=config.model.seq_length,
        blend=([prefix], None),
        split=",".join(f"{Decimal(share):f}" for share in split_shares(data.split)),  # it reads digits and dots only
        path_to_cache=str(cache),
        tokenizer=ByteTokenizer(vocab_size, eod),
        reset_position_ids=False,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=data.reset_attention_mask,
    )
