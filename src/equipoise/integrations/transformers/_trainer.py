# SPDX-License-Identifier: Apache-2.0
"""`RoutedTrainer`: transformers' Trainer with the surrogate of every router in its loss.

Legend: V tokens of the vocabulary, N tokens that count in all batches of one optimiser step.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import nested_gather

from equipoise.integrations.transformers._checkpoint import load_renamed, load_router_states, router_states
from equipoise.integrations.transformers._layer import ROUTER, routed_blocks
from equipoise.nn import Readouts, Surrogate, capture
from equipoise.nn._credit import counted_rows
from equipoise.nn._routings import Routings

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

STATE = "routers.pt"
"""The file in a checkpoint with the routers' state and the surrogate's."""
LOGGED = ("max_violation", "fraction_dropped", "effective_sample_size", "router_entropy")
_IGNORED = -100


class RoutedTrainerMixin(_Base):
    """Lets a Trainer train equipoise's routers: `class MyTrainer(RoutedTrainerMixin, SomeTrainer)`.

    - The loss of a training batch is that of a `Surrogate`: the cross-entropy of each token, the score-function terms
      and balance losses of all layers. With N tokens in all batches of an optimiser step (gradient accumulation,
      several devices), every batch is divided by N, as the Trainer does. Label smoothing is part of each token's loss.
    - After the optimiser step, routers update what is not learnt by gradient: prices, biases, schedules. They move once
      for each batch of the step; with gradient accumulation, divide the rate of `loss-free` by the number of batches.
    - What the Trainer logs holds, by layer, the load violation (MaxVio), the fraction dropped, the effective sample
      size and the router's entropy, of the last batch, under `routing/<layer>/<name>`.
    - Checkpoints hold the routers' state and the baseline, so that an interrupted run continues with the same losses.
    - Evaluation is the Trainer's own: the model's loss, with routers in evaluation mode.

    Args:
        surrogate: computes the loss; None: `Surrogate()`. `Surrogate(Readouts(model, vocabulary))` has a baseline for
            each layer, whose heads the Trainer's optimiser trains.
        args: as the Trainer's.
        kwargs: as the Trainer's.

    Example:
        Put it before a subclass of transformers' Trainer, such as one of another package; `RoutedTrainer` shows a run.

        >>> class OtherTrainer(Trainer):
        ...     pass
        >>> class MyTrainer(RoutedTrainerMixin, OtherTrainer):
        ...     pass
        >>> MyTrainer.compute_loss is RoutedTrainerMixin.compute_loss
        True
    """

    def __init__(self, *args: Any, surrogate: Surrogate | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.surrogate = Surrogate() if surrogate is None else surrogate
        self._routed: list[Routings] = []
        self._last: Routings | None = None
        self._parts: dict[str, Tensor] = {}
        self._steps = 0
        _check_routed(self.model)
        _check_loss(self.compute_loss_func, getattr(self.model, "config", None))
        self.add_callback(_UpdateRouters(self))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Computes the loss of a batch: in training the surrogate's, in evaluation the model's own.

        Args:
            model: wrapped or not.
            inputs: with `labels`, of which -100 does not count, or `shift_labels`, which are shifted already.
            return_outputs: whether to return the model's outputs too.
            num_items_in_batch: N; None: the mean over this batch.

        Returns:
            The loss, or the loss and the outputs.
        """
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        _check_labels(inputs)
        labels = _next_tokens(inputs)
        given = {name: x for name, x in inputs.items() if name not in ("labels", "shift_labels")}
        # The layers are the same modules within any wrapper; their names are the model's own.
        inner: Any = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        reads = isinstance(self.surrogate.baseline, Readouts)
        with capture(inner, inputs=reads) as routings:
            outputs: Any = model(**given)
        losses, counts = token_losses(outputs.logits, labels, self.args.label_smoothing_factor)
        counted = counted_rows(counts.reshape(-1), routings)
        parts = self.surrogate.parts(losses, routings, mask=counts, targets=labels if reads else None)
        loss, task, balance = parts.loss, parts.task, parts.balance
        self.loss_is_scaled_for_ga = num_items_in_batch is not None
        if num_items_in_batch is not None:
            own = counts.numel() if counted is None else counted.sum()
            processes = self.accelerator.num_processes // self.get_tp_size()
            many = processes if self.args.average_tokens_across_devices else 1
            loss, task, balance = (x * own / num_items_in_batch * many for x in (loss, task, balance))
            batches = 1
        else:
            batches = self.current_gradient_accumulation_steps  # by which the Trainer divides the loss itself
        for name, x in (("task_loss", task), ("balance_loss", balance)):
            self._parts[name] = self._parts.get(name, 0.0) + x / batches
        self._routed.append(routings)
        return (loss, outputs) if return_outputs else loss

    def update_routers(self) -> None:
        """Updates what routers learn without gradient, from the batches of the optimiser step that has ended."""
        for routings in self._routed:
            routings.update()
        if self._routed:
            self._last = self._routed[-1]
        self._steps += 1
        self._routed.clear()

    def forget_parts(self) -> None:
        """Begins the means of the loss's parts anew, at the start and after each log."""
        self._parts.clear()
        self._steps = 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, with the parts of the training loss and the telemetry of the last batch beside it.

        Args:
            logs: what the Trainer logs.
            args: as the Trainer's.
            kwargs: as the Trainer's.
        """
        if "loss" in logs and self._last is not None:
            for name, total in self._parts.items():  # as the Trainer's own: over all processes, by the steps since
                gathered: Any = nested_gather(total, self.args.parallel_mode)
                logs[name] = gathered.mean().item() / max(self._steps, 1)
            self.forget_parts()
            logs.update(_telemetry(self._last))
        super().log(logs, *args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Creates the Trainer's optimiser, and gives it the surrogate's readouts too.

        Args:
            args: as the Trainer's.
            kwargs: as the Trainer's.
        """
        optimizer = super().create_optimizer(*args, **kwargs)
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        readouts = [p for p in self.surrogate.parameters() if id(p) not in known]
        if readouts:
            optimizer.add_param_group({"params": readouts, "weight_decay": 0.0})
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the parameters that weight decay is for: the Trainer's, without the tables of token priors.

        Args:
            model: the model.
        """
        return [name for name in super().get_decay_parameter_names(model) if f"{ROUTER}." not in name]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self.args.should_save:
            folder = os.path.join(self._get_output_dir(trial=None), f"checkpoint-{self.state.global_step}")
            model: Any = self.model
            state = {"surrogate": self.surrogate.state_dict(), "routers": router_states(model)}
            torch.save(state, os.path.join(folder, STATE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_routing(resume_from_checkpoint, self.model if model is None else model)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.state.best_model_checkpoint is not None:
            self._load_routing(self.state.best_model_checkpoint, self.model)

    def _load_routing(self, folder: str, model: Any) -> None:
        """Loads what the Trainer does not: parameters that are stored under other names, routers, the surrogate."""
        load_renamed(model, folder)
        path = os.path.join(folder, STATE)
        if not os.path.isfile(path):
            raise ValueError(
                f"resume_from_checkpoint must be a checkpoint of a RoutedTrainer, got {folder!r} without {STATE}: load "
                "its weights with from_pretrained, and train without resuming"
            )
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        self.surrogate.load_state_dict(state["surrogate"])
        load_router_states(model, state["routers"])


class RoutedTrainer(RoutedTrainerMixin, Trainer):
    """transformers' Trainer for models with swapped routers; see `RoutedTrainerMixin`.

    Example:
        >>> import tempfile, torch
        >>> from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments
        >>> from equipoise.integrations.transformers import swap_routers
        >>> small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_key_value_heads=2, **small))
        >>> names = swap_routers(model, "skip-iw", loss="gating")
        >>> tokens = torch.randint(16, (4, 8))
        >>> data = [{"input_ids": row, "labels": row} for row in tokens]
        >>> how = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
        >>> args = TrainingArguments(tempfile.mkdtemp(), max_steps=1, **how)
        >>> trainer = RoutedTrainer(model=model, args=args, train_dataset=data)
        >>> trainer.train().global_step
        {'train_runtime': ...}
        1
    """


class _UpdateRouters(TrainerCallback):
    """Calls `update_routers` after every step of the optimiser, and `forget_parts` at the start."""

    def __init__(self, trainer: RoutedTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Runs when training starts or goes on."""
        self._trainer.forget_parts()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Runs after the optimiser has stepped."""
        self._trainer.update_routers()


def token_losses(
    logits: Float[Tensor, "*shape V"], labels: Int[Tensor, "*shape"], smoothing: float = 0.0
) -> tuple[Float[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """Computes the cross-entropy of every token, for a training loop of your own.

    Args:
        logits: the model's logits.
        labels: the token that each position predicts; -100 where none counts.
        smoothing: the label smoothing factor.

    Returns:
        The losses, float32, 0 where nothing counts; and which tokens count.

    Example:
        >>> losses, counts = token_losses(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]))
        >>> losses, counts
        (tensor([[1.3863, 0.0000]]), tensor([[ True, False]]))
    """
    flat = F.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=_IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )
    return flat.view(labels.shape), labels != _IGNORED


def _next_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """Returns the token that each position predicts."""
    if inputs.get("shift_labels") is not None:
        return inputs["shift_labels"]
    return F.pad(inputs["labels"], (0, 1), value=_IGNORED)[..., 1:]


def _telemetry(routings: Routings) -> dict[str, float]:
    """Returns the numbers to log."""
    return {
        f"routing/{layer}/{name}": float(stats[name])  # pyright: ignore[reportArgumentType]
        for layer, stats in routings.stats().items()
        for name in LOGGED
    }


def _check_routed(model: nn.Module | None) -> None:
    """Requires routers of ours."""
    if model is None or not routed_blocks(model):
        raise ValueError(
            f"model must have routers of ours, got {type(model).__name__} without any: call swap_routers(model, "
            f"...) first"
        )


def _check_loss(compute_loss_func: Any, config: Any) -> None:
    """Requires that no other loss takes the place of the surrogate, or is left out."""
    if compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func must be None, got a function: it sees no routing; override compute_loss, with "
            "the loop in docs/transformers.md"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits must be False in the model's config, got True: the model's auxiliary loss "
            "would be left "
            "out; routers of ours have balance losses by layer, swap_routers(model, ..., balance_loss=0.01)"
        )


def _check_labels(inputs: Mapping[str, Any]) -> None:
    """Requires labels."""
    if inputs.get("labels") is None and inputs.get("shift_labels") is None:
        raise ValueError(
            f"inputs must have labels in training, got {', '.join(inputs)}: use "
            f"DataCollatorForLanguageModeling(mlm=False)"
        )
