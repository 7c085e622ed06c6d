"""Lines that hold no text to train on, or not the kind they say: refused with file, line and what to do."""

import json
import shutil

import pytest

from eaglejax.errors import PromptError
from eaglejax.text.tokenizer import load_tokenizer
from eaglejax.training.conversations import Reader
from eaglejax.training.lines import HEADER

TEMPLATE = (
    "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}_{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("text") / "letters"
    shutil.copytree(data / "text" / "letters", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Reader(load_tokenizer(folder), 64, (63,))


def written(folder, *rows):
    file = folder / "data.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": 5}, "turns: turns are a list of texts; found 5"),
        ({"turns": {"a": 1}}, "turns: turns are a list of texts; found {'a': 1}"),
        ({"turns": "text"}, "turns: turns are a list of texts; found 'text'"),
        ({"turns": [5]}, "turns: turns are a list of texts; found [5]"),
        ({"prompt": 5}, "prompt: a prompt is text; found 5"),
        ({"prompt": ""}, "prompt: is empty; found ''"),
        ({"turns": []}, "turns: is empty; found []"),
        ({"prompt": " \n"}, "prompt: is blank"),
        ({"prompt": "a\0b"}, "prompt: holds a NUL character; found at character 1"),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "messages[0]: holds a NUL character"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0]: an unknown role"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "conversations[0]: an unknown role"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages: a conversation without a user's turn"),
        ({"token_ids": [4]}, "line 2: an answer without its prompt; found token_ids; expected prompt_ids"),
        ({"text": "a"}, "line 2: holds no training text; found text"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: a message needs text"),
        ({"prompt_ids": [1.5]}, "token ids are a list of whole numbers"),
        ({"prompt_ids": [70]}, "a token id that the target does not have"),
        ("[1]", "line 2: is not an object"),
        ("{", "line 2: is not JSON"),
    ],
)
def test_lines_that_are_no_prompt(reader, tmp_path, row, message):
    file = written(tmp_path, {"prompt": "ab"}, row)
    with pytest.raises(PromptError) as error:
        reader.prompts([file], 20)
    assert message in str(error.value) and f"{file}, line 2" in str(error.value)
    assert error.value.fix


def test_files_that_hold_nothing(reader, tmp_path):
    file = written(tmp_path, {HEADER: 1})
    for read in (reader.corpus, reader.prompts):
        with pytest.raises(PromptError, match="data.jsonl: holds a header and no answer"):
            read([file], 20)
    file.write_text("\n \n")
    with pytest.raises(PromptError, match="data.jsonl: is empty"):
        reader.prompts([file], 20)


def test_encodings(reader, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"prompt": "ab"}\n{"prompt": "\xff"}\n')
    with pytest.raises(PromptError, match="line 2: is not UTF-8; found byte 0xff at 12"):
        reader.prompts([file], 20)
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "ab"}\r\n')
    assert len(reader.prompts([file], 20).fitting) == 1


def test_long_prompts_are_counted(reader, tmp_path):
    found = reader.prompts([written(tmp_path, {"prompt": "ab"}, {"prompt": "abcdef"}, {"prompt": "abcdefg"})], 5)
    assert (len(found.fitting), found.too_long) == (1, 2)


def test_a_conversation_that_nobody_asked_for_is_left_out_of_training_text(reader, tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
    corpus = reader.corpus([written(tmp_path, {"messages": talk[1:]}, {"messages": talk})], 20)
    assert (corpus.lines, corpus.without_loss, len(corpus.documents)) == (2, 1, 1)


def test_answers_that_the_row_cuts_away(reader, tmp_path):
    talk = [{"role": "user", "content": "abcdefgh"}, {"role": "assistant", "content": "bcd"}]
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    file = written(tmp_path, {"messages": talk})
    with pytest.raises(
        PromptError, match="answers begin where the row ends.*cut away at row_length 9.*larger row_length"
    ):
        reader.corpus([file], 9)
    corpus = reader.corpus([written(tmp_path, {"messages": talk}, {"messages": short})], 9)
    assert corpus.cut_away == 1 and "1 of them since the cut left no answer" in str(corpus)
