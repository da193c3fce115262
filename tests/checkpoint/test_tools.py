"""The script with Ascend's flags: Hugging Face to Megatron's folders and back, by the real command line."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Key, Target
from hp_muon_plugin.checkpoint.convert import plan
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.cli import ckpt
from hp_muon_plugin.errors import ConfigError
from tests.checkpoint.fixtures import MadeUp
from tests.checkpoint.others import fixture, written
from tests.checkpoint.test_hf import latent_model

SCRIPT = Path(__file__).parents[2] / "tools" / "convert_ckpt_v2.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_ckpt_v2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hugging_face_to_megatron_as_one_is_used_to(tmp_path: Path) -> None:
    source = open_checkpoint(fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt")
    written(source, "hf", tmp_path / "hf")
    command = [
        *(sys.executable, str(SCRIPT), "--load-model-type", "hf", "--save-model-type", "mg"),
        *("--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "mg")),
        *("--target-tensor-parallel-size", "2", "--target-expert-parallel-size", "2"),
        *("--make-vocab-size-divisible-by", "16"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1])
    assert done.returncode == 0, done.stderr
    found = open_checkpoint(tmp_path / "mg")
    for name in ("decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"):
        assert torch.equal(found.read(Key(name, "weight")), source.read(Key(name, "weight")))
    assert found.state().args["expert_model_parallel_size"] == 2


BASE = ["--load-dir", "a", "--save-dir", "b"]
TO = ["ckpt", "convert", "a", "b", "--to"]


def test_defaults_are_upstreams() -> None:
    """From Hugging Face to Megatron's local modules, experts one by one, all sizes 1."""
    made = script().translated(BASE)
    assert made[:6] == [*TO, "torch"]
    assert made[6:12] == ["--tp", "1", "--pp", "1", "--ep", "1"]
    assert made[12:] == ["--option", "spec=local", "--option", "experts=separate", "--drop"]


MAPPED = {
    "--load-model-type": (["mg"], None),
    "--save-model-type": (["hf"], "hf"),
    "--load-dir": (["other"], "other"),
    "--save-dir": (["other"], "other"),
    "--model-type-hf": (["qwen3-moe"], None),
    "--target-tensor-parallel-size": (["2"], "--tp 2"),
    "--target-pipeline-parallel-size": (["2"], "--pp 2"),
    "--target-expert-parallel-size": (["2"], "--ep 2"),
    "--expert-tensor-parallel-size": (["1"], "expert_tensor_parallel_size=1"),
    "--pipeline-model-parallel-layout": (["Et|tL"], "pipeline_model_parallel_layout=Et|tL"),
    "--moe-grouped-gemm": ([], "experts=grouped"),
    "--transformer-impl": (["transformer_engine"], "spec=te"),
    "--save-layer-by-layer": ([], None),
    "--hf-cfg-dir": (["a"], None),
}
"""Flags of section 5 of the notes on Ascend by what they become; None where nothing is left to say."""
OF_THE_SOURCE = (
    *("--num-layers-per-virtual-pipeline-stage", "--num-layer-list"),
    *("--mtp-num-layers", "--first-k-dense-replace", "--num-layers"),
)
"""Flags whose meaning the checkpoint has a part in."""
REFUSED = {
    "--noop-layers": ["47,48"],
    "--moe-tp-extend-ep": [],
    "--mla-mm-split": [],
    "--schedules-method": ["dualpipev"],
    "--lora-load": ["c"],
    "--lora-r": ["8"],
    "--lora-alpha": ["16"],
    "--lora-target-modules": ["linear_qkv", "linear_proj"],
    "--save-lora-to-hf": [],
}


@pytest.mark.parametrize("flag", MAPPED)
def test_flags_of_upstream_are_heeded(flag: str) -> None:
    values, expected = MAPPED[flag]
    made = script().translated([*BASE, flag, *values])
    if expected is not None:
        assert expected in " ".join(made)
        assert expected not in " ".join(script().translated(BASE))


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_that_we_cannot_honour_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten of upstream's flags were "unrecognized arguments"."""
    with pytest.raises(SystemExit) as caught:
        script().translated([*BASE, flag, *REFUSED[flag]])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert f"error: {flag}: " in told
    assert told.endswith("; leave it out\n")


