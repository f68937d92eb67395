"""SentenceTransformerTrainer with an objective: parameters are trained, saved and resumed, steps of terms are run."""

import shutil

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses, modules

import dipole
from dipole.core.objectives.objective import Objective
from dipole.core.objectives.registry import register, registry
from dipole.core.utils.errors import CheckpointError
from tests.text.tiny_sentences import COLUMNS, features, tiny_model

PROXIMAL = "infonce(temperature=0.05) + 1.0*cllr(solver=proximal, alpha=60)"
BILINEAR = "infonce(similarity=bilinear, temperature=1)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def trainer_of(model, loss, out, steps=6, **arguments):
    given = {"learning_rate": 1e-2, "save_steps": 3, "per_device_train_batch_size": 8} | arguments
    args = SentenceTransformerTrainingArguments(
        output_dir=str(out), max_steps=steps, report_to=[], disable_tqdm=True, use_cpu=True, **given
    )
    data = Dataset.from_dict({name: texts * 4 for name, texts in COLUMNS.items()})
    data = dict.fromkeys(loss, data) if isinstance(loss, dict) else data
    return SentenceTransformerTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, loss=loss)


def made(folder, spec, out, **arguments):
    model = tiny_model(folder, dropout=0.1)
    loss = dipole.text.ContrastiveLoss(model, spec)
    return trainer_of(model, loss, out, **arguments), loss


