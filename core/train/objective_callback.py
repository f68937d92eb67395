"""A callback for trainers of transformers: proximal steps of objectives, and their parameters in checkpoints.

Importing this module adds it to the default callbacks of transformers, and so of sentence-transformers. It finds the
objectives that are trained with the trainer's model. In other trainers it does nothing.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dipole.core.objectives.objective import Composite
from dipole.core.utils.distributed import world_size
from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.extras import needing
from dipole.core.utils.files import atomic_write

with needing("text", __name__):
    from transformers.trainer import DEFAULT_CALLBACKS
    from transformers.trainer_callback import ExportableState, TrainerCallback

FILE = "objective.safetensors"
STATE = "trainer_state.json"

_carriers: WeakValueDictionary[int, Any] = WeakValueDictionary()


def carry(carrier: Any, in_model: bool = False) -> None:
    """Register a loss for trainers, with `objective` and `trains(model)`: whether it is the loss of that model.

    It gets `taken`, whether a trainer's callback has found it. A loss of no model sets `called` at each call, so the
    next optimizer step is its own. An optional `check_dataset` gets the training set. `in_model`: the model saves it.
    """
    carrier.taken, carrier.in_model = False, in_model
    _carriers[id(carrier)] = carrier


def _losses_of(model: Any) -> list[Any]:
    """Return the losses that are trained with a model."""
    return [each for each in _carriers.values() if each.trains(model)]


def _refuse_other_losses(model: nn.Module, *_: Any) -> None:
    """Check the checkpoint that a trainer resumes, before its optimizer is loaded. Callbacks are called after that."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_load_from_checkpoint":
        if frame.f_back is None:
            return  # not a trainer's
        frame = frame.f_back
    folder = Path(frame.f_locals[frame.f_code.co_varnames[1]])
    if (folder / STATE).is_file():
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        _require_same(_losses_of(model), state.get("global_step"), state.get("stateful_callbacks", {}))


