"""The exact engine: one `autograd.grad` per group. Right for any network, and the oracle of every faster one."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.gradients.surrogate import Cut, NotExactError, owned_parameters, scalar_with_gradients


class GroupGradients:
    """Gradients of one micro-batch's group loss sums, and the scalar that finishes the step.

    Args:
        rows: [G, P], one row per group, in at least float32; [G, S] sketches of them from an engine that sketches.
            None where they are formed when asked for, which one that only asks for `gram()` may be spared.
    """

    def __init__(self, rows: Tensor | None = None) -> None:
        self._rows = rows

    @property
    def rows(self) -> Tensor:
        """The gradients [G, P] (or sketches [G, S])."""
        if self._rows is None:
            self._rows = self._form_rows()
        return self._rows

    def _form_rows(self) -> Tensor:
        raise NotImplementedError

    def gram(self) -> Tensor:
        """Inner products of the rows: float64 [G, G] on the CPU."""
        return gram_matrix(self.rows)

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        """What to call `backward()` on for the gradient of sum_n coefficients_n l_n, whose value is `loss`.

        Args:
            loss: that sum, with the graph of the forward pass.
            coefficients: [B], the same for all examples of a group.
        """
        return loss


class PerGroupEngine:
    """Gradients of the groups' loss sums over the scope, one backward pass per group that is present.

    Args:
        parameters: the gradient scope, all trainable. P is their total number of elements.
    """

    name = "per_group"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def recording(self) -> AbstractContextManager[None]:
        """Goes around the forward pass; this engine has nothing to record."""
        return nullcontext()

    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """Gradient of the *sum* of each listed group's losses.

        Sums, so that micro-batches and processes can be added up. The graph of `losses` [B] is kept for the backward
        pass of the step; `.grad` is not touched. A parameter that the loss does not depend on gives zeros.
        """
        rows = []
        for group in groups:
            members = (group_ids == group).to(losses)
            gradients = torch.autograd.grad(losses, self.parameters, members, retain_graph=True, allow_unused=True)
            rows.append(flatten(gradients, self.parameters))
        return GroupGradients(torch.stack(rows))


class PerGroupCutEngine:
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
        self._modules = list(owned_parameters(model, self.parameters))
        self._cut: Cut | None = None
        self._seen = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass: within, the first input of the scope is taken note of."""
        self._cut, self._seen = None, False
        hooks = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in self._modules]
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
            NotExactError: the scope was not seen in the forward pass, or its first input was changed in place.
        """
        cut, self._cut = self._cut, None
        if not self._seen:
            raise NotExactError("no module of the scope was seen in the forward pass")
        if cut is not None:
            cut.require_intact()
        sources = [*self.parameters, *([] if cut is None else [cut.tensor])]
        rows, at_cut = [], []
        for place, group in enumerate(groups):
            last = place == len(groups) - 1
            gradients = torch.autograd.grad(
                losses[group_ids == group].sum(), sources, retain_graph=keep_graph or not last, allow_unused=True
            )
            rows.append(flatten(gradients[: len(self.parameters)], self.parameters))
            if cut is not None:
                at_cut.append(torch.zeros_like(cut.tensor) if gradients[-1] is None else gradients[-1])
        first = torch.stack([(group_ids == group).nonzero()[0, 0] for group in groups])
        return _CutGradients(torch.stack(rows), self.parameters, first, cut, at_cut)

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self._seen and torch.is_grad_enabled():
            self._seen, self._cut = True, Cut.of((arguments, keywords))


class _CutGradients(GroupGradients):
    def __init__(
        self, rows: Tensor, parameters: list[nn.Parameter], first: Tensor, cut: Cut | None, at_cut: list[Tensor]
    ) -> None:
        super().__init__(rows)
        self._parameters = parameters
        self._first = first
        self._cut = cut
        self._at_cut = at_cut

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        of_groups = coefficients[self._first]
        gradients = unflatten(weighted_sum(self.rows, of_groups), self._parameters)
        tensors: list[Tensor] = list(self._parameters)
        if self._cut is not None:
            tensors.append(self._cut.tensor)
            weighted = zip(of_groups.unbind(), self._at_cut, strict=True)
            gradients.append(sum((c.to(g) * g for c, g in weighted), torch.zeros_like(self._at_cut[0])))
        return scalar_with_gradients(loss, tensors, gradients)


def flatten(gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> Tensor:
    """One vector [P] of the gradients of all parameters, zeros for None, in at least float32."""
    parts = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return torch.cat([part.flatten().to(torch.promote_types(part.dtype, torch.float32)) for part in parts])


def unflatten(vector: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """A vector [P] as gradients in the shapes and types of the parameters."""
    pieces = vector.split([parameter.numel() for parameter in parameters])
    return [piece.view_as(p).to(p.dtype) for piece, p in zip(pieces, parameters, strict=True)]


def weighted_sum(rows: Tensor, coefficients: Tensor) -> Tensor:
    """Sum [P] of the rows [G, P] with these coefficients [G]."""
    return torch.mv(rows.T, coefficients.to(rows))


def gram_matrix(rows: Tensor) -> Tensor:
    """Inner products [G, G] of the rows [G, P], in float64 on the CPU.

    Rows whose squares would leave the range of float32 are scaled to a largest entry of 1 first; a zero row gives
    zeros.
    """
    gram = _inner_products(rows)
    squares = gram.diagonal()
    if bool(((squares > 1e-30) & (squares < 1e30)).all()):
        return gram
    largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)
    scales = scale.to("cpu", torch.float64)
    return _inner_products(rows / scale) * scales * scales.T


GRAM_COLUMNS = 1024
GRAM_ROWS = 12
"""Tile of the Gram matrix. A float32 sum over millions of columns in one go is wrong by up to 4e-4 of itself; sums
over a tile, added up in float64, are not, and are up to three times as fast on CPUs (docs/performance.md)."""


def gram_on_device(rows: Tensor) -> Tensor:
    """The same where nothing may wait for the device: in the type of the rows, and where they are.

    Squares that leave the range of that type are not made up for: a gradient shorter than 1e-19 counts as zero.
    """
    tiled = rows.shape[1] - rows.shape[1] % GRAM_COLUMNS
    tiles = rows[:, :tiled].unflatten(1, (-1, GRAM_COLUMNS)).transpose(0, 1)
    rest = rows[:, tiled:]
    return torch.bmm(tiles, tiles.transpose(1, 2)).sum(dim=0) + rest @ rest.T


def _inner_products(rows: Tensor) -> Tensor:
    groups, size = rows.shape
    tiled = size - size % GRAM_COLUMNS
    tiles = rows[:, :tiled].unflatten(1, (-1, GRAM_COLUMNS)).transpose(0, 1)
    rest = rows[:, tiled:]
    gram = (rest @ rest.T).to(torch.float64)
    if tiled:
        bounds = [(start, min(start + GRAM_ROWS, groups)) for start in range(0, groups, GRAM_ROWS)]
        for place, (top, bottom) in enumerate(bounds):
            for left, right in bounds[: place + 1]:
                products = torch.bmm(tiles[:, top:bottom], tiles[:, left:right].transpose(1, 2))
                block = products.sum(dim=0, dtype=torch.float64)
                gram[top:bottom, left:right] += block
                if left != top:
                    gram[left:right, top:bottom] += block.T
    return gram.cpu()
