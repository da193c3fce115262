"""Batches from Megatron datasets, through megatron-core's own dataset classes."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from hp_muon_plugin.config.blend import Blend, read_blend, shown_path
from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.data_checks import split_shares
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError, DataError
from hp_muon_plugin.train.index_file import TokenFile
from hp_muon_plugin.train.text import ByteTokenizer, build_pydoc_dataset, unigram_entropy, vocabulary_size
from hp_muon_plugin.train.token_checks import check_ids, open_files, tokens_to_check

_HASHED_SEQUENCES = 1 << 18
_ORDER_SAMPLES = 1000
_PLACE = "dataset_id"
"""Megatron's name for a sample's dataset in a blend."""


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
    blend, vocab_size = dataset_blend(config), vocabulary_size(config.data)
    by_name = open_files(blend, config.data.split, seq_length=config.model.seq_length, vocab_size=vocab_size)
    files = [by_name[prefix] for prefix in blend.prefixes]
    train, held_out = _built(config, blend, _cache_folder(config, list(by_name.values())))
    texts = [file.first_tokens(tokens_to_check(len(by_name))) for file in files]
    entropy = unigram_entropy(texts, blend.weights or [file.num_tokens for file in files])
    return TrainingData(train, held_out, vocab_size, sum(file.num_tokens for file in by_name.values()), entropy)


def dataset_blend(config: Train) -> Blend:
    """Where the datasets lie; the built-in text is written first if it is not there.

    Args:
        config: Checked options.

    Returns:
        Prefixes of ``.bin`` and ``.idx`` files, and their weights.
    """
    if config.data.kind is DataKind.pydoc:
        return Blend((build_pydoc_dataset(config.data.cache_dir),))
    return read_blend(config.data.path)


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
        places = [int(item.pop(_PLACE, 0)) for item in items]
        batch = {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}
        _check_batch(batch, places, vocab_size, config, mine)
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
    if getattr(dataset, "shuffle_index", None) is None and not hasattr(dataset, "dataset_index"):
        return None
    length = len(dataset)
    places = [
        _place_of(dataset, index % length)
        for index in sorted({number * count // _ORDER_SAMPLES for number in range(_ORDER_SAMPLES)})
    ]
    return zlib.crc32(repr(places).encode("ascii"))


def _place_of(dataset: Any, index: int) -> tuple[int, ...]:
    """Document and token with which a sample begins, behind the dataset's place in a blend."""
    if hasattr(dataset, "dataset_index"):
        place = int(dataset.dataset_index[index])
        return (place, *_place_of(dataset.datasets[place], int(dataset.dataset_sample_index[index])))
    first, offset = dataset.sample_index[dataset.shuffle_index[index]]
    return int(dataset.document_index[first]), int(offset)


def _check_batch(
    batch: dict[str, torch.Tensor], places: list[int], vocab_size: int, config: Train, samples: range
) -> None:
    """Tensor-parallel embeddings take an id outside the vocabulary for another rank's, and say nothing.

    The tensors are on the CPU, so reading their extremes waits for no device.
    """
    ids = [batch[name] for name in ("tokens", "labels")]  # (B, S) each
    smallest, largest = min(int(each.min()) for each in ids), max(int(each.max()) for each in ids)
    if smallest >= 0 and largest < vocab_size:
        return
    bad = next(row for row in range(len(samples)) for each in ids if not _is_known(each[row], vocab_size))
    where = f"{dataset_blend(config).prefixes[places[bad]]}.bin (in samples {samples.start} to {samples.stop - 1})"
    check_ids(smallest, largest, vocab_size, where=where)


def _is_known(ids: torch.Tensor, vocab_size: int) -> bool:
    return int(ids.min()) >= 0 and int(ids.max()) < vocab_size


def _built(config: Train, blend: Blend, cache: Path) -> tuple[Any, Any]:
    """Training and held-out samples from megatron-core's builder, which keeps its shuffled indices in ``cache``."""
    run = config.run
    samples = [run.steps * run.global_batch_size, run.eval_batches * run.global_batch_size, 0]
    dataset_config = _dataset_config(config, blend, cache)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, dataset_config)
    try:
        train, held_out, _ = builder.build()
    except FileNotFoundError as error:  # rank 0 writes them, and the others come behind it
        raise _not_shared(config, error) from error
    except (OSError, ValueError, EOFError) as error:  # numpy's, from a cached file that was cut off
        raise DataError(
            f"Megatron's shuffled indices in {cache} cannot be used ({type(error).__name__}: {error})\n"
            "  fix: delete that folder; it is made again"
        ) from error
    except IndexError as error:
        raise _too_few_samples(config, blend) from error
    if any(map(_draws_too_many, (train, held_out))):  # what Megatron finds in the cache it does not look at again
        raise _too_few_samples(config, blend)
    return train, held_out


def _not_shared(config: Train, error: FileNotFoundError) -> ConfigError:
    return ConfigError(
        "data.cache_dir",
        config.data.cache_dir,
        f"rank 0 has written Megatron's shuffled indices there, and this rank finds no {error.filename}",
        "choose a folder that all nodes see, or start every node in the same one",
    )


def _draws_too_many(dataset: Any) -> bool:
    """Whether a blend takes samples that one of its datasets does not have."""
    if not hasattr(dataset, "dataset_index"):
        return False
    taken = np.bincount(dataset.dataset_index, minlength=len(dataset.datasets))
    return any(count > len(member) for count, member in zip(taken, dataset.datasets, strict=True))


def _too_few_samples(config: Train, blend: Blend) -> ConfigError:
    """Megatron rounds every dataset's share up, so that a blend of many is longer than what it makes of each."""
    return ConfigError(
        "data.path",
        shown_path(config.data.path),
        f"so few training or held-out samples cannot be divided by weight among {len(blend.prefixes)} datasets: "
        "Megatron rounds each one's number up and draws from the heaviest more than it has made ready",
        "raise run.steps or run.eval_batches, name fewer datasets, or leave the weights out",
    )


def _cache_folder(config: Train, files: Sequence[TokenFile]) -> Path:
    """One folder per content: Megatron tells cached indices apart by path alone, and files get rewritten."""
    hashes = [zlib.crc32(file.lengths[:_HASHED_SEQUENCES].tobytes()) for file in files]
    counts = [(len(file.lengths), file.num_tokens) for file in files]
    digest = hashes[0] if len(files) == 1 else zlib.crc32(repr((counts, hashes)).encode("ascii"))
    sequences, tokens = (sum(column) for column in zip(*counts, strict=True))
    return Path(config.data.cache_dir) / "index" / f"{sequences}-{tokens}-{digest:08x}"


def _dataset_config(config: Train, blend: Blend, cache: Path) -> GPTDatasetConfig:
    data, vocab_size = config.data, vocabulary_size(config.data)
    eod = vocab_size - 1 if data.eod_id is None else data.eod_id
    dataset_config = GPTDatasetConfig(
        random_seed=config.run.seed,
        sequence_length=config.model.seq_length,
        blend=(list(blend.prefixes), None if blend.weights is None else list(blend.weights)),
        split=",".join(f"{Decimal(share):f}" for share in split_shares(data.split)),  # it reads digits and dots only
        path_to_cache=str(cache),
        tokenizer=ByteTokenizer(vocab_size, eod),
        reset_position_ids=False,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=data.reset_attention_mask,
    )
    assert dataset_config.split_matrix is not None
    dataset_config.split_matrix[2] = None  # nothing reads the test part: an empty one would be looked through for ever
    return dataset_config