def difference(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("spec", [PROXIMAL, BILINEAR, "infonce(temperature=learned, init=0.07) + 0.1*dp"])
def test_resumed_is_uninterrupted(folder, tmp_path, spec):
    trainer, whole = made(folder, spec, tmp_path / "a")
    start = {name: value.clone() for name, value in whole.objective.state_dict().items()}
    trainer.train()
    assert all(bool((value != start[name]).any()) for name, value in whole.objective.state_dict().items())
    other, again = made(folder, spec, tmp_path / "b")  # another output folder
    other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert difference(whole, again) == 0


def test_gradients_of_the_objective_are_those_of_one_step(folder, tmp_path):
    """A trainer that clears the model's gradients alone would add up those of W from step to step."""
    trainer, whole = made(folder, BILINEAR, tmp_path / "a")
    trainer.train()
    other, alone = made(folder, BILINEAR, tmp_path / "b")
    for callback in list(other.callback_handler.callbacks):
        if "ZeroGrad" in type(callback).__name__:  # sentence-transformers has one since 6.2
            other.remove_callback(callback)
    other.train()
    assert difference(whole, alone) == 0
    assert alone.objective.terms[0].W.grad is None


def test_a_moved_checkpoint(folder, tmp_path):
    trainer, whole = made(folder, BILINEAR, tmp_path / "a")
    trainer.train()
    shutil.move(tmp_path / "a" / "checkpoint-3", tmp_path / "moved")
    other, again = made(folder, BILINEAR, tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"terms.0.W.*the checkpoint was moved.*load_objective"):
        other.train(resume_from_checkpoint=str(tmp_path / "moved"))
    other, again = made(folder, BILINEAR, tmp_path / "b")
    again.load_objective(tmp_path / "moved")
    other.train(resume_from_checkpoint=str(tmp_path / "moved"))
    assert difference(whole, again) == 0
    with pytest.raises(CheckpointError, match=r"holds 0.terms.0.W \(16, 16\); the objective has 0.terms.1.L"):
        dipole.text.ContrastiveLoss(tiny_model(folder), "infonce + cllr").load_objective(tmp_path / "moved")


def test_a_checkpoint_of_another_loss(folder, tmp_path):
    """Without parameters it resumes; an objective with some does not start from new ones in silence."""
    model = tiny_model(folder)
    trainer_of(model, losses.MultipleNegativesRankingLoss(model), tmp_path, steps=3, save_only_model=True).train()
    assert not (tmp_path / "checkpoint-3" / "objective.safetensors").exists()
    other, _ = made(folder, "infonce", tmp_path)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    other, _ = made(folder, BILINEAR, tmp_path)
    with pytest.raises(CheckpointError, match="written without the parameters of the objective"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_checkpoint_of_another_objective(folder, tmp_path):
    trainer, _ = made(folder, "infonce", tmp_path)
    trainer.train()
    del trainer
    other, _ = made(folder, "triplet + 0.1*dp", tmp_path)
    with pytest.raises(CheckpointError, match=r"trained with infonce, and this loss is triplet \+ 0.1\*dp"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    other, _ = made(folder, "infonce(temperature=0.2)", tmp_path)  # the same terms with other numbers
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_proximal_steps_and_the_projection(folder, tmp_path):
    """Columns of L become zero exactly, which no gradient does; L is a Dense module of what is saved."""
    trainer, loss = made(folder, PROXIMAL, tmp_path / "a")
    trainer.train()
    L = loss.objective.terms[1].L.detach()
    # A column of length 1 loses lr alpha = 0.6 in the first step, and less in each of the others.
    assert bool((L.norm(dim=0) == 0).any())
    _, untouched = made(folder, "infonce(temperature=0.05) + cllr(solver=subgradient, alpha=60)", tmp_path / "b")
    assert not bool((untouched.objective.terms[1].L.norm(dim=0) == 0).any())
    with torch.no_grad():
        L.copy_(torch.randn(16, 16))
    plain = dipole.text.ContrastiveLoss(loss.model, "infonce")
    assert plain.projected_model() is loss.model  # nothing to project
    model = loss.projected_model()
    assert isinstance(model[-1], modules.Dense)
    model.save_pretrained(str(tmp_path / "final"))
    again = SentenceTransformer(str(tmp_path / "final"), device="cpu")
    texts = COLUMNS["anchor"]
    wanted = loss.model.encode(texts, convert_to_tensor=True) @ L.T
    torch.testing.assert_close(again.encode(texts, convert_to_tensor=True), wanted)


def test_the_best_checkpoint_brings_its_parameters(folder, tmp_path):
    trainer, loss = made(
        folder, BILINEAR, tmp_path, eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=True, learning_rate=3e-2,
    )  # fmt: skip
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best.endswith("checkpoint-1")  # the loss falls, and the greatest was asked for
    other = dipole.text.ContrastiveLoss(tiny_model(folder), BILINEAR)
    other.load_objective(best)
    assert torch.equal(loss.objective.terms[0].W, other.objective.terms[0].W)


def test_after_step_gets_the_rate_and_the_place_of_its_step_and_runs_once(folder, tmp_path):
    rates = []
    with registry.temporary():

        @register("counts_steps", kind="regularizer")
        class Counts(Objective):
            """Notes its steps."""

            def loss(self, positive, rows):
                return rows.x.square().sum(1)

            def after_step(self, learning_rate, weight, step, total):
                rates.append((learning_rate, weight, step, total))

        trainer, _ = made(folder, "infonce + 0.5*counts_steps", tmp_path, steps=4, save_steps=100)
        trainer.train()
    assert rates == [(pytest.approx(1e-2 * left / 4), 0.5, 5 - left, 4) for left in (4, 3, 2, 1)]


def test_steps_of_an_earlier_loss_are_left_alone(folder, tmp_path):
    model = tiny_model(folder)
    earlier = dipole.text.ContrastiveLoss(model, PROXIMAL)
    trainer_of(model, dipole.text.ContrastiveLoss(model, PROXIMAL), tmp_path, steps=2).train()
    assert torch.equal(earlier.objective.terms[1].L, torch.eye(16))


def test_losses_of_several_data_sets(folder, tmp_path):
    def both(out):
        model = tiny_model(folder)
        loss = {name: dipole.text.ContrastiveLoss(model, spec) for name, spec in (("one", BILINEAR), ("two", PROXIMAL))}
        return trainer_of(model, loss, out, steps=4, save_steps=2), loss

    trainer, whole = both(tmp_path / "a")
    trainer.train()
    other, again = both(tmp_path / "b")
    other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert all(difference(whole[name], again[name]) == 0 for name in whole)


def test_a_loop_of_ones_own_is_told(folder):
    model = tiny_model(folder)
    loss = dipole.text.ContrastiveLoss(model, BILINEAR)
    with pytest.warns(UserWarning, match="no trainer looks after the objective"):
        loss(features(model), None)
