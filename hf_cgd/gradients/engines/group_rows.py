"""The gradients of the groups as rows, formed from what one backward pass left of each layer."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from hf_cgd.arithmetic import is_on_host
from hf_cgd.gradients.autograd import RowBlock
from hf_cgd.gradients.base import GroupGradients
from hf_cgd.gradients.engines.backward_pass import BackwardPass
from hf_cgd.gradients.gram import inner_products
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import LayerCall, OutputGradients, ReusedMemory
from hf_cgd.gradients.verification import row_error

MEMORY_BUDGET = 2 * 2**30
"""Default bytes for the gradients of all groups."""
SMALL_ROWS = 2**18
"""Numbers in the gradients of all groups up to which they are formed at once: the cache holds them anyway."""


class GroupRows:
    """Forms the groups' gradients over the scope, in memory that it uses again.

    Args:
        parameters: the gradient scope.
        owned: of each module the parameters of the scope that it holds, by name.
        memory_budget: bytes that the groups' gradients may take. Where they would take more and only inner products
            are needed, the last modules' gradients are not kept: their weighted sum is formed anew later.

    Attributes:
        places: where a parameter (by id) stands in a row [P].
        size: P.
        shares_parameters: whether a parameter belongs to several modules.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owned: dict[nn.Module, dict[str, nn.Parameter]],
        memory_budget: float = MEMORY_BUDGET,
    ) -> None:
        self.parameters = parameters
        self.owned = owned
        self.memory_budget = memory_budget
        ends = list(accumulate(parameter.numel() for parameter in parameters))
        self.places = dict(zip(map(id, parameters), pairwise([0, *ends]), strict=True))
        self.size = ends[-1] if ends else 0
        owners = Counter(id(parameter) for own in owned.values() for parameter in own.values())
        self.shares_parameters = max(owners.values(), default=0) > 1
        self._memory = ReusedMemory()

    def gradients_of(self, step: BackwardPass) -> GroupGradients:
        """The groups' gradients of a backward pass."""
        return _RowsOnDemand(self, step)

    def error_of_row(self, expected: Tensor, row: Tensor, floor: float = 0.0) -> float:
        """Largest relative error of a row, given the gradient [P] that is expected.

        `floor`: share of the largest entry of all that is added to each parameter's own.
        """
        allowance = floor * float(expected.abs().max())
        return row_error(expected, row, self.parameters, [allowance] * len(self.parameters))

    def rows_of(self, step: BackwardPass) -> Tensor:
        """The groups' gradients [G, P], valid until the next call of this or `gram_by_module`."""
        if len(step.order.bounds) * self.size <= SMALL_ROWS:
            small = self._small_rows_of(step)
            if small is not None:
                return small
        rows = self._memory.of_shape((len(step.order.bounds), self.size), step.device, step.dtype)
        vectors = vectors_of(step)
        known = {} if vectors is None else vectors.pieces()
        for parameter, piece in known.items():
            rows[:, slice(*self.places[parameter])] = piece
        fresh = self.places.keys() - known.keys()
        for call, gradients in step.calls:
            own = {name: p for name, p in self.owned[call.module].items() if id(p) not in known}
            if not own:
                continue
            targets = {name: rows[:, slice(*self.places[id(parameter)])] for name, parameter in own.items()}
            first = [name for name, parameter in own.items() if id(parameter) in fresh]
            call.rule.form_gradients(call, gradients, step.order, targets, first)
            fresh.difference_update(id(parameter) for parameter in own.values())
        for parameter in fresh:
            rows[:, slice(*self.places[parameter])] = 0
        return rows

    def _small_rows_of(self, step: BackwardPass) -> Tensor | None:
        """The same for a small network whose rules form all of it at once; None where one does not."""
        parts: dict[int, Tensor] = {}
        for call, gradients in step.calls:
            own = self.owned[call.module]
            found = call.rule.small_gradients(call, gradients, step.order, own, step.dtype)
            if found is None:
                return None
            for name, parameter in own.items():
                place = id(parameter)
                parts[place] = found[name] if place not in parts else parts[place] + found[name]
        if len(parts) < len(self.parameters):
            return None
        return torch.cat([parts[id(parameter)] for parameter in self.parameters], dim=1)

    def gram_by_module(self, step: BackwardPass, reads_values: bool) -> tuple[Tensor, list[RowBlock]]:
        """The Gram matrix, on the host taken module by module while the gradients are in the cache.

        Returns:
            [G, G] as of `inner_products`, and the gradients of as many parameters as the memory budget lets. They are
            valid until the next call of this or `rows_of`.
        """
        vectors = vectors_of(step)
        known = {} if vectors is None else vectors.places
        uses: dict[nn.Module, list[tuple[LayerCall, OutputGradients]]] = {}
        for call, gradients in step.calls:
            if any(id(p) not in known for p in self.owned[call.module].values()):
                uses.setdefault(call.module, []).append((call, gradients))
        owned = {module: {n: p for n, p in self.owned[module].items() if id(p) not in known} for module in uses}
        groups = len(step.order.bounds)
        sizes = {module: sum(p.numel() for p in own.values()) for module, own in owned.items()}
        keep = _within_budget(sizes, int(self.memory_budget // (groups * step.dtype.itemsize)))
        kept_size = sum(sizes[module] for module in keep)
        last = max((size for module, size in sizes.items() if module not in keep), default=0)
        memory = self._memory.of_shape((groups * (kept_size + last),), step.device, step.dtype)
        kept = memory[: groups * kept_size].view(groups, kept_size)
        by_module = is_on_host(step.order.first)
        products: list[Tensor] = []
        places: dict[int, tuple[int, int]] = {}
        used = 0
        for module, calls in uses.items():
            own, size = owned[module], sizes[module]
            is_kept = module in keep
            block = (
                kept[:, used : used + size] if is_kept else memory[kept.numel() :][: groups * size].view(groups, size)
            )
            columns = block.split([p.numel() for p in own.values()], dim=1)
            targets = dict(zip(own, columns, strict=True))
            for place, (call, gradients) in enumerate(calls):
                fresh = () if place else targets
                call.rule.form_gradients(call, gradients, step.order, targets, fresh)
            if by_module or not is_kept:
                products.append(inner_products(block, reads_values))
            if is_kept:
                for parameter in own.values():
                    places[id(parameter)] = (used, used + parameter.numel())
                    used += parameter.numel()
        blocks = [RowBlock(kept, places)] if kept_size else []
        if vectors is not None:
            blocks.append(vectors)
        if not by_module:
            products += [inner_products(block.rows, reads_values) for block in blocks]
        return torch.stack(products).sum(dim=0), blocks


class _RowsOnDemand(GroupGradients):
    """Forms what it is asked for: rows, or the Gram matrix module by module, or neither."""

    reads_graph = False

    def __init__(self, former: GroupRows, step: BackwardPass) -> None:
        super().__init__()
        self.others = step.others
        self._former = former
        self._step = step
        self._gram: Tensor | None = None
        self._kept: list[RowBlock] = []

    def _form_rows(self) -> Tensor:
        self._kept = []
        with torch.no_grad():
            return self._former.rows_of(self._step)

    def gram(self, reads_values: bool = True) -> Tensor:
        """See `GroupGradients.gram`."""
        size = self._former.size * len(self._step.order.bounds)
        fits = size * self._step.dtype.itemsize <= self._former.memory_budget
        if (size <= SMALL_ROWS and fits) or self._former.shares_parameters:
            return super().gram(reads_values)
        if self._gram is None:
            with torch.no_grad():
                self._gram, self._kept = self._former.gram_by_module(self._step, reads_values)
        return self._gram

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        if self._rows is not None:
            return self._step.scalar_of_rows(loss, coefficients, self._rows)
        return self._step.scalar(loss, coefficients, self._kept)


def vectors_of(step: BackwardPass) -> RowBlock | None:
    """Gradients of biases and scales, for all groups and layers at once; None where there are none.

    None on the host as well: there a slice of a layer that is in the cache anyway is faster than a call is short.
    """
    if is_on_host(step.order.first):
        return None
    left_out = {
        id(p) for call, _ in step.calls if not call.rule.sums_vectors for p in step.owned[call.module].values()
    }
    everyone = GroupOrder.one_group_per_example(step.order.bounds[-1][1], step.device)
    found: dict[int, Tensor] = {}
    for call, gradients in step.calls:
        own = step.owned[call.module]
        names = [name for name, p in own.items() if p.ndim == 1 and id(p) not in left_out]
        if not names or gradients[0] is None:
            continue
        for name, rows in call.rule.example_gradients(call, gradients, everyone, names, step.dtype).items():
            place = id(own[name])
            found[place] = found[place] + rows if place in found else rows
    if not found:
        return None
    ends = list(accumulate(rows.shape[1] for rows in found.values()))
    sums = step.order.sums(torch.cat(list(found.values()), dim=1))
    return RowBlock(sums, dict(zip(found, pairwise([0, *ends]), strict=True)))


def _within_budget(sizes: dict[nn.Module, int], most: int) -> set[nn.Module]:
    """The modules whose gradients are kept; where not all are, one module at a time needs room beside them."""
    if sum(sizes.values()) <= most:
        return set(sizes)
    keep, left = set(), most - max(sizes.values())
    for module, size in sizes.items():
        if size <= left:
            keep.add(module)
            left -= size
    return keep
