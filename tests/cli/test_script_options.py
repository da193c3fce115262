"""The command line of ``python -m hp_muon_plugin.run``, before any rank or script starts."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hp_muon_plugin.cli.script import run
from hp_muon_plugin.cli.script_args import flag_of, parse, parser
from hp_muon_plugin.cli.script_config import composed_choice
from hp_muon_plugin.cli.script_files import check_data, check_save
from hp_muon_plugin.cli.script_line import added_variables, script_line
from hp_muon_plugin.cli.script_module import find_module
from hp_muon_plugin.cli.script_ranks import check_ranks
from hp_muon_plugin.config.choices import OuterMode, PlatformName, Schedule
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.script import Choice
from hp_muon_plugin.errors import ConfigError, ConfigErrors


def _choice(*arguments: str) -> Choice:
    return composed_choice(parse(["train.py", *arguments]))


def test_where_options_are_listed_is_this_launchers_own() -> None:
    """It sent users to the trainer's list, which has other options."""
    with pytest.raises(ConfigError, match=r"hp_muon_plugin\.run --help. prints every option"):
        _choice("--", "model=tiny_moe")


def test_every_option_is_a_flag_with_its_description() -> None:
    text = " ".join(parser().format_help().split())
    for cls, path, prefix in ((HpMuon, "optimizer", "--hp-muon"), (HpFsdp, "dp", "--hp-fsdp")):
        for option in fields(cls):
            if option.name in ("_target_", "name", "adamw", "rates"):
                continue
            flag = flag_of(f"{path}.{option.name}")
            assert flag is not None, option.name
            assert flag.name == f"{prefix}-{option.name.replace('_', '-')}"
            assert len(flag.text) > 10, option.name
            assert flag.name in text
    assert "--hp-muon-adamw-betas BETAS [BETAS ...]" in text
    assert "--hp-muon-rates-flops-per-s" in text
    assert "--no-hp-muon-nesterov" in text
    assert "Decay of the moving average m = momentum * m + (1 - momentum) * grad. (default: 0.95)" in text


def test_our_options_leave_the_line_wherever_they_stand_and_the_rest_keeps_its_order() -> None:
    request = parse(
        ["--hp-dp", "hp_hsdp", "train.py", "--lr", "-1", "--hp-muon-lr=0.02", "--data-path", "a", "b"]
        + ["--hp-muon-adamw-betas", "0.8", "0.9", "--no-hp-muon-nesterov", "--bf16", "--", "dp.replicas=4"]
    )
    assert request.script == "train.py"
    assert request.arguments == ("--lr", "-1", "--data-path", "a", "b", "--bf16")
    assert request.overrides == ("dp=hp_hsdp", "dp.replicas=4")
    assert request.values == {"optimizer.lr": 0.02, "optimizer.adamw.betas": [0.8, 0.9], "optimizer.nesterov": False}


def test_what_was_given_counts_and_nothing_else_does() -> None:
    """A default that was written is one that was given: Megatron's own value must not overrule it."""
    assert _choice().optimizer == {}
    given = _choice("--hp-muon-momentum", "0.95", "--hp-muon-schedule", "you", "--", "optimizer.adamw.eps=1e-6")
    assert given.optimizer == {"momentum": 0.95, "schedule": Schedule.you, "adamw": {"eps": 1e-6}}
    patterns = _choice("--hp-muon-adamw-params", "*.linear_proj.weight", "*.x").optimizer
    assert patterns == {"adamw_params": ["*.linear_proj.weight", "*.x"]}


def test_options_of_the_wrapper_choose_it() -> None:
    assert _choice().data_parallel is None
    assert _choice("--hp-fsdp-prefetch", "2").data_parallel == HpFsdp(prefetch=2)
    assert _choice("--", "dp=hp_hsdp").data_parallel == HpFsdp(replicas=2, outer=OuterMode.shard)
    chosen = _choice("--hp-fsdp-replicas", "4", "--hp-fsdp-reshard-after-forward", "false", "--", "dp=hp_hsdp")
    assert chosen.data_parallel == HpFsdp(replicas=4, outer=OuterMode.shard, reshard_after_forward=False)


