"""Heads that predict words: the next one, hidden ones, or those of an answer to a text."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_cgd.data.training_groups import IGNORED
from hf_cgd.models.heads.base import TokenHead, vocabulary_of


class LanguageModelHead(TokenHead):
    """Scores [B, L, V] over a vocabulary."""

    predicts_vocabulary = True

    def num_outputs(self, network: nn.Module) -> int | None:
        """See `Head.num_outputs`."""
        return vocabulary_of(network)


class CausalLMHead(LanguageModelHead):
    """`*ForCausalLM`: each place predicts the label of the next one, so the first label of a row is not used."""

    name = "causal_lm"
    missing_labels = "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them of input_ids."

    def targets(self, labels: Tensor) -> Tensor:
        """See `TokenHead.targets`."""
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


class MaskedLMHead(LanguageModelHead):
    """`*ForMaskedLM`: labels are -100 but where a word is hidden."""

    name = "masked_lm"
    missing_labels = "DataCollatorForLanguageModeling(tokenizer) hides words and makes them."


class Seq2SeqLMHead(LanguageModelHead):
    """`*ForConditionalGeneration` of an encoder and a decoder: labels are the decoder's words."""

    name = "seq2seq_lm"
    missing_labels = "DataCollatorForSeq2Seq(tokenizer, model) pads them."

    def completed(self, inputs: dict[str, Any], labels: Tensor, network: nn.Module) -> dict[str, Any]:
        """See `Head.completed`: what the decoder is given are the labels, one place later.

        A network that does not tell how these are made (Whisper) gets the labels and makes them in its forward pass.
        """
        if inputs.get("decoder_input_ids") is not None or inputs.get("decoder_inputs_embeds") is not None:
            return inputs
        make = getattr(network, "prepare_decoder_input_ids_from_labels", None)
        if not callable(make):
            return {**inputs, "labels": labels}
        return {**inputs, "decoder_input_ids": make(labels=labels)}
