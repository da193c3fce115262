"""What is seen of a checkpoint to resume from before ranks start."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import MLA, Checkpoint, Model, MoE, Train
from hp_muon_plugin.errors import ConfigError, ConfigErrors
from hp_muon_plugin.train.checkpoint_folder import check_checkpoints


@pytest.mark.parametrize(
    ("tracker", "why"),
    [
        (None, "there is neither manifest.json nor"),
        ("3", "names iter_0000003, which has no manifest.json"),
        ("7", "names iter_0000007, which has no manifest.json"),
        ("release", "holds 'release', not a number of steps"),
    ],
)
def test_checkpoints_of_others_are_refused_before_ranks_start(tracker: str | None, why: str, tmp_path: Path) -> None:
    """Where there was a tracker file, as Megatron has it, every rank started and rank 0 failed with exit code 1."""
    (tmp_path / "iter_0000003").mkdir()
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    config = Train(checkpoint=Checkpoint(resume=str(tmp_path)))
    with pytest.raises(ConfigError, match=why) as caught:
        check_checkpoints(config, tmp_path / "run")
    assert "hp-muon ckpt convert --to hp" in str(caught.value)
    if tracker == "3":
        (tmp_path / "iter_0000003" / "manifest.json").touch()
        check_checkpoints(config, tmp_path / "run")


MOE = Model(name="tiny_moe", moe=MoE())


@pytest.mark.parametrize("resume", ["auto", "named", "tracked"])
@pytest.mark.parametrize(
    ("saved", "wanted", "options"),
    [
        (Model(), Model(num_layers=6, rotary_base=500), ["model.num_layers=6"]),
        (Model(), Model(hidden_size=64, qk_layernorm=True), ["model.hidden_size=64", "model.qk_layernorm=True"]),
        (MOE, replace(MOE, moe=MoE(num_experts=4, top_k=1)), ["model.moe.num_experts=4"]),
        (MOE, Model(), ["model.moe=None"]),
        (Model(), replace(MOE, mla=MLA()), ["model.moe=MoE", "model.mla=MLA"]),
        (MOE, replace(MOE, ffn_hidden_size=8, seq_length=64), []),
        (Model(), Model(init_std=0.5, vocab_multiple=128), []),
    ],
)
def test_a_checkpoint_of_a_model_of_other_shapes_is_refused_before_ranks_start(
    resume: str, saved: Model, wanted: Model, options: list[str], tmp_path: Path
) -> None:
    save = tmp_path / "run" / "checkpoints"
    folder = save / "iter_0000003"
    folder.mkdir(parents=True)
    (save / "latest_checkpointed_iteration.txt").write_text("3")
    (folder / "manifest.json").write_text(json.dumps({"state": {"model": asdict(saved)}}))
    named = {"auto": "auto", "named": str(folder), "tracked": str(save)}[resume]
    config = Train(model=wanted, checkpoint=Checkpoint(every=1, resume=named))
    if not options:
        check_checkpoints(config, tmp_path / "run")
        return
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        check_checkpoints(config, tmp_path / "run")
    assert [option for option in options if option not in str(caught.value)] == []
    assert str(caught.value).count("was saved with") == len(options)


def test_auto_looks_at_the_checkpoint_that_it_would_go_on_from(tmp_path: Path) -> None:
    """It looked at the greatest step, which a run that went back has written earlier, and of another model."""
    save = tmp_path / "run" / "checkpoints"
    for step, layers in ((3, 4), (9, 6)):
        folder = save / f"iter_{step:07d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"state": {"model": asdict(Model(num_layers=layers))}}))
    tracker = save / "latest_checkpointed_iteration.txt"
    config = Train(model=Model(num_layers=4), checkpoint=Checkpoint(every=1, resume="auto"))
    tracker.write_text("3")
    check_checkpoints(config, tmp_path / "run")
    (save / "iter_0000012").mkdir()  # not whole: the next one is tried
    tracker.write_text("12")
    (save / "iter_0000009" / "manifest.json").touch()
    with pytest.raises(ConfigError, match=r"model\.num_layers=4: \S+iter_0000009 was saved with 6"):
        check_checkpoints(config, tmp_path / "run")


def test_what_other_programs_recorded_of_a_model_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"state": {"model": {"num_query_groups": 1, "num_layers": 9}}}))
    check_checkpoints(Train(checkpoint=Checkpoint(resume=str(tmp_path))), tmp_path / "run")


NORM = "decoder.final_layernorm.weight"
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"
EXPERT = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"


def _saved(folder: Path, *, step: int = 3, optimizer: HpMuon | AdamW | None = None, **kinds: list[str]) -> None:
    """A manifest with weights, and what it holds of each."""
    names = sorted({name for held in kinds.values() for name in held} | {NORM, PROJ, EXPERT})
    state = {"iteration": step, "model": asdict(MOE)}
    if optimizer is not None:
        state["other"] = {"config": {"optimizer": asdict(optimizer)}}
    tensors = [f"weight/{name}" for name in names] + [f"{kind}/{name}" for kind, held in kinds.items() for name in held]
    (folder / "manifest.json").write_text(json.dumps({"state": state, "tensors": dict.fromkeys(tensors)}))


def _config(folder: Path, optimizer: HpMuon | AdamW, **options: bool) -> Train:
    return Train(model=MOE, optimizer=optimizer, checkpoint=Checkpoint(resume=str(folder), **options))


@pytest.mark.parametrize(
    ("loading", "saving", "message"),
    [
        (AdamW(), HpMuon(), rf"optimizer=adamw: needs exp_avg of {EXPERT} and of 1 more, and \S+ has momentum_buffer: "
         r"another optimizer updated it\n  fix: take that optimizer: optimizer=hp_muon, or set checkpoint\.load_opt"),
        (AdamW(), None, "fix: take that optimizer, or set checkpoint.load_optimizer=false"),
        (HpMuon(adamw_params=["*linear_proj*", "*router*"]), HpMuon(adamw_params=["*router*"]),
         rf"optimizer=hp_muon: needs exp_avg of {PROJ}, and \S+ has momentum_buffer: another optimizer updated it\n"
         r"  fix: choose as that run did: 'optimizer\.adamw_params=\[\"\*router\*\"\]', or set"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_optimizer_is_refused_before_ranks_start(
    loading: HpMuon | AdamW, saving: HpMuon | None, message: str, tmp_path: Path
) -> None:
    """A rank said so, when all had started."""
    _saved(tmp_path, optimizer=saving, exp_avg=[NORM], momentum_buffer=[PROJ, EXPERT])
    with pytest.raises(ConfigError, match=message):
        check_checkpoints(_config(tmp_path, loading), tmp_path / "run")
    check_checkpoints(_config(tmp_path, loading, load_optimizer=False), tmp_path / "run")
    check_checkpoints(_config(tmp_path, HpMuon()), tmp_path / "run")


def test_a_checkpoint_without_optimizer_state_is_refused_before_ranks_start(tmp_path: Path) -> None:
    """Such are converted from weights."""
    _saved(tmp_path)
    for optimizer in (HpMuon(), AdamW()):
        with pytest.raises(ConfigError, match=r"has no state of an optimizer\n  fix: set checkpoint\.load_optimizer=f"):
            check_checkpoints(_config(tmp_path, optimizer), tmp_path / "run")
        check_checkpoints(_config(tmp_path, optimizer, load_optimizer=False), tmp_path / "run")


def test_names_of_grouped_experts_are_left_to_the_ranks(tmp_path: Path) -> None:
    _saved(tmp_path, exp_avg=[NORM, EXPERT], momentum_buffer=[PROJ])
    config = _config(tmp_path, HpMuon(adamw_params=["*experts.weight1"]))
    config.model = replace(MOE, moe=MoE(grouped_gemm=True))
    check_checkpoints(config, tmp_path / "run")


def test_a_checkpoint_of_a_later_step_is_refused_before_ranks_start(tmp_path: Path) -> None:
    _saved(tmp_path, step=7, exp_avg=[NORM], momentum_buffer=[PROJ, EXPERT])
    config = _config(tmp_path, HpMuon())
    config.run.steps = 5
    with pytest.raises(ConfigError, match=rf"run\.steps=5: {tmp_path} has done 7 steps already") as caught:
        check_checkpoints(config, tmp_path / "run")
    assert "fix: run.steps=12 for 5 more, name an earlier checkpoint" in str(caught.value)
    config.checkpoint.load_position = False
    check_checkpoints(config, tmp_path / "run")
    config.checkpoint.load_position, config.run.steps = True, 7
    check_checkpoints(config, tmp_path / "run")
