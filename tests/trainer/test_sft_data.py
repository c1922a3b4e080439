"""Data that trl's SFTTrainer prepares: masks of its own, groups kept, packing within a group; and what is refused."""

from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import ClassLabel, Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainingArguments

from hf_cgd import GroupRobustConfig, GroupRobustTrainer, GroupRobustWarning
from hf_cgd.trainer.sft_data import prepare_sft

pytest.importorskip("trl", reason="trl is an extra: pip install 'hf-cgd[trl]'")

CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<eos>"
    "{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.train_from_iterator(
        ["the cat sat on a mat user assistant"],
        trainers.BpeTrainer(
            vocab_size=280, special_tokens=["<pad>", "<eos>", "<unk>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        ),
    )  # fmt: skip
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    wrapped.chat_template = CHAT
    return wrapped


def chats() -> Dataset:
    said = [("where", "on a mat"), ("who", "the cat"), ("what", "sat"), ("where", "the mat")]
    return Dataset.from_list(
        [
            {
                "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}],
                "source": "ab"[row % 2],
            }
            for row, (q, a) in enumerate(said)
        ]
    )


def counted(tokenizer: Any, row: dict[str, Any]) -> str:
    kept = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    assert kept == [label for label in row["labels"] if label != -100]
    return tokenizer.decode(kept)


def test_only_the_assistants_turns_count_and_groups_stay(tokenizer: Any) -> None:
    data = prepare_sft(chats(), tokenizer, "source", chats(), assistant_only_loss=True, max_length=64)
    said = ["on a mat<eos>", "the cat<eos>", "sat<eos>", "the mat<eos>"]
    for prepared in (data.train_dataset, data.eval_dataset):
        assert prepared["source"][:] == ["a", "b", "a", "b"]
        assert [counted(tokenizer, row).strip() for row in prepared] == said
    batch = data.data_collator([data.train_dataset[row] for row in range(2)])
    lengths = [len(data.train_dataset[row]["input_ids"]) for row in range(2)]
    assert batch["attention_mask"].sum(dim=1).tolist() == lengths
    assert batch["labels"].shape == batch["input_ids"].shape


def test_only_completions_count(tokenizer: Any) -> None:
    rows = [
        {"prompt": "the", "completion": " cat", "source": "a"},
        {"prompt": "a", "completion": " mat", "source": "b"},
    ]
    data = prepare_sft(Dataset.from_list(rows), tokenizer, ["source"])
    assert [counted(tokenizer, row) for row in data.train_dataset] == [" cat<eos>", " mat<eos>"]
    both = prepare_sft(Dataset.from_list(rows), tokenizer, "source", completion_only_loss=False)
    assert [counted(tokenizer, row) for row in both.train_dataset] == ["the cat<eos>", "a mat<eos>"]


def test_each_group_is_packed_by_itself(tokenizer: Any) -> None:
    texts = ["the cat sat", "a mat", "on a mat sat the cat", "sat", "cat"]
    raw = Dataset.from_dict({"text": texts, "source": [0, 1, 0, 1, 1]}).cast_column(
        "source", ClassLabel(names=["x", "y"])
    )
    data = prepare_sft(raw, tokenizer, "source", raw, packing=True, packing_strategy="wrapped", max_length=6)
    alone = prepare_sft(raw, tokenizer, "source").train_dataset
    for packed in (data.train_dataset, data.eval_dataset):
        assert packed.features["source"] == raw.features["source"]
        for group in range(2):
            rows = [row for row in packed if row["source"] == group]
            assert all(len(row["input_ids"]) == 6 for row in rows[:-1])
            tokens = [token for row in rows for token in row["input_ids"]]
            assert tokens == [token for row in alone if row["source"] == group for token in row["input_ids"]]
    batch = data.data_collator([data.train_dataset[0], data.train_dataset[1]])
    assert batch["input_ids"].shape == (2, 6) and bool((batch["attention_mask"] == 1).all())


def long_texts(shares: tuple[int, int]) -> Dataset:
    """Of 20 rows of each group so many have eleven tokens with the end, the others two."""
    texts = ["cat" * 10 if row < number else "cat" for number in shares for row in range(20)]
    return Dataset.from_dict({"text": texts, "source": ["a"] * 20 + ["b"] * 20})


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_texts_that_are_cut_are_told_by_group(tokenizer: Any, mode: str) -> None:
    assert [len(tokenizer(text)["input_ids"]) for text in ("cat", "cat" * 10)] == [1, 10]
    raw = long_texts((5, 1))
    with pytest.warns(GroupRobustWarning) as told:
        data = prepare_sft(raw, tokenizer, "source", long_texts((0, 2)), max_length=6, truncation_mode=mode)
    (caution,) = data.cautions
    assert caution == (
        "Texts of more than 6 tokens were cut, and the rest was not read. train_dataset: 6 of 40 (15.0%); "
        '"a" 25.0% of 20, "b" 5.0% of 20; eval_dataset: 2 of 40 (5.0%); "b" 10.0% of 20, no row of 1 other(s).'
    )
    (ours,) = [one for one in told if one.category is GroupRobustWarning]
    assert str(ours.message).startswith(caution) and ours.filename == __file__
    # The rows are those of trl, which is told to cut.
    whole = prepare_sft(raw, tokenizer, "source", max_length=None)
    assert not whole.cautions and max(len(ids) for ids in whole.train_dataset["input_ids"]) == 11
    part = slice(None, 6) if mode == "keep_start" else slice(-6, None)
    for name in ("input_ids", "labels"):
        assert data.train_dataset[name][:] == [row[part] for row in whole.train_dataset[name]]
    assert set(data.train_dataset.column_names) == set(whole.train_dataset.column_names)
    assert data.train_dataset["source"][:] == raw["source"][:]


def test_rows_of_which_nothing_is_left_that_counts_are_told(tokenizer: Any) -> None:
    """The answer of one row lies behind the cut; trl drops it."""
    asked = [("cat", "sat"), ("cat" * 10, "sat"), ("cat", "sat"), ("mat", "sat")]
    rows = Dataset.from_list([{"prompt": p, "completion": c, "source": "ab"[n % 2]} for n, (p, c) in enumerate(asked)])
    with pytest.warns(GroupRobustWarning) as told:
        data = prepare_sft(rows, tokenizer, "source", max_length=6)
    assert [str(one.message).split(".")[0] for one in told if one.category is GroupRobustWarning] == [
        "Texts of more than 6 tokens were cut, and the rest was not read",
        "Rows of which the cut left no token that counts were dropped",
    ]
    assert 'train_dataset: 1 of 4 (25.0%); "b" 50.0% of 2, no row of 1 other(s)' in data.cautions[1]
    assert data.train_dataset["source"][:] == ["a", "a", "b"]
    assert [counted(tokenizer, row) for row in data.train_dataset] == ["sat<eos>"] * 3
    chosen = prepare_sft(chats(), tokenizer, "source", assistant_only_loss=True, max_length=64)
    assert chosen.cautions == []


def test_few_cut_texts_are_told_quietly_and_those_of_streams_not_counted(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Dataset.from_dict({"text": ["cat"] * 399 + ["cat" * 10], "source": ["a"] * 400})
    with caplog.at_level("INFO", "hf_cgd"):
        data = prepare_sft(rows, tokenizer, "source", max_length=6)
        assert "1 of 400 (0.2%)" in caplog.text and "1 of 400" in data.cautions[0]
        stream = prepare_sft(long_texts((5, 1)).to_iterable_dataset(), tokenizer, "source", max_length=6)
    assert "of a stream are cut at 6 tokens, and not counted" in caplog.text
    assert max(len(row["input_ids"]) for row in stream.train_dataset) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_free": True}, "padding_free=True makes one row of a whole batch"),
        ({"packing": True}, "packing_strategy='bfd' makes one row.*Use packing_strategy='wrapped'"),
        ({"packing": True, "packing_strategy": "bfd_split"}, "packing_strategy='bfd_split'"),
    ],
)
def test_rows_that_are_no_examples_are_refused(tokenizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_sft(chats(), tokenizer, "source", **options)


def test_what_else_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"train_dataset has no column \['origin'\]"):
        prepare_sft(chats(), tokenizer, "origin")
    with pytest.raises(ValueError, match="eval_dataset has no column"):
        prepare_sft(chats(), tokenizer, "source", chats().remove_columns("source"))
    with pytest.raises(ValueError, match="needs a tokenizer, got object"):
        prepare_sft(chats(), object(), "source")  # type: ignore[arg-type]


