"""With the CPU fixes megatron-core is imported without torch's compiler, which took a second of each rank's start."""

import subprocess
import sys
import textwrap

CODE = """
    import sys
    import torch
    from hp_muon_plugin.megatron.cpu_fixes import apply_cpu_fixes, remove_cpu_fixes
    from hp_muon_plugin.platform import standin

    def double(x):
        return 2 * x

    original = torch.compile
    standin.activate()
    apply_cpu_fixes()
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    from megatron.core.jit import jit_fuser
    assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules)
    assert jit_fuser(double) is torch.compile(double) is torch.compile(dynamic=True)(double) is double
    remove_cpu_fixes()
    assert torch.compile is original

    graphs = []
    compiled = torch.compile(double, backend=lambda graph, inputs: graphs.append(graph) or graph)
    apply_cpu_fixes()
    assert compiled(torch.ones(1)) == 2 and not graphs
    remove_cpu_fixes()
    compiled = torch.compile(lambda x: 2 * x, backend=lambda graph, inputs: graphs.append(graph) or graph)
    assert compiled(torch.ones(1)) == 2 and len(graphs) == 1
    print("ok")
"""


def test_nothing_is_compiled_and_the_compiler_is_not_imported() -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CODE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
