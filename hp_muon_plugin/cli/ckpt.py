"""``hp-muon ckpt``: convert, inspect, diff and verify checkpoints."""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hp_muon_plugin.cli.parsers import WHOLE_FLAGS
from hp_muon_plugin.errors import ConfigError, DamageError, HpMuonError, VerifyError

if TYPE_CHECKING:
    import torch

    from hp_muon_plugin.checkpoint.canonical import Source, Target

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DTYPES = ("float32", "bfloat16", "float16")
_FLAGS = ("tp", "pp", "ep", "sharding", "megatron", "dtype")
_VOCABULARY = ("embedding.word_embeddings.", "output_layer.")
_REFUSED, _DIFFERENT, _NOT_VERIFIED = 2, 1, 3


def run(arguments: list[str], respelt: Callable[[str], str] = str) -> int:
    """Run a command.

    Args:
        arguments: Of ``hp-muon ckpt``.
        respelt: Makes of a message one for users of other flags.

    Returns:
        0 if all is well, 1 if ``diff`` found a difference, 2 for a refused input or option, 3 if the output or the
        checkpoint does not verify.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except HpMuonError as error:
        print(f"hp-muon: {respelt(str(error))}", file=sys.stderr)
        return _NOT_VERIFIED if isinstance(error, DamageError | VerifyError) else _REFUSED
    except BrokenPipeError:
        raise  # as after `| head`, which main() knows
    except OSError as error:  # a file that cannot be read, a folder that cannot be written: the system says which
        place = f"{error.filename}: " if error.filename else ""
        print(f"hp-muon: {place}{error.strerror or error}", file=sys.stderr)
        return _REFUSED


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a folder")
    return Path(text)


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no tolerance: give 0 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hp-muon ckpt", description="Checkpoints of Megatron, PyTorch, HyperParallel, Hugging Face and our own."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=WHOLE_FLAGS)
    _add_convert(commands)
    inspect = commands.add_parser("inspect", help="what a checkpoint holds: names, shapes, dtypes, layout, step")
    inspect.add_argument("source", type=_folder, metavar="SRC")
    inspect.add_argument("--json", action="store_true", help="everything, for programs")
    inspect.add_argument("--all", action="store_true", help="a row for every layer and expert")
    inspect.set_defaults(run=_inspect)
    diff = commands.add_parser("diff", help="compare two checkpoints of any formats, tensor by tensor")
    diff.add_argument("a", type=_folder, metavar="A")
    diff.add_argument("b", type=_folder, metavar="B")
    diff.add_argument("--rtol", type=_tolerance, help="relative tolerance; without tolerances bits are compared")
    diff.add_argument("--atol", type=_tolerance, help="absolute tolerance")
    diff.set_defaults(run=_diff)
    verify = commands.add_parser("verify", help="hashes, coverage, and masters against weights")
    verify.add_argument("source", type=_folder, metavar="SRC")
    verify.set_defaults(run=_verify)
    return parser


def _add_convert(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("convert", help="write a checkpoint in another format")
    parser.add_argument("source", type=_folder, metavar="SRC", help="its folder, or the one with the tracker file")
    parser.add_argument("destination", type=_folder, metavar="DST")
    parser.add_argument("--to", required=True, metavar="FORMAT", help=_format_help())
    parser.add_argument("--tp", type=int, help="tensor-parallel size (default: the source's)")
    parser.add_argument("--pp", type=int, help="pipeline-parallel size (default: the source's)")
    parser.add_argument("--ep", type=int, help="expert-parallel size (default: the source's)")
    parser.add_argument("--sharding", help="form of the optimizer state, as fully_reshardable or none")
    parser.add_argument("--megatron", metavar="VERSION", help="megatron-core that will read it, as 0.16")
    parser.add_argument("--dtype", choices=_DTYPES, help="of weights, in formats that hold weights only")
    parser.add_argument("--vocab-size", type=int, help="true size of the vocabulary, without padding")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer state out")
    parser.add_argument("--budget", default="2G", help="memory for tensors (default 2G)")
    parser.add_argument(
        "--jobs", type=int, default=2, help="threads that read, write, and read the output again (default 2)"
    )
    parser.add_argument("--drop", action="store_true", help="go on although the target cannot hold everything")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--all", action="store_true", help="a line of the plan for every layer and expert")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of one format; may repeat")
    parser.set_defaults(run=_convert)


def _format_help() -> str:
    from hp_muon_plugin.checkpoint.formats import FORMATS

    return "; ".join(f"{entry.name}: {entry.what}" for entry in FORMATS.values() if entry.writer)


def _convert(options: argparse.Namespace) -> int:
    from hp_muon_plugin.checkpoint import convert, formats
    from hp_muon_plugin.checkpoint.hashing import WeightsOnly
    from hp_muon_plugin.cli.ckpt_progress import progress
    from hp_muon_plugin.cli.ckpt_text import plan_lines, report_lines

    budget = parse_bytes(options.budget, "--budget")
    if options.jobs < 1:
        raise ConfigError("--jobs", options.jobs, "is no number of threads", "1 or more")
    formats.writer(options.to)
    given = [name for name in _FLAGS if getattr(options, name) is not None]
    source: Source = formats.open_checkpoint(options.source)
    try:
        if options.weights_only:
            source = WeightsOnly(source)
        if options.vocab_size is not None:
            source.state().vocab_size = _vocabulary(options.vocab_size, source)
        found = convert.plan(source, options.to, _target(options, source, budget), given)
        if options.dry_run:
            for line in plan_lines(found, collapsed=not options.all):
                print(line)
            return 0
        with progress() as shown:
            report = convert.convert(
                found,
                options.destination,
                budget=budget,
                jobs=options.jobs,
                drop=options.drop,
                force=options.force,
                progress=shown,
            )
        for line in report_lines(found, report):
            print(line)
        return 0
    finally:
        source.close()


def _target(options: argparse.Namespace, source: "Source", budget: int) -> "Target":
    from hp_muon_plugin.checkpoint.canonical import Target

    sizes = {}
    args = source.state().args
    for name, argument in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name}", given, "is no parallel size", "1 or more")
        before = args.get(f"{argument}_model_parallel_size")
        sizes[name] = given if given is not None else before if isinstance(before, int) and before > 0 else 1
    return Target(
        **sizes,
        sharding=options.sharding,
        megatron=_version(options.megatron),
        dtype=_dtype(options.dtype),
        options=_pairs(options.option),
    )


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError("--option", text, "is not KEY=VALUE", "as in --option spec=te")
        pairs[key] = value
    return pairs


def _vocabulary(given: int, source: "Source") -> int:
    """The true size, which is at most the rows that are there."""
    stored = [info.shape[0] for key, info in source.tensors().items() if key.name.startswith(_VOCABULARY)]
    if given < 1 or (stored and given > min(stored)):
        there = f"the source has {min(stored)} rows" if stored else "no size"
        raise ConfigError("--vocab-size", given, there, "give the size without padding, which is not above that")
    return given


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.match(r"(\d+)\.(\d+)(\.\d+)?\Z", text)
    if not match:
        raise ConfigError("--megatron", text, "is no version of megatron-core", "as in --megatron 0.16")
    return int(match[1]), int(match[2])


def _dtype(text: str | None) -> "torch.dtype | None":
    import torch

    return None if text is None else {name: getattr(torch, name) for name in _DTYPES}[text]


def parse_bytes(text: str, option: str) -> int:
    """A number of bytes such as ``512M`` or ``2G``.

    Args:
        text: As the user writes it.
        option: For the message.

    Raises:
        ConfigError: If it is none, or less than 1 MiB.
    """
    match = re.match(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\Z", text, re.IGNORECASE)
    found = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if found < 2**20:
        raise ConfigError(option, text, "is no number of bytes of at least 1M", "as in 512M or 2G")
    return found


def _inspect(options: argparse.Namespace) -> int:
    from hp_muon_plugin.checkpoint.formats import open_checkpoint
    from hp_muon_plugin.cli.ckpt_text import inspected, inspected_lines

    source = open_checkpoint(options.source)
    try:
        if options.json:
            print(json.dumps(inspected(source), indent=1))
        else:
            for line in inspected_lines(source, collapsed=not options.all):
                print(line)
    finally:
        source.close()
    return 0


def _diff(options: argparse.Namespace) -> int:
    from hp_muon_plugin.checkpoint.formats import open_checkpoint
    from hp_muon_plugin.checkpoint.verify import compared
    from hp_muon_plugin.cli.ckpt_progress import progress

    a, b = open_checkpoint(options.a), open_checkpoint(options.b)
    with progress() as shown:
        shown.begin("compare", sum(info.nbytes for source in (a, b) for info in source.tensors().values()))
        found = list(compared(a, b, rtol=options.rtol, atol=options.atol, count=shown.advance))
    for difference in found:
        print(difference)
    if not found:
        print(f"{len(a.tensors())} tensors are equal")
    return _DIFFERENT if found else 0


def _verify(options: argparse.Namespace) -> int:
    from hp_muon_plugin.checkpoint.check import verified
    from hp_muon_plugin.checkpoint.formats import open_checkpoint
    from hp_muon_plugin.cli.ckpt_progress import progress

    source = open_checkpoint(options.source)
    with progress() as shown:
        problems, checks = verified(source, shown)
    for problem in problems:
        print(problem)
    if problems:
        return _NOT_VERIFIED
    print("; ".join(checks))
    return 0
