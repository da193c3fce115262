"""``hp-muon``: train, plan, bench, ckpt, doctor."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import hp_muon_plugin
from hp_muon_plugin.cli.interrupts import remembered
from hp_muon_plugin.cli.standard_files import open_missing

_USAGE = """usage: hp-muon COMMAND ...

  train [OVERRIDE ...]   train a megatron-core GPT; Hydra overrides such as
                         optimizer=adamw model=tiny_dense topology.ranks=2 run.steps=100
                         --dry-run prints the plan and stops; --cfg job, --info and -m are Hydra's
  plan [OVERRIDE ...]    the same run's ranks, layout, bytes by link, memory and routing; nothing starts
  bench newton-schulz    polar factors: ours against peers, with the machine's floor; --help lists options
  bench fsdp             sharded data parallelism: ours against torch's fully_shard
  bench trainer          a step of our trainer under every wrapper
  bench optimizer        a distributed Muon step: every strategy of ours, and its peers
  ckpt convert SRC DST --to FORMAT
                         any checkpoint into any format, optimizer state included; also
                         ckpt inspect SRC, ckpt diff A B, ckpt verify SRC; --help lists options
  doctor                 versions, platform, hooks, and what would not work and why
  --version              print the version
"""
_INTERRUPTED_EXIT = 130  # 128 + SIGINT, as shells count
_BROKEN_PIPE_EXIT = 141  # 128 + SIGPIPE


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``hp-muon``.

    Args:
        arguments: Command-line arguments; None takes those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    run_to_exit(lambda: _run(given))


def run_to_exit(command: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its exit code, also after Ctrl-C or a closed pipe.

    Args:
        command: Returns the exit code.
    """
    open_missing()
    tells_logging_errors = logging.raiseExceptions
    logging.raiseExceptions = False  # a line of Hydra's log that nobody reads would be a traceback on standard error
    try:
        code = _code_of(command)
    except BrokenPipeError:  # as after `| head`; Python's own flush at the end must not meet it again
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        code = _BROKEN_PIPE_EXIT
    finally:
        logging.raiseExceptions = tells_logging_errors
    if code == _INTERRUPTED_EXIT:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C would be a traceback of Python's own exit
    sys.exit(code)


def _code_of(command: Callable[[], int]) -> int:
    try:
        with remembered():
            code = command()
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("hp-muon: interrupted", file=sys.stderr, flush=True)
        return _INTERRUPTED_EXIT
    return code


def run_module(command: str) -> None:
    """Entry point of ``python -m hp_muon_plugin.cli.COMMAND``, which may repeat the command.

    Args:
        command: Name of the command.
    """
    given = sys.argv[1:]
    main(given if given[:1] == [command] else [command, *given])


def _run(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if given else 2
    if given[0] == "--version":
        print(hp_muon_plugin.__version__)
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "plan": _plan,
        "bench": _bench,
        "ckpt": _ckpt,
        "doctor": _doctor,
    }
    if given[0] not in commands:
        print(f"hp-muon: no command {given[0]!r}; commands are {', '.join(commands)}", file=sys.stderr)
        return 2
    return commands[given[0]](given[1:])


def _train(arguments: list[str]) -> int:
    from hp_muon_plugin.cli.train import run

    return run(arguments)


def _plan(arguments: list[str]) -> int:
    return _train([*arguments, "--dry-run"])


def _bench(arguments: list[str]) -> int:
    from hp_muon_plugin.cli.bench import run

    return run(arguments)


def _ckpt(arguments: list[str]) -> int:
    from hp_muon_plugin.cli.ckpt import run

    return run(arguments)


def _doctor(arguments: list[str]) -> int:
    from hp_muon_plugin.cli.doctor import run

    return run(arguments)


if __name__ == "__main__":
    main()
