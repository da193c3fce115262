"""The torch.cuda stand-in: explicit, reversible, and never where an accelerator is."""

import subprocess
import sys
import textwrap

import pytest
import torch

from hp_muon_plugin.errors import PlatformError


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_changes_nothing_and_deactivating_gives_everything_back() -> None:
    out = run_python("""
        import torch
        owners = [torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module]
        before = [dict(vars(owner)) for owner in owners]
        from hp_muon_plugin.platform import standin
        assert [dict(vars(owner)) for owner in owners] == before, "import changed something"
        standin.activate()
        standin.activate()
        count = sum(vars(o).get(k) is not b.get(k) for o, b in zip(owners, before) for k in {*vars(o), *b})
        assert standin.is_active() and count == len(standin.replaced()), (count, len(standin.replaced()))
        standin.deactivate()
        standin.deactivate()
        for owner, old in zip(owners, before):
            now = dict(vars(owner))
            assert now.keys() == old.keys(), set(now) ^ set(old)
            assert all(now[name] is old[name] for name in now)
        try:
            torch.zeros(1, device="cuda")
        except (AssertionError, RuntimeError):
            print("given back")
    """)
    assert out == "given back"


def test_what_megatron_does_with_cuda_happens_on_the_cpu() -> None:
    out = run_python("""
        import torch
        from hp_muon_plugin.platform import standin
        standin.activate()
        made = [
            torch.zeros(2, device="cuda"),
            torch.zeros(2, device="cuda:1"),
            torch.zeros(2, device=torch.device("cuda", 0)),
            torch.zeros(2, device=torch.cuda.current_device()),
            torch.zeros(2).cuda(),
            torch.zeros(2).to("cuda"),
            torch.zeros(2).to(0),
            torch.zeros(2).new_empty(3, device="cuda"),
            torch.nn.Linear(2, 2).cuda().weight,
            torch.empty(2, pin_memory=True),
        ]
        assert {t.device.type for t in made} == {"cpu"}, made
        assert f"cuda:{torch.cuda.current_device()}" == "cuda:0"
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            event = stream.record_event()
        torch.cuda.current_stream().wait_stream(stream)
        assert event.query()
        assert torch.zeros(1).type() == "torch.FloatTensor"

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x
            @staticmethod
            def backward(ctx, g):
                (x,) = ctx.saved_tensors
                return g * 2 * x + x.new_zeros(1, device=torch.cuda.current_device())

        x = torch.ones(3, requires_grad=True)
        Square.apply(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))
        state = torch.cuda.get_rng_state()
        a = torch.rand(2)
        torch.cuda.set_rng_state(state)
        assert torch.equal(a, torch.rand(2))
        torch.cuda.manual_seed(5)
        a = torch.rand(2)
        torch.manual_seed(5)
        assert torch.equal(a, torch.rand(2))
        print("ok")
    """)
    assert out == "ok"


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_it_refuses_where_an_accelerator_is_present(device: str) -> None:
    out = run_python(f"""
        import types, torch
        torch.npu = types.SimpleNamespace(is_available=lambda: {device == "npu"})
        torch.cuda.is_available = lambda: {device == "cuda"}
        from hp_muon_plugin.errors import PlatformError
        from hp_muon_plugin.platform import standin
        try:
            standin.activate()
        except PlatformError as error:
            print(standin.is_active(), len(standin.replaced()), str(error).splitlines()[0])
    """)
    assert out.startswith(f"False 0 platform=cpu: this machine has a {device} device")


def test_names_that_megatron_imported_before_are_replaced_too() -> None:
    """megatron-core's random-state code holds torch.cuda._lazy_call by name; left alone it queues for ever."""
    out = run_python("""
        import sys, types, torch
        holder = types.ModuleType("megatron.core.holder")
        holder.call, holder.stream = torch.cuda._lazy_call, torch.cuda.Stream
        other = types.ModuleType("elsewhere")
        other.call = torch.cuda._lazy_call
        sys.modules["megatron.core.holder"], sys.modules["elsewhere"] = holder, other
        original, stream = torch.cuda._lazy_call, torch.cuda.Stream
        from hp_muon_plugin.platform import standin
        standin.activate()
        ran = []
        holder.call(lambda: ran.append(1))
        assert ran == [1] and holder.stream is torch.cuda.Stream and other.call is original
        standin.deactivate()
        assert holder.call is original and holder.stream is stream
        print("ok")
    """)
    assert out == "ok"


def test_every_replacement_says_why() -> None:
    from hp_muon_plugin.platform.standin.torch_cuda import replacements

    assert all(len(replacement.why) > 10 for replacement in replacements())


def test_tensor_type_is_a_cuda_name_for_megatron_only() -> None:
    out = run_python("""
        import types, torch
        from hp_muon_plugin.platform import standin
        standin.activate()
        module = types.ModuleType("megatron.core.fake")
        exec("def ask(t): return t.type()", module.__dict__)
        print(module.ask(torch.zeros(1)), module.ask(torch.zeros(1, dtype=torch.bfloat16)), torch.zeros(1).type())
    """)
    assert out == "torch.cuda.FloatTensor torch.cuda.BFloat16Tensor torch.FloatTensor"


def test_no_accelerator_here_means_the_cpu_is_chosen() -> None:
    from hp_muon_plugin.config.choices import PlatformName
    from hp_muon_plugin.platform.base import choose

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert choose(PlatformName.auto).name is PlatformName.cpu
    with pytest.raises(PlatformError, match="platform=cuda: torch sees no such device"):
        choose(PlatformName.cuda)
    with pytest.raises(PlatformError, match="platform=npu"):
        choose(PlatformName.npu)
