"""Vocabulary, loss places and packing: documents of one row do not touch each other."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from eaglejax import load_draft
from eaglejax.errors import ConfigError, PromptError
from eaglejax.training.data import PADDING, Document, draft_vocabulary, loss_places, pack
from eaglejax.training.trainer import TrainSettings, chain_acceptance
from eaglejax.training.ttt import Text, teach, ttt


def document(tokens, answer, ended=False):
    return Document(np.asarray(tokens, np.int32), answer, ended)


def test_vocabulary_counts_answers_only():
    documents = [document([9, 9, 9, 9, 4, 4, 5], 4), document([9, 2, 5, 4], 1)]
    ids, covered = draft_vocabulary(documents, 2, 12)
    assert ids.tolist() == [4, 5] and covered == pytest.approx(5 / 6)
    # fewer seen than asked for: the lowest unseen ids
    assert draft_vocabulary(documents, 5, 12)[0].tolist() == [0, 1, 2, 4, 5]


def test_vocabulary_refuses():
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        draft_vocabulary([document([1, 2], 1)], 13, 12)
    with pytest.raises(PromptError, match="no answer tokens"):
        draft_vocabulary([document([1, 2], 2)], 2, 12)


def test_loss_places():
    # prompt 0..2, answer 3..6: row 2 reads token 3 and foretells token 4; behind the end token nothing
    assert np.flatnonzero(loss_places(document(range(7), 3, ended=True))).tolist() == [2, 3, 4]
    assert np.flatnonzero(loss_places(document(range(7), 3))).tolist() == [2, 3, 4, 5]


def test_pack_fills_rows_and_keeps_documents_whole():
    rng = np.random.default_rng(0)
    documents = [document(rng.integers(3, 50, n), 2) for n in rng.integers(4, 30, 40)]
    text = pack(documents, 32)
    found = []
    for row in range(text.tokens.shape[0]):
        for segment in range(text.segments[row].max() + 1):
            places = np.flatnonzero(text.segments[row] == segment)
            assert np.all(np.diff(places) == 1) and text.positions[row, places].tolist() == list(range(len(places)))
            found.append(tuple(text.tokens[row, places].tolist()))
    assert sorted(found) == sorted(tuple(d.tokens.tolist()) for d in documents)
    assert (text.segments == PADDING).mean() < 0.2  # one document a row would leave 47 % empty
    assert not text.loss[text.segments == PADDING].any()


def test_pack_refuses():
    with pytest.raises(PromptError, match="longer than a row"):
        pack([document(range(9), 2)], 8)
    with pytest.raises(PromptError, match="no token carries loss"):
        pack([document(range(4), 6)], 8)


def test_packed_documents_have_the_losses_they_have_alone(data):
    folder = data / "train_eagle3"
    x = load_file(folder / "expected.safetensors")
    embedding = load_file(folder / "embed.safetensors")["model.embed_tokens.weight"]
    head = jnp.asarray(load_file(folder / "target_head.safetensors")["lm_head.weight"])
    draft = load_draft(str(folder), target_embedding=embedding, dtype="float32").draft
    ids = x["input_ids"].astype(np.int32)

    def losses(pieces):
        """pieces: rows of (sequence, length, document number)."""
        cut = lambda array: jnp.asarray(np.stack([np.concatenate([array[b, :n] for b, n, _ in row]) for row in pieces]))
        lengths = [[n for _, n, _ in row] for row in pieces]
        text = Text(
            tokens=cut(ids),
            positions=jnp.asarray(
                np.stack([np.concatenate([np.arange(n, dtype=np.int32) for n in row]) for row in lengths])
            ),
            segments=jnp.asarray(
                np.stack([np.concatenate([np.full(n, s, np.int32) for _, n, s in row]) for row in pieces])
            ),
            loss=jnp.asarray(np.stack([np.concatenate([np.arange(n) < n - 2 for n in row]) for row in lengths])),
        )
        teacher = teach(cut(x["target_last_hidden"]), head, draft.target_ids[...])
        out = ttt(draft, text, cut(x["aux_hidden"]), teacher, 3)
        return np.asarray(out.losses) * text.tokens.size, np.asarray(out.places)

    together = losses([[(0, 9, 0), (1, 7, 1)]])
    alone = [losses([[(0, 9, 0)]]), losses([[(1, 7, 0)]])]
    # a step's window may not reach over a document's end, alone or packed
    np.testing.assert_array_equal(together[1], alone[0][1] + alone[1][1])
    np.testing.assert_allclose(together[0], alone[0][0] + alone[1][0], rtol=1e-5)
    merged = losses([[(0, 9, 0), (1, 7, 0)]])
    assert np.abs(merged[0] - together[0]).max() > 1e-2


def test_chain_acceptance_by_hand():
    tokens = np.asarray([[1, 2, 10, 11, 12, 13, 14, 15, 16, 17]], np.int32)
    text = Text(
        tokens,
        np.arange(10, dtype=np.int32)[None],
        np.zeros((1, 10), np.int32),
        np.asarray([[0, 1, *[1] * 7, 0]], bool),
    )
    drafted = np.zeros((2, 1, 10), np.int32)
    # the first cycle starts at the answer's first token (place 2), row 1: both drafted tokens right -> root 5
    drafted[0, 0, 1], drafted[1, 0, 1] = 11, 12
    # from 5, row 4: the first is wrong, the second does not count -> root 6
    # from 6, row 5: one right -> root 8, too near the end for another cycle
    drafted[1, 0, 4] = 15
    drafted[0, 0, 5] = 15
    taus, cycles = chain_acceptance(text, drafted, 2)
    assert cycles.tolist() == [3] and taus.tolist() == [pytest.approx(1 + 3 / 3)]


def test_rate_rises_then_falls():
    settings = TrainSettings(rate=1.0, warmup=0.1, final=0.1)
    assert settings.rate_at(0.05) == pytest.approx(0.5)
    assert settings.rate_at(0.1) == pytest.approx(1.0)
    assert settings.rate_at(1.0) == pytest.approx(0.1) == settings.rate_at(2.0)
