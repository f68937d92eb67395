"""Functions that torch.compile leaves alone, and that nobody waits for a compiler who compiles nothing."""

import subprocess
import sys

import torch

from dipole.core.utils.uncompiled import uncompiled


def test_a_run_starts_without_the_compiler_and_scikit_learn():
    code = (
        "import sys\nfrom dipole.core.train.recipe import load\nload('digits-simclr')\n"
        "import dipole.core.objectives.tiles, dipole.vision.probes, dipole.core.utils.sync_batch_norm\n"
        "import dipole.core.train.run, dipole.text.adapter\n"
        "assert 'torch' in sys.modules\n"
        "assert not {'torch._dynamo', 'sklearn', 'pandas', 'matplotlib', 'altair'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_is_run_as_written_inside_of_what_is_compiled():
    seen = []

    def inner(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    @uncompiled
    def outer(x):
        seen.append(torch.compiler.is_compiling())
        return inner(x) * 2

    assert outer(torch.ones(2)).tolist() == [4, 4]
    assert outer.__name__ == "outer"
    torch._dynamo.reset()
    traced = []

    def backend(graph, _):
        traced.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    step = torch.compile(lambda x: outer(x.sin()).cos(), backend=backend)
    for size in (2, 3, 4):
        x = torch.linspace(0, 1, size)
        assert torch.equal(step(x), ((x.sin() + 1) * 2).cos())
    names = {getattr(each, "__name__", str(each)) for each in traced}
    assert not any(seen)
    assert len(seen) == 2 * 4
    assert not names & {"add", "mul"}
