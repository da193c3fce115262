"""Routes are chosen for all kinds of items together, because items of one route share its messages."""

from hp_muon_plugin.muon.distributed.cost import Price
from hp_muon_plugin.muon.distributed.plan import Route
from hp_muon_plugin.muon.distributed.planner import cheapest_together
from hp_muon_plugin.muon.rates import Rates

RATES = Rates(1e9, 1e9, 1e-3)


def price(milliseconds: float, messages: int) -> Price:
    return Price(milliseconds * 1e6, 0.0, messages)


def test_a_route_that_saves_less_than_its_messages_cost_is_not_taken() -> None:
    kinds = [
        {"alltoall": price(10, 6), "gram": price(8, 3)},
        {"alltoall": price(5, 6), "allgather": price(9, 1)},
    ]
    assert cheapest_together(kinds, RATES) == [Route.OWNER, Route.OWNER]  # 21 ms; gram and alltoall 22, alone 24 and 17


def test_each_kind_takes_its_own_where_messages_are_cheap() -> None:
    kinds = [
        {"alltoall": price(10, 6), "gram": price(8, 3)},
        {"alltoall": price(5, 6), "allgather": price(9, 1)},
    ]
    assert cheapest_together(kinds, Rates(1e9, 1e9, 1e-6)) == [Route.GRAM, Route.OWNER]


def test_a_forbidden_route_is_not_taken_and_nothing_needs_none() -> None:
    kinds = [{"alltoall": price(1, 0), "allgather_dedup": price(2, 0)}]
    assert cheapest_together(kinds, RATES, forbidden=(Route.OWNER,)) == [Route.UPDATES]
    assert cheapest_together([], RATES) == []
