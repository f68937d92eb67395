"""An update of the agent reads nothing back from the device, and what is not finite is told an update late there."""

import copy
import dataclasses
import sys
import threading
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from dipole.core.utils.errors import TrainingError
from dipole.rl import ContrastiveDQN, ContrastiveDrQ, ContrastiveSAC
from dipole.rl import pixel_agent as agent_module
from dipole.rl.description import open_agent
from dipole.rl.envs.dot_discrete import DiscreteDotEnv

sys.path.insert(0, str(Path(__file__).parents[1]))
from device_reads import META, no_cuda_waits, no_reads


@pytest.fixture
def late(monkeypatch):
    """As on a GPU: Adam's fused form can leave a step out on a CPU as well."""
    monkeypatch.setattr(ContrastiveSAC, "_reads_late", property(lambda self: True))


class Steps(torch.optim.Adam):
    """Adam's fused form, which waits for nothing, does not know meta tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            having = [parameter for parameter in group["params"] if parameter.grad is not None]
            torch._foreach_add_(having, [parameter.grad for parameter in having], alpha=-group["lr"])


def on_meta(agent, monkeypatch):
    """The same agent without numbers; its optimizers are made again, as a module that moves gets new parameters."""
    policy = agent.policy.to(META)
    policy.adam = lambda parameters, rate, beta=None: Steps(parameters, lr=rate)
    agent.device = META
    agent.log_ent_coef = torch.zeros(1, device=META, requires_grad=True)
    agent.ent_coef_optimizer = policy.adam([agent.log_ent_coef], 1e-4)
    shared = {id(parameter) for parameter in policy.encoder.convs.parameters()}
    own = [parameter for parameter in policy.actor.parameters() if id(parameter) not in shared]
    policy.actor.optimizer, policy.critic.optimizer = (
        policy.adam(own, 1e-3),
        policy.adam(policy.critic.parameters(), 1e-3),
    )
    monkeypatch.setattr(agent_module, "require_unlabelled", lambda *arguments: None)  # it has passed
    agent._setup_contrast()
    # Lists of duplicates are the host's; they go through pinned memory, which only a machine with a GPU has.
    monkeypatch.setattr(agent_module, "to_device", lambda x, device: torch.empty(x.shape, dtype=x.dtype, device=device))
    return agent


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"joint_backward": True},
        {"objective": "infonce + dp", "encoder_steps": 1, "exclude_duplicates": True},
        {"objective": "cacr(k=2) + 0.1*cllr", "detach_encoder": True},
        {"objective": "none"},
    ],
    ids=lambda settings: " ".join(map(str, settings)) or "curl",
)
def test_an_update_reads_nothing_back(tiny_agent, settings, monkeypatch):
    agent = tiny_agent(**settings)
    agent.learn(12)
    batch = agent.replay_buffer.sample_views(8, agent._augment, agent._positives)
    there = {
        field.name: value.to(META) if isinstance(value := getattr(batch, field.name), torch.Tensor) else value
        for field in dataclasses.fields(batch)
    }
    on_meta(agent, monkeypatch)
    batch = dataclasses.replace(batch, **there)
    for _ in range(3):
        agent._unread = None  # what the update before has sent to the host: it waits for that alone
        with no_reads():
            agent.update(batch)


@pytest.mark.parametrize("joint", [False, True])
def test_read_late_the_agent_is_the_same_bit_for_bit(tiny_agent, joint, request):
    at_once = tiny_agent(objective="infonce + dp", joint_backward=joint)
    at_once.learn(24)
    request.getfixturevalue("late")
    late = tiny_agent(objective="infonce + dp", joint_backward=joint)
    late.learn(24)
    for name, value in at_once.policy.state_dict().items():
        assert torch.equal(late.policy.state_dict()[name], value), name
    logged = [
        {k: v for k, v in each.logger.name_to_value.items() if k.startswith("train/")} for each in (at_once, late)
    ]
    assert logged[0].keys() == logged[1].keys()
    assert all(isinstance(value, (int, float)) for value in logged[1].values())


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("term", ["critic", "dp"])
def test_a_bad_loss_reaches_no_weight_and_is_told_before_the_next_step(tiny_agent, late, term, joint):
    agent = tiny_agent(objective="infonce + dp", joint_backward=joint)
    agent.learn(12)
    batch = agent.replay_buffer.sample_views(8, agent._augment, 1)
    if term == "critic":
        batch.rewards[0] = torch.nan
    else:
        agent.contrast.terms[1].loss = lambda positive, rows: positive.sum() * torch.nan
    guarded = [*agent.contrast.parameters(), *agent.policy.encoder.parameters()]
    guarded += [*agent.critic.parameters(), *agent.actor.parameters()] if term == "critic" else []
    # What precedes the bad term in an update is stepped: the critic, and the encoder with it.
    if term == "dp" and not joint:
        guarded = list(agent.contrast.parameters())
    before = copy.deepcopy([parameter.detach() for parameter in guarded])
    agent.update(batch)
    with pytest.raises(TrainingError, match=rf"the {term} loss is nan at update \d+ \(12 environment steps\)"):
        agent.update(batch)
    assert all(map(torch.equal, before, guarded))
    assert all(parameter.isfinite().all() for parameter in agent.policy.parameters())


def test_a_bad_gradient_names_the_term_late(tiny_agent, late):
    agent = tiny_agent(objective="infonce + dp")
    agent.learn(12)
    batch = agent.replay_buffer.sample_views(8, agent._augment, 1)
    agent.contrast.terms[1].loss = lambda positive, rows: (positive - positive.detach()).sqrt().sum()
    agent.update(batch)
    with pytest.raises(TrainingError, match=r"gradient of the contrastive loss is not finite.*the term dp"):
        agent.settle()
    assert all(p.isfinite().all() for p in agent.policy.parameters())


def test_an_agent_with_a_bad_update_is_not_saved(tiny_agent, late, tmp_path):
    agent = tiny_agent()
    agent.learn(12)
    batch = agent.replay_buffer.sample_views(8, agent._augment, 1)
    batch.rewards[0] = torch.nan
    agent.update(batch)
    with pytest.raises(TrainingError, match="critic loss is nan"):
        agent.save(tmp_path / "agent")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("joint", [False, True])
def test_an_update_on_a_gpu_waits_for_nothing(tiny_agent, joint):
    agent = tiny_agent(device="cuda", objective="infonce + dp", joint_backward=joint, storage="device")
    agent.learn(16)
    batches = [agent.replay_buffer.sample_views(8, agent._augment, 1) for _ in range(3)]
    agent.update(batches[0])
    agent.update(batches[1])
    with no_cuda_waits():
        agent.update(batches[2])


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
    """Frames on the host of a GPU; not what errors decide, or a function that may draw from torch's generator."""
    agents = {
        "host": tiny_agent(storage="host"),
        "device": tiny_agent(storage="device"),
        "function": tiny_agent(augmentation=lambda images: images[..., :24, :24]),
        "uniform": tiny_agent(DiscreteDotEnv(), kind=ContrastiveDQN, architecture="uniform", prioritized=False),
        "prioritised": tiny_agent(DiscreteDotEnv(), kind=ContrastiveDQN, architecture="uniform"),
    }
    for agent in agents.values():
        monkeypatch.setattr(agent, "device", torch.device("cuda"))
    assert [name for name, agent in agents.items() if agent._draws_ahead] == ["host", "uniform"]
