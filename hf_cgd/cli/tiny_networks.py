"""Networks for made-up data: tiny, untrained, and there without a network connection."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def tiny_text_classifier(
    texts: Sequence[Sequence[str]], label_names: Sequence[str]
) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """A DistilBERT of two layers for these labels, and a tokenizer with a token for each word of the texts.

    Args:
        texts: columns of texts; two of them are pairs.
        label_names: names of the classes, stored with the model.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        (text for column in texts for text in column), trainers.WordLevelTrainer(special_tokens=list(SPECIAL.values()))
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    size: dict[str, Any] = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": len(wrapped)}
    size |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    config = DistilBertConfig(id2label=dict(enumerate(label_names)), **size)
    return DistilBertForSequenceClassification(config), wrapped
