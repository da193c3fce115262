"""Runs of ``python -m hp_muon_plugin.run`` on forked ranks, through upstream's own ``pretrain()``."""

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dist_pool import joined, run_ranks
from made_once import computed_once

from hp_muon_plugin.train.environment import INIT_METHOD
from hp_muon_plugin.train.setup import Launch

SCRIPT = str(Path(__file__).parents[2] / "recipes" / "pretrain" / "pretrain_gpt.py")


def _words(text: str) -> list[str]:
    return text.split()


SMALL = _words(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 64 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 4 --eval-iters 2 --eval-interval 4 --log-interval 1 --lr 0.005 --min-lr 0.001 --weight-decay 0.1 "
    "--lr-decay-style cosine --clip-grad 0.7 --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --num-workers 0 "
    "--untie-embeddings-and-output-weights --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion "
    "--no-rope-fusion --attention-backend unfused --hidden-dropout 0 --attention-dropout 0"
)
MOCK = ["--mock-data"]
MOE = _words(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01"
)


@dataclass(frozen=True)
class Outcome:
    """What a run of a script printed, on all ranks.

    Attributes:
        code: Exit code.
        text: Everything that rank 0 printed.
        last: What the last rank printed, where losses are.
    """

    code: int
    text: str
    last: str

    @property
    def validation(self) -> str:
        """The validation loss after training, all printed digits."""
        return re.findall(r"on validation set \| lm loss value: (\S+)", self.last)[-1]

    @property
    def losses(self) -> list[str]:
        return re.findall(r"lm loss: (\S+)", self.last)

    @property
    def norms(self) -> list[str]:
        return re.findall(r"grad norm: (\S+)", self.last)


def require_training() -> None:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this megatron-core's wheel has no megatron.training")


def script(num_ranks: int, *arguments: str, path: str = SCRIPT, small: bool = True) -> Outcome:
    line = (path, *(SMALL if small else ()), *arguments)
    return _run(num_ranks, line)


@computed_once
def shared_script(num_ranks: int, *arguments: str) -> Outcome:
    """One run for all tests that look at it."""
    return script(num_ranks, *arguments)


def script_alone(num_ranks: int, path: str, *arguments: str) -> Outcome:
    """A script without ``hp_muon_plugin.run``, which has to register the plugin by itself."""
    return _run(num_ranks, (path, *SMALL, *arguments), _alone)


def _run(
    num_ranks: int, line: tuple[str, ...], rank: Callable[[Launch, tuple[str, ...]], Any] | None = None
) -> Outcome:
    require_training()
    import megatron.training.training  # noqa: F401  # once, before ranks are forked

    import hp_muon_plugin.cli.script
    import hp_muon_plugin.megatron.training_fixes  # noqa: F401

    results = run_ranks(num_ranks, rank or rank_of_script, line, timeout_s=280.0)
    codes = {code for code, _ in results}
    assert len(codes) == 1, results
    return Outcome(codes.pop(), results[0][1], results[-1][1])


def rank_of_script(launch: Launch, line: tuple[str, ...]) -> Any:
    """One rank of ``hp_muon_plugin.run``: exit code, and what it printed."""
    from hp_muon_plugin.cli.script import run

    return _told(launch, lambda: run(line))


def _alone(launch: Launch, line: tuple[str, ...]) -> Any:
    from hp_muon_plugin.megatron.training_fixes import apply_training_fixes

    def call() -> int:
        apply_training_fixes()
        sys.argv = list(line)
        try:
            runpy.run_path(line[0], run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return _told(launch, call)


def _told(launch: Launch, call: Callable[[], int]) -> tuple[int, str]:
    os.environ.update(
        {
            "RANK": str(launch.rank),
            "LOCAL_RANK": str(launch.local_rank),
            "WORLD_SIZE": str(launch.world_size),
            "LOCAL_WORLD_SIZE": str(launch.world_size),
            INIT_METHOD: launch.init_method,
        }
    )
    joined(launch, timeout_s=60.0)  # Megatron takes a job that is joined already, so that no port is needed
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = call()
    return code, out.getvalue()
