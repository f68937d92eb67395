"""Compiled networks, and what the extra installs."""

from importlib.metadata import requires

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from dipole.rl.algorithms import open_agent


@pytest.mark.parametrize(("joint", "mode"), [(False, True), (True, True), (False, "reduce-overhead")])
def test_compiled_the_agent_is_the_same(tiny_agent, monkeypatch, joint, mode, tmp_path):
    """Traced by Dynamo and run as it was written; what Inductor fuses is rounded otherwise."""
    plain = tiny_agent(objective="infonce + dp", joint_backward=joint).learn(16)
    traced, marks = {}, []

    def compile_eagerly(function, mode, **options):
        traced[function.__name__] = mode
        return original(function, backend="eager", **options)

    def mark():
        marks.append(compiled.num_timesteps)
        begin()

    original, begin = torch.compile, torch.compiler.cudagraph_mark_step_begin
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", mark)
    compiled = tiny_agent(objective="infonce + dp", joint_backward=joint, compile=mode)
    compiled.learn(16)
    assert traced == dict.fromkeys(("convolve", "head", "distribution"), None if mode is True else mode)
    # A CUDA graph may write over what it returned before each action and each update, and never within one.
    assert len(marks) == (0 if mode is True else 6 + 6)
    for name, value in plain.policy.state_dict().items():
        assert torch.equal(compiled.policy.state_dict()[name], value), name
    compiled.save(tmp_path / "agent.zip")
    assert open_agent(tmp_path / "agent.zip", type(plain), device="cpu").settings.compile == mode


@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="2.11 cannot trace whether there is autocast")
@pytest.mark.parametrize("joint", [False, True])
def test_no_compiled_network_breaks_its_graph(tiny_agent, monkeypatch, joint):
    """Of what `compile` is given every call is one graph: a break would give a part back to Python."""
    original, graphs = torch.compile, []

    def count(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", lambda each, mode, **options: original(each, backend=count, **options))
    tiny_agent(objective="infonce + dp", joint_backward=joint, compile=True).learn(16)
    assert graphs
    assert not torch._dynamo.utils.counters["graph_break"]


def asked(package: str, python: str, extra: str = "") -> dict[str, Requirement]:
    lines = [Requirement(each) for each in requires(package) or []]
    place = {"python_version": python, "extra": extra}
    return {each.name.lower(): each for each in lines if each.marker is None or each.marker.evaluate(place)}


def test_up_to_3_12_dm_control_installs_its_dependencies():
    assert "dm-control" in asked("dipole", "3.12", "rl")
    assert "dm-tree" not in asked("dipole", "3.12", "rl")


@pytest.mark.parametrize("python", ["3.13", "3.14"])
def test_from_3_13_the_extra_lists_dependencies_of_dm_control_except_labmaze(python):
    ours = asked("dipole", python, "rl")
    assert "dm-control" not in ours
    assert asked("dm-control", python).keys() - ours.keys() - {"labmaze"} == set()
