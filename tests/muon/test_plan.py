import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_muon_plugin.config.choices import ScaleMode
from hp_muon_plugin.config.optimizer import HpMuon, ScalarAdamW
from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.spec import AxisSplit, ParamSpec, Role, plain_matrix, stacked_matrices
from hp_muon_plugin.muon.algorithm import Algorithm, Form
from hp_muon_plugin.muon.plan import build_plan


def spec(name: str, rows: int, cols: int, tp: int = 1) -> ParamSpec:
    split = AxisSplit("tp", tp, (rows, cols), 0) if tp > 1 else None
    return ParamSpec(name, Role.matrix, (rows, cols), view=plain_matrix(rows, cols), split=split)


def test_matrices_of_one_short_side_share_a_batch_wide_and_tall() -> None:
    plan = build_plan([spec("a", 24, 48), spec("b", 72, 24), spec("c", 24, 48), spec("d", 24, 99)], HpMuon())
    (stage,) = plan.stages
    (batch,) = stage.batches
    assert (batch.short, batch.count, str(batch.algorithm)) == (24, 4, "gram float32")
    assert [(f.rows, f.cols, [p.piece for p in f.parts]) for f in batch.families] == [
        (24, 48, [0, 2]),
        (24, 99, [3]),
        (72, 24, [1]),
    ]


def test_another_algorithm_is_another_batch() -> None:
    """Squares go to the standard form on the CPU, long matrices to the Gram form."""
    plan = build_plan([spec("a", 128, 128), spec("b", 128, 512)], HpMuon())
    assert [(b.short, b.algorithm.form) for b in plan.stages[0].batches] == [
        (128, Form.gram),
        (128, Form.standard),
    ]


def test_slightly_smaller_matrices_join_a_batch_on_accelerators_only() -> None:
    """Padding 24 to 32 adds 3 percent to [24, 10240]; padding a square would double its work."""
    specs = [spec("a", 24, 10240), spec("b", 32, 10240), spec("c", 10240, 30), spec("d", 40, 40)]
    assert [b.short for b in build_plan(specs, HpMuon()).stages[0].batches] == [24, 30, 32, 40]
    plan = build_plan(specs, HpMuon(), device="cuda")
    assert [(b.short, b.count) for b in plan.stages[0].batches] == [(32, 3), (40, 1)]
    own = build_plan(specs, HpMuon(), device="cuda").flops
    assert own < 1.1 * sum(
        Algorithm(Form.gram).flops(m, n, (5,)) for m, n in [(24, 10240), (32, 10240), (30, 10240), (40, 40)]
    )


def test_whole_parameters_need_no_communication_and_split_ones_one_gather() -> None:
    plan = build_plan([spec("a", 8, 16), spec("b", 8, 16, tp=4), spec("c", 16, 8, tp=4)], HpMuon())
    whole, gathered = plan.stages
    assert (whole.axis, whole.received_bytes) == (None, 0)
    assert (gathered.axis, gathered.size, gathered.pieces) == ("tp", 4, (1, 2))
    assert gathered.received_bytes == 4 * (32 + 32) * 3
    assert plan.received_bytes == gathered.received_bytes


def test_stages_and_batches_respect_the_workspace_limit() -> None:
    specs = [spec(f"w{i}", 64, 64, tp=2) for i in range(10)]
    plan = build_plan(specs, HpMuon(), max_stage_bytes=4 * 64 * 64 * 3)
    assert [len(stage.pieces) for stage in plan.stages] == [3, 3, 3, 1]
    plan = build_plan([spec(f"w{i}", 64, 64) for i in range(10)], HpMuon(), max_batch_bytes=4 * 64 * 64 * 2)
    assert [batch.count for batch in plan.stages[0].batches] == [2] * 5


def test_scale_is_that_of_the_logical_matrix_not_of_the_shard() -> None:
    options = HpMuon(scale=ScaleMode.spectral, adamw=ScalarAdamW(lr=1e-3))
    (stage,) = build_plan([spec("a", 64, 4, tp=8)], options).stages
    assert stage.batches[0].families[0].parts[0].scale == pytest.approx(8.0)


def test_flops_and_state_of_a_known_model() -> None:
    plan = build_plan(
        [spec("a", 10, 20), ParamSpec("e", Role.matrix, (3, 4, 6), view=stacked_matrices(3, 4, 6))], HpMuon()
    )
    assert plan.num_matrices == 4
    assert plan.flops == 5 * (4 * 100 * 20 + 2 * 1000) + 3 * 5 * (4 * 16 * 6 + 2 * 64)
    assert build_plan([spec("a", 16, 80)], HpMuon()).flops == 4 * 16 * 16 * 80 + 34 * 16**3
    assert plan.state_bytes() == 4 * (200 + 72)
    assert plan.state_bytes(2) == 2 * (200 + 72)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), max_size=12))
def test_every_matrix_is_planned_exactly_once(shapes: list[tuple[int, int, bool]]) -> None:
    specs = []
    for index, (rows, cols, gated) in enumerate(shapes):
        view = fused.gated_view(rows, cols) if gated else plain_matrix(rows, cols)
        specs.append(ParamSpec(f"w{index}", Role.matrix, view.factors, view=view))
    plan = build_plan(specs, HpMuon(), max_batch_bytes=400)
    families = [family for stage in plan.stages for batch in stage.batches for family in batch.families]
    planned = [(part.piece, part.part) for family in families for part in family.parts]
    assert all(part.rows == family.rows and part.cols == family.cols for family in families for part in family.parts)
    assert sorted(planned) == [(i, p) for i, s in enumerate(specs) for p in range(len(s.view.parts))]  # type: ignore[union-attr]
    assert plan == build_plan(specs, HpMuon(), max_batch_bytes=400)
