"""How a run takes group gradients: which engine, over which parameters, and every combination that is refused."""

import logging
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import TrainingArguments

from hf_cgd.arithmetic import HOST, Arithmetic, DeviceArithmetic
from hf_cgd.data.groups import GroupInfo
from hf_cgd.distributed.communication import Communication, ProcessGroupCommunication
from hf_cgd.gradients import (
    AutoEngine,
    GradientEngine,
    PerGroupEngine,
    TensorHookEngine,
    needs_static_shapes,
)
from hf_cgd.gradients.compiled import compiled_parts, prepare_for_compiled_networks
from hf_cgd.gradients.scope import DEFAULT_LAYERS, HEAD, gradient_scope, parse_gradient_layers
from hf_cgd.gradients.structure import SYNCED
from hf_cgd.models.batch_norm import has_synced
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.estimators import Scale
from hf_cgd.robust_loss.excess import ExcessClip
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.config import options_of
from hf_cgd.trainer.sharding import is_compiled, is_sharded, require_supported, require_that_fsdp_runs

logger = logging.getLogger(__name__)

STATIC_ENGINES = ("auto", "single_pass", "per_group")
"""Values of `gradient_engine` that work on XLA devices."""
COMPILED = (
    "torch.compile: group gradients are compared on the first step. Where compiled code hides what the single pass "
    "needs, each step takes one backward pass for each group, and a line of the log (INFO) says so."
)
"""Told when a run begins."""


