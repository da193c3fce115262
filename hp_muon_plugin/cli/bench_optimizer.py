"""``hp-muon bench optimizer``: a distributed Muon step of ours and of everybody else."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_muon_plugin.cli.bench_fsdp import add_rank_options, testbeds
from hp_muon_plugin.errors import ConfigError

if TYPE_CHECKING:
    from hp_muon_plugin.bench.fsdp import Supernodes
    from hp_muon_plugin.bench.opt_cases import Case
    from hp_muon_plugin.bench.optimizer import Field
    from hp_muon_plugin.bench.report import Row

_ABOUT = (
    "Every contender holds the same sharded weights and is given the same gradients; only the optimizer's step is "
    "timed. Contenders of all environments take turns step by step, each with as many ranks on these cores, while "
    "the others wait. A time is that of the slowest rank, a median over the rounds; a ratio is the median of the "
    "ratios within a round. CPU time counts all threads of a rank, those of gloo too, and depends less on other load.",
    "First, the changes of all weights over 2 steps are compared with one process that does the same in float64, "
    "with the peer's own scale, coefficients and decay (the errors below are those of the worst parameter). Right is "
    "who is off by at most four times what the plain iteration in the peer's own type is off by (bf16: about 4e-2), "
    "or by 1e-4; who is wrong is told in the notes and has no part in the ratio.",
    "The floor is the longer of two times: the operations of five Newton-Schulz steps on every matrix once, in the "
    "form that has fewer, divided over the ranks at the measured float32 matmul rate of a rank while all ranks work; "
    "and the least bytes that a rank must send at the measured rate of neighbours that all send at once (on the "
    "testbed: the least bytes that anybody put on the slow link, at its rate).",
)
_TIMEOUT_S = 120.0


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command.

    Args:
        commands: Of ``hp-muon bench``.
    """
    parser = commands.add_parser("optimizer", help="a distributed Muon step, of ours and of every peer that runs")
    parser.add_argument("--only", metavar="CASE", action="append", help="505b, dense, or 1dense+1moe16; may repeat")
    parser.add_argument(
        "--strategies",
        metavar="LIST",
        help="of ours, comma-separated; also measured, replicated (default: all but that)",
    )
    parser.add_argument("--peers", metavar="LIST", help="comma-separated, or none (default: all that are found)")
    parser.add_argument(
        "--peer-python", metavar="NAME=PYTHON", action="append", default=[], help="run a peer there; may repeat"
    )
    parser.add_argument(
        "--install-peers", type=Path, metavar="FOLDER", help="make environments for missing peers, or find them there"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long one case is timed (default 60)")
    add_rank_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark.

    Args:
        options: Parsed.

    Returns:
        Exit code.
    """
    beds = testbeds(options)
    if options.seconds <= 0:
        raise ConfigError("--seconds", options.seconds, "must be above 0", "give about how long a case may take")
    cases = _cases(options)
    field = _field(options)
    import torch

    from hp_muon_plugin.bench.machine import describe
    from hp_muon_plugin.bench.opt_mission import table
    from hp_muon_plugin.bench.report import write_report

    for name, why in field.places.absent.items():
        print(f"absent: {name}: {why}", file=sys.stderr)
    machine = describe(torch.device("cpu")) | {"ranks": options.ranks}
    made: list[Row] = []
    figures: list[dict[str, Any]] = []
    for testbed in beds:
        found = _measure(options, cases, field, testbed, machine, figures)
        if found is None:
            return 1
        made += found
    about = [text for text in (*_ABOUT, table(figures)) if text]
    name = "optimizer" + (f"_{options.replicas}x{options.ranks // options.replicas}" if options.replicas > 1 else "")
    name += "_supernodes" if options.supernodes else ""
    for path in write_report(options.out, name, "Distributed Muon", made, machine, about=about):
        print(path)
    return 0


def _cases(options: argparse.Namespace) -> "list[Case]":
    from hp_muon_plugin.bench.opt_cases import NAMED, parse_case

    return [parse_case(text, "--only") for text in options.only or NAMED]


def _field(options: argparse.Namespace) -> "Field":
    from hp_muon_plugin.bench.opt_everyone import peers
    from hp_muon_plugin.bench.opt_ours import DEFAULT, STRATEGIES
    from hp_muon_plugin.bench.opt_places import find_places
    from hp_muon_plugin.bench.optimizer import Field

    known = peers()
    strategies = _chosen("--strategies", options.strategies or ",".join(DEFAULT), list(STRATEGIES))
    names = [] if options.peers == "none" else _chosen("--peers", options.peers, list(known))
    named = {}
    for text in options.peer_python:
        name, _, python = text.partition("=")
        if not python:
            raise ConfigError("--peer-python", text, "is no NAME=PYTHON", "write such as muonium=/path/to/python")
        named[_chosen("--peer-python", name, list(known))[0]] = python
    wanted = {name: known[name] for name in names}
    places = find_places(
        wanted,
        named=named,
        folder=options.install_peers,
        replicas=options.replicas,
        is_here_only=options.supernodes is not None,
    )
    return Field(tuple(strategies), wanted, places)


def _chosen(option: str, text: str | None, known: list[str]) -> list[str]:
    names = known if text is None else text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(option, name, "is not known", f"write one of {', '.join(known)}")
    return names


def _measure(
    options: argparse.Namespace,
    cases: "list[Case]",
    field: "Field",
    testbed: "Supernodes | None",
    machine: dict[str, object],
    figures: list[dict[str, Any]],
) -> "list[Row] | None":
    from hp_muon_plugin.bench.opt_lane import Job, LaneError
    from hp_muon_plugin.bench.opt_mission import compare
    from hp_muon_plugin.bench.optimizer import check_memory, rows, run_cases
    from hp_muon_plugin.train.launch import Stop

    made: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hp-muon-bench-") as text, Stop() as stop:
        job = Job(options.ranks, options.replicas, _TIMEOUT_S, stop, testbed)
        for line in check_memory(cases, field, job):
            print(line, file=sys.stderr, flush=True)
        try:
            results = run_cases(cases, field, job, Path(text), seconds=options.seconds)
        except LaneError as error:
            print(f"hp-muon: {error}", file=sys.stderr)
            return None
    for result in results:
        found = rows(result, field, job)
        figures += compare(result, replicas=options.replicas)
        machine[f"rates of a rank in {result.case} (GFLOP/s, GB/s)"] = _rates(result.rates["wall"], result.link["wall"])
        made += found
        for row in found:
            print(_line(row), flush=True)
    return made


def _rates(rates: dict[str, float], link: float) -> dict[str, float]:
    return {name: round(value / 1e9, 2) for name, value in (rates | {"link": link}).items()}


def _line(row: "Row") -> str:
    peers = ", ".join(f"{name} {time:.4g} ({row.ratios[name]:.2f}x)" for name, time in row.peers.items())
    bad = [f"{key}: {value}" for key, value in row.notes.items() if key.startswith(("WRONG", "FAILED"))]
    told = "; ".join(text for text in (peers, *bad) if text)
    ratio = "no right peer" if row.right_ratio is None else f"ratio {row.ratio:.2f}"
    head = f"{row.case}: ours {row.ours:.4g} ms {row.clock}, {ratio}, floor {row.floor:.4g}"
    return f"{head}; {told}" if told else head
