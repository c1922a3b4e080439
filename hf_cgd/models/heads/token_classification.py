"""Heads that give each token a class: names, parts of speech, frames of sound."""

from torch import nn

from hf_cgd.models.heads.base import TokenHead


class TokenClassificationHead(TokenHead):
    """`*ForTokenClassification`: labels [B, L] are classes, -100 for tokens that count for nothing."""

    name = "token_classification"
    missing_labels = "DataCollatorForTokenClassification(tokenizer) pads them."

    def num_outputs(self, network: nn.Module) -> int | None:
        """See `Head.num_outputs`."""
        own = getattr(getattr(network, "config", None), "num_labels", None)
        return own if isinstance(own, int) else None
