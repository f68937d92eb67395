"""An update of the agent reads nothing back from the device, and what is not finite is told an update late there."""

import copy
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from dipole.core.ground.errors import TrainingError
from dipole.rl import ContrastiveSAC
from dipole.rl import pixel_agent as agent_module
from dipole.rl.description import open_agent

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
    monkeypatch.setattr(agent_module, "sent", lambda x, device: torch.empty(x.shape, dtype=x.dtype, device=device))
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


@pytest.mark.parametrize("joint", [False, True])
def test_compiled_the_agent_is_the_same(tiny_agent, monkeypatch, joint, tmp_path):
    """Traced by Dynamo and run as it was written; what Inductor fuses is rounded otherwise."""
    plain = tiny_agent(objective="infonce + dp", joint_backward=joint).learn(16)
    traced = []

    def compile_eagerly(function, **options):
        traced.append(function.__name__)
        return original(function, backend="eager", **options)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    compiled = tiny_agent(objective="infonce + dp", joint_backward=joint, compile=True).learn(16)
    assert set(traced) == {"convolve", "head", "distribution"}
    for name, value in plain.policy.state_dict().items():
        assert torch.equal(compiled.policy.state_dict()[name], value), name
    compiled.save(tmp_path / "agent.zip")
    assert open_agent(tmp_path / "agent.zip", type(plain), device="cpu").settings.compile
