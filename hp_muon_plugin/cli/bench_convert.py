"""``hp-muon bench convert``: conversions of checkpoints beside a plain copy."""

import argparse
import shutil
import tempfile
from pathlib import Path

from hp_muon_plugin.errors import ConfigError

_ABOUT = (
    "In every round the same checkpoint (a dense model in bfloat16 with AdamW's state) is converted by ours, copied by "
    "`cp -r`, copied and synced, and, where it is a DCP folder, made one torch.save file by torch's own "
    "`dcp_to_torch_save`; times are medians over the rounds, ratios medians of the ratios within a round. Ours is "
    "`hp-muon ckpt convert` with its defaults, in one process, without the start of Python: it checks masters, hashes, "
    "syncs, and reads the output again. `cp` and torch's converter do none of that. The files are in the page cache.",
    "The floor is the time of `cp -r`, without sync.",
)


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command.

    Args:
        commands: Of ``hp-muon bench``.
    """
    parser = commands.add_parser("convert", help="conversions of checkpoints beside a plain copy")
    parser.add_argument("--only", metavar="FROM-TO", action="append", help="such as hp-torch_dist; may repeat")
    parser.add_argument("--mib", type=int, default=1024, help="size of the checkpoint (default 1024)")
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long one case is timed (default 20)")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder (default outputs/bench)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark.

    Args:
        options: Parsed.

    Returns:
        Exit code.
    """
    for name in ("mib", "seconds"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name}", getattr(options, name), "must be above 0", "leave it out for the default")
    if shutil.which("cp") is None:
        raise ConfigError("bench", "convert", "there is no cp here to compare with", "run it on Linux or macOS")
    if options.folder is not None and not options.folder.is_dir():
        raise ConfigError("--folder", options.folder, "is no folder", "name one on the disk that is to be measured")
    import torch

    from hp_muon_plugin.bench import convert
    from hp_muon_plugin.bench.machine import describe
    from hp_muon_plugin.bench.report import write_report

    cases = [convert.parse_case(text) for text in options.only or convert.CASES]
    rows = []
    with tempfile.TemporaryDirectory(prefix="hp-muon-bench-", dir=options.folder) as folder:
        for case in cases:
            row = convert.measure(case, options.mib, Path(folder), budget_s=options.seconds)
            rows.append(row)
            peers = ", ".join(f"{name} {time:.4g}" for name, time in row.peers.items())
            print(f"{row.case}: ours {row.ours:.4g} ms wall, ratio {row.ratio:.2f}; {peers}", flush=True)
    for path in write_report(
        options.out, "convert", "Conversion of checkpoints", rows, describe(torch.device("cpu")), about=_ABOUT
    ):
        print(path)
    return 0