def test_a_file_of_the_users_and_a_name_are_taken(tmp_path: Path) -> None:
    (tmp_path / "shared.yaml").write_text("optimizer:\n  scale_factor: 0.2\n")
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [shared, _self_]\noptimizer: {momentum: 0.95}\ndp: hp_fsdp\nplatform: cpu\n")
    choice = _choice("--hp-config", str(path), "--", "optimizer.lr=0.5")
    assert choice.optimizer == {"momentum": 0.95, "scale_factor": 0.2, "lr": 0.5}
    assert choice.data_parallel == HpFsdp()
    assert choice.platform is PlatformName.cpu
    assert _choice("--hp-config", "hp_muon_run").optimizer == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--hp-muon-momentm", "1"],
            "--hp-muon-momentm=...: there is no such option\n  fix: did you mean --hp-muon-mom",
        ),
        (["--hp-muon-lr"], "--hp-muon-lr=: has no value"),
        (["--hp-muon-lr", "--bf16"], "--hp-muon-lr=: has no value"),
        (["--hp-muon-lr", "fast"], "fast"),
        (["--hp-muon-lr", "-1"], "optimizer.lr=-1: must be greater than 0"),
        (["--hp-muon-scale", "spectrl"], "spectrl"),
        (["--", "optimizer.momentm=1"], "did you mean optimizer.momentum?"),
        (["--", "optimizer=hp_moun"], "did you mean optimizer=hp_muon?"),
        (["--", "model=tiny_moe"], "model"),
        (["--", "--hp-dp", "hp_fsdp"], "overrides=--hp-dp: is a flag"),
        (["--", "platform.precision=bf16"], "give it --bf16"),
        (["--", "optimizer=adamw", "optimizer.lr=0.1"], "is the script's own optimizer's"),
        (["--", "dp.overlap_grad_reduce=true"], "is the script's own wrapper's"),
        (["--hp-fsdp-outer", "shard"], "dp.outer=shard: says what replicas do"),
        (["--hp-config", "nowhere.yaml"], "there is no such file"),
    ],
)
def test_a_wrong_option_is_one_message(arguments: list[str], message: str) -> None:
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        _choice(*arguments)
    assert message in str(caught.value)
    assert "\n  fix: " in str(caught.value)


def _line(arguments: list[str], *options: str, platform: PlatformName = PlatformName.cuda) -> tuple[Any, Any]:
    return script_line(arguments, _choice(*options), platform)


def test_a_name_that_megatrons_parser_does_not_know_never_reaches_it() -> None:
    line, added = _line(["--optimizer", "hp_muon", "--bf16"], "--hp-muon-lr", "0.25")
    assert line == ["--bf16", "--optimizer", "adam", "--lr", "0.25"]
    assert added == line[1:]
    assert _line(["--optimizer=hp_muon", "--lr", "1"], "--hp-muon-lr", "0.25")[0] == [
        "--lr",
        "1",
        "--optimizer",
        "adam",
    ]
    assert _line(["--optimizer", "sgd"], "--", "optimizer=adamw")[0] == ["--optimizer", "sgd"]


