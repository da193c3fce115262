"""What ``data.path`` may be: what Megatron's ``--data-path`` takes."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hp_muon_plugin.config.blend import Blend, read_blend
from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.data_checks import data_errors
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.train_options import load_train, save_train, typed_train
from hp_muon_plugin.config.trainer import Data, Train
from hp_muon_plugin.errors import ConfigError

TWO = Blend(("/a", "/b"))
WEIGHTED = Blend(("/a", "/b"), (0.3, 0.7))


@pytest.mark.parametrize(
    ("path", "blend"),
    [
        ("/a", Blend(("/a",))),
        (["/a"], Blend(("/a",))),
        (2026, Blend(("2026",))),
        ("/a /b", TWO),
        (["/a", " /b"], TWO),
        ("0.3 /a 0.7 /b", WEIGHTED),
        ([0.3, "/a", "0.7", "/b"], WEIGHTED),
        ([30, "/a"], Blend(("/a",), (30.0,))),
        ([1, "2025", 2, "2026"], Blend(("2025", "2026"), (1.0, 2.0))),
        (["/with space/a", "/b"], Blend(("/with space/a", "/b"))),
    ],
)
def test_prefixes_and_weights(path: Any, blend: Blend) -> None:
    assert read_blend(path) == blend


def test_a_text_that_is_a_files_name_is_not_divided(tmp_path: Path) -> None:
    prefix = tmp_path / "my data"
    assert read_blend(str(prefix)) == Blend((f"{tmp_path}/my", "data"))
    prefix.with_suffix(".idx").touch()
    assert read_blend(str(prefix)) == Blend((str(prefix),))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("0.3 /a 0.7", r"data\.path=0\.3 /a 0\.7: .* the weight 0\.7 has no prefix behind it \(an odd number of .*3\)"),
        (["/a", 0.3, "/b", 0.7], r"data\.path=\[/a,0\.3,/b,0\.7\]: .* part 1 is /a, and a weight belongs there\n"),
        ("0.3 /a /b", r"part 3 is /b, and a weight belongs there \(an odd number of parts, 3\)"),
        ("0.3 /a /b /c", r"part 3 is /b, and a weight belongs there\n"),
        ("0.3 /a 0 /b", r"the weight 0 of /b is not above 0 and finite\n  fix: leave /b out"),
        ("nan /a 1 /b", r"the weight nan of /a is not above 0 and finite"),
        ([-1, "/a"], r"the weight -1 of /a is not above 0"),
        (["/a", None], r"data\.path=\[/a,None\]: None is neither a prefix nor a weight\n  fix: one prefix, a list"),
        ([["/a"], "/b"], r"\['/a'\] is neither"),
        ({"a": 1}, r"\{'a': 1\} is neither"),
        (True, "True is neither"),
        (["/a", " "], "' ' is neither"),
    ],
)
def test_what_is_no_blend_is_said(path: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_blend(path)
    (error,) = data_errors(Data(kind=DataKind.megatron, path=path, vocab_size=9))
    assert isinstance(error, ConfigError)


def messages(path: Any) -> list[str]:
    return [str(error) for error in data_errors(Data(kind=DataKind.megatron, path=path, vocab_size=9))]


def test_every_missing_file_of_a_blend_is_named(tmp_path: Path) -> None:
    for ending in (".bin", ".idx"):
        (tmp_path / f"a{ending}").touch()
    (tmp_path / "c.idx").touch()
    found = messages([1, f"{tmp_path}/a", 2, f"{tmp_path}/b", 3, f"{tmp_path}/c", 4, f"{tmp_path}/a.bin"])
    assert [message.splitlines()[0] for message in found] == [
        f"data.path={tmp_path}/b: there is no file {tmp_path}/b.bin and no file {tmp_path}/b.idx",
        f"data.path={tmp_path}/c: there is no file {tmp_path}/c.bin",
        f"data.path={tmp_path}/a.bin: is a file, and a prefix is wanted",
    ]
    assert messages(f"1 {tmp_path}/a 2 {tmp_path}/a") == []
    assert "a prefix with spaces stands in a list" in messages("/my data/text")[0]
    for nothing in (None, "", "  ", []):
        assert "data=megatron needs your dataset" in messages(nothing)[0]


def test_the_built_in_text_takes_none() -> None:
    (error,) = data_errors(Data(path=[0.3, "/a", 0.7, "/b"]))
    assert str(error).startswith("data.path=[0.3,/a,0.7,/b]: data=pydoc trains on")


@pytest.mark.parametrize("path", ["0.3 /a 0.7 /b", [0.3, "/a", 0.7, "/b"], "/a"])
def test_a_list_goes_through_files_of_options(path: Any, tmp_path: Path) -> None:
    train = Train(optimizer=HpMuon(), data=Data(path=path))
    save_train(train, tmp_path / "config.yaml")
    assert load_train(tmp_path / "config.yaml").data.path == path
    assert typed_train(OmegaConf.create({"optimizer": {"name": "hp_muon"}, "data": {"path": path}})).data.path == path