class EngineChoice:
    """Refuses what does not go together, and builds the loss of a run with the engine that its options ask for.

    Args:
        args: those of the Trainer; read anew at each call, since a search changes them.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        self.tensor_hooks: TensorHookEngine | None = None
        """The engine in use where it works by tensor hooks."""
        self._tensor_hooks_made_for: tuple[Any, str] | None = None
        self._tensor_hooks_over: list[str] = []
        """Names of the parameters that it was built for."""
        self._compiled = False
        """Whether the network of the last engine is compiled."""
        self._communication: tuple[Accelerator, Communication] | None = None
        self._scope_of_run: list[str] | None = None
        """Names of the parameters that group gradients are compared over; None where they need not be watched."""

    def require_supported(self, objective: Objective, model: nn.Module, accelerator: Accelerator) -> None:
        """Raise a ValueError unless this kind of run can train by the objective."""
        args, options = self._args, options_of(self._args)
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs are visible to one process, which transformers would drive by DataParallel. "
                "Group losses need one process per GPU: start the script with `accelerate launch`, or set "
                "CUDA_VISIBLE_DEVICES to a single GPU."
            )
        require_that_fsdp_runs(accelerator)
        if needs_static_shapes(args.device):
            _require_static_shapes(options.forward_mode, options.gradient_engine)
        if options.forward_mode == "split" and accelerator.num_processes > 1:
            _require_passes_without_others(model, accelerator)
        if objective.needs_gradients:
            engine, timing = options.gradient_engine, options.weight_timing
            require_supported(objective.name, model, args, accelerator, engine, timing)

    def build_loss(
        self,
        objective: Objective,
        groups: GroupInfo,
        model: nn.Module,
        accelerator: Accelerator,
        excess_clip: ExcessClip | None = None,
    ) -> GroupRobustLoss:
        """The loss of a run, with its gradient engine.

        Args:
            objective: what is minimised.
            groups: the training groups.
            model: the network; its parameters now are those that are trained.
            accelerator: the Trainer's.
            excess_clip: of reference losses; None without.

        Raises:
            ValueError: options, groups and model do not fit the objective.
        """
        args, options = self._args, options_of(self._args)
        communication = self.communication_of(accelerator)
        engine, rows_of = None, ""
        if objective.needs_gradients:
            engine, names = self._engine(objective, model, accelerator, communication)
            rows_of = _rows_of(names, options.gradient_engine == "sketch")
        late = args.gradient_accumulation_steps > 1 or (engine is not None and engine.timing == "after_backward")
        return GroupRobustLoss(
            objective,
            groups,
            [] if engine is None else engine.parameters,
            engine=engine,
            weight_timing=options.weight_timing or ("next" if late else "current"),
            communication=communication,
            loss_scale=_loss_scale(accelerator.scaler, args.device),
            nonfinite=options.nonfinite,
            arithmetic=arithmetic_on(args.device),
            excess_clip=excess_clip,
            weights_enter="sampling" if options.group_sampling == "weights" else "loss",
            rows_of=rows_of,
        )

    def log_run(self, robust_loss: GroupRobustLoss | None, model: nn.Module) -> None:
        """Say in the log what a run trains by: objective, groups, and where group gradients are taken."""
        self._scope_of_run = None
        if robust_loss is None:
            return
        objective, groups = robust_loss.objective, robust_loss.groups
        counts = ", ".join(f"{n} ({c})" for n, c in zip(groups.names, groups.counts or (), strict=False))
        logger.info("Objective %s, learning rate %g", objective, self._args.learning_rate)
        logger.info("  %d groups: %s", len(groups), counts or ", ".join(groups.names))
        if not objective.needs_gradients:
            return
        if self.tensor_hooks is not None:
            size = self.tensor_hooks.size
            logger.info("  Group gradients over %d parameters, by tensor hooks in the backward pass", size)
            logger.info("  weight_timing='next': a step's statistics set the weights of the following one")
            return
        if self._compiled:
            logger.warning(COMPILED)
        scope = self._scope(model)
        self._scope_of_run = list(scope)
        size = sum(parameter.numel() for parameter in scope.values())
        logger.info("  Group gradients over %d parameters (%s)", size, _span(self._scope_of_run))

    def watch_scope(self, model: nn.Module) -> None:
        """Warn, once a run, where layers were frozen or unfrozen so that `gradient_layers` now stands for others."""
        if self._scope_of_run is None:
            return
        now = list(self._scope(model))
        if now == self._scope_of_run:
            return
        at_first, self._scope_of_run = self._scope_of_run, None
        warnings.warn(
            f"Layers were frozen or unfrozen since the run began. Group gradients are still compared over "
            f"{_span(at_first)}; gradient_layers would now choose {_span(now)}, and so will a run resumed from "
            "here. To compare over those, call train() anew; to compare over the same all along, name them by regular "
            "expressions in gradient_layers.",
            GroupRobustWarning,
            stacklevel=2,
        )

    def _engine(
        self, objective: Objective, model: nn.Module, accelerator: Accelerator, communication: Communication
    ) -> tuple[GradientEngine, list[str]]:
        """The engine, and the names of the parameters that it was built for."""
        options = options_of(self._args)
        _require_gradients_without_others(model, accelerator, options.gradient_layers)
        engine = options.gradient_engine
        if engine == "tensor_hooks" or is_sharded(model, accelerator):
            if options.forward_mode != "joint":
                raise ValueError(
                    "forward_mode='split' has a forward pass for each group, but tensor hooks (sharded parameters, or "
                    "gradient_engine='tensor_hooks') follow a single one. Use forward_mode='joint'."
                )
            # Built while the parameters are whole, and kept: FSDP leaves neither their shapes nor their identity.
            made_for = (options.gradient_layers, engine)
            known = self.tensor_hooks is not None and self.tensor_hooks.belongs_to(model)
            if not known or made_for != self._tensor_hooks_made_for:
                scope = self._scope(model)
                parameters = list(scope.values())
                self.tensor_hooks = TensorHookEngine(model, parameters, engine == "sketch", self._args.device)
                self._tensor_hooks_made_for, self._tensor_hooks_over = made_for, list(scope)
            assert self.tensor_hooks is not None
            return self.tensor_hooks, self._tensor_hooks_over
        self.tensor_hooks = None
        _require_graph_of_each_step(accelerator)
        # A model may come compiled as well, whole or in parts.
        compiled = is_compiled(self._args, accelerator) or next(compiled_parts(model), None) is not None
        self._compiled = compiled
        if compiled:
            # Group gradients need several backward passes over one graph.
            prepare_for_compiled_networks()
        scope = self._scope(model)
        parameters, names = list(scope.values()), list(scope)
        # The fast engines need one forward pass of the whole batch, and one coefficient for each group.
        if engine == "per_group" or options.forward_mode == "split" or not objective.linear_in_losses:
            return PerGroupEngine(parameters), names
        static, agree = needs_static_shapes(self._args.device), communication.all_agree
        return AutoEngine(model, parameters, engine, agree, static=static, compiled=compiled), names

    def communication_of(self, accelerator: Accelerator) -> Communication:
        """What sums over the processes: one for all runs, since it may hold a process group of its own."""
        if self._communication is None or self._communication[0] is not accelerator:
            self._communication = accelerator, communication_of(accelerator, self._args)
        return self._communication[1]

    def _scope(self, model: nn.Module) -> dict[str, nn.Parameter]:
        layers = options_of(self._args).gradient_layers
        return gradient_scope(model, DEFAULT_LAYERS if layers is None else layers)


def _rows_of(names: list[str], are_sketches: bool) -> str:
    """What the rows of an engine stand for: the parameters in short, and a number that is another for others."""
    what = "sketches of gradients" if are_sketches else "gradients"
    return f"{what} over {len(names)} parameters ({_span(names)}; {zlib.crc32(chr(10).join(names).encode()):08x})"


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def arithmetic_on(device: torch.device) -> Arithmetic:
    """Where the statistics of a run are kept: on an accelerator, so that no step waits for it."""
    fixed_shapes = needs_static_shapes(device)
    return DeviceArithmetic(device, fixed_shapes) if fixed_shapes or device.type != "cpu" else HOST


def _loss_scale(scaler: Any, device: torch.device) -> Callable[[], Scale] | None:
    """The factor of a `GradScaler`, None for none; on a device as a tensor, since to read it would be a wait."""
    if scaler is None or device.type == "cpu":
        return None if scaler is None else scaler.get_scale
    one = torch.ones((), device=device)
    return lambda: scaler.scale(one)


def communication_of(accelerator: Accelerator, args: TrainingArguments) -> Communication:
    """Sums over the processes of a run."""
    if accelerator.num_processes == 1:
        return Communication()
    if dist.is_initialized():
        return ProcessGroupCommunication(args.device, args.ddp_timeout_delta)
    return Communication(
        lambda tensor: accelerator.reduce(tensor.to(args.device), reduction="sum").to(tensor.device),
        accelerator.num_processes,
        accelerator.process_index,
    )


def _require_passes_without_others(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise a ValueError where the processes exchange something in each pass, of which they have other numbers."""
    synced = has_synced(model)
    if synced or is_sharded(model, accelerator):
        what = "SyncBatchNorm" if synced else "sharded parameters (FSDP, DeepSpeed)"
        raise ValueError(
            f"forward_mode='split' has a forward pass for each group that a process holds, and with {what} each pass "
            "waits for all processes, which hold other groups. Use forward_mode='joint'."
        )