def _require_same(carriers: list[Any], step: Any, callbacks: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's attributes of the callback. Raise CheckpointError if it belongs to other objectives."""
    kept = callbacks.get(ObjectiveCallback.__name__) or {}
    if isinstance(kept, list):
        kept = kept[0]
    attributes: dict[str, Any] = kept.get("attributes", {})
    own, before = [str(each.objective) for each in carriers], attributes.get("objectives", [])
    known = list(zip(map(_terms, before), attributes.get("parameters", []), strict=False))
    if own and before and not any(each in known for each in zip(map(_terms, own), _shapes(carriers), strict=True)):
        raise CheckpointError(
            f"the checkpoint of step {step} belongs to another loss: it was trained with {'; '.join(before)}, and this "
            f"loss is {'; '.join(own)}. Resume with that loss, or start anew from the weights of the model."
        )
    return attributes


def _shapes(carriers: list[Any]) -> list[dict[str, list[int]]]:
    """Return the names and shapes of each objective's state."""
    return [{name: [*value.shape] for name, value in each.objective.state_dict().items()} for each in carriers]


def _called() -> list[Any]:
    """Return the losses of no model that were called since the last optimizer step, and forget their calls."""
    found = [each for each in _carriers.values() if getattr(each, "called", False)]
    for each in found:
        each.called = False
    return found


class ObjectiveCallback(TrainerCallback, ExportableState):
    """Runs `after_step`, clears gradients, saves and resumes the parameters of the objectives of a trainer.

    A checkpoint folder gets `objective.safetensors`. `trainer_state.json` has its place and digest, so a run resumes
    only with these parameters. At the start all ranks take those of rank 0.

        >>> from transformers import Trainer, TrainingArguments
        >>> clip = torch.nn.Linear(4, 3)
        >>> loss_of = dipole.compute_loss("infonce(temperature=learned)", model=clip, dim=3)
        >>> arguments = TrainingArguments(folder, use_cpu=True, report_to=[])
        >>> trainer = Trainer(clip, arguments, compute_loss_func=loss_of, callbacks=[ObjectiveCallback()])

    Raises:
        CheckpointError: the resumed checkpoint has no or other parameters of this objective.
    """

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._folder: Path | None = None
        self._check: RemovableHandle | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs.get("model")
        if isinstance(model, nn.Module) and _losses_of(model):
            self._check = model.register_load_state_dict_pre_hook(_refuse_other_losses)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._check is not None:  # a saved model does not keep the hook, and so needs no dipole
            self._check.remove()
        optimised = {id(p) for group in kwargs["optimizer"].param_groups for p in group["params"]}
        self._found = [
            each for each in _losses_of(kwargs["model"]) if {id(p) for p in each.objective.parameters()} <= optimised
        ]
        for each in self._found:
            each.taken = True
            each.objective.zero_grad()
            if hasattr(each, "check_dataset"):
                each.check_dataset(getattr(kwargs["train_dataloader"], "dataset", None))
        _called()
        if state.global_step:
            self._resume(args, state)
        # The trainer wants an entry of each callback. A run that began without this one has none.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if world_size() > 1:
            for each in self._found:
                for value in each.objective.state_dict().values():
                    dist.broadcast(value, 0)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        called = _called()
        if getattr(optimizer, "step_was_skipped", False):
            return
        for each in [*self._found, *called]:
            own = {id(parameter) for parameter in each.objective.parameters()}
            groups = [group for group in optimizer.param_groups if not own or own & {id(p) for p in group["params"]}]
            # The trainer counts the step afterwards.
            each.objective.after_step(float(groups[0]["lr"]), state.global_step + 1, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for each in self._found:  # transformers clears only the gradients of the model
            each.objective.zero_grad()
        self._folder = checkpoint_folder(args, state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        values, folder = self._values(), checkpoint_folder(args, state)
        if values and state.is_world_process_zero and folder.is_dir():
            told = json.dumps([str(each) for each in self._apart()])
            atomic_write(folder / FILE, save(values, metadata={"objectives": told}))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint and self._values():
            load_objectives(Path(state.best_model_checkpoint) / FILE, self._apart())

    def state(self) -> dict[str, Any]:
        """Return the entry of `trainer_state.json`."""
        attributes: dict[str, Any] = {}
        if self._found:
            attributes["objectives"] = [str(each.objective) for each in self._found]
            attributes["parameters"] = _shapes(self._found)
        values = self._values()
        if values and self._folder is not None:
            attributes["written"] = {"file": str(self._folder / FILE), "sha256": tensors_hash(values)}
        return {"args": {}, "attributes": attributes}

    def _apart(self) -> list[Composite]:
        """Return the objectives that are not saved with the model."""
        return [each.objective for each in self._found if not each.in_model]

    def _values(self) -> dict[str, Tensor]:
        return {name: value.detach().contiguous() for name, value in _states(self._apart()).items()}

    def _resume(self, args: Any, state: Any) -> None:
        wanted = self._values()
        attributes = _require_same(self._found, state.global_step, state.stateful_callbacks)
        if not wanted:
            return
        written = attributes.get("written")
        names = ", ".join(sorted({name.split(".", 1)[1] for name in wanted}))
        if written is None:
            raise CheckpointError(
                f"the checkpoint of step {state.global_step} was written without the parameters of the objective "
                f"({names}): it belongs to another loss. Start training anew, or resume with that loss."
            )
        if tensors_hash(wanted) == written["sha256"]:
            return  # they are loaded already
        places = [Path(written["file"]), checkpoint_folder(args, state) / FILE]
        if isinstance(args.resume_from_checkpoint, str):
            places.append(Path(args.resume_from_checkpoint) / FILE)
        for place in places:
            if place.is_file() and tensors_hash(load_file(place)) == written["sha256"]:
                load_objectives(place, self._apart())
                return
        raise CheckpointError(
            f"the parameters of the objective ({names}) at step {state.global_step} are not in "
            f"{' or '.join(dict.fromkeys(map(str, places)))}: the checkpoint was moved. Before trainer.train(...) call "
            "loss.load_objective(FOLDER) with the folder that holds the checkpoint now."
        )


def _states(objectives: list[Composite]) -> dict[str, Tensor]:
    """Return the state of all objectives by "NUMBER.NAME"."""
    states = enumerate(each.state_dict() for each in objectives)
    return {f"{number}.{name}": value for number, state in states for name, value in state.items()}


def load_objectives(file: Path, objectives: list[Composite]) -> None:
    """Load a file of `ObjectiveCallback` into objectives of the same structure."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: a checkpoint folder holds it if the objective has parameters.")
    values = load_file(file)
    own = _states(objectives)
    if {name: value.shape for name, value in values.items()} != {name: value.shape for name, value in own.items()}:
        shown = [", ".join(f"{name} {tuple(v.shape)}" for name, v in each.items()) for each in (values, own)]
        raise CheckpointError(f"{file} holds {shown[0]}; the objective has {shown[1]}. Build the loss as it was.")
    with safe_open(file, "pt") as opened:
        before = json.loads((opened.metadata() or {}).get("objectives", "null"))
    named = [str(each) for each in objectives]
    if before is not None and list(map(_terms, before)) != list(map(_terms, named)):
        raise CheckpointError(f"{file} belongs to {'; '.join(before)}, and this objective is {'; '.join(named)}.")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(values[name])


def _terms(objective: str) -> list[str]:
    """Return the names of the terms of an objective's text. Weights and numbers may change between two trainings."""
    return re.findall(r"[a-z_]\w*(?=\(|\s|$)", re.sub(r"\([^()]*\)", "", objective))


def checkpoint_folder(args: Any, state: Any) -> Path:
    """Return the trainer's checkpoint folder of the current step."""
    return Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}"


def tensors_hash(values: dict[str, Tensor]) -> str:
    """Return a hash of named tensors on any device."""
    return hashlib.sha256(save({name: value.cpu() for name, value in values.items()})).hexdigest()


defaults: list[Any] = DEFAULT_CALLBACKS
defaults.append(ObjectiveCallback)