def test_the_cpu_needs_other_defaults_of_megatron() -> None:
    _, added = _line([], platform=PlatformName.cpu)
    assert added[:5] == ["--optimizer", "adam", "--no-gradient-accumulation-fusion", "--distributed-backend", "gloo"]
    kept, _ = _line(["--distributed-backend", "ucc", "--transformer-impl", "local"], platform=PlatformName.cpu)
    assert kept.count("--distributed-backend") == kept.count("--transformer-impl") == 1


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        (["--optimizer", "adam"], ["--hp-muon-lr", "1"], "--optimizer=adam: hp_muon is chosen by the plugin's options"),
        (["--optimizer", "hp_muon"], ["--", "optimizer=adamw"], "another optimizer is chosen after `--`"),
        (
            ["--optimizer", "sgd"],
            ["--hp-dp", "hp_fsdp", "--", "optimizer=adamw"],
            "would take shards for whole weights",
        ),
        (["--fp16"], [], "--fp16=True: needs dynamic loss scaling"),
        (["--use-distributed-optimizer"], [], "its flat shards cut matrices"),
        (["--use-torch-fsdp2"], [], "shards parameters in a way that cuts matrices"),
        (["--ckpt-format", "torch"], ["--hp-dp", "hp_fsdp"], "keeps one data-parallel rank's shards alone"),
    ],
)
def test_arguments_of_the_script_that_cannot_work_are_refused(
    line: list[str], options: list[str], message: str
) -> None:
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        _line(line, *options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_ours"), [("hp-muon", True), ("hpmuon", True), ("HP_Muon", True), ("muon", False), ("adam", False)]
)
def test_a_misspelt_name_is_told_and_megatrons_own_are_left(name: str, is_ours: bool) -> None:
    """Megatron's parser prints some thousand lines of usage for it."""
    if not is_ours:
        assert _line(["--optimizer", name], "--", "optimizer=adamw")[0] == ["--optimizer", name]
        return
    with pytest.raises(
        ConfigError, match=rf"--optimizer={name}: there is no such optimizer\n  fix: did you mean hp_muon"
    ):
        _line(["--optimizer", name], "--", "optimizer=adamw")


_TP2, _EP2 = ["--tensor-model-parallel-size", "2"], ["--num-experts", "4", "--expert-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("line", "options", "ranks", "message"),
    [
        (_TP2, [], 0, r"size=2: needs 2 ranks or a multiple.*without torchrun.*torchrun --nproc-per-node 2 -m"),
        (_TP2, [], 3, r"--tensor-model-parallel-size=2: 3 ranks cannot be split into groups of 2.*among 1, 3"),
        ([*_TP2, "--context-parallel-size", "4"], [], 4, r"--context-parallel-size=4: 4 ranks.*groups of 8 \(--tensor"),
        (_EP2, [], 0, r"--expert-model-parallel-size=2: needs 2 ranks or a multiple"),
        ([], ["--hp-dp", "hp_hsdp"], 3, r"--hp-fsdp-replicas=2: the 3 data-parallel ranks cannot .*among 1, 3"),
        (_EP2, ["--hp-dp", "hp_hsdp"], 2, r"--hp-fsdp-replicas=2: the 1 ranks that hold the same experts"),
    ],
)
def test_ranks_that_cannot_be_laid_out_are_told_at_once(
    line: list[str], options: list[str], ranks: int, message: str
) -> None:
    """Megatron asserts it on every rank, and never heard of torchrun or of replicas."""
    with pytest.raises(ConfigError) as caught:
        check_ranks(line, _choice(*options), max(ranks, 1), is_alone=not ranks)
    assert re.search(message, str(caught.value), re.DOTALL), caught.value


@pytest.mark.parametrize(
    ("line", "options", "ranks"),
    [
        ([], [], 3),
        ([*_TP2, *_EP2, "--pipeline-model-parallel-size=2"], ["--hp-dp", "hp_hsdp"], 16),
        ([*_TP2, *_EP2, "--expert-tensor-parallel-size", "1"], ["--hp-dp", "hp_fsdp"], 2),
        (["--tensor-model-parallel-size", "x"], [], 1),  # Megatron's parser says it
        ([*_TP2, "--use-checkpoint-args"], [], 1),  # the checkpoint may say otherwise
    ],
)
def test_ranks_that_can_be_are_left_to_megatron(line: list[str], options: list[str], ranks: int) -> None:
    check_ranks(line, _choice(*options), ranks, is_alone=False)


