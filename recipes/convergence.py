"""The CGD paper's convergence theorem (section 3), measured: equation 3 with the step sizes that it prescribes.

Printed: the mean squared gradient norm over a sweep of T beside the theorem's bound, and the slope of its logarithm
against log T (the bound's is -1/2). Then: groups with orthogonal gradients, where CGD (equation 5) is Group-DRO.

    python recipes/convergence.py                         # about four minutes on a CPU
    python recipes/convergence.py --steps 100 400 1600
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import HfArgumentParser

from hf_cgd.experiments.studies.convergence import (
    PROBLEMS,
    difference_from_group_dro,
    mean_squared_gradient_norm,
    slope,
)


@dataclass
class Options:
    steps: list[int] = field(default_factory=lambda: [100 * 2**power for power in range(7)])
    seeds: int = 3


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    kinds: Any = Options
    (options,) = HfArgumentParser(kinds).parse_args_into_dataclasses(arguments)
    slopes = {}
    for name, make in PROBLEMS.items():
        problems = [make(seed) for seed in range(options.seeds)]
        print(f"\n{name}: mean squared gradient norm, mean of {len(problems)} seeds; largest share of the bound")
        means = []
        for steps in options.steps:
            values = [mean_squared_gradient_norm(problem, steps) for problem in problems]
            shares = [value / problem.limit(steps) for value, problem in zip(values, problems, strict=True)]
            means.append(sum(values) / len(values))
            print(f"  T = {steps:6}  {means[-1]:.3e}  {max(shares):.3f}", flush=True)
        slopes[name] = slope(options.steps, means)
        print(f"  slope {slopes[name]:.3f} (the bound's is -0.5)")
    print("\nlargest difference between the group weights of CGD and Group-DRO over a run")
    for overlap in (0.0, 0.5):
        print(f"  cosine between groups {overlap:.1f}: {difference_from_group_dro(overlap):.1e}")
    return slopes


if __name__ == "__main__":
    main()
