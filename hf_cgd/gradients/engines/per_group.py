"""The exact engine: one `autograd.grad` per group. Right for any network, and the oracle of every faster one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.arithmetic import moved
from hf_cgd.gradients.autograd import (
    Cut,
    flatten,
    modules_around,
    owned_parameters,
    require_dense,
    scalar_with_gradients,
    unflatten,
    weighted_sum,
)
from hf_cgd.gradients.base import GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.compiled import as_hook
from hf_cgd.gradients.fast_engine import FastEngine
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.structure import LossGraph, require_unsynced


class PerGroupEngine(GradientEngine):
    """Gradients of the groups' loss sums over the scope, one backward pass per group that is present.

    Args:
        parameters: the gradient scope, all trainable. P is their total number of elements.
    """

    name = "per_group"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._checked = False

    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """Gradient of the *sum* of each listed group's losses.

        Sums, so that micro-batches and processes can be added up. The graph of `losses` [B] is kept for the backward
        pass of the step; `.grad` is not touched. A parameter that the loss does not depend on, or that is frozen,
        gives zeros.

        Raises:
            ValueError: re-entrant gradient checkpointing hides the scope, or the losses do not depend on it.
        """
        self.require_visible(losses)
        rows = []
        for group in groups:
            in_group = moved(group_ids == group, losses.device, losses.dtype)
            gradients = _gradients(losses, self.parameters, in_group, True)
            rows.append(flatten(gradients, self.parameters))
        return GroupGradients(torch.stack(rows))

    def require_visible(self, losses: Tensor) -> None:
        """Raise a ValueError where no pass for a group can be taken; once.

        Re-entrant checkpointing hides the scope, the losses do not use it, or SyncBatchNorm lies before it.
        """
        if not self._checked:
            _require_visible_parameters(losses, self.parameters)
            self._checked = True


class PerGroupCutEngine(FastEngine):
    """The same, with each group's gradient at the cut as well, so that the final pass runs through the body alone.

    Exact for any network whose body reaches the loss only through the first input of the scope, and whose parameters
    behind that input are all in the scope or frozen: `AutoEngine` checks it.

    Args:
        model: the network that runs the forward pass, or what it wraps.
        parameters: the gradient scope.
    """

    name = "per_group with the cut"

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._scope = frozenset(map(id, self.parameters))
        self._modules = list(owned_parameters(model, self.parameters))
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._cut: Cut | None = None
        self._seen = False
        self._around = modules_around(model, self.parameters)
        self._hook, self._enter_hook = as_hook(self._note), as_hook(self._enter)

    @property
    def cut(self) -> Cut | None:
        """See `FastEngine.cut`."""
        return self._cut

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass: within, the first input of the scope is noted."""
        self._cut, self._seen = None, False
        hooks = [module.register_forward_pre_hook(self._enter_hook, with_kwargs=True) for module in self._around]
        hooks += [module.register_forward_pre_hook(self._hook, with_kwargs=True) for module in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def group_gradients(
        self,
        losses: Tensor,
        group_ids: Tensor,
        groups: Sequence[int],
        keep_graph: bool = False,
    ) -> GroupGradients:
        """See `PerGroupEngine.group_gradients`; the graph of the scope is used up unless `keep_graph`.

        Raises:
            NotExactError: the scope was not seen in the forward pass, its first input was changed in place,
                parameters outside of the scope are reached by another way, or a gradient is sparse or has a hook.
        """
        cut, self._cut = self._cut, None
        if not self._seen:
            raise NotExactError("no module of the scope was seen in the forward pass")
        if cut is not None:
            cut.require_intact()
        graph = LossGraph(losses, [], cut)
        graph.require_visible()
        graph.require_within_scope(self._scope, self._names)
        self._require_no_hooks()
        sources = [*self.parameters, *([] if cut is None else [cut.tensor])]
        rows, at_cut = [], []
        used = [False] * len(self.parameters)
        for place, group in enumerate(groups):
            last = place == len(groups) - 1
            in_group = moved(group_ids == group, losses.device, losses.dtype)
            gradients = _gradients(losses, sources, in_group, keep_graph or not last)
            require_dense(gradients)
            used = [known or gradient is not None for known, gradient in zip(used, gradients, strict=False)]
            rows.append(flatten(gradients[: len(self.parameters)], self.parameters))
            if cut is not None:
                at_cut.append(torch.zeros_like(cut.tensor) if gradients[-1] is None else gradients[-1])
        first = GroupOrder.by_group(group_ids, groups, losses.device).first
        return _CutGradients(torch.stack(rows), self.parameters, used, first, cut, at_cut)

    def _require_no_hooks(self) -> None:
        """Raise a NotExactError for hooks of parameters, which would change each group's gradient and then the sum."""
        for parameter in self.parameters:
            if parameter._backward_hooks:
                raise NotExactError(f"{self._names.get(id(parameter))} has a hook on its gradient")

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self._seen and torch.is_grad_enabled():
            self._seen, self._cut = True, self._cut or Cut.of((arguments, keywords))

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._cut is None and not self._seen and torch.is_grad_enabled():
            self._cut = Cut.of((arguments, keywords))


def _gradients(losses: Tensor, sources: Sequence[Tensor], weights: Tensor, keep_graph: bool) -> list[Tensor | None]:
    """Gradients with respect to the sources, None for those that are frozen or not reached."""
    places = [place for place, source in enumerate(sources) if source.requires_grad]
    gradients: list[Tensor | None] = [None] * len(sources)
    if places:
        wanted = [sources[place] for place in places]
        found = torch.autograd.grad(losses, wanted, weights, retain_graph=keep_graph, allow_unused=True)
        for place, gradient in zip(places, found, strict=True):
            gradients[place] = gradient
    return gradients


def _require_visible_parameters(losses: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    graph = LossGraph(losses, [], None)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    require_unsynced(losses, {id(parameter) for parameter in trainable})
    if trainable and not graph.hides_parameters and not any(id(parameter) in graph.reached for parameter in trainable):
        shapes = ", ".join(str(list(parameter.shape)) for parameter in trainable[:4])
        raise ValueError(
            f"The losses depend on none of the {len(trainable)} parameters that group gradients are compared over (of "
            f"shapes {shapes}{', …' if len(trainable) > 4 else ''}), so that group weights would never move. Expected "
            "layers that the network uses for its losses: set gradient_layers to regular expressions that match some, "
            "or pass the gradient_scope of the very model that is trained."
        )
    hidden = graph.hides_parameters and any(p.requires_grad and id(p) not in graph.reached for p in parameters)
    if hidden or (graph.hides_parameters and _checkpoint_is_needed(losses, parameters)):
        graph.require_visible()


def _checkpoint_is_needed(losses: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a pass to the parameters runs through a re-entrant checkpoint."""
    try:
        _gradients(losses[:1], parameters, torch.zeros_like(losses[:1]), True)
    except RuntimeError as error:
        return "use_reentrant" in str(error)
    return False


class _CutGradients(GroupGradients):
    reads_graph = False

    def __init__(
        self,
        rows: Tensor,
        parameters: list[nn.Parameter],
        used: list[bool],
        first: Tensor,
        cut: Cut | None,
        at_cut: list[Tensor],
    ) -> None:
        super().__init__(rows)
        self._parameters = parameters
        self._used = used
        self._first = first
        self._cut = cut
        self._at_cut = at_cut

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        of_groups = coefficients[self._first]
        gradients = unflatten(weighted_sum(self.rows, of_groups), self._parameters)
        # Parameters that no loss depends on get no gradient, as in an ordinary backward pass.
        tensors: list[Tensor] = list(compress(self._parameters, self._used))
        gradients = list(compress(gradients, self._used))
        if self._cut is not None:
            tensors.append(self._cut.tensor)
            weighted = zip(of_groups.unbind(), self._at_cut, strict=True)
            gradients.append(sum((c.to(g) * g for c, g in weighted), torch.zeros_like(self._at_cut[0])))
        return scalar_with_gradients(loss, tensors, gradients)
