"""The page of combinations says what was recorded, of every tested version, and claims nothing else."""

import itertools

import pytest
from combinations import LAYOUTS, LOSS, NAMES, NORM, PAGE, load, page, status

RECORD = load()


def test_the_page_is_generated_from_the_record() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(RECORD)


@pytest.mark.parametrize("version", RECORD)
def test_what_is_called_tested_was_near_one_rank(version: str) -> None:
    runs = RECORD[version]["runs"]
    tested = [run for run in runs if run["status"] == "tested"]
    assert all(run["loss"] < LOSS and run["norm"] < NORM for run in tested)
    assert not [run for run in runs if run["status"] == "failed"]
    assert len({(run["features"], run["dp"]) for run in runs}) == len(runs)


@pytest.mark.parametrize("version", RECORD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_four_ranks_was_run(version: str, layout: str) -> None:
    found = [run for run in RECORD[version]["runs"] if run["features"] == LAYOUTS[layout]]
    assert {run["dp"] for run in found} == {"hp_fsdp", "hp_hsdp"}


def test_all_three_versions_are_there() -> None:
    assert [version.rpartition(".")[0] for version in RECORD] == ["0.12", "0.16", "0.19"]


def test_a_pair_is_tested_only_where_one_run_has_both() -> None:
    runs = [
        {"features": "tp sp", "dp": "hp_fsdp", "status": "tested"},
        {"features": "pp", "dp": "hp_hsdp", "status": "tested"},
        {"features": "mla tp", "dp": "hp_fsdp", "status": "refused"},
    ]
    assert status(runs, {"tp", "sp"}) == "FSDP"
    assert status(runs, {"pp"}) == "HSDP"
    assert status(runs, {"tp", "pp"}) == "?"
    assert status(runs, {"tp", "mla"}) == "refused"
    assert all(status(runs, set(pair)) != "yes" for pair in itertools.product(NAMES, repeat=2))
