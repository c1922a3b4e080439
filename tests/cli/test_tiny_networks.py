"""The network for made-up texts: its vocabulary by hand, on every process the same."""

import pytest

from hf_cgd.cli.tiny_networks import tiny_text_classifier


def test_words_by_how_often_they_come_and_then_by_the_alphabet() -> None:
    model, tokenizer = tiny_text_classifier([["b a", "B c"], ["c d"]], ["no", "yes"])
    # b and c twice, a and d once.
    assert sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get) == [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "b", "c", "a", "d",
    ]  # fmt: skip
    assert tokenizer("a", "d z")["input_ids"] == [2, 6, 3, 7, 1, 3]
    assert tokenizer.pad_token_id == 0 == model.config.pad_token_id
    assert model.config.id2label == {0: "no", 1: "yes"} and model.config.vocab_size == 8


@pytest.mark.parametrize("length", [2, 5])
def test_longer_texts_are_cut(length: int) -> None:
    _, tokenizer = tiny_text_classifier([["a b c d e f"]], ["no", "yes"])
    assert len(tokenizer("a b c d e f", truncation=True, max_length=length)["input_ids"]) == length