def test_a_config_that_was_made_before_keeps_its_precision_and_device(tokenizer: Any, tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    device, known = args.device, dict(AcceleratorState._shared_state)
    prepare_sft(chats(), tokenizer, "source")
    assert dict(AcceleratorState._shared_state) == known
    assert args.device == device == torch.device("cpu")


def test_what_is_prepared_is_trained_with_its_masks_and_groups(tokenizer: Any, tmp_path: Any) -> None:
    """The groups' first losses are those of the counted tokens alone, by hand; trl's collator drops the column."""
    data = prepare_sft(chats(), tokenizer, "source", assistant_only_loss=True, max_length=64)
    torch.manual_seed(0)
    sizes = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    model = GPT2LMHeadModel(sizes)
    expected: dict[str, list[float]] = {"a": [], "b": []}
    for row in data.train_dataset:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, :-1]
        expected[row["source"]].append(torch.nn.functional.cross_entropy(scores, labels[1:]).item())
    args = GroupRobustConfig(
        str(tmp_path), objective="cgd", group_column="source", per_device_train_batch_size=4, max_steps=2,
        logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = GroupRobustTrainer(model, args, train_dataset=data.train_dataset, data_collator=data.data_collator)
    trainer.train()
    log = trainer.state.log_history[0]
    for name, losses in expected.items():
        assert log[f"group_loss/{name}"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