def test_every_flag_of_upstream_is_known_here() -> None:
    known = {option for action in script().parser()._actions for option in action.option_strings}
    assert known >= {*MAPPED, *OF_THE_SOURCE, *REFUSED}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four layers, the first one dense, from Hugging Face."""
    folder = tmp_path_factory.mktemp("model")
    source = latent_model()
    shapes = {key: info for key, info in source.tensors().items() if ".layers.1." in key.name}
    infos = dict(source.tensors())
    for layer in (2, 3):
        infos |= {
            Key(key.name.replace(".layers.1.", f".layers.{layer}."), key.kind): info for key, info in shapes.items()
        }
    written(MadeUp(infos, source.state()), "hf", folder / "hf").close()
    return ["--load-dir", str(folder / "hf"), "--save-dir", str(folder / "mg")]


@pytest.mark.parametrize(("flag", "right"), [("mtp-num-layers", 1), ("first-k-dense-replace", 1), ("num-layers", 4)])
def test_flags_that_say_what_the_checkpoint_says_must_say_the_same(
    flag: str, right: int, model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert script().translated([*model, f"--{flag}", str(right)]) == script().translated(model)
    with pytest.raises(SystemExit):
        script().translated([*model, f"--{flag}", str(right + 1)])
    told = capsys.readouterr().err
    assert f"--{flag} {right + 1}: {model[1]} has {right}, all of which are converted; leave it out" in told
    for kind in ("hf", "mg"):
        with pytest.raises(SystemExit):
            script().translated([*model, "--load-model-type", kind, "--hf-cfg-dir", "elsewhere"])
        assert "--hf-cfg-dir elsewhere: config.json is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        (["--num-layers-per-virtual-pipeline-stage", "1"], [[1, 1], [1, 1]]),
        (["--num-layer-list", "1,3"], [[1], [3]]),
        (["--pipeline-model-parallel-layout", "Ettt|tmL"], [[3], [1]]),
    ],
)
def test_stages_share_the_layers_as_asked(
    flags: list[str], stages: list[list[int]], model: list[str], tmp_path: Path
) -> None:
    """Virtual stages and lists of layers were refused, which the converter can write."""
    out = tmp_path / "mg"
    two = [*model[:2], "--save-dir", str(out), "--target-pipeline-parallel-size", "2", *flags]
    assert ckpt.run(script().translated(two)[1:]) == 0
    source, found = open_checkpoint(Path(model[1])), open_checkpoint(out)
    assert set(found.tensors()) == set(source.tensors())
    for key in source.tensors():
        assert torch.equal(found.read(key), source.read(key)), key
    for rank, chunks in enumerate(stages):
        saved = torch.load(next(out.glob(f"iter_*/mp_rank_00_{rank:03d}/*rng.pt")), weights_only=False)
        models = [saved["model"]] if len(chunks) == 1 else [saved[f"model{index}"] for index in range(len(chunks))]
        held = [{name.split(".")[2] for name in each if name.startswith("decoder.layers.")} for each in models]
        assert [len(layers) for layers in held] == chunks


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-layer-list", "2,3"], "2 numbers, one for each stage, that make 4 layers in all"),
        (["--num-layer-list", "4"], "2 numbers, one for each stage, that make 4 layers in all"),
        (["--num-layer-list", "2,x"], "is no list of numbers, as 4,4,3"),
        (["--num-layers-per-virtual-pipeline-stage", "2"], "4 layers on 2 stages are not several virtual stages"),
        (["--num-layers-per-virtual-pipeline-stage", "0"], "4 layers on 2 stages are not several virtual stages"),
        (["--num-layer-list", "2,2", "--num-layers-per-virtual-pipeline-stage", "1"], "leave one out"),
        (["--num-layer-list", "4", "--target-pipeline-parallel-size", "1"], "choose 2 or more, or leave it out"),
        (["--num-layer-list", "2,2", "--pipeline-model-parallel-layout", "E|L"], "not allowed with argument"),
    ],
)
def test_stages_that_cannot_be_are_refused(
    flags: list[str], message: str, model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script().translated([*model, "--target-pipeline-parallel-size", "2", *flags])
    assert message in capsys.readouterr().err


def test_a_source_of_the_other_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--load-model-type hf`` took Megatron's folders, and with --drop."""
    folder = fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt"
    written(open_checkpoint(folder), "hf", tmp_path / "hf")
    rest = ["--save-model-type", "mg", "--save-dir", "b"]
    for kind, source in (("hf", folder), ("mg", tmp_path / "hf")):
        with pytest.raises(SystemExit) as caught:
            script().check_source(["--load-model-type", kind, "--load-dir", str(source), *rest])
        assert caught.value.code == 2
        assert f"--load-model-type {kind}: {source}" in capsys.readouterr().err
    script().check_source(["--load-model-type", "hf", "--load-dir", str(tmp_path / "hf"), *rest])
    script().check_source(["--load-model-type", "mg", "--load-dir", str(folder), *rest])


