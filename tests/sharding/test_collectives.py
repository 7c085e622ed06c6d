"""Collectives read from compiled programs: small ones built here, and the asynchronous forms of a GPU as text."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from eaglejax.sharding.collectives import by_phase, read_collectives

PROGRAM = """
    import jax, jax.numpy as jnp
    from jax import lax
    from jax.sharding import AxisType, PartitionSpec as P
    mesh = jax.make_mesh((1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    def step(x, w):
        with jax.named_scope("verify"), jax.named_scope("layer_0"):
            x = lax.psum(x @ w, "model")
        with jax.named_scope("draft_step_1"):
            x = x + lax.all_gather(x[:, :2], "model").sum().astype(x.dtype)
        with jax.named_scope("threshold"):
            x = lax.fori_loop(0, 8, lambda i, x: lax.psum(x, "model"), x)
        return lax.cond(x[0, 0] > 2, lambda x: lax.pmax(x, "model"), lambda x: x, x)
    def loop(w, x):
        with jax.named_scope("before"):
            x = lax.ppermute(x, "model", [(0, 1), (1, 0)])
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, step(c[1], w)), (jnp.int32(0), x))[1]
    run = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    shape = lambda *n: jax.ShapeDtypeStruct(n, DTYPE)
    print(run.lower(shape(8, 8), shape(3, 8)).compile().as_text())
"""


def compiled(dtype: str) -> str:
    code = textwrap.dedent(PROGRAM).replace("DTYPE", f"jnp.{dtype}")
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_kinds_shapes_phases_and_loops(dtype, item):
    found = read_collectives(compiled(dtype))
    seen = {(c.phase, c.kind): c for c in found}
    assert len(found) == len(seen) == 5

    layer = seen["verify", "all-reduce"]
    assert layer.shapes[0][1] == (3, 8) and layer.scopes == ("verify", "layer_0")
    assert layer.bytes == 3 * 8 * item  # also where a CPU widens a bfloat16 sum
    assert layer.widened == (dtype == "bfloat16")
    assert len(layer.loops) == 1 and not layer.conditional and layer.trips == 1

    gathered = seen["draft_step_1", "all-gather"]
    assert gathered.shapes[0][1] == (4, 3, 2) and not gathered.conditional
    inner = seen["threshold", "all-reduce"]
    assert len(inner.loops) == 2 and inner.trips == 8
    assert by_phase(found)["threshold"] == {"all-reduce": (8, 8 * 3 * 8 * item)}

    assert seen["", "all-reduce"].conditional
    before = seen["before", "collective-permute"]
    assert before.loops == () and before.bytes in (3 * 8 * item, 3 * 8 * 4)


def test_a_program_without_any():
    text = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile().as_text()
    assert read_collectives(text) == []
    with pytest.raises(ValueError, match="no ENTRY"):
        read_collectives("nothing")


GPU = """\
%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
}

%body.1 (p: (s32[], bf16[4,16])) -> (s32[], bf16[4,16]) {
  %start = bf16[4,16]{1,0} all-reduce-start(%x), to_apply=%sum, metadata={op_name="jit(decode)/while/body/verify/target/psum"}
  %done = bf16[4,16]{1,0} all-reduce-done(%start)
  %two = (bf16[4,16]{1,0}, f32[2]{0}) all-reduce(%x, %y), to_apply=%sum, metadata={op_name="jit(decode)/while/body/verify/psum"}
  %gather = (s32[1,4]{1,0}, s32[2,4]{1,0}) all-gather-start(%z), dimensions={0}, metadata={op_name="jit(decode)/while/body/head/all_gather"}
  %gathered = s32[2,4]{1,0} all-gather-done(%gather)
  %moved = (f8e4m3fn[64]{0}, f8e4m3fn[64]{0}, u32[], u32[]) collective-permute-start(%q), source_target_pairs={{0,1}}
}

ENTRY %main.2 (p: bf16[4,16]) -> bf16[4,16] {
  ROOT %loop = (s32[], bf16[4,16]{1,0}, s32[], s32[], s32[], /*index=5*/s32[]) while(%init), condition=%cond.1, body=%body.1
}
"""


def test_asynchronous_pairs_count_once():
    found = read_collectives(GPU)
    assert [(c.kind, c.bytes, c.phase) for c in found] == [
        ("all-reduce", 4 * 16 * 2, "verify"),
        ("all-reduce", 4 * 16 * 2 + 2 * 4, "verify"),
        ("all-gather", 2 * 4 * 4, "head"),
        ("collective-permute", 64, ""),
    ]
    assert all(c.loops == ("body.1",) for c in found)


def test_a_collective_out_of_reach_is_not_passed_over():
    with pytest.raises(ValueError, match="collective start in body.1"):
        read_collectives(GPU.replace("body=%body.1", "heart=%body.1"))
