"""How a batch becomes an update, in every domain without a training loop of its own.

batch -> adapter.embed -> rows of all ranks -> Pairs -> objective -> loss -> gradients -> optimizer
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from dipole.core.evaluation.arrays import in_range
from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.objectives.objective import Composite, Outcome
from dipole.core.objectives.spec import Range
from dipole.core.objectives.term_values import GlobalPairs
from dipole.core.train.adapter import Adapter
from dipole.core.train.checkpoint import restoring
from dipole.core.train.config import TrainConfig
from dipole.core.train.memory_saving import PatchedEncoders, compiler_problem
from dipole.core.utils.errors import ConfigError, OptionError, TrainingError
from dipole.core.utils.sync_batch_norm import synchronize

HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype of autocast around the encoder, by train.precision."""


class Update:
    """Makes the updates of a `Run`. It owns the optimizer and the loss scale of float16.

    Raise ConfigError if a setting of [train] has no effect.
    """

    def __init__(self, run: Any) -> None:
        self._run, state = run, run.update_state
        config, adapter, objective, device = run.config.train, run.adapter, run.objective, run.device
        parameters = [*adapter.module.parameters(), *objective.parameters()]
        self._parameters = [each for each in parameters if each.requires_grad]
        self._optimizer = build_optimizer(config, self._parameters)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "16-mixed")
        if state["optimizer"]:
            with restoring():
                self._optimizer.load_state_dict(state["optimizer"])
                self.scaler.load_state_dict(state["scaler"])
        if config.sync_batch_norm and not synchronize(adapter.module):
            raise ConfigError("train.sync_batch_norm: has no effect, as there is no batch norm. Leave it out.")
        compiles = bool(config.compile or adapter.compiles)
        if compiles and (problem := compiler_problem(device)):
            run.progress.warn(f"warning: train.compile: this machine cannot compile, so nothing is ({problem}).")
            compiles = False
        encoders = PatchedEncoders(adapter.encoders(), config, compiles)
        self._forward = run.processes.wrap(ForwardPass(adapter, objective, encoders, HALF.get(config.precision)))

    def __call__(self, batch: Any) -> dict[str, Tensor | float]:
        """Make the next update of the run, and return its values by their names in metrics.jsonl.

        Raise TrainingError if the loss or gradient is not finite. It has then not reached the weights.
        """
        run, optimizer, scaler = self._run, self._optimizer, self.scaler
        config, adapter, objective = run.config.train, run.adapter, run.objective
        rate = learning_rate(config, run.step, run.total_steps, adapter.steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate

        outcome, pairs = self._forward(lambda: batch)  # DistributedDataParallel would scatter and cast tensors
        loss = outcome.loss
        run.note_terms(outcome, pairs.local_pairs)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        adapter.before_step()
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

        values: dict[str, Tensor | float] = {"train/loss": loss.detach(), "train/lr": rate}
        is_finite = math.isfinite(loss.detach() + norm)  # waits for the device, once a step
        if is_finite:
            if config.clip is not None:
                clip_grads_with_norm_(self._parameters, config.clip, norm, foreach=True)
            optimizer.step()
            objective.after_step(rate, run.step + 1, run.total_steps)
            # The mean of squares is not the square of the mean.
            values |= {"train/grad_norm": norm, "train/grad_norm_squared": norm * norm}
        # A loss scale of float16 that is too large explains a nonfinite gradient, and the step is skipped. The scale is
        # halved each time. Below 1 there must be another cause.
        elif not (scaler.is_enabled() and math.isfinite(loss.detach()) and scaler.get_scale() >= 1):
            raise TrainingError(
                f"step {run.step + 1}: {not_finite(outcome, pairs, objective, norm)} Stopped before the optimizer "
                "step. The last checkpoint is intact. Try a lower train.learning_rate, train.clip, a higher "
                "temperature, train.precision = 32."
            )
        scaler.update()
        adapter.after_step()  # also of a step that float16 skips: its rows are as good as others for a queue

        if scaler.is_enabled():
            values["train/skipped"] = float(not is_finite)
        values |= {f"train/{name}": value for name, value in adapter.metrics().items()}
        return values | {f"train/loss.{name}": term.value for name, term in outcome.terms.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"optimizer": self._optimizer.state_dict(), "scaler": self.scaler.state_dict()}


class ForwardPass(nn.Module):
    """Encoder and objective in one module, so that DistributedDataParallel sees one forward pass."""

    def __init__(
        self, adapter: Adapter, objective: Composite, encoders: PatchedEncoders, half: torch.dtype | None
    ) -> None:
        super().__init__()
        self.module = adapter.module
        self.objective = objective
        self._adapter = adapter
        self._encoders = encoders
        self._half = half

    def forward(self, batch: Callable[[], Any]) -> tuple[Outcome, GlobalPairs]:
        device, half = self._adapter.device.type, self._half
        with torch.autocast(device, half, enabled=half is not None), self._encoders():
            pairs = all_gather_pairs(self._adapter.embed(batch()))
        # In the similarity matrix half precision would cost accuracy, so the engine uses at least float32.
        return self.objective(pairs), pairs


# A loss or gradient that is not finite -------------------------------------------------------------------------------


def not_finite(outcome: Outcome, batch: GlobalPairs, objective: Composite, norm: Tensor) -> str:
    """Name the term and the place. This runs once, so it may compute."""
    shown = ", ".join(f"{name} = {float(term):.6g}" for name, term in outcome.terms.items())
    bad = [name for name, term in outcome.terms.items() if not math.isfinite(float(term))]
    if bad:
        what = f"the loss is not finite in the term{'s' * (len(bad) > 1)} {', '.join(map(repr, bad))} ({shown})"
    elif not math.isfinite(float(outcome.loss.detach())):
        what = f"the weighted sum of the terms overflows ({shown})"
    else:
        culprits = [repr(name) for name in terms_with_bad_gradient(batch, objective)]
        source = f"through the term {' and '.join(culprits)}" if culprits else "inside the encoder"
        what = f"the gradient norm is {float(norm):g} while the loss is finite ({shown}); it arises {source}"
    embeddings = list({id(x): x for pairs in batch.pairs for x in (pairs.anchors, pairs.candidates)}.values())
    rows = sum(int((~torch.isfinite(each)).any(1).sum()) for each in embeddings)
    if not rows:
        return f"{what}. The embeddings are finite."
    return f"{what}. {rows} of {sum(map(len, embeddings))} embeddings are not finite: look at the encoder and the data."


def terms_with_bad_gradient(batch: GlobalPairs, objective: Composite) -> Iterator[str]:
    """Yield the names of the terms whose own gradient is not finite."""
    leaves: dict[int, Tensor] = {}

    def leaf(x: Tensor) -> Tensor:
        return leaves.setdefault(id(x), x.detach().requires_grad_())

    # One tensor stays one leaf: objectives recognise anchors that are the candidates by identity.
    pairs = tuple(replace(p, anchors=leaf(p.anchors), candidates=leaf(p.candidates)) for p in batch.pairs)
    for name, _, term in objective:
        grads = torch.autograd.grad(
            term(replace(batch, pairs=pairs)), [*leaves.values(), *term.parameters()], allow_unused=True
        )
        if any(grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads):
            yield name


# Optimizers and learning rates ---------------------------------------------------------------------------------------


@in_range
def warmup_cosine(step: float, total: float, warmup: float = 0, peak: float = 1.0) -> float:
    """Return the learning rate of a step: a linear rise to `peak`, then half a cosine to 0 at `total`.

    Loshchilov & Hutter 2017, Eq. 5, one period. The last step of the warm-up has the peak.

        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> factor = lambda step: warmup_cosine(step, total=100, warmup=10)
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        >>> [round(warmup_cosine(step, 100, 10, peak=0.1), 4) for step in (0, 9, 10, 55, 100)]
        [0.01, 0.1, 0.1, 0.05, 0.0]

    Args:
        step: from 0.
        total: steps of the run, > warmup.
        warmup: steps of the linear rise, >= 0.
        peak: the largest rate. The default, 1, gives a factor for `torch.optim.lr_scheduler.LambdaLR`.
    """
    if max(step, 0) < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def learning_rate(config: TrainConfig, step: int, total: int, steps_per_epoch: int) -> float:
    """Return the rate of update `step` (from 0) of `total`.

    Warm-up rises linearly and reaches the peak with its last update. "cosine" then falls to 0 at `total`
    (Loshchilov & Hutter 2017, Eq. 5, one period). "step" multiplies by `decay` at each milestone.
    """
    peak = config.learning_rate
    warmup = config.in_steps(config.warmup, steps_per_epoch)
    if step < warmup or config.rate_schedule == "cosine":
        return warmup_cosine(step, total, warmup, peak)
    if config.rate_schedule == "step":
        passed = sum(step >= config.in_steps(milestone, steps_per_epoch) for milestone in config.milestones or ())
        return peak * (config.decay or 0.1) ** passed
    return peak


def build_optimizer(config: TrainConfig, parameters: Iterable[Tensor]) -> Optimizer:
    """Build the optimizer of a [train] table. Raise ConfigError if no parameter requires a gradient."""
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        raise ConfigError(
            "there is nothing to train: neither the encoder nor the objective has a parameter that learns. Choose an "
            "encoder that learns, or freeze less of it."
        )
    rate, decay = config.learning_rate, config.weight_decay
    groups: Any = wanted
    if decay:
        free = [parameter for parameter in wanted if getattr(parameter, "undecayed", False)]
        decayed = [parameter for parameter in wanted if not getattr(parameter, "undecayed", False)]
        groups = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
    # One kernel for all parameters, where PyTorch has it.
    fused = all(parameter.device.type in ("cpu", "cuda") and parameter.dtype.is_floating_point for parameter in wanted)
    betas = config.betas or (0.9, 0.999)
    kinds: dict[str, Callable[..., Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if config.optimizer in kinds:
        return kinds[config.optimizer](groups, lr=rate, betas=betas, weight_decay=decay, fused=fused)
    momentum = config.momentum or 0.0
    if config.optimizer == "lars":
        return LARS(groups, lr=rate, momentum=momentum, weight_decay=decay)
    return torch.optim.SGD(groups, lr=rate, momentum=momentum, weight_decay=decay, fused=fused)


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, Algorithm 1).

        g <- grad + weight_decay * w
        v <- momentum * v + lr * trust * ||w|| / ||g|| * g
        w <- w - v

    Vectors and scalars (biases, batch-norm scales) get neither weight decay nor the ratio, as in SimCLR's code. The
    paper writes the ratio's denominator as ||grad|| + weight_decay ||w||. Here it is the norm of the decayed gradient.

        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = LARS(model.parameters(), lr=0.3 * 1024 / 256, weight_decay=1e-6)

    Args:
        params: tensors (...) to optimise, or groups of them.
        lr: global learning rate, >= 0.
        momentum: in [0, 1).
        weight_decay: >= 0.
        trust: trust coefficient eta, > 0.

    Raises:
        OptionError: a number is outside its range, or there are no tensors.
    """

    @in_range
    def __init__(
        self,
        params: Any,
        lr: Annotated[float, Range(at_least=0)],
        momentum: Annotated[float, Range(at_least=0, below=1)] = 0.9,
        weight_decay: Annotated[float, Range(at_least=0)] = 0.0,
        trust: Annotated[float, Range(above=0)] = 1e-3,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        try:
            super().__init__(params, defaults)
        except (TypeError, ValueError) as error:
            raise OptionError(f"LARS: params must be tensors or groups of them: {error}.", "params") from None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                grad, rate = weight.grad, group["lr"]
                if weight.ndim > 1:
                    grad = grad.add(weight, alpha=group["weight_decay"])
                    w, g = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(grad)
                    # A weight or gradient of norm 0 has no direction to scale: plain step.
                    rate = rate * torch.where((w > 0) & (g > 0), group["trust"] * w / g, 1.0)
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                velocity.mul_(group["momentum"]).add_(grad * rate)
                weight.sub_(velocity)
        return loss
