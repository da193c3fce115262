"""``hp-muon train`` saves and goes on: the same losses on the same samples, and Ctrl-C leaves a checkpoint."""

import json
import re
import signal
from pathlib import Path

import pytest
from cli.commands import TINY, hp_muon, started

from hp_muon_plugin.checkpoint.folders import iterations, read_tracker
from hp_muon_plugin.checkpoint.manifest import read_manifest

# what these start is at the mercy of what else the machine does: once more before it counts
pytestmark = [pytest.mark.flaky(reruns=1), pytest.mark.timeout(300)]


def _losses(run: Path) -> dict[tuple[int, str], float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (line["step"], name): line[name] for line in lines for name in ("loss/train", "loss/held_out") if name in line
    }


@pytest.mark.slow  # starts two real ranks twice
def test_a_resumed_run_sees_the_samples_and_has_the_losses_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    common = [*TINY, "run.steps=4", "checkpoint.every=2", "checkpoint.keep=3"]
    whole = hp_muon("train", *common, "run.name=whole", folder=tmp_path, timeout=120)
    assert whole.returncode == 0, whole.stderr
    saved = outputs / "whole" / "checkpoints"
    assert re.search(r"step 2 is saved in \S+iter_0000002 \(\d", whole.stderr)
    assert (iterations(saved), read_tracker(saved)) == ([2, 4], 4)
    state = read_manifest(saved / "iter_0000002").state
    assert (state.iteration, state.consumed_samples, state.vocab_size) == (2, 8, 257)
    assert state.other["config"]["run"]["name"] == "whole"

    goes_on = [f"checkpoint.resume={saved / 'iter_0000002'}", f"checkpoint.save={tmp_path / 'last'}", "run.name=again"]
    again = hp_muon("train", *TINY, "run.steps=4", *goes_on, folder=tmp_path, timeout=120)
    assert again.returncode == 0, again.stderr
    assert "step 2, 8 samples seen" in again.stderr
    wanted = {key: loss for key, loss in _losses(outputs / "whole").items() if key[0] > 2}
    assert _losses(outputs / "again") == wanted
    assert len(wanted) == 3
    assert (iterations(tmp_path / "last"), read_tracker(tmp_path / "last")) == ([4], 4)  # of its last step alone

    done = hp_muon("train", *common, "run.name=whole", "checkpoint.resume=auto", folder=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "nothing was left to train: the checkpoint is of step 4; raise run.steps=4\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("done")
    assert "nothing was left" not in again.stdout
    refused = hp_muon("train", *common, "run.name=whole", folder=tmp_path)
    assert refused.returncode == 2
    assert "holds checkpoints of an earlier run (the last one of step 4)" in refused.stderr
    missing = hp_muon("train", *common, "checkpoint.resume=nowhere", folder=tmp_path)
    assert missing.returncode == 2
    assert "checkpoint.resume=nowhere: is no checkpoint of hp_muon_plugin" in missing.stderr
    assert iterations(saved) == [2, 4]


@pytest.mark.slow  # starts two real ranks twice
def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_command_goes_on(tmp_path: Path) -> None:
    options = ["checkpoint.every=100000", "checkpoint.on_interrupt=true", "checkpoint.asynchronous=true"]
    process = started(tmp_path, *options, "checkpoint.resume=auto")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 130, stderr
    told = re.search(r"the last checkpoint is of step (\d+), go on with checkpoint.resume=auto", stderr)
    assert told, stderr
    step = int(told[1])
    saved = tmp_path / "outputs" / "long" / "checkpoints"
    assert iterations(saved) == [step]
    arguments = [
        *TINY,
        "run.name=long",
        *options,
        "checkpoint.resume=auto",
        f"run.steps={step + 1}",
        "optimizer.split_qkv=false",
    ]
    done = hp_muon("train", *arguments, folder=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"step {step}, {4 * step} samples seen" in done.stderr
    assert f"lr_decay_steps 100000 -> {step + 1}" in done.stderr
    assert "this run's options hold, not the checkpoint's: optimizer.split_qkv true -> false\n" in done.stderr
    assert iterations(saved) == [step, step + 1]
