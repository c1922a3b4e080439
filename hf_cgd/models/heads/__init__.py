"""Which head a network has: one registry, asked by class names, which is how transformers tells heads apart."""

import re
from collections.abc import Callable

from torch import nn

from hf_cgd.models.heads.base import TOKEN_REDUCTIONS, Head, LossOptions, TokenHead, TokenReduction
from hf_cgd.models.heads.examples import ExampleHead
from hf_cgd.models.heads.language_models import CausalLMHead, MaskedLMHead, Seq2SeqLMHead
from hf_cgd.models.heads.question_answering import POSITIONS, QuestionAnsweringHead
from hf_cgd.models.heads.token_classification import TokenClassificationHead
from hf_cgd.models.outputs import forward_parameters, without_wrappers

UNSHIFTED = re.compile(
    r"^(Bart|BigBirdPegasus|Blenderbot|BlenderbotSmall|CpmAnt|MBart|Marian|Mvp|PLBart|Pegasus|ProphetNet|TrOCR|Whisper)"
    r"ForCausalLM$|^(XLMWith|FlaubertWith|XLNet)LMHeadModel$|^(Musicgen|MusicgenMelody|Clvp)ForCausalLM$"
)
"""Language models whose own losses take the labels to be in the place of their scores, or are of another form."""
UNSUPPORTED = re.compile(
    r"For(AudioFrameClassification|CTC|PreTraining|ObjectDetection|DepthEstimation|MaskedImageModeling|XVector|"
    r"\w*Segmentation|\w*Generation|\w*LM|QuestionAnswering|QuestionAnsweringSimple)$|DoubleHeadsModel$"
)
"""Names of `transformers` classes whose outputs belong to pixels, boxes or something else that is not known here."""


def _is_encoder_decoder(network: nn.Module) -> bool:
    return bool(getattr(getattr(network, "config", None), "is_encoder_decoder", False))


def _has_places(network: nn.Module) -> bool:
    beam = any(
        re.search(r"^(XLNet|XLM|Flaubert)ForQuestionAnswering$", kind.__name__) for kind in type(network).__mro__
    )
    return not beam and all(name in forward_parameters(network) for name in POSITIONS)


def _any(network: nn.Module) -> bool:
    return True


# Class names end so; of a class of one's own those of its bases count. A new head is one class and one entry here.
_HEADS: list[tuple[re.Pattern[str], Callable[[nn.Module], bool], type[TokenHead]]] = [
    (re.compile(r"(ForCausalLM|LMHeadModel)$"), _any, CausalLMHead),
    (re.compile(r"ForMaskedLM$"), _any, MaskedLMHead),
    (re.compile(r"(ForConditionalGeneration|EncoderDecoderModel)$"), _is_encoder_decoder, Seq2SeqLMHead),
    (re.compile(r"ForConditionalGeneration$"), _any, CausalLMHead),
    (re.compile(r"ForTokenClassification$"), _any, TokenClassificationHead),
    (re.compile(r"ForQuestionAnswering(Simple)?$"), _has_places, QuestionAnsweringHead),
]


def head_of(model: nn.Module) -> Head:
    """The head of a network: one of tokens by the name of its class, that of whole examples for any other.

    Raises:
        ValueError: a head that gives an example no loss of its own, or whose loss is not known.
    """
    network = without_wrappers(model)
    names = [kind.__name__ for kind in type(network).__mro__]
    if any(UNSHIFTED.search(name) for name in names):
        raise ValueError(
            f"{type(network).__name__} does not shift its labels as other language models do, so what its users take "
            "for labels is not clear. Expected a decoder of its own kind (GPT-2, Llama, OPT, …), or the whole encoder "
            "and decoder (*ForConditionalGeneration)."
        )
    for name in names:
        for pattern, holds, kind in _HEADS:
            if pattern.search(name) and holds(network):
                return kind()
    found = next((name for name in names if UNSUPPORTED.search(name)), None)
    if found is not None:
        raise ValueError(
            f"{found}: it is not known how its outputs make one loss for each example. Expected a classifier or "
            "regressor of whole examples, a language model, or a head for token classification or extractive question "
            "answering. For another one write a class that ends in a loss of each example."
        )
    return ExampleHead.of(network)


def require_whole_examples(model: nn.Module) -> None:
    """Raise a ValueError that names the head, where it gives something else than one answer to an example."""
    head = head_of(model)
    if head.of_tokens:
        raise ValueError(
            f"{type(without_wrappers(model)).__name__} does not give one answer to an example, but one to each of its "
            "tokens. Expected a classifier or regressor of whole examples, such as "
            "AutoModelForSequenceClassification, AutoModelForImageClassification or AutoModelForAudioClassification."
        )


__all__ = [
    "TOKEN_REDUCTIONS",
    "CausalLMHead",
    "ExampleHead",
    "Head",
    "LossOptions",
    "MaskedLMHead",
    "QuestionAnsweringHead",
    "Seq2SeqLMHead",
    "TokenClassificationHead",
    "TokenHead",
    "TokenReduction",
    "head_of",
    "require_whole_examples",
]
