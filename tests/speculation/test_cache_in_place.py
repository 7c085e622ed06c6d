"""Caches are written where they lie, and float32 means float32: asked of the compiled programs, which run no token
here."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from flax import nnx

from eaglejax.config import Auto, Speculation
from eaglejax.models.config import (
    DenseConfig,
    DraftConfig,
    GQAConfig,
    LayerConfig,
    MLAConfig,
    MoEConfig,
    RopeConfig,
    TargetConfig,
)
from eaglejax.models.draft import Draft
from eaglejax.models.target import Target
from eaglejax.speculation import cache as caches
from eaglejax.speculation.programs import Programs

SLOTS, MAX_LEN, VOCAB, HIDDEN = 4, 512, 96, 32
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=16, rope=RopeConfig(10000.0, 16))
MLA = MLAConfig(
    heads=4,
    q_lora_rank=16,
    kv_lora_rank=24,
    nope_dim=16,
    rope_dim=8,
    value_dim=12,
    rope=RopeConfig(10000.0, 8, interleaved=True),
    scale=24**-0.5,
)
MLP = DenseConfig(48)
MOE = MoEConfig(experts=8, topk=2, width=16, score="sigmoid", groups=2, correction_bias=True, shared_width=16)
LLAMA = (LayerConfig(GQA, MLP),) * 2
LATENT = (LayerConfig(MLA, MLP), LayerConfig(MLA, MOE))
PROGRAMS = {
    "llama, plain": (LLAMA, Speculation(num_steps=0)),
    "llama, chain": (LLAMA, Speculation(2, 1)),
    "mla and experts, tree": (LATENT, Speculation(2, 2, 4)),
    # a window whose scores do not happen to have a cache's size
    "mla and experts, auto": (LATENT, Auto((Speculation(2, 1), Speculation(2, 2, 4)), window=24)),
}


def programs(name: str, max_len: int, dtype: str = "float32") -> Programs:
    """Programs over shapes: no weight is made."""
    layers, spec = PROGRAMS[name]
    target = TargetConfig("small", VOCAB, HIDDEN, layers, 1e-6, tie_embeddings=False, max_position=4096)
    boundaries = (0, 1, 2)
    draft = DraftConfig(VOCAB, 64, HIDDEN, HIDDEN, boundaries, LLAMA[:1], 1e-6)
    make = lambda kind, config: nnx.eval_shape(lambda: kind(config, dtype=dtype))
    return Programs(make(Target, target), make(Draft, draft), boundaries, spec, max_len, jnp.dtype(dtype))


@contextlib.contextmanager
def shapes_alone():
    """A state of shapes holds no arrays, which the type checks of the other tests would refuse."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def lower(made: Programs, kind: str) -> jax.stages.Lowered:
    with shapes_alone():
        return made.lower_decode(SLOTS) if kind == "decode" else made.lower_prefill(SLOTS, 16)


@functools.cache
def compiled(name: str, kind: str, max_len: int):
    lowered = lower(programs(name, max_len), kind)
    return lowered.as_text(), lowered.compile()


def hlo(program: jax.stages.Compiled) -> str:
    text = program.as_text()
    assert text
    return text


def memory(program: jax.stages.Compiled):
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis


@functools.cache
def cache_leaves(name: str, max_len: int, dtype: str = "float32") -> list[jax.ShapeDtypeStruct]:
    with shapes_alone():
        state = programs(name, max_len, dtype).state_shapes(SLOTS)
    return jax.tree.leaves((state.target_cache, state.draft_cache))


def size(leaves) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def whole_cache_copies(text: str, leaves: list[jax.ShapeDtypeStruct]) -> list[str]:
    """Lines of an HLO text that copy something with as many elements as a whole cache, in whatever layout."""
    sizes = {leaf.size for leaf in leaves}
    found = []
    for line in text.splitlines():
        if match := re.search(r"= \(?f32\[([\d,]+)\]\S* (?:copy|copy-start)\(", line):
            count = 1
            for word in match[1].split(","):
                count *= int(word)
            if count in sizes:
                found.append(line.strip())
    return found


each = pytest.mark.parametrize("name", PROGRAMS)
both = pytest.mark.parametrize("kind", ["decode", "prefill"])


@both
@each
def test_no_whole_cache_is_copied(name, kind):
    _, program = compiled(name, kind, MAX_LEN)
    text = hlo(program)
    assert " copy(" in text  # small ones there are: the pattern is the one this backend prints
    assert whole_cache_copies(text, cache_leaves(name, MAX_LEN)) == []


@both
@each
def test_temporaries_do_not_grow_with_the_cache(name, kind):
    small, large = (memory(compiled(name, kind, n)[1]).temp_size_in_bytes for n in (MAX_LEN, 2 * MAX_LEN))
    added = size(cache_leaves(name, 2 * MAX_LEN)) - size(cache_leaves(name, MAX_LEN))
    assert large - small < 0.05 * added, (small, large, added)


@both
@each
def test_the_caches_go_in_and_come_out_in_the_same_memory(name, kind):
    _, program = compiled(name, kind, MAX_LEN)
    assert memory(program).alias_size_in_bytes >= size(cache_leaves(name, MAX_LEN))


@pytest.mark.filterwarnings("error")
@both
@each
def test_every_donated_buffer_is_used(name, kind):
    """jax warns where a donated buffer finds no output; here that is an error."""
    lowered = lower(programs(name, MAX_LEN), kind)
    state = jax.tree.leaves(lowered.args_info[0][1])
    assert state and all(argument.donated for argument in state)


@both
@each
def test_float32_is_highest_precision_everywhere(name, kind):
    lowered, program = compiled(name, kind, MAX_LEN)
    assert lowered
    dots = [line for line in lowered.splitlines() if re.search(r"stablehlo\.(dot|ragged_dot|convolution)", line)]
    assert dots and [line for line in dots if "precision = [HIGHEST, HIGHEST]" not in line] == []
    text = hlo(program)
    dots = [line for line in text.splitlines() if re.search(r" (dot|convolution|ragged-dot)\(", line)]
    assert dots and [line for line in dots if "operand_precision={highest,highest}" not in line] == []
    # nothing computes in fewer bits on the way
    assert not re.search(r"\b(bf16|f16|tf32)\b", text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_bytes_are_the_formula(dtype):
    width = jnp.dtype(dtype).itemsize
    grouped = 2 * SLOTS * MAX_LEN * GQA.kv_heads * GQA.head_dim * width  # keys and values
    latent = SLOTS * MAX_LEN * (MLA.kv_lora_rank + MLA.rope_dim) * width  # one latent row: never the expanded heads
    expected = {
        "llama, plain": 2 * grouped,
        "llama, chain": 2 * grouped + grouped,
        "mla and experts, tree": 2 * latent + grouped,
        "mla and experts, auto": 2 * latent + grouped,
    }
    for name, count in expected.items():
        assert size(cache_leaves(name, MAX_LEN, dtype)) == count, name


def test_without_the_order_caches_are_copied(monkeypatch):
    """The write waits for the reads (`cache.true_after`). Without that there are copies, and these tests see them."""
    monkeypatch.setattr(caches, "true_after", lambda read: jnp.ones((read.shape[0],), bool))
    name = "llama, plain"
    program = lower(programs(name, MAX_LEN), "decode").compile()
    found = whole_cache_copies(hlo(program), cache_leaves(name, MAX_LEN))
    assert len(found) >= 4, "XLA no longer copies caches whose write is not ordered: `true_after` may go"
