"""What an objective is, in words and as a formula for readers, and where it comes from."""

from collections.abc import Mapping
from typing import Any, NamedTuple

WEIGHTED = r"\sum_i \alpha_i \ell_i"
GROUP_MEAN = "$\\ell_i$ is the mean loss of group $i$ in a step, $n_i$ the number of its training examples"


class Explained(NamedTuple):
    """An objective for readers.

    Attributes:
        title: its name.
        words: one sentence.
        loss: what is minimised, in TeX.
        weights: how the group weights move, in TeX; None where there are none.
        symbols: what the symbols stand for.
        source: key in `CITATIONS`; None for none.
    """

    title: str
    words: str
    loss: str
    weights: str | None
    symbols: str
    source: str | None


_EXPLAINED = {
    "erm": Explained(
        "ERM", "It minimises the mean loss over all examples, whatever their group.",
        r"\frac{1}{N} \sum_n \ell_n", None, "$\\ell_n$ is the loss of an example", None,
    ),
    "erm_uw": Explained(
        "Up-weighted ERM", "It minimises the groups' mean losses under fixed weights that favour small groups.",
        WEIGHTED, r"\alpha_i \propto \exp(C / \sqrt{n_i})", f"{GROUP_MEAN}, $C$ is `adjustment`", "cgd",
    ),
    "group_dro": Explained(
        "Group-DRO", "It moves weight to the groups with the highest loss.",
        WEIGHTED, r"\alpha_i \leftarrow \alpha_i \exp\left(\eta\,(\ell_i + C / \sqrt{n_i})\right) \big/ Z",
        f"{GROUP_MEAN}, $\\eta$ is `step_size`, $C$ is `adjustment`, $Z$ makes the weights sum to 1", "group_dro",
    ),
    "cgd": Explained(
        "CGD (Common Gradient Descent)",
        "It moves weight to the groups whose gradient also lowers the loss of the other groups.",
        WEIGHTED,
        r"\alpha_i \leftarrow \alpha_i \exp\Big(\eta \sum_j (\ell_i \ell_j)^p \cos(g_i, g_j)\Big) \big/ Z",
        f"{GROUP_MEAN}, $g_i$ the gradient of $\\ell_i$, $\\eta$ is `step_size`, $p$ is `exponent`; with `adjustment` "
        "$C > 0$ each $\\ell$ in the exponent is $\\ell + C / \\sqrt{n}$; $Z$ makes the weights sum to 1",
        "cgd",
    ),
    "pgi": Explained(
        "PGI (Predictive Group Invariance)",
        "It adds a penalty where, within a class, a group's mean prediction differs from that of the largest group.",
        r"\frac{1}{N} \sum_n \ell_n + \lambda \sum_c \mathrm{KL}(Q^c \,\|\, P^c)", None,
        "$Q^c$ and $P^c$ are mean predicted probabilities of class $c$ in a smaller and in the largest group, "
        "$\\lambda$ is `penalty_weight`", "pgi",
    ),
    "irm": Explained(
        "IRM (Invariant Risk Minimisation)",
        "It adds a penalty where another scale of the predictions would be better in some group.",
        r"\frac{1}{K} \sum_i \Big(\ell_i + \lambda \big(\partial_w \ell_i(w)\big|_{w=1}\big)^2\Big)", None,
        f"{GROUP_MEAN}, $w$ multiplies the predictions, $\\lambda$ is `penalty_weight`", "irm",
    ),
    "coral": Explained(
        "CORAL (Correlation Alignment)",
        "It adds a penalty where means and covariances of the features differ between groups.",
        r"\frac{1}{N} \sum_n \ell_n + \lambda \operatorname{mean}_{i<j}"
        r"\Big(\tfrac{1}{D}\|\mu_i-\mu_j\|^2 + \tfrac{1}{D^2}\|C_i-C_j\|_F^2\Big)",
        None,
        "$\\mu_i$ and $C_i$ are mean and covariance of group $i$'s $D$ features, $\\lambda$ is `penalty_weight`",
        "coral",
    ),
}  # fmt: skip
_GRADIENT_SCALING = (
    r"\alpha_i \leftarrow \alpha_i \exp\Big(\eta\, \big\langle g_i, \sum_j g_j \big\rangle\Big) \big/ Z"
)
CITATIONS = {
    "cgd": """@inproceedings{piratla2022focus,
  title = {Focus on the Common Good: Group Distributional Robustness Follows},
  author = {Piratla, Vihari and Netrapalli, Praneeth and Sarawagi, Sunita},
  booktitle = {International Conference on Learning Representations},
  year = {2022},
}""",
    "group_dro": """@inproceedings{sagawa2020distributionally,
  title = {Distributionally Robust Neural Networks for Group Shifts: On the Importance of Regularization for Worst-Case Generalization},
  author = {Sagawa, Shiori and Koh, Pang Wei and Hashimoto, Tatsunori B. and Liang, Percy},
  booktitle = {International Conference on Learning Representations},
  year = {2020},
}""",  # noqa: E501
    "pgi": """@inproceedings{ahmed2021systematic,
  title = {Systematic Generalisation with Group Invariant Predictions},
  author = {Ahmed, Faruk and Bengio, Yoshua and van Seijen, Harm and Courville, Aaron},
  booktitle = {International Conference on Learning Representations},
  year = {2021},
}""",
    "irm": """@article{arjovsky2019invariant,
  title = {Invariant Risk Minimization},
  author = {Arjovsky, Martin and Bottou, L{\\'e}on and Gulrajani, Ishaan and Lopez-Paz, David},
  journal = {arXiv preprint arXiv:1907.02893},
  year = {2019},
}""",
    "coral": """@inproceedings{sun2016deep,
  title = {Deep CORAL: Correlation Alignment for Deep Domain Adaptation},
  author = {Sun, Baochen and Saenko, Kate},
  booktitle = {ECCV 2016 Workshops},
  year = {2016},
}""",
}


