"""``hp-muon bench fsdp``: the sharded data-parallel engine against torch's ``fully_shard``."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hp_muon_plugin.errors import ConfigError

if TYPE_CHECKING:
    from hp_muon_plugin.bench.fsdp import Supernodes
    from hp_muon_plugin.bench.fsdp_cases import Case
    from hp_muon_plugin.bench.report import Row
    from hp_muon_plugin.train.worker import Failure

_ABOUT = (
    "All contenders train the same model in the same processes and take turns step by step. A time is that of the "
    "slowest rank, a median over the steps; a ratio is the median of the ratios within a round. CPU time counts all "
    "threads of a rank, those of gloo too, and hardly depends on other load.",
    "First, losses, gradients and changes of weights of 3 steps are compared with unsharded training on the batches "
    "of all ranks (the errors below); who is wrong is told in the notes and has no part in the ratio. AdamW is torch's "
    "fused one for everybody.",
    "The floor is the longer of two times: the same model computed by every rank without any communication, and the "
    "bytes that our collectives must send at the measured rate of neighbours that all send at once (on the testbed: "
    "the least bytes over the slow link at its rate). Memory is the peak of resident memory in training, over that "
    "before the model was built, in a process of its own; the largest of all ranks.",
)
_TIMEOUT_S = 60.0
_TESTBED_TIMEOUT_S = 1800.0


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command.

    Args:
        commands: Of ``hp-muon bench``.
    """
    parser = commands.add_parser("fsdp", help="sharded data parallelism against torch's fully_shard")
    parser.add_argument("--only", metavar="CASE", action="append", help="dense, or width x layers as 512x6; may repeat")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each rank and step (default 128)")
    parser.add_argument("--optimizer", choices=("adamw", "none"), default="adamw", help="default adamw")
    parser.add_argument("--seconds", type=float, default=15.0, help="about how long one case is timed (default 15)")
    parser.add_argument("--no-memory", action="store_true", help="skip the processes that measure memory")
    add_rank_options(parser)
    parser.set_defaults(run=run)


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add what every bench with ranks takes: how many, where, and the folder of its report.

    Args:
        parser: Of the command.
    """
    parser.add_argument("--ranks", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--replicas", type=int, default=1, help="size of the replicate axis: HSDP (default 1)")
    parser.add_argument("--supernodes", type=int, metavar="N", help="run on N nodes of the testbed; needs root")
    parser.add_argument("--testbed", type=Path, metavar="PROGRAM", help="what makes the nodes, for --supernodes")
    parser.add_argument("--rate", action="append", help="of the link between nodes, as 200mbit or none; may repeat")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder (default outputs/bench)")


def run(options: argparse.Namespace) -> int:
    """Run the benchmark.

    Args:
        options: Parsed.

    Returns:
        Exit code.
    """
    beds = testbeds(options)
    _check(options)
    import torch

    from hp_muon_plugin.bench.machine import describe
    from hp_muon_plugin.bench.report import write_report

    rows = []
    for testbed in beds:
        found = _measure(options, testbed)
        if isinstance(found, int):
            return found
        rows += found
        for row in found:
            print(_line(row), flush=True)
    machine = describe(torch.device("cpu"))
    machine |= {"ranks": options.ranks, "tokens per rank": options.tokens, "optimizer": options.optimizer}
    name = "fsdp" + (f"_{options.replicas}x{options.ranks // options.replicas}" if options.replicas > 1 else "")
    name += "_supernodes" if options.supernodes else ""
    for path in write_report(options.out, name, "Sharded data parallelism", rows, machine, about=_ABOUT):
        print(path)
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.seconds <= 0:
        raise ConfigError("--seconds", options.seconds, "must be above 0", "give about how long a case may take")
    if options.tokens < 1:
        raise ConfigError("--tokens", options.tokens, "must be above 0", "give the tokens of a rank's batch")


def _cases(options: argparse.Namespace) -> "list[Case]":
    from hp_muon_plugin.bench.fsdp_cases import NAMED, parse_case

    cases = [parse_case(text, "--only") for text in options.only or NAMED]
    for case in cases:
        if case.experts and options.tokens % case.experts:
            why = f"{case.experts} experts do not share them equally"
            raise ConfigError("--tokens", options.tokens, why, f"give a multiple of {case.experts}")
    return cases


def testbeds(options: argparse.Namespace) -> "list[Supernodes | None]":
    """Check ranks, replicas and the options of the testbed.

    Args:
        options: Parsed.

    Returns:
        What to run on, in order; None is this machine.

    Raises:
        ConfigError: If they do not fit each other.
    """
    if options.ranks < 1 or options.replicas < 1 or options.ranks % options.replicas:
        fix = f"--ranks={options.ranks} must be a multiple of it"
        raise ConfigError("--replicas", options.replicas, "does not divide the ranks", fix)
    if options.supernodes is None:
        if options.testbed or options.rate:
            raise ConfigError("--supernodes", None, "--testbed and --rate belong to it", "add --supernodes 2")
        return [None]
    if options.supernodes < 1 or options.ranks % options.supernodes:
        fix = f"--ranks={options.ranks} must be a multiple of it"
        raise ConfigError("--supernodes", options.supernodes, "does not divide the ranks", fix)
    if options.testbed is None or not options.testbed.is_file():
        raise ConfigError("--testbed", options.testbed, "there is no such program", "give what makes the nodes")
    from hp_muon_plugin.bench.fsdp import Supernodes

    program = options.testbed.resolve()
    beds = [Supernodes(program, options.supernodes, rate) for rate in options.rate or ("none", "200mbit", "100mbit")]
    for bed in beds:
        bed.bytes_per_s  # noqa: B018 -- raises for a rate that is none
    return list(beds)


def _measure(options: argparse.Namespace, testbed: "Supernodes | None") -> "list[Row] | int":
    from hp_muon_plugin.bench import fsdp
    from hp_muon_plugin.bench.fsdp_rank import Plan

    cases = [str(case) for case in _cases(options)]
    plan = Plan(
        cases=cases,
        replicas=options.replicas,
        num_tokens=options.tokens,
        seconds=options.seconds,
        has_optimizer=options.optimizer == "adamw",
        has_memory=not (options.no_memory or testbed),
        nodes=testbed.nodes if testbed else 0,
        timeout_s=_TIMEOUT_S,
    )
    with tempfile.TemporaryDirectory(prefix="hp-muon-bench-") as text:
        folder, ranks = Path(text), options.ranks
        if testbed is None:
            failure = fsdp.run_here(plan, folder, num_ranks=ranks)
        else:
            failure = fsdp.run_on_testbed(plan, folder, num_ranks=ranks, testbed=testbed, timeout_s=_TESTBED_TIMEOUT_S)
        return told(failure) if failure else fsdp.rows(plan, folder, num_ranks=ranks, testbed=testbed)


def told(failure: "Failure") -> int:
    """Tell the user of a failure, with the end of its log.

    Args:
        failure: Of a rank.

    Returns:
        The exit code.
    """
    print(f"hp-muon: rank {failure.rank}: {failure.message}", file=sys.stderr)
    if failure.log is not None:  # its folder is about to go
        print(failure.log.read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
    return failure.exit_code


def _line(row: "Row") -> str:
    peers = ", ".join(f"{name} {time:.4g}" for name, time in row.peers.items())
    wrong = f"; WRONG: {row.notes['WRONG']}" if "WRONG" in row.notes else ""
    memory = ", ".join(f"{key} {value:.0f}" for key, value in row.notes.items() if key.startswith("peak"))
    sent = ", ".join(f"{key} {value}" for key, value in row.notes.items() if key.startswith("slow-link"))
    bound = f"bound: ours is {row.notes['bound']}" if "bound" in row.notes else ""
    told = "; ".join(text for text in (peers, memory, sent, bound) if text)
    return (
        f"{row.case}: ours {row.ours:.4g} ms {row.clock}, ratio {row.ratio:.2f}, floor {row.floor:.4g}; {told}{wrong}"
    )
