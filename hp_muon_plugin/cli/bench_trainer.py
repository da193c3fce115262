"""``hp-muon bench trainer``: steps of our trainer under each data-parallel wrapper."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hp_muon_plugin.errors import ConfigError

if TYPE_CHECKING:
    from hp_muon_plugin.bench.report import Row

_ABOUT = (
    "One process group trains the same megatron-core model under every wrapper; they take turns step by step. A time "
    "is that of a whole step of `hp-muon train` (forward, backward, reduction, norm, clipping, update) on the slowest "
    "rank, a median over the rounds; a ratio is the median of the ratios within a round, and the fastest peer is "
    "torch_fsdp2 or megatron_fsdp. megatron_ddp shards nothing and stands beside them.",
    "First, losses of 3 steps are compared with megatron_ddp's (the errors below); who differs is told in the notes "
    "and has no part in the ratio. AdamW is the plugin's over the shards of hp_fsdp and torch_fsdp2, and Megatron's "
    "own for megatron_ddp and megatron_fsdp.",
    "The floor is forward and backward of the bare model: no communication, no optimizer.",
)
_TIMEOUT_S = 120.0


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command.

    Args:
        commands: Of ``hp-muon bench``.
    """
    parser = commands.add_parser("trainer", help="steps of our trainer under each data-parallel wrapper")
    parser.add_argument("--only", metavar="CASE", action="append", help="such as dense256x4 or moe128x4; may repeat")
    parser.add_argument("--ranks", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--optimizer", choices=("adamw", "hp_muon"), default="adamw", help="default adamw")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default fp32")
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long one case is timed (default 20)")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder (default outputs/bench)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark.

    Args:
        options: Parsed.

    Returns:
        Exit code.
    """
    from hp_muon_plugin.bench.trainer_cases import NAMED, model_of

    cases = list(options.only or NAMED)
    for text in cases:
        model_of(text, "--only")
    if options.seconds <= 0:
        raise ConfigError("--seconds", options.seconds, "must be above 0", "give about how long a case may take")
    if options.ranks < 1:
        raise ConfigError("--ranks", options.ranks, "must be above 0", "give the ranks to start")
    import torch

    from hp_muon_plugin.bench import trainer
    from hp_muon_plugin.bench.machine import describe
    from hp_muon_plugin.bench.report import write_report
    from hp_muon_plugin.bench.trainer_rank import Plan
    from hp_muon_plugin.cli.bench_fsdp import told
    from hp_muon_plugin.megatron.versions import core_version

    plan = Plan(cases, options.optimizer, options.precision, options.seconds, _TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="hp-muon-bench-") as folder:
        failure = trainer.run_here(plan, Path(folder), num_ranks=options.ranks)
        if failure is not None:
            return told(failure)
        rows = trainer.rows(plan, Path(folder), num_ranks=options.ranks)
    for row in rows:
        print(_line(row), flush=True)
    machine = describe(torch.device("cpu")) | {"ranks": options.ranks, "optimizer": options.optimizer}
    machine |= {"precision": options.precision, "megatron-core": str(core_version())}
    for path in write_report(options.out, "trainer", "Steps of the trainer", rows, machine, about=_ABOUT):
        print(path)
    return 0


def _line(row: "Row") -> str:
    peers = ", ".join(f"{name} {time:.4g}" for name, time in row.peers.items())
    told = "; ".join(f"{key}: {value}" for key, value in row.notes.items() if key == "WRONG" or key.endswith("failed"))
    return (
        f"{row.case}: ours {row.ours:.4g} ms {row.clock}, ratio {row.ratio:.2f}, floor {row.floor:.4g}; {peers}"
        f"{'; ' * bool(told)}{told}"
    )
