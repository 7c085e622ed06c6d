"""From instructions to phases: scopes, what lost them, loops and branches, kernels of a command buffer, programs of one name."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eaglejax.measure.profile_events import _kernels, _named, _Raw
from eaglejax.measure.profile_hlo import Instructions
from eaglejax.measure.profile_phases import group_of, in_order, phase_of

HLO = """HloModule jit_decode, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %lost = f32[4]{0} negate(%p)
  ROOT %inner = f32[4]{0} add(%p, %p), metadata={op_name="jit(decode)/while/body/verify/target/layer_0/block/gqa/add"}
}

%branch (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %sampled = f32[4]{0} negate(%a)
}

%body (s: f32[4]) -> f32[4] {
  %s = f32[4]{0} parameter(0)
  %fusion.1 = f32[4]{0} fusion(%s), kind=kLoop, calls=%fused
  %copy.3 = f32[4]{0} copy(%fusion.1)
  %step = f32[4]{0} add(%copy.3, %s), metadata={op_name="jit(decode)/while/body/draft_step_2/draft/mlp/add"}
  %sum = f32[4]{0} all-reduce(%step), metadata={op_name="jit(decode)/verify/target/block/moe/all_reduce/psum"}, to_apply=%branch
  %cond.4 = f32[4]{0} conditional(%s, %sum, %sum), branch_computations={%branch}, metadata={op_name="jit(decode)/verify/draw/cond"}
  ROOT %plain = f32[4]{0} add(%cond.4, %s), metadata={op_name="jit(decode)/while/body/add"}
}

%test (t: f32[4]) -> pred[] {
  %t = f32[4]{0} parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %while.1 = f32[4]{0} while(%x), condition=%test, body=%body, metadata={op_name="jit(decode)/while"}
}
"""


def test_phases_of_instructions_with_and_without_scopes():
    program = Instructions(HLO)
    phases = program.phases
    assert program.module == "jit_decode"
    assert phases["fusion.1"] == "verify: attention"  # from what is fused in it
    assert phases["copy.3"] == "verify: attention"  # from its operand
    assert phases["step"] == "draft step 2"
    assert phases["sum"] == "verify: collectives"
    assert phases["sampled"] == "verify: draw"  # from the branch it stands in
    assert phases["plain"] == "loop"  # the source has no scope there
    assert program.containers == {"while.1", "cond.4"}
    assert {"fusion.1", "step", "plain"} <= program.every_cycle
    assert not {"sampled", "while.1", "x"} & program.every_cycle


def test_an_event_names_its_instruction_or_its_kernel_does():
    program = Instructions(HLO)
    assert program.name_of("step", "") == "step"
    assert program.name_of("command_buffer_2", "fusion_1") == "fusion.1"  # a kernel launched from a command buffer
    assert program.name_of("", "ncclDevKernel_AllReduce") is None
    raw = [
        _Raw(0, "jit_decode", "command_buffer_2", "fusion_1", 0, 0.0, 3.0),
        _Raw(0, "", "", "copy_3", 0, 3.0, 4.0),  # no module either
        _Raw(0, "jit_decode", "while.1", "MemcpyD2H", 0, 4.0, 5.0),
        _Raw(0, "jit_decode", "command_buffer_2", "cublas_gemm", 0, 5.0, 9.0),
        _Raw(0, "jit_other", "add.1", "add_1", 0, 9.0, 10.0),
    ]
    ops, by_kernel = _named(raw, [program])
    assert [(one.name, one.phase) for one in ops] == [
        ("fusion.1", "verify: attention"),
        ("copy.3", "verify: attention"),
        ("command_buffer_2", None),  # told as unnamed, not dropped
    ]
    assert by_kernel == 2


def test_kernels_are_read_from_the_streams_of_a_gpu():
    kernel = lambda name, begin, **stats: SimpleNamespace(
        name=name, start_ns=float(begin), end_ns=begin + 2.0, stats=list(stats.items())
    )
    streams = [
        SimpleNamespace(
            name="Stream #13(Compute)", events=[kernel("fusion_1", 0, hlo_module="jit_decode", hlo_op="fusion.1")]
        ),
        SimpleNamespace(name="Stream #14(Compute,MemcpyD2H)", events=[kernel("copy_3", 1, correlation_id=5)]),
        SimpleNamespace(name="XLA Modules", events=[kernel("jit_decode", 0)]),
    ]
    raw = _kernels(SimpleNamespace(lines=streams), 3)
    assert [(r.device, r.module, r.op, r.kernel, r.begin, r.end) for r in raw] == [
        (3, "jit_decode", "fusion.1", "fusion_1", 0, 2),
        (3, "", "", "copy_3", 1, 3),
    ]


def test_runs_of_programs_of_one_name_are_told_apart_by_their_order():
    one = Instructions(HLO.replace("draft_step_2", "draft_step_1"))
    two = Instructions(HLO)
    raw = [_Raw(0, "jit_decode", "step", "", run, float(run), run + 0.5) for run in (7, 9)]
    ops, _ = _named(raw, [one, two])
    assert [op.phase for op in ops] == ["draft step 1", "draft step 2"]


def test_scopes_of_a_real_program():
    def body(state):
        with jax.named_scope("verify"), jax.named_scope("head"):
            state = jnp.tanh(state @ state)
        with jax.named_scope("accept"):
            return lax.fori_loop(0, 3, lambda _, x: jnp.sin(x) + x.sum(), state)

    run = jax.jit(lambda x: lax.while_loop(lambda x: x[0, 0] < 2, body, x))
    program = Instructions(run.lower(jnp.ones((8, 8))).compile().as_text())
    assert {"verify: head", "accept", "loop"} == set(program.phases.values())


def test_other_text_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        Instructions("module @jit_decode {}")


def test_phases_groups_and_their_order():
    assert phase_of(("draft_prefill", "draft_extend"), False) == "draft prefill"
    assert phase_of(("draft_extend", "commit"), False) == "draft extend"
    assert phase_of(("verify", "target", "layer_1", "block", "moe", "mlp"), False) == "verify: experts"
    assert phase_of(("verify", "target", "layer_1", "block"), False) == "verify: norms"
    assert phase_of(("verify",), False) == "verify: rest"
    assert phase_of(("draft_step_3",), True) == "draft step 3: collectives"
    assert phase_of(("elsewhere",), False) is None
    mixed = {"commit", "verify: head", "draft step 10", "draft step 2", "verify: attention", "draft extend", "loop"}
    assert in_order(mixed) == [
        "loop", "draft extend", "draft step 2", "draft step 10", "verify: attention", "verify: head", "commit",
    ]  # fmt: skip
    assert [group_of(p) for p in ("rerank", "draft step 2: collectives", "verify: head", "host: return", "commit")] == [
        "draft", "draft", "verify", "host", "commit",
    ]  # fmt: skip
