"""Losses of examples whose labels belong to tokens: against plain cross-entropies and the models' own losses."""

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from tiny import tiny_distilbert, with_lora
from tiny_tokens import MODELS, batch_of, tiny_model, token_rows
from transformers.trainer_pt_utils import LabelSmoother

from hf_cgd.models.heads import (
    CausalLMHead,
    ExampleHead,
    LossOptions,
    MaskedLMHead,
    QuestionAnsweringHead,
    Seq2SeqLMHead,
    TokenClassificationHead,
    TokenHead,
    head_of,
    require_whole_examples,
)
from hf_cgd.models.heads.token_losses import token_losses

KINDS = {"gpt2": CausalLMHead, "llama tied": CausalLMHead, "t5": Seq2SeqLMHead, "masked": MaskedLMHead,
         "tokens": TokenClassificationHead, "answers": QuestionAnsweringHead}  # fmt: skip
NAMES = ("start_positions", "end_positions")


def names_of(name: str) -> tuple[str, ...]:
    return NAMES if name == "answers" else ("labels",)


@pytest.mark.parametrize("name", list(KINDS))
def test_the_mean_over_all_tokens_is_the_models_own_loss(name: str) -> None:
    model, batch = tiny_model(name).eval(), batch_of(token_rows(name))
    head = head_of(model)
    assert type(head) is KINDS[name] and isinstance(head, TokenHead)
    labels = head.labels_in(batch, names_of(name))
    assert labels is not None
    outputs = model(**batch)
    scores = head.scores_of(outputs, after_loss=True)
    losses = head.losses(scores, labels, model, LossOptions())
    counts = head.num_tokens(labels).double()
    torch.testing.assert_close((losses * counts).sum() / counts.sum(), outputs.loss.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.mean(losses, labels), outputs.loss, rtol=1e-5, atol=1e-6)
    sums = head.losses(scores, labels, model, LossOptions(token_reduction="sum"))
    torch.testing.assert_close(sums, losses * counts.float())
    # One row alone is the model's own loss of it.
    for row in range(3):
        alone = model(**{key: value[row : row + 1] for key, value in batch.items()}).loss
        torch.testing.assert_close(losses[row], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "t5", "masked", "tokens"])
def test_label_smoothing_is_that_of_the_trainer(name: str) -> None:
    model, batch = tiny_model(name).eval(), batch_of(token_rows(name))
    head, labels = head_of(model), batch["labels"]
    scores = model(**batch).logits
    losses = head.losses(scores, labels, model, LossOptions(label_smoothing=0.3))
    expected = LabelSmoother(0.3)({"logits": scores}, labels.clone(), shift_labels=name == "gpt2")
    torch.testing.assert_close(head.mean(losses, labels), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("chunk", [1, 30, 2**24])
def test_chunks_change_nothing(
    dtype: torch.dtype, smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_cgd.models.heads.token_losses.CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    scores = (3 * torch.randn(3, 5, 7, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, 7, (3, 5), generator=generator)
    targets[0, 2:] = targets[2] = -100
    before, wide = scores.detach().clone(), scores.detach().double().requires_grad_()
    expected = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing)
    losses = token_losses(scores, targets, smoothing)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(losses.flatten().double(), expected, **tolerance)
    weights = torch.randn(15, generator=generator, dtype=torch.float64)
    (losses.flatten().double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert scores.grad is not None and wide.grad is not None and scores.grad.dtype == dtype
    assert torch.equal(scores, before)
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(scores.grad.double(), wide.grad, **tolerance)


def test_what_is_left_out_may_be_anything() -> None:
    scores = torch.zeros(1, 3, 4)
    scores[0, 1] = float("nan")
    scores.requires_grad_()
    losses = token_losses(scores, torch.tensor([[0, -100, 1]]))
    losses.sum().backward()
    assert losses.isfinite().all() and losses[0, 1] == 0
    assert scores.grad is not None and scores.grad.isfinite().all() and (scores.grad[0, 1] == 0).all()


def test_a_row_without_a_valid_token_has_no_label() -> None:
    # A causal model predicts from the second place on, so that a label in the first one is nobody's.
    labels = torch.tensor([[7, -100, -100], [-100, 4, -100], [-100, -100, -100]])
    assert CausalLMHead().labelled(labels).tolist() == [False, True, False]
    assert CausalLMHead().num_tokens(labels).tolist() == [0, 1, 0]
    assert MaskedLMHead().labelled(labels).tolist() == [True, True, False]
    losses = MaskedLMHead().losses(torch.randn(3, 3, 9), labels, torch.nn.Identity(), LossOptions())
    assert losses[2] == 0 and (losses[:2] > 0).all()


def test_places_behind_the_end_of_a_row_are_left_out_as_the_models_do() -> None:
    model = tiny_model("answers").eval()
    batch = batch_of(token_rows("answers", 4))
    batch["end_positions"][:] = 99
    head = head_of(model)
    labels = head.labels_in(batch, NAMES)
    assert labels is not None and (labels[:, 1] == -100).all() and head.num_tokens(labels).tolist() == [1] * 4
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    expected = F.cross_entropy(outputs.start_logits, batch["start_positions"], reduction="none")
    torch.testing.assert_close(head.losses(head.scores_of(outputs), labels, model, LossOptions()), expected)


def test_heads_are_told_by_class_names() -> None:
    class Mine(tf.DistilBertForTokenClassification):
        pass

    config = tf.DistilBertConfig(vocab_size=9, dim=8, hidden_dim=8, n_layers=1, n_heads=1)
    assert isinstance(head_of(Mine(config)), TokenClassificationHead)
    for model in (tiny_distilbert(), with_lora(tiny_distilbert()), torch.nn.Linear(2, 2)):
        assert isinstance(head_of(model), ExampleHead)
        require_whole_examples(model)
    with pytest.raises(ValueError, match="DistilBertForMaskedLM does not give one answer"):
        require_whole_examples(tf.DistilBertForMaskedLM(config))


def test_heads_whose_losses_are_others_are_refused() -> None:
    bart = tf.BartConfig(vocab_size=9, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
                         decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=8)  # fmt: skip
    with pytest.raises(ValueError, match="BartForCausalLM does not shift"):
        head_of(tf.BartForCausalLM(bart))
    gpt2 = tf.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
    with pytest.raises(ValueError, match="GPT2DoubleHeadsModel: it is not known"):
        head_of(tf.GPT2DoubleHeadsModel(gpt2))
    xlnet = tf.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=1, d_inner=8)
    with pytest.raises(ValueError, match="XLNetForQuestionAnswering: it is not known"):
        head_of(tf.XLNetForQuestionAnswering(xlnet))


def test_every_tiny_model_knows_the_width_of_its_scores() -> None:
    for name in MODELS:
        model, batch = tiny_model(name).eval(), batch_of(token_rows(name, 2))
        head = head_of(model)
        if name != "answers":
            assert head.num_outputs(model) == head.scores_of(model(**batch), after_loss=True).shape[-1], name
