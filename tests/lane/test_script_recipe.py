"""The Megatron script of the 505B recipe: its arguments, and the divided model through upstream's trainer."""

import os
import sys
from pathlib import Path

import pytest
from asked_of_torchrun import asked_of_torchrun
from dist_pool import run_ranks

from hp_muon_plugin.cli.script_args import parse
from hp_muon_plugin.cli.script_config import composed_choice
from hp_muon_plugin.cli.script_line import script_line
from hp_muon_plugin.cli.script_ranks import check_ranks
from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.train.setup import Launch
from lane.script_runs import MOCK, SCRIPT, require_training, script

PRETRAIN = Path(__file__).parents[2] / "recipes" / "moe_505b" / "pretrain.sh"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _words(size: str, tmp_path: Path) -> list[str]:
    """What stands after the script's name."""
    variables = {"MASTER_ADDR": "node0", "NODE_RANK": "0", "SCRIPT": SCRIPT, "SIZE": size}
    line = asked_of_torchrun(PRETRAIN, tmp_path, *MOCK, "--tokenizer-type", "NullTokenizer", **variables)
    return [word for word in line[line.index(SCRIPT) + 1 :] if not word.startswith("HCCL")]


def _parsed(launch: Launch, line: list[str]) -> tuple[int, int, int, str]:
    from megatron.training.arguments import parse_args, validate_args

    os.environ.update({"WORLD_SIZE": "768", "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    sys.argv = [SCRIPT, *line]
    args = validate_args(parse_args())
    return args.data_parallel_size, args.num_experts, sum(args.moe_layer_freq), args.optimizer


def test_megatrons_parser_takes_the_arguments_for_768_ranks(tmp_path: Path) -> None:
    require_training()
    request = parse([SCRIPT, *_words("full", tmp_path)])
    choice = composed_choice(request)
    line, added = script_line(request.arguments, choice, PlatformName.npu)
    check_ranks(request.arguments, choice, 768, is_alone=False)
    assert added == ["--optimizer", "adam", "--no-gradient-accumulation-fusion"]
    assert run_ranks(1, _parsed, line) == [(768, 384, 47, "adam")]


def test_the_divided_model_learns_through_upstreams_trainer(tmp_path: Path) -> None:
    ran = script(4, *_words("small", tmp_path), "--train-iters", "6", "--log-interval", "1", small=False)
    assert ran.code == 0
    assert "sharded: 2 replicas, outer=shard" in ran.text
    losses = [float(loss) for loss in ran.losses]
    assert len(losses) == 6
    assert losses[-1] < 0.6 * losses[0]
