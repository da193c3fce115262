"""What upstream's own trainer saved goes on in another layout: other ranks, another wrapper, Megatron's own AdamW.

All moves that were seen: docs/megatron_run.md. These are the ones in which most is different on both sides.
"""

from pathlib import Path

import pytest

from lane.script_runs import MOCK, MOE, Outcome, script

# Upstream's pretrain() twice or three times, and its writer, which starts processes on every rank.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_EP1, _EP2 = [*MOCK, *MOE], [*MOCK, *MOE, "--expert-model-parallel-size", "2"]
_DIGIT = 1.001e-6
"""Of a loss: other ranks add up in another order, which showed in the last of the seven digits printed."""


def _saved(ranks: int, folder: Path, *options: str) -> Outcome:
    """Four steps straight, whose second one is the checkpoint to go on from."""
    outcome = script(ranks, *options, "--save", str(folder), "--save-interval", "2")
    assert outcome.code == 0, outcome.text[-2000:]
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return outcome


def _assert_goes_on(straight: Outcome, folder: Path, *options: str, digits: float) -> None:
    resumed = script(2, *options, "--load", str(folder))
    assert resumed.code == 0, resumed.text[-2000:]
    assert "successfully loaded checkpoint" in resumed.text
    assert float(resumed.losses[0]) == pytest.approx(float(straight.losses[2]), rel=0, abs=digits)
    assert resumed.norms == straight.norms[2:]
    assert float(resumed.validation) == pytest.approx(float(straight.validation), rel=0, abs=digits)


def _assert_weights_alone(straight: Outcome, folder: Path, *options: str) -> None:
    resumed = script(1, *options, "--load", str(folder), "--no-load-optim")
    assert resumed.code == 0, resumed.text[-2000:]
    assert float(resumed.losses[0]) == pytest.approx(float(straight.losses[2]), rel=0, abs=_DIGIT)


def test_muon_goes_on_from_divided_replicas_on_fewer_ranks_over_another_wrapper(tmp_path: Path) -> None:
    """Without expert parallelism there are half as many param groups, which Megatron would not merge."""
    hsdp = ["--hp-dp", "hp_hsdp", "--hp-fsdp-replicas", "2", "--hp-fsdp-outer", "shard"]
    straight = _saved(4, tmp_path, *_EP2, *hsdp)
    _assert_goes_on(straight, tmp_path, *_EP2, "--hp-dp", "hp_fsdp", digits=_DIGIT)
    _assert_goes_on(straight, tmp_path, *_EP1, digits=_DIGIT)
    for wrapper in ([], ["--hp-dp", "hp_fsdp"]):  # it was a list of all keys, when every rank had built the model
        refused = script(1, *_EP1, "--optimizer", "adam", *wrapper, "--load", str(tmp_path))
        assert refused.code == 2
        assert "the checkpoint holds state of hp_muon, and this run has --optimizer adam" in refused.text
        assert "number of parameters" not in refused.text
    _assert_weights_alone(straight, tmp_path, *_EP1, "--optimizer", "adam", "--hp-dp", "hp_fsdp")


@pytest.mark.parametrize("saves", ["megatrons", "shards"])
def test_adamw_goes_on_over_shards_and_in_megatrons_own(saves: str, tmp_path: Path) -> None:
    """Megatron chains an optimizer for dense weights and one for experts; what is no tensor lies elsewhere.

    It found neither our groups nor two optimizers, and stopped.
    """
    adam = [*_EP2, "--bf16", "--optimizer", "adam"]
    sharded = [*adam, "--hp-dp", "hp_fsdp"]
    before, after = (adam, sharded) if saves == "megatrons" else (sharded, adam)
    straight = _saved(2, tmp_path, *before)
    _assert_goes_on(straight, tmp_path, *after, digits=0.0)
    refused = script(1, *_EP1, "--optimizer", "hp_muon", "--load", str(tmp_path))
    assert refused.code == 2
    assert "the checkpoint holds state of adam, and this run has --optimizer hp_muon" in refused.text
    assert "give --no-load-optim to take the weights alone, or go on with --optimizer adam" in refused.text


def test_float32_adamw_of_pipeline_stages_goes_on_over_tensor_parallel_ranks_of_megatrons_own(tmp_path: Path) -> None:
    """In float32 the form is another one, and each stage holds other layers."""
    adam = [*MOCK, "--optimizer", "adam", "--make-vocab-size-divisible-by", "64"]
    straight = _saved(4, tmp_path, *adam, "--pipeline-model-parallel-size", "2", "--hp-dp", "hp_fsdp")
    _assert_goes_on(straight, tmp_path, *adam, "--tensor-model-parallel-size", "2", digits=_DIGIT)
