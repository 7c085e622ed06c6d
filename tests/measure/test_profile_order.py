"""Kernels without instruction names, told apart by their order."""

import numpy as np

from eaglejax.measure.profile_events import _named, _Raw
from eaglejax.measure.profile_hlo import Instructions
from eaglejax.measure.profile_order import Order, kernel_name
from eaglejax.sharding.hlo_text import parse_program

SCOPES = ("draft_extend", "verify/target/layer_0/block/mlp", "verify/target/layer_1/block/mlp")


def program(layers: int = 3) -> str:
    """A loop whose layers run equal fusions, each a sum of squares and a scaling; the first and the last instruction are like no other."""
    fused, body, before = [], [], "%start.1"
    for kind in ("reduce", "scale"):
        for layer in range(layers):
            fused.append(
                f"%{kind}_c.{layer} (p{layer}: f32[8]) -> f32[8] {{\n  %p{layer} = f32[8]{{0}} parameter(0)\n"
                f"  ROOT %{kind}_r.{layer} = f32[8]{{0}} {'multiply' if kind == 'scale' else 'add'}(%p{layer}, %p{layer})\n}}\n"
            )
    for layer in range(layers):
        for kind in ("reduce", "scale"):
            name = f"%{kind}_fusion.{layer}"
            scope = f'metadata={{op_name="jit(decode)/while/body/{SCOPES[layer]}/{kind}"}}'
            body.append(f"  {name} = f32[8]{{0}} fusion({before}), kind=kLoop, calls=%{kind}_c.{layer}, {scope}")
            before = name
    return (
        "HloModule jit_decode, is_scheduled=true\n\n"
        + "\n".join(fused)
        + "\n%start_c (q: f32[8]) -> f32[8] {\n  %q = f32[8]{0} parameter(0)\n  ROOT %n = f32[8]{0} negate(%q)\n}\n"
        + "\n%body (s: f32[8]) -> f32[8] {\n  %s = f32[8]{0} parameter(0)\n"
        + '  %start.1 = f32[8]{0} fusion(%s), kind=kLoop, calls=%start_c, metadata={op_name="jit(decode)/while/body/accept/n"}\n'
        + "\n".join(body)
        + f'\n  %gemm.1 = f32[8]{{0}} custom-call({before}), custom_call_target="__cublas$gemm", '
        + 'metadata={op_name="jit(decode)/while/body/verify/target/head/dot"}\n'
        + '  ROOT %copy.9 = f32[8]{0} copy(%gemm.1), metadata={op_name="jit(decode)/while/body/commit/copy"}\n}\n'
        + "\n%test (t: f32[8]) -> pred[] {\n  %t = f32[8]{0} parameter(0)\n  ROOT %less = pred[] constant(true)\n}\n"
        + "\nENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
        + "  ROOT %while.1 = f32[8]{0} while(%x), condition=%test, body=%body\n}\n"
    )


# as XLA runs them: one kernel for all equal instructions, called after the first
CYCLE = ["start_1", *("reduce_fusion_0", "scale_fusion_0") * 3, "nvjet_gemm", "splitK_reduce", "MemcpyD2D"]
INSTRUCTIONS = ["start.1", *(f"{kind}_fusion.{layer}" for layer in range(3) for kind in ("reduce", "scale"))]


def test_equal_kernels_are_told_apart_by_their_order():
    entry, computations = parse_program(program())
    order = Order(computations, "body")
    laid = order.lay(CYCLE * 3, loop=True)
    names = [None if line is None else line.name for line in laid]
    assert (
        names == [*INSTRUCTIONS, "gemm.1", None, "copy.9"] * 3 or names == [*INSTRUCTIONS, None, "gemm.1", "copy.9"] * 3
    )


def test_a_kernel_that_is_missing_moves_no_other():
    order = Order(parse_program(program())[1], "body")
    whole, cut = list(CYCLE), list(CYCLE)
    del cut[7]  # the library's kernel: what stands around it keeps its place
    names = [None if line is None else line.name for line in order.lay(whole + cut + whole, loop=True)]
    assert names[10:17] == INSTRUCTIONS and names[-1] == "copy.9"


def test_phases_by_place():
    instructions = Instructions(program())
    raw = [
        _Raw(0, "jit_decode", "command_buffer_1", kernel, 0, float(place), place + 0.5)
        for place, kernel in enumerate(CYCLE * 2)
    ]
    ops, told = _named(raw, [instructions])
    assert told == len(raw) == len(ops)
    phases = [op.phase for op in ops]
    one = ["accept", *["draft extend"] * 2, *["verify: MLP"] * 4, "verify: head", "verify: head", "commit"]
    assert phases == one * 2
    assert {op.name for op in ops} >= set(INSTRUCTIONS)  # so that every instruction is found as often as cycles ran


def test_the_name_of_a_kernel():
    assert kernel_name("loop_add_fusion.4") == "loop_add_fusion_4"


def test_many_random_programs_keep_their_order():
    random = np.random.default_rng(0)
    order = Order(parse_program(program())[1], "body")
    for _ in range(20):
        # cycles with random kernels left out: those that remain are laid in order, each on an instruction that may run it
        kernels = [kernel for kernel in CYCLE if kernel == "start_1" or random.random() < 0.8]
        places = [order.lines.index(line) for line in order.lay(kernels, loop=True) if line is not None]
        assert places == sorted(places) and len(set(places)) == len(places)
        fits = [kernel for kernel in kernels if kernel != "splitK_reduce" or "nvjet_gemm" not in kernels]
        assert len(places) == len(fits)
