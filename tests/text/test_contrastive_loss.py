"""Objectives as losses of sentence-transformers: the library's own losses, ranks, and its trainer."""

import shutil
import warnings
from functools import partial

import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.sentence_transformer import losses, modules
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer import DEFAULT_CALLBACKS

import dipole
from dipole.core.objectives.objective import Objective
from dipole.core.objectives.registry import register, registry
from dipole.core.train.objective_callback import ObjectiveCallback
from dipole.core.utils.errors import CheckpointError, ConfigError, DipoleError, OptionError, PairsError, SpecError
from tests.ranks import from_ranks
from tests.runs import refused
from tests.text.tiny_sentences import COLUMNS, features, loaded_model, tiny_model

SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
QUERIES = {"directions": ("query_to_doc", "query_to_query")}
ROWS = len(COLUMNS["anchor"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def measured(loss, columns=4, labels=None, seed=3, rows=slice(None)):
    """Value and the gradient of every parameter of the loss, dropout on."""
    model = loss.model
    inner = getattr(model, "module", model)
    loss.train()
    loss.zero_grad()
    given = [{k: v[rows] if torch.is_tensor(v) else v for k, v in each.items()} for each in features(inner, columns)]
    torch.default_generator.manual_seed(seed)
    value = loss(given, labels)
    value.backward()
    found = {n.replace("model.module.", "model."): p.grad for n, p in loss.named_parameters() if p.grad is not None}
    return value.detach(), {name: grad.clone() for name, grad in found.items()}


def check_same(found, wanted, tolerance=1e-9):
    assert float(found[0]) == pytest.approx(float(wanted[0]), abs=tolerance)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("directions", [{}, SYMMETRIC, QUERIES], ids=["query_to_doc", "symmetric", "queries"])
def test_infonce_is_multiple_negatives_ranking(folder, columns, directions):
    model = tiny_model(folder, dropout=0.1).double()
    wanted = measured(losses.MultipleNegativesRankingLoss(model, scale=20.0, **directions), columns)
    ours = dipole.text.ContrastiveLoss(model, "infonce(temperature=0.05)", **directions)
    check_same(measured(ours, columns), wanted)
    other = dipole.text.ContrastiveLoss(model, "infonce(temperature=0.06)", **directions)
    assert abs(measured(other, columns)[0] - wanted[0]) > 1e-3


@pytest.mark.parametrize("size", [1, 2, 4, 100])
def test_cached_is_the_undivided_batch(folder, size):
    model = tiny_model(folder).double()
    for spec in ("infonce(temperature=0.05) + 0.1*dp", "infonce(similarity=bilinear) + 0.1*cllr"):
        found = measured(dipole.text.CachedContrastiveLoss(model, spec, mini_batch_size=size))
        check_same(found, measured(dipole.text.ContrastiveLoss(model, spec)))
    found = measured(dipole.text.CachedContrastiveLoss(model, "infonce(temperature=0.05)", mini_batch_size=size))
    # Until 6.1 sentence-transformers rounds the gradient of its cached loss: 6e-7 from that of its plain one.
    check_same(found, measured(losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=size)), 1e-5)


def test_cached_holds_the_activations_of_a_few_sentences(folder):
    """No part of the encoder's graph outlives its mini-batch."""
    model, seen = tiny_model(folder), []
    model[0].register_forward_hook(lambda module, given, out: seen.append(len(given[0]["input_ids"])))
    value = dipole.text.CachedContrastiveLoss(model, "infonce", mini_batch_size=4)(features(model), None)
    assert max(seen) == 4
    first = len(seen)
    value.backward()
    assert len(seen) == 2 * first


KINDS = [dipole.text.ContrastiveLoss, partial(dipole.text.CachedContrastiveLoss, mini_batch_size=2)]


@pytest.mark.parametrize("kind", KINDS)
def test_matryoshka_widths(folder, kind):
    dropout = 0.1 * (kind is KINDS[0])  # microbatches draw masks of their own
    model = tiny_model(folder, dropout=dropout).double()
    widths, weights = [16, 8, 4], [1.0, 0.5, 0.25]
    both = losses.MultipleNegativesRankingLoss(model), kind(model, "infonce(temperature=0.05)")
    wanted, found = (measured(losses.MatryoshkaLoss(model, loss, widths, weights)) for loss in both)
    check_same(found, wanted)


def test_matryoshka_refuses_parameters_of_one_width_and_adaptive_layers_wrap_them(folder):
    model = tiny_model(folder)
    loss = dipole.text.ContrastiveLoss(model, "infonce + 0.1*cllr")
    with pytest.raises(PairsError, match=r"8 wide.*cllr was built for embeddings of width 16.*MatryoshkaLoss leave"):
        losses.MatryoshkaLoss(model, loss, [16, 8])(features(model), None)
    assert torch.isfinite(losses.MatryoshkaLoss(model, loss, [16])(features(model), None))
    model = tiny_model(folder, layers=2).double()
    ours = dipole.text.ContrastiveLoss(model, "infonce(temperature=0.05)")
    both = (ours, losses.MultipleNegativesRankingLoss(model))
    check_same(*(measured(losses.AdaptiveLayerLoss(model, each, n_layers_per_step=-1), 3) for each in both))
    for size in (2, 32):
        loss = dipole.text.CachedContrastiveLoss(model, "infonce", mini_batch_size=size)
        for outer in (losses.AdaptiveLayerLoss(model, loss), losses.Matryoshka2dLoss(model, loss, [16, 8])):
            message = "does not work inside AdaptiveLayerLoss or Matryoshka2dLoss.*Use Contrast"
            refused(ConfigError, message, outer, features(model), None)


@pytest.mark.parametrize("reentrant", [True, False])
def test_cached_with_checkpointed_activations(folder, reentrant):
    model = tiny_model(folder, layers=2).double()
    wanted = measured(dipole.text.ContrastiveLoss(model, "infonce"))
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    check_same(measured(dipole.text.CachedContrastiveLoss(model, "infonce", mini_batch_size=2)), wanted)
    kept = [part._gradient_checkpointing_func for part in model.modules() if hasattr(part, "gradient_checkpointing")]
    assert all(function.keywords["use_reentrant"] == reentrant for function in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_were_read_as_floats(folder, kind):
    """A column of integers with a gap becomes one of floats."""
    model = tiny_model(folder).double()
    loss, column, classes = kind(model, "infonce"), features(model, 1), torch.tensor([0, 0, 1, 1, 1, 2])
    assert loss(column, classes.double()).item() == loss(column, classes).item()
    assert loss(column, classes == 1).item() == loss(column, (classes == 1).long()).item()
    for scores in (torch.rand(ROWS), classes / 0.0, classes * 1e30):
        refused(PairsError, "labels are scores, not classes", loss, column, scores)
    refused(PairsError, r"one class number for each of 6 sentences, got \(6, 1\)", loss, column, classes[:, None])


@pytest.mark.parametrize(("labels", "columns", "message"), [
    (["a", "b"] * 3, 1, r"type string, and labels are numbers.*class_encode_column\('label'\)"),
    ([-1, 0, 1] * 2, 1, "-1 in the column 'label' is a class here, and SNLI.* >= 0"),
    ([1, 0, 1] * 2, 2, "trained as a pair, whatever its 'label' is.*filter"),
    ([0.2, 1.0, 0.5] * 2, 3, "trained as a pair.*CoSENTLoss"),
])  # fmt: skip
def test_labels_of_a_training_set_are_checked_before_the_first_step(folder, tmp_path, labels, columns, message):
    model = tiny_model(folder)
    data = Dataset.from_dict({**{name: COLUMNS[name] for name in [*COLUMNS][:columns]}, "label": labels})
    args = Arguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
    trainer = SentenceTransformerTrainer(model, args, data, loss=dipole.text.ContrastiveLoss(model, "infonce"))
    with pytest.raises(PairsError, match=message) if labels[0] == "a" else pytest.warns(UserWarning, match=message):
        trainer.train()


@pytest.mark.parametrize(("labels", "what"), [(torch.zeros(ROWS).long(), "negative"), (torch.arange(ROWS), "positive")])
def test_a_batch_that_teaches_nothing_is_said_once(folder, labels, what):
    model = tiny_model(folder)
    loss = dipole.text.ContrastiveLoss(model, "infonce")
    with pytest.warns(UserWarning, match=f"infonce is 0: no anchor has a {what}.*GROUP_BY_LABEL"):
        assert loss(features(model, 1), labels) == 0
    with warnings.catch_warnings(action="error"):
        loss(features(model, 1), labels)


def supervised_contrast(z, labels, temperature):
    """Mean over anchors with partners of the mean over positives of -log softmax against the other classes."""
    s = z @ z.T / temperature
    values = []
    for i in range(len(z)):
        positives = [j for j in range(len(z)) if j != i and labels[j] == labels[i]]
        others = torch.stack([s[i, j] for j in range(len(z)) if labels[j] != labels[i]])
        if positives:
            terms = [torch.logsumexp(torch.cat([s[i, p : p + 1], others]), 0) - s[i, p] for p in positives]
            values.append(torch.stack(terms).mean())
    return torch.stack(values).mean()


def test_classes_beside_one_column_and_several(folder):
    model = tiny_model(folder).double()
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    loss = dipole.text.ContrastiveLoss(model, "infonce(temperature=0.1)")
    column = features(model, 1)
    z = torch.nn.functional.normalize(model(dict(column[0]))["sentence_embedding"])
    assert loss(column, labels).item() == pytest.approx(supervised_contrast(z, labels, 0.1).item(), abs=1e-9)
    logs = (z @ z.T / 0.1).masked_fill(torch.eye(ROWS, dtype=torch.bool), -torch.inf).log_softmax(1)
    same = (labels[:, None] == labels) & ~torch.eye(ROWS, dtype=torch.bool)
    wanted = torch.stack([-logs[i][same[i]].mean() for i in range(ROWS) if same[i].any()]).mean()
    loss = dipole.text.ContrastiveLoss(model, "supcon(temperature=0.1)")
    assert loss(column, labels).item() == pytest.approx(wanted.item(), abs=1e-9)
    model = tiny_model(folder)
    loss = dipole.text.ContrastiveLoss(model, "tuple")
    for given, words in ((None, "give the data set a column 'label'"), (torch.rand(ROWS), "Scores are no classes")):
        refused(PairsError, f"tuple needs labels: .*{words}", loss, features(model, 2), given)
    assert torch.isfinite(loss(features(model, 2), torch.tensor([0, 0, 1, 1, 2, 2])))


def test_a_learned_temperature_gets_its_gradient(folder):
    model = tiny_model(folder, dropout=0.0).double()
    _, fixed = measured(dipole.text.ContrastiveLoss(model, "infonce(temperature=0.07)"))
    spec = "infonce(temperature=learned, init=0.07)"
    ours = dipole.text.ContrastiveLoss(model, spec)
    value, learned = measured(ours)
    (extra,) = learned.keys() - fixed.keys()
    assert float(learned[extra].abs()) > 1e-3
    check_same(measured(dipole.text.CachedContrastiveLoss(model, spec, mini_batch_size=4)), (value, learned))
    assert torch.isfinite(losses.MatryoshkaLoss(model, ours, [16, 8])(features(model), None))  # a number has no width


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda m: dipole.text.ContrastiveLoss(m, "infonc"), SpecError, "Did you mean 'infonce'"),
    (lambda m: dipole.text.ContrastiveLoss(m, 3), ConfigError, "objective must be a text"),
    (lambda m: dipole.text.ContrastiveLoss(m[0], "infonce"), ConfigError, "a SentenceTransformer; got Transformer"),
    (lambda m: dipole.text.ContrastiveLoss(m, "infonce", directions="both"), OptionError, "got 'both'"),
    (lambda m: dipole.text.ContrastiveLoss(m, "infonce", directions=[["query_to_doc"]]), OptionError, "must be one of"),
    (lambda m: dipole.text.ContrastiveLoss(m, "infonce", directions=("query_to_doc", "doc_to_query")), OptionError,
     "need partition_mode='per_direction'"),
    (lambda m: dipole.text.CachedContrastiveLoss(m, "infonce", mini_batch_size=0), OptionError, "whole number"),
    (lambda m: dipole.text.ContrastiveLoss(m, "infonce")(features(m, 1), None), PairsError, "one column of text"),
    (lambda m: dipole.text.ContrastiveLoss(m, "infonce")([], None), PairsError, "got no column"),
    (lambda m: dipole.text.CachedContrastiveLoss(m, "infonce")(features(m)[0]), PairsError, "of each column, not str"),
    (lambda m: dipole.text.ContrastiveLoss(m, "infonce")(features(m), [0, 1]), PairsError, "a tensor, got list"),
    (lambda m: dipole.text.ContrastiveLoss(SentenceTransformer(modules=[m[0]]), "infonce")(features(m), None),
     ConfigError, "gives no sentence_embedding"),
])  # fmt: skip
def test_one_message_for_each_mistake(folder, make, error, message):
    assert issubclass(error, DipoleError)
    refused(error, message, make, tiny_model(folder))


