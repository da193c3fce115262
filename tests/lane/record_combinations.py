"""Train every combination of docs/combinations.md on the installed megatron-core, and write what came out.

``PYTHONPATH=. python tests/lane/record_combinations.py`` takes some minutes; a run is written as soon as it is done.
Arguments are features of single runs to do again, e.g. "tp sp mtp".
"""

import datetime
import json
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from combinations import LOSS, NORM, PAGE, RECORD, load, page
from dist_pool import RankError, run_ranks

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.megatron.cpu_fixes import apply_cpu_fixes
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.platform import standin
from lane import combos

RUNS = (
    *(("", 4), ("tp sp", 4), ("pp", 4), ("moe", 4), ("tp sp etp", 4), ("ep", 4), ("ep4", 4), ("pp moe", 4)),
    *(("tp", 4), ("mla tp", 4), ("mla tp sp", 4), ("mla tp sp etp", 4), ("etp ep tp sp", 8)),
    *(("tp sp mtp recompute", 4), ("tp sp ep shared recompute mtp", 4), ("tp sp etp shared recompute mtp", 4)),
    *(("pp vpp recompute mtp", 4), ("pp vpp ep mla shared", 8), ("ep mla mtp shared recompute", 4)),
    *(("pp mla recompute mtp shared ep", 8), ("cp tp sp", 4), ("cp ep shared recompute", 4), ("cp pp vpp", 4)),
    *(("cp mtp recompute", 4), ("cp mla shared ep", 4), ("tp sp pp vpp recompute", 8), ("tp sp pp ep shared", 8)),
    *(
        ("tp sp etp pp vpp", 8),
        ("cp tp sp etp", 8),
        ("tp sp ep shared recompute", 4),
        ("tp sp etp shared recompute", 4),
    ),
    *(("tp sp mtp", 4), ("tp mtp", 4), ("cp mtp", 4)),
    *(("cp recompute", 4), ("cp mla", 4), ("cp shared", 4), ("cp ep", 4), ("tp sp etp mtp", 4)),
)
WRAPPERS = {"hp_fsdp": HpFsdp(), "hp_hsdp": HpFsdp(replicas=2, outer=OuterMode.shard)}


@cache
def reference(kept: combos.Features) -> combos.Curves:
    found: combos.Curves = run_ranks(1, combos.run, kept, [None], timeout_s=300.0)[0][0]
    return found


def difference(found: list[float], wanted: list[float]) -> float:
    return max(abs(x / y - 1) for x, y in zip(found, wanted, strict=True))


def record(text: str, ranks: int) -> list[dict[str, Any]]:
    """What came out under each wrapper."""
    chosen = combos.features(text)
    try:
        found = run_ranks(ranks, combos.run, chosen, list(WRAPPERS.values()), timeout_s=300.0)[0]
    except RankError as error:
        told = _explained(str(error), chosen, ranks)
        return [{"features": text, "ranks": ranks, "dp": name} | told for name in WRAPPERS]
    return [
        {"features": text, "ranks": ranks, "dp": name} | _compared(curves, chosen, ranks)
        for name, curves in zip(WRAPPERS, found, strict=True)
    ]


def _compared(found: combos.Curves | str, chosen: combos.Features, ranks: int) -> dict[str, Any]:
    if isinstance(found, str):
        return {"status": "refused", "error": found.splitlines()[0]}
    near = _near(found, reference(combos.reference(chosen)))
    if _is_tested(near):
        return {"status": "tested"} | near
    far = f"from one rank losses differ by {near['loss']:.1e}, norms by {near['norm']:.1e}"
    megatron: combos.Curves = run_ranks(ranks, combos.run, chosen, [None], timeout_s=300.0)[0][0]
    if _is_tested(_near(found, megatron)):
        return {"status": "upstream", "error": f"{far}; with Megatron's own wrapper alike"}
    return {"status": "failed", "error": far}


def _near(found: combos.Curves, wanted: combos.Curves) -> dict[str, float]:
    return {"loss": difference(found[0], wanted[0]), "norm": difference(found[1], wanted[1])}


def _is_tested(near: dict[str, float]) -> bool:
    return near["loss"] < LOSS and near["norm"] < NORM


def _explained(error: str, chosen: combos.Features, ranks: int) -> dict[str, Any]:
    """Whether Megatron's own wrapper fails as well."""
    try:
        run_ranks(ranks, combos.run, chosen, [None], timeout_s=300.0)
    except RankError as upstream:
        return {"status": "upstream", "error": _first_line(str(upstream))}
    return {"status": "failed", "error": _first_line(error)}


def _first_line(error: str) -> str:
    return error.splitlines()[0].partition(": ")[2]


def main() -> None:
    standin.activate()
    apply_cpu_fixes()
    version = str(core_version())
    asked = sys.argv[1:]
    for text, ranks in RUNS:
        for told in record(text, ranks) if not asked or text in asked else ():
            print(version, told, flush=True)
            whole = load() if RECORD.is_file() else {}
            lane = whole.setdefault(version, {"runs": []})
            lane |= {"date": datetime.date.today().isoformat(), "torch": torch.__version__.partition("+")[0]}
            lane["python"] = platform.python_version()
            lane["runs"] = [r for r in lane["runs"] if (r["features"], r["dp"]) != (text, told["dp"])] + [told]
            RECORD.write_text(json.dumps(dict(sorted(whole.items())), indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(page(dict(sorted(whole.items()))), encoding="utf-8")


if __name__ == "__main__":
    main()
