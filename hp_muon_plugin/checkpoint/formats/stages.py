"""Which pipeline stage has which layers, by megatron-core's rules: even, uneven, virtual, or a layout of one's own.

Chunks follow one another through all stages: chunk 0 of every stage, then chunk 1 of every stage.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Source, Target
from hp_muon_plugin.errors import ConfigError

VIRTUAL = "virtual_pipeline_model_parallel_size"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
LAYOUT = "pipeline_model_parallel_layout"
EMBEDDING_COUNTS, LOSS_COUNTS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
PIPELINES = "pipeline_model_parallel_size"
INSIDE = "expert_tensor_parallel_size"
DIVISION = dict.fromkeys((VIRTUAL, FIRST, LAST, LAYOUT)) | dict.fromkeys((EMBEDDING_COUNTS, LOSS_COUNTS), False)
"""Megatron's arguments that say how layers are divided, with their defaults."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A model chunk.

    Attributes:
        layers: Global numbers of its decoder layers.
        embeds: Whether it has the embedding of the input.
        ends: Whether it has the output layer.
        normalises: Whether it has the norm behind the last layer.
        predicts: Whether it has the layers of multi-token prediction, which have an embedding of their own.
    """

    layers: range
    embeds: bool
    ends: bool
    normalises: bool
    predicts: bool


Stages = list[list[Chunk]]
"""Chunks of each pipeline rank."""


def stages(num_layers: int, pipelines: int, division: Mapping[str, Any], *, predicts: bool) -> Stages:
    """Chunks of every pipeline rank.

    Args:
        num_layers: Layers of the decoder.
        pipelines: Pipeline ranks.
        division: Megatron's arguments; those of :data:`DIVISION` count, with more than one pipeline rank.
        predicts: Whether there is multi-token prediction.

    Raises:
        ConfigError: If layers do not divide so.
    """
    if pipelines == 1:
        return [[Chunk(range(num_layers), True, True, True, predicts)]]
    text = division.get(LAYOUT)
    if text:
        counts, predicting = _of_layout(str(text), num_layers, pipelines, predicts)
    else:
        counts = _of_sizes(num_layers, pipelines, division)
        predicting = (len(counts) - 1, pipelines - 1) if predicts else None
    found: Stages = [[] for _ in range(pipelines)]
    start, last = 0, len(counts) - 1
    for number, row in enumerate(counts):
        for pipeline, count in enumerate(row):
            ends = (number, pipeline) == (last, pipelines - 1)
            layers = range(start, start + count)
            normalises = num_layers - 1 in layers if predicts else ends
            is_first = number == pipeline == 0
            found[pipeline].append(Chunk(layers, is_first, ends, normalises, (number, pipeline) == predicting))
            start += count
    return found


def division_of(source: Source, target: Target) -> dict[str, Any]:
    """Arguments that say how pipeline stages share the layers: the target's options, else as the source had them.

    Args:
        source: What is divided; its own division counts if it has as many stages.
        target: Its sizes and options.
    """
    args = source.state().args
    had = args if args.get(PIPELINES) == target.pp > 1 else {}
    return {key: _number(target.options.get(key, had.get(key, default))) for key, default in DIVISION.items()}


def sizes_of(source: Source, target: Target) -> dict[str, Any]:
    """Megatron's arguments for the sizes of a target, and how its stages share the layers.

    Args:
        source: What is divided.
        target: Its sizes.
    """
    division = division_of(source, target)
    known = {key: value for key, value in division.items() if key in source.state().args or value is not None}
    return {
        "tensor_model_parallel_size": target.tp,
        PIPELINES: target.pp,
        "expert_model_parallel_size": target.ep,
        **known,
    }


def expert_tensors_of(source: Source, target: Target) -> int:
    """Tensor-parallel ranks inside an expert: as the option says, as the source had on these ranks, or as outside.

    Args:
        source: What is written.
        target: Its sizes and options.
    """
    given = target.options.get(INSIDE)
    if given is not None:
        return int(given)
    args = source.state().args
    same = args.get("tensor_model_parallel_size") == target.tp and args.get(PIPELINES) == target.pp
    same = same and args.get("expert_model_parallel_size") == target.ep
    return int(args.get(INSIDE) or target.tp) if same else target.tp


def bucket_size_of(source: Source, target: Target, pipeline: int, chunk: int) -> int | None:
    """Elements at which DistributedOptimizer's buckets are closed on a rank; None for one bucket.

    Args:
        source: The checkpoint, whose arguments or buckets tell.
        target: Its option ``bucket_size`` overrules.
        pipeline: Pipeline rank; Megatron cuts the first alone.
        chunk: Model chunk, likewise.
    """
    args = source.state().args
    size = _number(target.options.get("bucket_size", source.state().model.get("bucket_size")))
    if size is None and args.get("overlap_grad_reduce"):
        ranks = int(args.get("data_parallel_size") or 1) * int(args.get("context_parallel_size") or 1)
        size = args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * ranks)
    return int(size) if size and pipeline == chunk == 0 else None


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _of_sizes(num_layers: int, pipelines: int, division: Mapping[str, Any]) -> list[list[int]]:
    """Layers of each (chunk, pipeline rank)."""
    chunks = int(division.get(VIRTUAL) or 1)
    first, last = division.get(FIRST), division.get(LAST)
    if first is not None or last is not None:
        per_rank = _uneven(num_layers, pipelines, first, last)
    else:
        extra = bool(division.get(EMBEDDING_COUNTS)) + bool(division.get(LOSS_COUNTS))
        if (num_layers + extra) % pipelines:
            _refuse("--pp", pipelines, num_layers, "which do not divide")
        per_rank = [(num_layers + extra) // pipelines] * pipelines
    if any(count % chunks for count in per_rank):
        _refuse(VIRTUAL, chunks, num_layers, f"of which the stages have {', '.join(map(str, sorted(set(per_rank))))}")
    counts = [[count // chunks for count in per_rank] for _ in range(chunks)]
    if first is None and last is None:
        counts[0][0] -= bool(division.get(EMBEDDING_COUNTS))
        counts[-1][-1] -= bool(division.get(LOSS_COUNTS))
    if sum(map(sum, counts)) != num_layers or min(map(min, counts)) < 0:
        _refuse("--pp", pipelines, num_layers, "which do not divide")
    return counts


def _uneven(num_layers: int, pipelines: int, first: Any, last: Any) -> list[int]:
    left = num_layers - int(first or 0) - int(last or 0)
    middle = pipelines - (first is not None) - (last is not None)
    if left < 0 or (left % middle if middle > 0 else left):
        option, value = (FIRST, first) if first is not None else (LAST, last)
        _refuse(option, value, num_layers, f"of which {left} are left for {max(0, middle)} other stages")
    found = [left // middle if middle > 0 else 0] * pipelines
    if first is not None:
        found[0] = int(first)
    if last is not None:
        found[-1] = int(last)
    return found


def _of_layout(
    text: str, num_layers: int, pipelines: int, predicts: bool
) -> tuple[list[list[int]], tuple[int, int] | None]:
    """Layers of each (chunk, pipeline rank), and the chunk with multi-token prediction, of ``"Et|(tt|)*2,mL"``."""
    plain = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(pattern, lambda found: found[1] * int(found[2]), plain)
    rows = plain.split("|")
    if set(plain) - set("EtmL|") or len(rows) % pipelines or plain.count("t") != num_layers:
        _refuse(LAYOUT, text, num_layers, f"which it does not divide among {pipelines} stages")
    if ("m" in plain) != predicts:
        _refuse(LAYOUT, text, num_layers, f"and {'has' if predicts else 'no'} multi-token prediction")
    counts = [[row.count("t") for row in rows[at : at + pipelines]] for at in range(0, len(rows), pipelines)]
    predicting = [divmod(at, pipelines) for at, row in enumerate(rows) if "m" in row]
    return counts, predicting[0] if predicting else None


def _refuse(option: str, value: Any, num_layers: int, why: str) -> None:
    if option in DIVISION:
        option = f"--option {option}"
    raise ConfigError(option, value, f"the model has {num_layers} layers, {why}", f"choose a divisor of {num_layers}")