def explained(objective: Mapping[str, Any]) -> Explained:
    """What readers are told of an objective.

    Args:
        objective: what `Objective.identity` says; with "own_loss" where the run's own code forms the loss.
    """
    name, knobs = str(objective["name"]), objective.get("knobs", {})
    found = _EXPLAINED.get(name)
    if found is None:
        words = f"It is an objective of its authors' own, `{objective.get('class', name)}`; see their code."
        return Explained(name, words, "", None, "", None)
    if name == "cgd" and knobs.get("scaling") == "gradient":
        symbols = (
            f"{GROUP_MEAN}, $g_i$ the gradient of $\\ell_i$, $\\eta$ is `step_size`; $Z$ makes the weights sum to 1"
        )
        found = found._replace(weights=_GRADIENT_SCALING, symbols=symbols)
    if name == "cgd" and knobs.get("interaction") == "mean" and found.weights is not None:
        found = found._replace(weights=found.weights.replace(r"\sum_j", r"\operatorname{mean}_j"))
    if name == "cgd" and knobs.get("variant") == "reference":
        found = found._replace(words=f"{found.words} The update is that of its authors' released code.")
    own = objective.get("own_loss")
    if own is not None and name == "erm" and not own.startswith("compute_loss_func"):
        words = f"It minimises the loss that `{own}` forms, code of this run's own; groups have no say in it."
        return found._replace(words=words, loss="", symbols="")
    return (
        found
        if own is None
        else found._replace(words=f"{found.words} The loss is formed by code of the run's own, `{own}`.")
    )


def citations(objective: Mapping[str, Any] | None) -> list[str]:
    """BibTeX of what a run builds on."""
    source = None if objective is None else explained(objective).source
    return [CITATIONS[key] for key in dict.fromkeys([source, "cgd"]) if key is not None]
