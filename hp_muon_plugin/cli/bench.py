"""``hp-muon bench``: benchmarks against named peers."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hp_muon_plugin.cli import bench_convert, bench_fsdp, bench_optimizer, bench_trainer
from hp_muon_plugin.cli.parsers import WHOLE_FLAGS
from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.errors import ConfigError, HpMuonError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hp_muon_plugin.bench.ns_cases import Case
    from hp_muon_plugin.bench.report import Row

_ABOUT = (
    "Every round runs ours and every peer once, in one process; times are medians over the rounds, ratios are "
    "medians of the ratios within a round. CPU time hardly depends on other load, but counts all threads, also while "
    "they wait for each other.",
    "The floor is the longer of two times: for `3 m^2 n` operations (one symmetric product and one application, "
    "which no polynomial iteration avoids) at the measured float32 matmul rate, and for reading the input and "
    "writing the result once at the measured copy rate. A peer is as accurate as ours with up to 10 times our "
    "error against the float64 iteration. All run five Keller steps on Gaussian matrices.",
)


def run(arguments: list[str]) -> int:
    """Run a benchmark.

    Args:
        arguments: Of ``hp-muon bench``.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(prog="hp-muon bench", description="Benchmarks against named peers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCHMARK", parser_class=WHOLE_FLAGS)
    _add_newton_schulz(commands)
    bench_fsdp.add(commands)
    bench_optimizer.add(commands)
    bench_trainer.add(commands)
    bench_convert.add(commands)
    options = parser.parse_args(arguments)
    from hp_muon_plugin.train.launch import INTERRUPTED_EXIT, Interrupted

    try:
        return int(options.run(options))
    except Interrupted:
        print("hp-muon: interrupted; every rank has ended", file=sys.stderr)
        return INTERRUPTED_EXIT
    except HpMuonError as error:
        print(f"hp-muon: {error}", file=sys.stderr)
        return 2


def _add_newton_schulz(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("newton-schulz", help="polar factors of many matrices")
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="one shape per line; default: the mission's")
    parser.add_argument("--only", metavar="SHAPE", action="append", help="one shape, such as 74x24x10240; may repeat")
    parser.add_argument("--threads", default="1,2", help="CPU threads, comma-separated (default 1,2)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu (default cpu)")
    parser.add_argument("--seconds", type=float, default=15.0, help="about how long one row takes (default 15)")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder (default outputs/bench)")
    parser.add_argument(
        "--ns-dtype",
        type=FloatDtype,
        choices=list(FloatDtype),
        help="type of ours, as optimizer.ns_dtype (default: by the table)",
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="algorithms to use, from --calibrate")
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="measure which algorithm is fastest, and write it"
    )
    parser.set_defaults(run=_newton_schulz)


def _newton_schulz(options: argparse.Namespace) -> int:
    threads = _threads(options.threads)
    import torch

    from hp_muon_plugin.bench import newton_schulz
    from hp_muon_plugin.bench.machine import describe, measure_rates, rates_for_json
    from hp_muon_plugin.bench.ns_cases import MISSION, parse_case, read_cases
    from hp_muon_plugin.bench.report import write_report
    from hp_muon_plugin.muon.algorithm import TABLE
    from hp_muon_plugin.muon.rule_file import load_table

    cases = list(MISSION)
    if options.shapes:
        cases = read_cases(options.shapes)
    if options.only:
        cases = [parse_case(text, "--only") for text in options.only]
    if options.seconds <= 0:
        raise ConfigError("--seconds", options.seconds, "must be above 0", "give about how long a row may take")
    table = load_table(options.table) if options.table else TABLE
    device = _device(options.device)
    if options.calibrate:
        chosen = cases if options.only or options.shapes else []
        return _calibrate(options.calibrate, device, threads[0], chosen, options.ns_dtype)
    clock = "cpu" if device.type == "cpu" else "wall"
    machine: dict[str, object] = describe(device)
    rows = []
    with torch.inference_mode():
        for count in threads if device.type == "cpu" else threads[:1]:
            torch.set_num_threads(count)
            rates = measure_rates(device)[clock]
            machine[f"rates with {count} threads (GFLOP/s, GB/s)"] = rates_for_json(rates)
            for case in cases:
                contest = newton_schulz.contest(case, device, table=table, dtype=options.ns_dtype)
                errors = newton_schulz.judge(contest)
                row = newton_schulz.measure(
                    contest, rates, device, clock=clock, budget_s=options.seconds, errors=errors
                )
                launched = newton_schulz.kernels(contest.runs[newton_schulz.OURS], device)
                row.notes["kernels"] = f"{launched.total()} ({', '.join(f'{n} {k}' for k, n in launched.items())})"
                rows.append(row)
                print(_line(row), flush=True)
    name = "newton_schulz" if device.type == "cpu" else f"newton_schulz_{device.type}"
    name += f"_{options.ns_dtype}" if options.ns_dtype else ""
    for path in write_report(options.out, name, "Newton-Schulz", rows, machine, about=_ABOUT):
        print(path)
    return 0


def _calibrate(
    path: Path, device: "torch.device", threads: int, cases: "Sequence[Case]", dtype: FloatDtype | None
) -> int:
    import torch

    from hp_muon_plugin.bench.calibrate import calibrate
    from hp_muon_plugin.bench.machine import describe
    from hp_muon_plugin.muon.rule_file import save_table

    torch.set_num_threads(threads)
    with torch.inference_mode():
        if cases:
            shorts = sorted({case.short for case in cases})
            aspects = sorted({case.long / case.short for case in cases}, reverse=True)
            rules = calibrate(device, shorts=shorts, aspects=aspects, dtype=dtype)
        else:
            rules = calibrate(device, dtype=dtype)
    save_table(rules, path, note=f"{describe(device)}, {threads} threads")
    print(f"{path}: {len(rules)} rows; use it with optimizer.ns_table={path}")
    return 0


def _line(row: "Row") -> str:
    peers = ", ".join(f"{name} {row.ratios[name]:.2f}x" for name in row.peers)
    return (
        f"{row.case} ({row.threads} threads): ours {row.ours:.3g} ms {row.clock}, floor {row.floor:.3g}; "
        f"{peers}; {row.notes['algorithm']}"
    )


def _threads(text: str) -> list[int]:
    try:
        found = [int(piece) for piece in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError("--threads", text, "is no list of thread counts", "write for example 1,2")
    return found


def _device(text: str) -> "torch.device":
    import torch

    from hp_muon_plugin.config.choices import PlatformName

    if text not in (PlatformName.cpu, PlatformName.cuda, PlatformName.npu):
        raise ConfigError("--device", text, "is no device", "write cpu, cuda or npu")
    if text == PlatformName.npu:
        import importlib

        if importlib.util.find_spec("torch_npu") is None:
            raise ConfigError("--device", text, "torch_npu is not installed", "install torch-npu, or write cpu")
        importlib.import_module("torch_npu")
    device = torch.device(text)
    if text != PlatformName.cpu and not torch.get_device_module(text).is_available():
        raise ConfigError("--device", text, "there is none here", "write cpu")
    return device


if __name__ == "__main__":
    from hp_muon_plugin.cli.main import run_module

    run_module("bench")
