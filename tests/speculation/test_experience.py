"""What "auto" carries from wave to wave: bounded, towards what was seen, and of slots with a request alone."""

import numpy as np

from eaglejax.speculation.adapt import ALLOWANCE, PRIOR, SHARE
from eaglejax.speculation.experience import FORGET, MOST, Experience

EASY = np.log(np.asarray([0.9, *[0.1 / 9] * 9], np.float32))
HARD = EASY[::-1]


def learned(difficulty, spent, made, taken, credit=ALLOWANCE):
    experience = Experience()
    size = len(spent)
    rows = np.broadcast_to(difficulty, (size, len(PRIOR)))
    experience.learn(
        rows, np.asarray(spent, np.float32), np.full(size, credit, np.float32), np.asarray(made), np.asarray(taken)
    )
    return experience


def test_the_first_wave_begins_with_the_prior():
    belief = Experience().begin(2, 3)
    np.testing.assert_allclose(np.exp(belief.difficulty), np.broadcast_to(PRIOR, (2, len(PRIOR))), rtol=1e-6)
    assert belief.credit.tolist() == [ALLOWANCE] * 2 and belief.spent.tolist() == [0, 0] and belief.used.shape == (2, 3)


def test_the_next_begins_nearer_to_what_was_seen():
    easy = learned(EASY, [60.0], [100], [True])
    np.testing.assert_allclose(easy.weights, FORGET * np.asarray(PRIOR) + (1 - FORGET) * np.exp(EASY), rtol=1e-5)
    np.testing.assert_allclose(easy.weights.sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(np.exp(easy.begin(1, 2).difficulty[0]), easy.weights, rtol=1e-5)


def test_credit_is_what_is_left_within_bounds():
    np.testing.assert_allclose(learned(EASY, [50.0], [49], [True]).credit, 49 - (1 - SHARE) * 50 + ALLOWANCE, rtol=1e-5)
    assert learned(EASY, [60.0], [100], [True]).credit == MOST
    assert learned(HARD, [60.0], [50], [True]).credit == 0
    # the mean of the slots that had a request
    np.testing.assert_allclose(
        learned(EASY, [50.0, 50.0, 50.0], [49, 50, 500], [True, True, False]).credit,
        49.5 - (1 - SHARE) * 50 + ALLOWANCE,
        rtol=1e-5,
    )


def test_a_wave_that_ran_no_cycle_teaches_nothing():
    nothing = learned(EASY, [0.0, 3.0], [0, 3], [True, False])
    np.testing.assert_array_equal(nothing.weights, np.asarray(PRIOR, np.float32))
    assert nothing.credit == ALLOWANCE
