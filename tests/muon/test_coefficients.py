import pytest

from hp_muon_plugin.config.choices import Schedule
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon.coefficients import SCHEDULES, resolve_schedule


def test_a_schedule_runs_as_many_steps_as_it_is_made_for() -> None:
    assert len(resolve_schedule(Schedule.keller)) == 5
    assert len(resolve_schedule(Schedule.deepseek_v4)) == 10


@pytest.mark.parametrize("schedule", [Schedule.you, Schedule.polar_express, Schedule.cans, Schedule.deepseek_v4])
def test_a_schedule_of_different_steps_is_never_cut(schedule: Schedule) -> None:
    with pytest.raises(ConfigError, match="optimizer.steps=3") as caught:
        resolve_schedule(schedule, steps=3)
    assert "fix:" in str(caught.value)


def test_equal_steps_may_be_fewer() -> None:
    assert resolve_schedule(Schedule.keller, steps=3) == ((3.4445, -4.7750, 2.0315),) * 3


def test_more_steps_use_the_documented_extension() -> None:
    rows = resolve_schedule(Schedule.polar_express, steps=9)
    spec = SCHEDULES[Schedule.polar_express]
    assert rows[:5] == spec.rows
    assert rows[5:] == (*spec.extension, spec.extension[-1])


def test_custom_takes_its_rows_and_no_other_number_of_steps() -> None:
    rows = [[1.5, -0.5, 0.0], [2, -1.5, 0.5]]
    assert resolve_schedule(Schedule.custom, custom=rows) == ((1.5, -0.5, 0.0), (2.0, -1.5, 0.5))
    with pytest.raises(ConfigError, match="has 2 rows"):
        resolve_schedule(Schedule.custom, steps=4, custom=rows)


@pytest.mark.parametrize("spec", list(SCHEDULES.values()), ids=list(SCHEDULES))
def test_every_schedule_names_its_source(spec: object) -> None:
    assert len(spec.source) > 20  # type: ignore[attr-defined]
