"""Which tokens of a conversation carry loss, and what is refused with its file and line."""

import json
import shutil

import numpy as np
import pytest

from eaglejax.errors import PromptError
from eaglejax.text.tokenizer import load_tokenizer
from eaglejax.training.conversations import Reader, shortened
from eaglejax.training.data import Document, draft_vocabulary, loss_places, mask_table

END = 63  # "_" of the letters
TEMPLATE = (
    "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}_{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


def reader_of(folder, data, template):
    shutil.copytree(data / "text" / "letters", folder)
    (folder / "chat_template.jinja").write_text(template)
    return Reader(load_tokenizer(folder), 64, (END,))


@pytest.fixture(scope="module")
def reader(tmp_path_factory, data):
    return reader_of(tmp_path_factory.mktemp("text") / "letters", data, TEMPLATE)


def write(folder, *rows):
    file = folder / "data.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def turns(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def test_answers_of_all_turns_carry_loss(reader):
    document = reader.document({"messages": turns("ab", "cde", "f", "gh")}, "here")
    text = reader.tokenizer.decode(document.tokens, skip_special_tokens=False)
    assert text == "Uab_Acde_Uf_Agh_"
    assert [text[a:b] for a, b in document.answers] == ["cde_", "gh_"] and document.ended
    # row i reads token i + 1 and foretells token i + 2: d, e, _ of the first answer, h, _ of the second
    counted = np.flatnonzero(loss_places(document))
    assert "".join(text[i + 2] for i in counted) == "de_h_"
    assert "".join(text[i + 1] for i in counted) == "cdegh"
    sharegpt = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cde"}]
    short = reader.document({"conversations": sharegpt}, "here")
    assert reader.tokenizer.decode(short.tokens, skip_special_tokens=False) == "Uab_Acde_"
    assert reader.prompt({"messages": turns("ab", "cde", "f", "gh")}, "here") == document.tokens[:13].tolist()


def test_mask_table_by_hand(reader):
    """Prompt U a, answer b c _: which row reads what, foretells what, and counts, at three steps."""
    document = reader.document({"messages": turns("a", "bc")}, "here")
    text = "Ua_Abc_"
    assert reader.tokenizer.decode(document.tokens, skip_special_tokens=False) == text
    found = [
        (
            p.step,
            p.place,
            text[p.place + p.step + 1],
            "-" if p.foretells is None else text[p.place + p.step + 2],
            p.counts,
        )
        for p in mask_table(document, 3)
    ]
    # the first answer token, b, comes from the target's prefill: no row is asked for it; nothing follows the end token
    assert found == [
        (0, 0, "a", "_", False), (0, 1, "_", "A", False), (0, 2, "A", "b", False), (0, 3, "b", "c", True),
        (0, 4, "c", "_", True), (0, 5, "_", "-", False),
        (1, 0, "_", "A", False), (1, 1, "A", "b", False), (1, 2, "b", "c", True), (1, 3, "c", "_", True),
        (1, 4, "_", "-", False),
        (2, 0, "A", "b", False), (2, 1, "b", "c", True), (2, 2, "c", "_", True), (2, 3, "_", "-", False),
    ]  # fmt: skip


def test_vocabulary_counts_every_answer(reader):
    document = reader.document({"messages": turns("zzz", "aab", "zzz", "ab")}, "here")
    ids, covered = draft_vocabulary([document], 3, 64)
    assert reader.tokenizer.decode(ids, skip_special_tokens=False) == "ab_" and covered == 1.0


def test_long_and_short_texts_are_cut_or_left_out_and_counted(reader, tmp_path):
    file = write(
        tmp_path,
        {"messages": turns("ab", "cdefghij")},
        {"messages": turns("abcdefghij", "cde")},
        {"messages": turns("a", "b")},
        {"prompt_ids": [5], "token_ids": [7]},
        {"prompt_ids": [5], "token_ids": [END]},
    )
    corpus = reader.corpus([file], 9)
    assert (corpus.lines, corpus.cut, corpus.without_loss) == (5, 2, 2)
    # an answer of one token that did not end: the target's word after it is known
    assert [len(d.tokens) for d in corpus.documents] == [9, 6, 2]
    assert [d.ended for d in corpus.documents] == [False, True, False]
    assert "2 cut to the row length, 2 without loss left out" in str(corpus)


def test_shortened_keeps_whole_answers_closed():
    document = Document(np.arange(12, dtype=np.int32), 8, True, ((2, 5),))
    cut = shortened(document, 7)
    assert cut is not None and len(cut.tokens) == 5 and cut.ended and cut.answers == ((2, 5),)
    cut = shortened(document, 4)
    assert cut is not None and not cut.ended and cut.answers == ((2, 4),)
    cut = shortened(document, 10)
    assert cut is not None and not cut.ended and cut.answers == ((2, 5), (8, 10))
    assert shortened(document, 2) is None


def test_markers_that_never_match_are_refused(tmp_path, data):
    """A template that writes answers in another way than it asks for them: nothing would carry loss."""
    other = reader_of(tmp_path / "other", data, TEMPLATE.replace("%}A{%", "%}B{%"))
    file = write(tmp_path, {"messages": turns("ab", "cd")}, {"messages": turns("ef", "gh")})
    with pytest.raises(PromptError, match=r"0 of \d+ tokens carry loss"):
        other.corpus([file], 32)
    with pytest.raises(PromptError, match="carry loss"):
        other.corpus([write(tmp_path, {"prompt": "ab"})], 32)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "data.jsonl: is empty"),
        ((*[{"prompt": "a"}] * 16, '{"prompt": '), "line 17: is not JSON"),
        (("[1]",), "line 1: is not an object"),
        (({"text": "a"},), "line 1: holds no training text; found text"),
        (({"prompt": "a", "messages": turns("a")},), "holds more than one kind"),
        (({"messages": [{"role": "user"}]},), r"line 1: messages\[0\].content"),
        (({"prompt_ids": [1, 64], "token_ids": [2]},), "made with another tokenizer; found 64; expected 0..63"),
        (({"prompt_ids": [1.5], "token_ids": [2]},), "whole numbers"),
    ],
)
def test_broken_files_are_refused(reader, tmp_path, rows, message):
    with pytest.raises(PromptError, match=message):
        reader.corpus([write(tmp_path, *rows)], 32)


def test_text_needs_a_tokenizer(tmp_path):
    with pytest.raises(PromptError, match="no tokenizer"):
        Reader(None, 64, ()).corpus([write(tmp_path, {"messages": turns("a", "b")})], 32)


def test_prompts_too_long_are_refused(reader, tmp_path):
    file = write(tmp_path, {"turns": ["abcdef"]}, {"prompt": "ab"})
    assert reader.tokenizer.decode(reader.prompts([file], 5).fitting[0], skip_special_tokens=False) == "Uab_A"
    with pytest.raises(PromptError, match="no prompt is short enough; found 5 tokens or more in 2 prompts"):
        reader.prompts([file], 4)
