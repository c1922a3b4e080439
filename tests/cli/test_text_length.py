"""Texts longer than a model's positions are refused before the first step, by what the model itself takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from datasets import Dataset, DatasetDict
from made_files import write_table
from tiny import tiny_distilbert
from tiny_tokens import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_cgd.__main__ import main
from hf_cgd.cli.text_length import require_room_for
from hf_cgd.data.lengths import lengths_of

SIZES: dict[str, Any] = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)  # fmt: skip
NETWORKS: dict[str, Callable[[], Any]] = {
    "distilbert": tiny_distilbert,
    "bert": lambda: tf.BertForSequenceClassification(tf.BertConfig(**SIZES, max_position_embeddings=32)),
    # Two positions are for padding.
    "roberta": lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(**SIZES, max_position_embeddings=34)),
    "gpt2": lambda: tf.GPT2ForSequenceClassification(
        tf.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32, pad_token_id=0)
    ),
    # It looks for the end of the text.
    "bart": lambda: tf.BartForSequenceClassification(
        tf.BartConfig(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                      decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
                      eos_token_id=2, pad_token_id=1, decoder_start_token_id=2)
    ),
    # Positions are relative, or none of a table: they take more than they state.
    "deberta": lambda: tf.DebertaV2ForSequenceClassification(
        tf.DebertaV2Config(**SIZES, max_position_embeddings=32, relative_attention=True, pos_att_type=["p2c", "c2p"],
                           position_biased_input=False)
    ),
    "llama": lambda: tf.LlamaForSequenceClassification(
        tf.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0)
    ),
    "t5": lambda: tf.T5EncoderModel(tf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)),
}  # fmt: skip
TAKE_MORE = {"deberta", "llama", "t5"}


def tokens(length: int) -> list[int]:
    return [*range(3, 3 + length - 1), 2] if length else []


def splits_of(*lengths: int) -> DatasetDict:
    rows = [{"input_ids": tokens(one), "attention_mask": [1] * one} for one in lengths]
    return DatasetDict(train=Dataset.from_list(rows[:1]), test=Dataset.from_list(rows[1:]))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_model_is_asked_how_many_tokens_it_takes(name: str) -> None:
    """By plain calls of 32 and 33 tokens, after which nothing of the model is another."""
    torch.manual_seed(0)
    model = NETWORKS[name]().train()
    takes = []
    for length in (32, 33):
        try:
            model.eval()(input_ids=torch.tensor([tokens(length)]))
            takes.append(length)
        except (IndexError, RuntimeError):
            assert name not in TAKE_MORE
    assert takes == ([32, 33] if name in TAKE_MORE else [32])
    model.train()
    before, drawn = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    require_room_for(model, splits_of(5, 3, 32), "max_length", 99)
    if name in TAKE_MORE:
        require_room_for(model, splits_of(5, 40), "max_length", 99)
    else:
        words = r"max_length=99: the longest row has 40 tokens, and the model takes 32 \(its config says .*Set max_length=32"
        for lengths in ((40, 5, 3), (5, 3, 40)):
            with pytest.raises(ValueError, match=words):
                require_room_for(model, splits_of(*lengths), "max_length", 99)
    assert model.training and torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


def test_rows_well_below_what_is_stated_are_not_tried_and_other_errors_are_left_to_the_run() -> None:
    model = tiny_distilbert()
    model.forward = None
    require_room_for(model, splits_of(24, 3), "max_length", 24)

    def broken(**batch: Any) -> Any:
        raise RuntimeError("of another kind")

    model.forward = broken
    require_room_for(model, splits_of(30, 3), "max_length", 24)


def test_lengths_of_lists() -> None:
    rows = splits_of(7, 2, 0, 5)["test"]
    assert lengths_of(rows, "input_ids").tolist() == [2, 0, 5]
    assert lengths_of(rows.select([2, 0]), "input_ids").tolist() == [5, 2]
    assert lengths_of(rows.select([]), "input_ids").tolist() == []


def saved(model: Any, place: Path) -> Path:
    """The model with a tokenizer of words."""
    words = {word: number for number, word in enumerate(["<pad>", "<unk>", "<eos>", "a", "b"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(place)
    model.save_pretrained(place)
    return place


@pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")
@pytest.mark.parametrize("command", ["train text", "evaluate"])
def test_commands_refuse_texts_longer_than_the_models_positions(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    model = saved(tiny_distilbert(**names), tmp_path / "model")
    texts = ["a b" if row < 58 else "a " * 50 for row in range(60)]
    data = {"text": texts, "label": ["bad", "good"] * 30, "place": ["x", "x", "y", "y"] * 15}
    table = write_table(tmp_path / "d.csv", data)
    words = ["--group_column", "place", "--use_cpu", "--output_dir", tmp_path / "out"]
    if command == "evaluate":
        words = ["evaluate", model, table, *words]
    else:
        words = ["train", "text", "--model", model, "--dataset", table, *words]
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert "--max_length 128: the longest row has 50 tokens, and the model takes 32" in error
    assert (
        "max_position_embeddings=32" in error
        and "Set --max_length 32 or less" in error
        and not list((tmp_path / "out").glob("group*"))
    )


def test_rows_of_a_language_model_are_refused_too(tmp_path: Path) -> None:
    from hf_cgd.cli.language_model import main as train

    model = saved(tiny_model("gpt2"), tmp_path / "model")
    for name in "xy":
        (tmp_path / f"{name}.txt").write_text("a b a b a b a b\n" * 80)
    words = ["--sources", f"x={tmp_path}/x.txt", f"y={tmp_path}/y.txt", "--model", model, "--block_length", 40]
    with pytest.raises((SystemExit, ValueError)) as ended:
        train([str(word) for word in (*words, "--use_cpu", "--output_dir", tmp_path / "out")])
    assert "block_length" in str(ended.value) and "the model takes 32" in str(ended.value)
