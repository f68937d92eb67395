"""Compiled networks, optimizers of another device, and batches that are drawn ahead."""

import copy
import threading

import pytest
import torch
from packaging.version import Version

from dipole.rl import ContrastiveDrQ, ContrastiveSAC
from dipole.rl.description import open_agent


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


def test_optimizers_fit_the_device_that_they_are_loaded_on(tiny_agent, monkeypatch):
    """A CUDA graph can be captured of Adam's step only where every group says so."""
    agent = tiny_agent(objective="infonce(similarity=bilinear)").learn(12)
    names = [name for name in agent.get_parameters() if "optimizer" in name]
    assert len(names) == 5

    def capturable(parameters):
        return {group["capturable"] for name in names for group in parameters[name]["param_groups"]}

    saved = copy.deepcopy(agent.get_parameters())
    monkeypatch.setattr(agent, "device", torch.device("cuda"))
    agent.set_parameters(saved)
    of_a_gpu = copy.deepcopy(agent.get_parameters())
    monkeypatch.undo()
    agent.set_parameters(of_a_gpu)
    assert [capturable(each) for each in (saved, of_a_gpu, agent.get_parameters())] == [{False}, {True}, {False}]
    agent.learn(4, reset_num_timesteps=False)


@pytest.mark.parametrize("kind", [ContrastiveSAC, ContrastiveDrQ])
def test_batches_drawn_ahead_are_the_same(tiny_agent, monkeypatch, kind):
    plain = tiny_agent(kind=kind, gradient_steps=3).learn(14)
    assert not plain._draws_ahead  # a thread is of no use to a CPU that is at the update itself
    drawn_by = []
    monkeypatch.setattr(kind, "_draws_ahead", True)
    ahead = tiny_agent(kind=kind, gradient_steps=3)
    sample = ahead._sample
    monkeypatch.setattr(ahead, "_sample", lambda size: drawn_by.append(threading.current_thread()) or sample(size))
    ahead.learn(14)
    assert drawn_by
    assert threading.main_thread() not in drawn_by
    assert ahead._n_updates == plain._n_updates == len(drawn_by)
    assert all(torch.equal(plain.policy.state_dict()[name], value) for name, value in ahead.policy.state_dict().items())
    assert plain.replay_buffer.rng.random() == ahead.replay_buffer.rng.random()


def test_batches_are_drawn_ahead_where_that_changes_nothing(tiny_agent, monkeypatch):
    """Frames on the host of a GPU; not with a function that may draw from torch's generator."""
    agents = {
        "host": tiny_agent(storage="host"),
        "device": tiny_agent(storage="device"),
        "function": tiny_agent(augmentation=lambda images: images[..., :24, :24]),
    }
    for agent in agents.values():
        monkeypatch.setattr(agent, "device", torch.device("cuda"))
    assert [name for name, agent in agents.items() if agent._draws_ahead] == ["host"]