def test_models_that_cannot_be_wrapped_are_refused(folder):
    tokenizer = tiny_model(folder).tokenizer.backend_tokenizer
    refused(ConfigError, "got CrossEncoder", KINDS[0], CrossEncoder(str(folder), num_labels=1, device="cpu"), "infonce")
    model = SentenceTransformer(modules=[modules.StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")
    assert torch.isfinite(dipole.text.ContrastiveLoss(model, "infonce")(features(model), None))
    refused(PairsError, "Use ContrastiveLoss for StaticEmbedding", KINDS[1](model, "infonce"), features(model), None)


def test_what_model_cards_ask_for(folder):
    model = tiny_model(folder)
    loss = dipole.text.CachedContrastiveLoss(model, "infonce(temperature=0.05) + 0.1*dp", mini_batch_size=8)
    config = loss.get_config_dict()
    assert (config["objective"], config["mini_batch_size"]) == ("infonce(temperature=0.05) + 0.1*dp", 8)
    assert all(source in loss.citation for source in ("NT-Xent of Chen et al. 2020", "gao2021scaling"))
    assert dipole.text.CachedContrastiveLoss(model, **config).get_config_dict() == config
    assert DEFAULT_CALLBACKS.count(ObjectiveCallback) == 1


GATHERED = {
    "hard negatives": ("infonce(temperature=0.05) + 0.1*dp", {}), "symmetric": ("infonce(temperature=0.05)", SYMMETRIC),
    "queries": ("infonce(temperature=0.05)", QUERIES), "W": ("infonce(similarity=bilinear)", {}),
    "L": ("infonce + 0.1*cllr", {}),
}  # fmt: skip
DIVIDED = {name: GATHERED[name] for name in ("hard negatives", "L")}


def every_case(folder, rank=0, ranks=1, gathered=True):
    """Value and gradients of each case on this rank's share of the rows. The shares are unequal."""
    found = {}
    rows = slice(*([0, ROWS] if ranks == 1 else [[0, 4], [4, ROWS]][rank]))
    for kind in KINDS:
        for name, (spec, directions) in (GATHERED if gathered and kind is KINDS[0] else DIVIDED).items():
            model = loaded_model(folder).double()
            # Several columns go through the model: with PyTorch 2.11 buffers sent again between them would be changed
            # under the first.
            shared = {"find_unused_parameters": True, "broadcast_buffers": False}
            loss = kind(model, spec, gather_across_devices=gathered, **directions)
            loss.objective.double()
            loss.model = model if ranks == 1 else DistributedDataParallel(model, **shared)
            found[name, kind is KINDS[0]] = measured(loss, rows=rows)
    return found


def on_a_rank(rank, folder):
    return [every_case(folder, rank, 2, gathered) for gathered in (True, False)]


@pytest.mark.slow
def test_two_ranks_are_one_process(folder):
    tiny_model(folder)
    ranks = from_ranks(2, on_a_rank, str(folder))
    one = every_case(folder)
    for two, apart in ranks:
        for case, wanted in one.items():
            check_same(two[case], wanted, 1e-8)
        for case in apart:
            assert abs(apart[case][0] - one[case][0]) > 1e-4, case
    # Ranks that do not look at each other take the same step all the same.
    (_, first), (_, second) = ranks
    for case in first:
        for name, grad in first[case][1].items():
            torch.testing.assert_close(second[case][1][name], grad, rtol=1e-8, atol=1e-8)


PROXIMAL = "infonce(temperature=0.05) + 1.0*cllr(solver=proximal, alpha=60)"
BILINEAR = "infonce(similarity=bilinear, temperature=1)"


def trainer_of(model, loss, out, steps=4, **arguments):
    given = {"learning_rate": 1e-2, "save_steps": 2, "per_device_train_batch_size": 8} | arguments
    args = Arguments(output_dir=str(out), max_steps=steps, report_to=[], disable_tqdm=True, use_cpu=True, **given)
    data = Dataset.from_dict({name: texts * 4 for name, texts in COLUMNS.items()})
    data = dict.fromkeys(loss, data) if isinstance(loss, dict) else data
    return SentenceTransformerTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, loss=loss)


def made(folder, spec, out, **arguments):
    model = tiny_model(folder, dropout=0.1)
    loss = dipole.text.ContrastiveLoss(model, spec)
    return trainer_of(model, loss, out, **arguments), loss


def trained(folder, spec, out, resumed=None, **arguments):
    trainer, loss = made(folder, spec, out, **arguments)
    trainer.train(resume_from_checkpoint=resumed and str(resumed))
    return trainer, loss


def difference(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("spec", [PROXIMAL, BILINEAR, "infonce(temperature=learned, init=0.07) + 0.1*dp"])
def test_resumed_is_uninterrupted(folder, tmp_path, spec):
    trainer, whole = made(folder, spec, tmp_path / "a")
    start = {name: value.clone() for name, value in whole.objective.state_dict().items()}
    trainer.train()
    assert all(bool((value != start[name]).any()) for name, value in whole.objective.state_dict().items())
    _, again = trained(folder, spec, tmp_path / "b", tmp_path / "a" / "checkpoint-2")  # another output folder
    assert difference(whole, again) == 0


def test_gradients_of_the_objective_are_those_of_one_step(folder, tmp_path):
    """A trainer that clears the model's gradients alone would add up those of W from step to step."""
    _, whole = trained(folder, BILINEAR, tmp_path / "a")
    other, alone = made(folder, BILINEAR, tmp_path / "b")
    for callback in list(other.callback_handler.callbacks):
        if "ZeroGrad" in type(callback).__name__:  # sentence-transformers has one since 6.2
            other.remove_callback(callback)
    other.train()
    assert difference(whole, alone) == 0
    assert alone.objective.terms[0].W.grad is None


def test_a_moved_checkpoint(folder, tmp_path):
    _, whole = trained(folder, BILINEAR, tmp_path / "a")
    moved = shutil.move(tmp_path / "a" / "checkpoint-2", tmp_path / "moved")
    message = r"terms.0.W.*the checkpoint was moved.*load_objective"
    refused(CheckpointError, message, trained, folder, BILINEAR, tmp_path / "b", moved)
    other, again = made(folder, BILINEAR, tmp_path / "b")
    again.load_objective(moved)
    other.train(resume_from_checkpoint=str(moved))
    assert difference(whole, again) == 0
    longer = dipole.text.ContrastiveLoss(tiny_model(folder), "infonce + cllr")
    refused(CheckpointError, r"holds 0.terms.0.W \(16, 16\); .* has 0.terms.1.L", longer.load_objective, moved)


def test_a_checkpoint_of_another_loss_or_objective(folder, tmp_path):
    """Without parameters it resumes. An objective with some does not start from new ones in silence."""
    model = tiny_model(folder)
    trainer_of(model, losses.MultipleNegativesRankingLoss(model), tmp_path, steps=2, save_only_model=True).train()
    first, written = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    assert not (first / "objective.safetensors").exists()
    trained(folder, "infonce", tmp_path, first)
    message = "written without the parameters of the objective"
    refused(CheckpointError, message, trained, folder, BILINEAR, tmp_path, first)
    message = r"trained with infonce, and this loss is triplet \+ 0.1\*dp"
    refused(CheckpointError, message, trained, folder, "triplet + 0.1*dp", tmp_path, written)
    trained(folder, "infonce(temperature=0.2)", tmp_path, written)  # the same terms with other numbers


def test_proximal_steps_and_the_projection(folder, tmp_path):
    """Columns of L become zero exactly, which no gradient does. L is a Dense module of what is saved."""
    _, loss = trained(folder, PROXIMAL, tmp_path / "a")
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
    own, found = (each.encode(COLUMNS["anchor"], convert_to_tensor=True) for each in (loss.model, again))
    torch.testing.assert_close(found, own @ L.T)


def test_the_best_checkpoint_brings_its_parameters(folder, tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 3e-2}
    trainer, loss = trained(folder, BILINEAR, tmp_path, **best, **every)
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

        trained(folder, "infonce + 0.5*counts_steps", tmp_path, steps=4, save_steps=100)
    assert rates == [(pytest.approx(1e-2 * left / 4), 0.5, 5 - left, 4) for left in (4, 3, 2, 1)]


def test_a_loss_of_no_trainer_is_told_and_left_alone(folder, tmp_path):
    model = tiny_model(folder)
    earlier = dipole.text.ContrastiveLoss(model, PROXIMAL)
    with pytest.warns(UserWarning, match="no trainer looks after the objective"):
        earlier(features(model), None)
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
