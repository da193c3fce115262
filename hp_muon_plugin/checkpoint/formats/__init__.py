"""The formats of checkpoints: which one a folder is, and the reader and writer of each."""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from hp_muon_plugin.checkpoint.canonical import Source, Writer
from hp_muon_plugin.checkpoint.detect import Found, find
from hp_muon_plugin.checkpoint.formats.spelling import PREDICTION, PREDICTIONS
from hp_muon_plugin.checkpoint.step_counts import OPTION, StepPlace
from hp_muon_plugin.errors import CheckpointError, ConfigError

_PACKAGE = "hp_muon_plugin.checkpoint.formats"
_ANY: tuple[str, ...] = ()
_NUMBER = ("1", "2", "...")
_MOMENTUM = {"momentum": ("sum", "average"), "momentum_is": ("sum", "average")}
_PREDICTION = {PREDICTION: PREDICTIONS}
_STEP = {OPTION: tuple(StepPlace)}
_SPELLING = {"spec": ("local", "te"), "experts": ("separate", "grouped"), **_PREDICTION}
_HEADS = {"num_attention_heads": _NUMBER}
_PADDING = {"make_vocab_size_divisible_by": _NUMBER}
_DIVISION = {
    "expert_tensor_parallel_size": _NUMBER,
    "virtual_pipeline_model_parallel_size": _NUMBER,
    "decoder_first_pipeline_num_layers": _NUMBER,
    "decoder_last_pipeline_num_layers": _NUMBER,
    "pipeline_model_parallel_layout": _ANY,
    "bucket_size": _NUMBER,
}


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    Attributes:
        name: As ``--to`` names it.
        what: One line for ``--help``.
        reader: ``module:function`` below this package, called with the folder of the iteration; None if not read.
        writer: ``module:Class`` below this package, made without arguments; None if not written.
        is_tracked: Whether checkpoints lie in ``iter_0000010`` beside a tracker file, as Megatron's.
        flags: Fields of :class:`Target` that the writer heeds.
        options: Names in ``Target.options`` that it heeds, each with its choices; ``_ANY`` for what it checks itself.
    """

    name: str
    what: str
    reader: str | None
    writer: str | None
    is_tracked: bool = True
    flags: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


FORMATS = {
    entry.name: entry
    for entry in (
        Format("hp", "our own: torch DCP files with a manifest", "hp:open_source", "hp:HpWriter"),
        Format(
            "torch_dist",
            "Megatron DDP and DistributedOptimizer, every sharding type",
            "torch_dist:open_source",
            "torch_dist:TorchDistWriter",
            flags=("tp", "pp", "ep", "sharding", "megatron"),
            options={
                **{"layers": ("stacked", "separate"), "spec": ("local", "te")},
                **_PADDING,
                **_DIVISION,
                **_HEADS,
                **_MOMENTUM,
                **_STEP,
            },
        ),
        Format(
            "torch",
            "Megatron's legacy mp_rank_* folders",
            "legacy:open_legacy",
            "legacy_write:LegacyWriter",
            flags=("tp", "pp", "ep", "sharding"),
            options={
                **_SPELLING,
                **_PADDING,
                **_DIVISION,
                "data_parallel_size": _NUMBER,
                **_HEADS,
                **_MOMENTUM,
                **_STEP,
            },
        ),
        Format(
            "fsdp_dtensor",
            "Megatron-FSDP",
            "megatron_fsdp:open_fsdp_dtensor",
            "megatron_fsdp_write:MegatronFsdpWriter",
            options={**_SPELLING, **_HEADS, **_MOMENTUM, **_STEP},
        ),
        Format(
            "fsdp2",
            "torch FSDP2 with DCP, by names",
            "fsdp2:open_fsdp2",
            "fsdp2_write:Fsdp2Writer",
            is_tracked=False,
            options={"style": ("nested", "flat"), "experts": ("separate", "stacked"), **_PREDICTION, **_MOMENTUM},
        ),
        Format(
            "torch_dcp",
            "Megatron's own torch FSDP2, by numbers",
            "torch_dcp:open_torch_dcp",
            "torch_dcp_write:TorchDcpWriter",
            options={**_SPELLING, **_HEADS, **_MOMENTUM, **_STEP},
        ),
        Format(
            "hyper_parallel",
            "HyperParallel's own",
            "hyper_parallel:open_hyper_parallel",
            "hyper_parallel_write:HyperParallelWriter",
            is_tracked=False,
            options={"world": _NUMBER, **_PREDICTION, **_MOMENTUM},
        ),
        Format(
            "hf",
            "Hugging Face safetensors, weights only",
            "hf:open_hf",
            "hf_write:HfWriter",
            is_tracked=False,
            flags=("dtype",),
            options={
                "family": _ANY,
                "vocab_size": _NUMBER,
                "num_attention_heads": _NUMBER,
                "num_query_groups": _NUMBER,
            },
        ),
    )
}


def open_checkpoint(path: Path, name: str | None = None) -> Source:
    """Open a checkpoint of any format.

    Args:
        path: Its folder, or the folder above with a tracker file that names the iteration.
        name: The format if it is known; None to detect it.

    Returns:
        The opened checkpoint; only metadata was read.

    Raises:
        CheckpointError: If there is none, of an unknown format, or damaged.
        ConfigError: If the named format is not read.
    """
    found = find(path)
    name = name or found.format
    reader = FORMATS[name].reader if name in FORMATS else None
    if reader is None:
        raise CheckpointError(f"{found.folder} is a checkpoint in the format {name}, which is not read")
    return cast(Callable[[Path], Source], _load(reader))(found.folder)


def writer(name: str) -> Writer:
    """The writer of a format.

    Args:
        name: As ``--to`` names it.

    Raises:
        ConfigError: If there is none.
    """
    if name not in FORMATS or FORMATS[name].writer is None:
        known = ", ".join(entry.name for entry in FORMATS.values() if entry.writer)
        raise ConfigError("--to", name, "no such format to write", f"one of {known}")
    return cast(Callable[[], Writer], _load(cast(str, FORMATS[name].writer)))()


def check_choices(to: str, flags: Collection[str], options: Mapping[str, str]) -> None:
    """Refuse what a format would pass over in silence, or cannot understand. The only check: writers rely on it.

    Args:
        to: Format to write.
        flags: Names of fields of :class:`Target` that were given.
        options: As in :class:`Target`.

    Raises:
        ConfigError: If the format has no such flag or option, or the option no such choice.
    """
    entry = FORMATS[to]
    for flag in flags:
        if flag not in entry.flags:
            those = ", ".join(other.name for other in FORMATS.values() if flag in other.flags)
            raise ConfigError(
                f"--{flag}", "...", f"means nothing in the format {to}", f"leave it out; it is for {those}"
            )
    for name, value in options.items():
        if name not in entry.options:
            those = ", ".join(f"{key}={'|'.join(choices)}" for key, choices in entry.options.items()) or "none"
            raise ConfigError(f"--option {name}", value, f"is no option of the format {to}", f"there are: {those}")
        choices = entry.options[name]
        if choices is _NUMBER:
            if not (value.isascii() and value.isdigit() and int(value) > 0):
                raise ConfigError(f"--option {name}", value, "is no number above 0", f"as in --option {name}=2")
        elif choices and value not in choices:
            raise ConfigError(f"--option {name}", value, "no such choice", f"one of {', '.join(choices)}")


def _load(place: str) -> object:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)


__all__ = ["FORMATS", "Format", "Found", "check_choices", "find", "open_checkpoint", "writer"]
