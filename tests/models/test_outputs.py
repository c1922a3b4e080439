"""What a model returns, in any form: its logits, and the forms that the Trainer is handed."""

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_cgd.models.outputs import logits_of, own_loss_of, with_logits, with_loss

LOGITS, FEATURES, LOSS = torch.eye(3), torch.ones(3, 5), torch.tensor(0.5)
Named = namedtuple("Named", ["features", "logits"])
FORMS: dict[str, Any] = {
    "tensor": LOGITS,
    "tuple": (LOGITS, FEATURES),
    "tuple behind None": (None, LOGITS),
    "tuple behind the loss": (LOSS, LOGITS, FEATURES),
    "list": [LOGITS],
    "mapping": {"features": FEATURES, "logits": LOGITS},
    "mapping with the loss": {"loss": LOSS, "features": FEATURES, "logits": LOGITS},
    "mapping of one tensor": {"loss": LOSS, "scores": LOGITS},
    "output": SequenceClassifierOutput(loss=LOSS, logits=LOGITS, hidden_states=(FEATURES,)),
    "named tuple": Named(FEATURES, LOGITS),
    "object": SimpleNamespace(features=FEATURES, logits=LOGITS),
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_every_form_also_after_they_are_replaced(form: str) -> None:
    assert logits_of(FORMS[form]) is LOGITS
    new = LOGITS * 2
    outputs = FORMS[form]
    outputs = type(outputs)(**outputs) if form == "output" else dict(outputs) if isinstance(outputs, dict) else outputs
    assert logits_of(with_logits(outputs, new)) is new
    assert logits_of(FORMS[form]) is LOGITS


@pytest.mark.parametrize("form", FORMS)
def test_the_trainer_finds_the_logits_by_name_or_behind_the_loss(form: str) -> None:
    found = with_loss(FORMS[form], LOSS)
    assert isinstance(found, (dict, tuple))
    assert logits_of(found, after_loss=True) is LOGITS


def test_own_loss_is_found_in_every_form() -> None:
    assert own_loss_of(LOGITS) is None and own_loss_of({"logits": LOGITS}) is None
    for outputs in ({"loss": LOSS, "logits": LOGITS}, (LOSS, LOGITS), FORMS["output"]):
        assert own_loss_of(outputs) is LOSS
    assert own_loss_of((LOGITS, FEATURES)) is None


def test_what_may_be_several_things_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected the model to return 'logits', got \['features', 'scores'\]"):
        logits_of({"features": FEATURES, "scores": LOGITS})
    with pytest.raises(ValueError, match="got NoneType"):
        logits_of(None)
    with pytest.raises(ValueError, match="got tuple"):
        logits_of((LOSS,))
