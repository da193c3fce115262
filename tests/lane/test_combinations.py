"""Features of Megatron together with HP-FSDP and HP-HSDP, against one rank that trains the same model whole.

All of them: docs/combinations.md, which tests/lane/record_combinations.py records. These are three that have most in
them. Seen: 4e-8 of a loss and 4e-7 of a norm.
"""

from functools import cache

import pytest
from combinations import LOSS, NORM, load
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.megatron.versions import TESTED, core_version
from lane import combos

FSDP, HSDP = HpFsdp(), HpFsdp(replicas=2, outer=OuterMode.shard)


@cache
def reference(kept: combos.Features) -> combos.Curves:
    found: combos.Curves = run_ranks(1, combos.run, kept, [None])[0][0]
    return found


# 0.12 trains otherwise where multi-token prediction meets sequence parallelism, and experts meet context parallelism,
# whatever the wrapper.
IS_OLD = core_version().lane < (0, 16)
PREDICTION, CONTEXT = ("mtp recompute", "cp tp sp") if IS_OLD else ("tp sp mtp recompute", "cp ep shared recompute")


@pytest.mark.parametrize(("text", "dp"), [(PREDICTION, HSDP), ("pp vpp ep mla shared", FSDP), (CONTEXT, HSDP)])
def test_losses_and_norms_are_those_of_one_rank(text: str, dp: HpFsdp) -> None:
    chosen = combos.features(text)
    losses, norms = reference(combos.reference(chosen))
    for found in run_ranks(4, combos.run, chosen, [dp]):
        assert found[0][0] == pytest.approx(losses, rel=LOSS)
        assert found[0][1] == pytest.approx(norms, rel=NORM)
    assert losses[0] != losses[1]


# "ep" is in test_fsdp_parity.py too, in every lane.
@pytest.mark.parametrize("text", [pytest.param("ep", marks=pytest.mark.once), "tp sp ep", "tp sp etp", "pp moe"])
def test_norms_with_experts_are_those_of_one_rank_on_every_mesh(text: str) -> None:
    """EP2 x DP2, TP2 x EP2, expert-TP2 x DP2, PP2 x DP2: a weight counted twice, or never, shows at once."""
    chosen, wrappers = combos.features(text), [FSDP, HpFsdp(replicas=2, outer=OuterMode.replicate), HSDP]
    _, norms = reference(combos.reference(chosen))
    for found in run_ranks(4, combos.run, chosen, wrappers):
        assert [curves[1] for curves in found] == [pytest.approx(norms, rel=NORM)] * len(wrappers)


def test_this_version_is_in_the_table() -> None:
    assert core_version().lane in TESTED
    assert str(core_version()) in load()
