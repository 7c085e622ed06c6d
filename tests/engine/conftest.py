"""Engines that several trials share: programs are compiled once for each pair and tree."""

import kit_m
import pairs
import pytest


@pytest.fixture(scope="session")
def ring_folders(tmp_path_factory):
    """P = Q = one ring through tokens 3..63: every drafted token is accepted. EOS ids 63 and 40."""
    p = kit_m.sharp(pairs.around())
    return pairs.write_ring(tmp_path_factory.mktemp("ring"), p, p)


@pytest.fixture(scope="session")
def ring(ring_folders):
    """The ring with five levels, four slots, max_len 128."""
    return pairs.load(*ring_folders, speculation=pairs.FIVE)


@pytest.fixture(scope="session")
def random_pairs(tmp_path_factory):
    """Folders of the random pairs by family."""
    make = lambda family: pairs.write_random(tmp_path_factory.mktemp(family), family)
    return {family: make(family) for family in ("deepseek_v3", "qwen3_moe")}


@pytest.fixture(scope="session")
def latent(random_pairs):
    """MLA, one dense and three expert layers, with a draft that is right about half the time."""
    return pairs.load(*random_pairs["deepseek_v3"])


@pytest.fixture(scope="session")
def grouped(random_pairs):
    """Qwen3-MoE, likewise."""
    return pairs.load(*random_pairs["qwen3_moe"])


@pytest.fixture(params=["latent", "grouped"], scope="session")
def random_engine(request):
    return request.getfixturevalue(request.param)