def test_data_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    """Megatron asserted it when every rank had built the model."""
    for name in ("whole.idx", "whole.bin", "half.idx", "text.jsonl"):
        (tmp_path / name).touch()
    whole, half, none, text = (str(tmp_path / name) for name in ("whole", "half", "none", "text.jsonl"))
    check_data(["--data-path", "0.5", whole, "1e-1", "s3://bucket/tokens", text, "--lr", none])
    for line, message in (
        (["--data-path", "0.5", whole, "0.5", none, "--bf16"], r"none: there is neither .*none.idx nor .*--mock-data"),
        ([f"--data-path={half}"], r"half: there is no .*half.bin.*both files"),
        (["--data-path", f"{none}.bin"], r"none.bin: is no prefix.*leave the ending out: .*none$"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_data(line)
        assert re.search(message, str(caught.value), re.DOTALL), caught.value


def test_a_folder_that_cannot_be_saved_to_is_told_at_once(tmp_path: Path) -> None:
    """It ended the run at the first checkpoint."""
    check_save(["--save", str(tmp_path / "new" / "ckpt"), "--lr", "1"])
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "ckpt", Path("/proc/nowhere/ckpt")):
        with pytest.raises(ConfigError, match="(?s)--save=.*cannot be written to.*fix: choose a folder"):
            check_save([f"--save={folder}"])


def test_tensor_parallel_ranks_need_no_variable_of_cuda_on_the_cpu() -> None:
    """Megatron's parser asserts CUDA_DEVICE_MAX_CONNECTIONS=1 for them, and another value for its own FSDP."""
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert added_variables(_TP2, PlatformName.cpu, {}) == wanted
    assert added_variables(["--context-parallel-size=2"], PlatformName.cpu, {}) == wanted
    assert added_variables([], PlatformName.cpu, {}) == {}
    assert added_variables(_TP2, PlatformName.cuda, {}) == {}
    assert added_variables(_TP2, PlatformName.cpu, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == {}
    assert added_variables([*_TP2, "--use-torch-fsdp2"], PlatformName.cpu, {}) == {}


def test_the_scripts_optimizer_is_left_alone_where_nothing_else_is_chosen() -> None:
    assert _line(["--use-distributed-optimizer"], "--", "optimizer=adamw")[0] == ["--use-distributed-optimizer"]


def test_mistakes_end_with_code_2_and_help_with_0(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["--help"]) == 0
    assert "--hp-muon-momentum" in capsys.readouterr().out
    assert run([]) == 2
    assert "SCRIPT=: no script to run is named" in capsys.readouterr().err
    assert run([str(tmp_path / "absent.py")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_a_module_that_is_not_there_is_told_before_anything_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback from runpy, behind Megatron's imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "somebodys_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported too early')")
    (package / "train.py").touch()
    for name, message in (
        ("nothing.at.all", "-m=nothing.at.all: there is no such module"),
        ("somebodys_package.trian", "there is no such module"),
        ("somebodys_package.train.deeper", "there is no such module"),
        ("somebodys_package", "is a package without __main__"),
    ):
        assert run(["-m", name]) == 2
        assert message in capsys.readouterr().err
    find_module("somebodys_package.train")
    find_module("json.tool")
    find_module("unittest")


@pytest.mark.parametrize(
    ("arguments", "message", "fix"),
    [
        (["--hp-muon-momentum", "abc"], "optimizer.momentum=abc: this value", "write a value of that kind"),
        (["--hp-muon-adamw-lr", "x"], "optimizer.adamw.lr=x: this value", "write a value of that kind"),
        (["--", "strict=maybe"], "strict=maybe: this value is not a valid bool", "write a value of that kind"),
        (["--hp-fsdp-outer", "shrad"], "dp.outer=shrad: there is no such choice", "did you mean dp.outer=shard?"),
        (["--", "stict=false"], "stict=false: there is no such option", "did you mean strict?"),
    ],
)
def test_a_wrong_value_is_told_with_its_option(arguments: list[str], message: str, fix: str) -> None:
    """The text was OmegaConf's: "Value 'abc' of type 'str' could not be converted to Float", of which option?"""
    with pytest.raises(ConfigError) as caught:
        _choice(*arguments)
    assert message in str(caught.value)
    assert fix in str(caught.value)


def test_options_of_a_file_are_told_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("optimizer: {momentun: 0.9}")
    with pytest.raises(ConfigError, match=r"optimizer\.momentun: there is no .*\n.*did you mean optimizer\.momentum\?"):
        _choice("--hp-config", str(tmp_path / "mine.yaml"))