def _require_gradients_without_others(model: nn.Module, accelerator: Accelerator, layers: Any) -> None:
    """Raise a ValueError where a backward pass for one group would take in what others have for another one.

    Passes to the head end before they come to a SyncBatchNorm; should one lie behind it, the first step tells.
    """
    of_head = layers is not None and parse_gradient_layers(layers) == HEAD
    if accelerator.num_processes > 1 and not of_head and has_synced(model):
        raise ValueError(SYNCED)


def _require_graph_of_each_step(accelerator: Accelerator) -> None:
    """Raise a ValueError where DDP takes the pass that asks for group gradients for the backward pass of its step.

    With a static graph it sums the gradients of the first step when a backward pass reaches the network's outputs, and
    nothing is summed in the pass that follows: each process would go on with gradients of its own.
    """
    handler = getattr(accelerator, "ddp_handler", None)
    if accelerator.num_processes > 1 and handler is not None and handler.static_graph:
        raise ValueError(
            "ddp_static_graph=True expects one backward pass in each step, and CGD asks for the groups' gradients in "
            "a pass before it: the processes would train models of their own. Leave ddp_static_graph unset, or set "
            "gradient_engine='tensor_hooks', which takes them in the step's own pass."
        )


def _require_static_shapes(forward_mode: str, engine: str) -> None:
    if forward_mode != "joint":
        raise ValueError(
            "forward_mode='split' runs the network on batches of another size in every step, and XLA devices would "
            "compile it for each. Use forward_mode='joint'."
        )
    if engine not in STATIC_ENGINES:
        raise ValueError(
            f"gradient_engine={engine!r} takes slices as long as groups are, and XLA devices would compile each anew. "
            f"Expected one of {', '.join(STATIC_ENGINES)}."
        )
