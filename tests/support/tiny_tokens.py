"""Models of tokens that train in milliseconds, and rows for them whose lengths differ."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from datasets import Dataset

VOCABULARY, LONGEST, CLASSES = 48, 9, 5
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "use_cpu": True,
    "report_to": [], "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "seed": 0,
    "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential",
}  # fmt: skip
"""Options of short, quiet runs."""


def _gpt2(**config: Any) -> torch.nn.Module:
    sizes = dict(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=32, resid_pdrop=0.0, attn_pdrop=0.0,
                 embd_pdrop=0.0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    return tf.GPT2LMHeadModel(tf.GPT2Config(**{**sizes, **config}))


def _llama(**config: Any) -> torch.nn.Module:
    sizes = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=32)  # fmt: skip
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**sizes, **config}))


def _t5(**config: Any) -> torch.nn.Module:
    sizes = dict(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
                 decoder_start_token_id=0)  # fmt: skip
    return tf.T5ForConditionalGeneration(tf.T5Config(**{**sizes, **config}))


def _bert(kind: Any, **config: Any) -> torch.nn.Module:
    sizes = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
                 max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return kind(tf.BertConfig(**{**sizes, **config}))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt2": lambda: _gpt2(),
    "gpt2 untied": lambda: _gpt2(tie_word_embeddings=False),
    "llama": lambda: _llama(),
    "llama tied": lambda: _llama(tie_word_embeddings=True),
    "t5": lambda: _t5(),
    "t5 untied": lambda: _t5(tie_word_embeddings=False),
    "masked": lambda: _bert(tf.BertForMaskedLM),
    "tokens": lambda: _bert(tf.BertForTokenClassification, num_labels=CLASSES),
    "answers": lambda: _bert(tf.BertForQuestionAnswering),
}


def tiny_model(name: str, seed: int = 0) -> torch.nn.Module:
    """A model of `MODELS`, its weights large enough that predictions differ from token to token."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def token_rows(name: str, size: int = 12, groups: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    """Rows for a model of `MODELS`, padded on the right; labels are -100 in padding and in some places more."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(size):
        length = int(torch.randint(4, LONGEST + 1, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (LONGEST,), generator=generator)
        mask = (torch.arange(LONGEST) < length).long()
        ids = ids * mask
        made = {
            "input_ids": ids.tolist(),
            "attention_mask": mask.tolist(),
            "group": "abc"[(row * row + row // 3) % groups],
        }
        if name == "answers":
            places = torch.randint(0, length, (2,), generator=generator).sort().values.tolist()
            made |= {"start_positions": places[0], "end_positions": places[1]}
        else:
            classes = CLASSES if name == "tokens" else VOCABULARY
            labels = torch.randint(0, classes, (LONGEST,), generator=generator) if name != "gpt2" else ids.clone()
            labels[torch.rand(LONGEST, generator=generator) < 0.2] = -100
            labels[mask == 0] = -100
            labels[1] = 3
            if name == "gpt2":
                # The Trainer counts the first label of GPT-2 (its class says no loss_type), which nothing predicts.
                labels[0] = -100
            made["labels"] = labels.tolist()
        rows.append(made)
    return rows


def token_dataset(name: str, size: int = 12, **kwargs: Any) -> Dataset:
    return Dataset.from_list(token_rows(name, size, **kwargs))


def batch_of(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The rows as tensors, groups left out."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0] if name != "group"}