def test_a_vocabulary_that_is_not_padded_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """The fix was "another tensor-parallel size", told while files were written."""
    source = open_checkpoint(fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt")
    unpadded = written(source, "hf", tmp_path / "hf", Target(options={"vocab_size": "125"}))
    with pytest.raises(ConfigError, match=r"125 rows of the vocabulary(.|\n)*make_vocab_size_divisible_by=128"):
        plan(unpadded, "torch", Target(tp=2))
    assert plan(unpadded, "torch", Target(tp=2, options={"make_vocab_size_divisible_by": "64"})).to == "torch"


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    given = script().translated(list(arguments))
    code = ckpt.run(given[1:], script().respelt)
    return code, capsys.readouterr().err


def test_messages_name_the_flags_of_this_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They named --tp, --pp, --ep, SRC and DST, which the script does not have."""
    folder = fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt"
    written(open_checkpoint(folder), "hf", tmp_path / "hf", Target(options={"vocab_size": "125"}))
    base = ["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", str(tmp_path / "hf")]
    to = ["--save-dir", str(tmp_path / "mg")]
    sizes = {"tensor": "tp", "pipeline": "pp", "expert": "ep"}
    for axis in sizes:
        flag = f"--target-{axis}-parallel-size"
        for size in ("0", "3"):
            code, told = ended(capsys, *base, *to, flag, size)
            assert code == 2
            assert told.startswith(f"hp-muon: {flag}={size}: "), told
            assert not [short for short in sizes.values() if f"--{short}" in told]
    code, told = ended(capsys, *base, *to, "--target-tensor-parallel-size", "2")
    assert "of the training: --make-vocab-size-divisible-by=128" in told
    assert "--option" not in told
    code, told = ended(capsys, *base, *to, "--target-tensor-parallel-size", "2", "--expert-tensor-parallel-size", "3")
    assert told.startswith("hp-muon: --expert-tensor-parallel-size=3: "), told
    (tmp_path / "file").touch()
    code, told = ended(capsys, *base, "--save-dir", str(tmp_path / "file"))
    assert code == 2
    assert told.startswith(f"hp-muon: --save-dir={tmp_path}/file"), told
    assert "/file is a file" in told
    back = ["--load-model-type", "mg", "--save-model-type", "mg", "--load-dir", str(folder), *to]
    code, told = ended(capsys, *back, "--target-expert-parallel-size", "4")
    assert code == 2
    assert told.startswith("hp-muon: --save-model-type=mg: cannot hold all of the source:"), told
    assert "pass --drop" in told
    assert not (tmp_path / "mg").exists()


def test_flags_that_the_script_lacks_are_said_to_be_elsewhere() -> None:
    respelt = script().respelt
    assert respelt("take --weights-only or --option family=qwen3") == (
        "take hp-muon ckpt convert --weights-only or hp-muon ckpt convert --option family=qwen3"
    )
    for same in ("hp-muon ckpt convert --to hp", "a-DST=3 tp=2 --tpx --weights"):
        assert respelt(same) == same
    assert respelt("DST=out: --tp 2") == "--save-dir=out: --target-tensor-parallel-size 2"


def test_an_empty_folder_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script().translated(["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", "", "--save-dir", "b"])
    assert "argument --load-dir: is empty: name a folder" in capsys.readouterr().err
