"""The CUDA kernel in Triton's interpreter, in a process of its own: the interpreter is chosen at import."""

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from hp_muon_plugin.config.choices import FloatDtype, Schedule
from hp_muon_plugin.muon.algorithm import Algorithm, Form
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz, orthogonalize
from hp_muon_plugin.muon.reference import reference_newton_schulz
from hp_muon_plugin.muon.triton_products import TritonProducts, symmetric_product

for side, inner, dtype, limit in [(5, 7, torch.float32, 1e-6), (130, 70, torch.float32, 1e-6),
                                  (257, 33, torch.float16, 1e-3)]:
    x = torch.randn(2, side, inner).to(dtype)
    whole = torch.full((2, 2 * side, side), 7.0, dtype=dtype)
    out = whole[:, ::2]
    symmetric_product(x, x.mT, out)
    wanted = x.double() @ x.double().mT
    assert (out.double() - wanted).norm() < limit * wanted.norm(), (side, dtype)
    assert torch.equal(out, out.mT)
    assert (whole[:, 1::2] == 7.0).all()
    r = (wanted / inner).to(dtype)
    symmetric_product(r, r, out, addend=r, factor=-4.775, alpha=2.0315)
    wanted = -4.775 * r.double() + 2.0315 * r.double() @ r.double()
    assert (out.double() - wanted).norm() < limit * wanted.norm(), (side, dtype)

keller = resolve_schedule(Schedule.keller)
for dtype, limit in ((FloatDtype.float32, 5e-5), (FloatDtype.float16, 1e-2)):
    for form in Form:
        for shape in ((40, 100), (90, 70)):
            engine = NewtonSchulz(keller, Algorithm(form, dtype=dtype, has_kernel=True), device=torch.device("cpu"))
            assert isinstance(engine._products, TritonProducts)
            x = torch.randn(shape)
            wanted = reference_newton_schulz(x, keller)
            assert (orthogonalize(x, engine).double() - wanted).norm() < limit * wanted.norm(), (dtype, form, shape)
print("all equal")
"""


@pytest.mark.lane  # the lanes differ in torch, and one of them has Triton
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with torch for CUDA")
def test_the_kernel_computes_symmetric_products() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=110, check=False
    )
    assert done.stdout == "all equal\n", done.stderr
