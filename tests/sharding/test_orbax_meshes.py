"""A checkpoint converted to Orbax restores on any mesh, plain or packed, with the tokens of the Hugging Face folder on one device."""

import re
import sys
from pathlib import Path

import pytest
from flax import nnx
from random_targets import QWEN, REQUESTS, engine, write

from eaglejax.checkpoint.convert import convert
from eaglejax.models.packed import PackedWeight

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from quantised_files import case_tensors, write_case  # noqa: E402

MESHES = ("model=8", "data=2,model=4")
READ = re.compile(r"read ([\d,]+) bytes of the files for ([\d,]+) bytes of tensors in")


def answers(made) -> list[list[int]]:
    """Greedy, sampled and filtered requests; ids below 64, the smaller vocabulary."""
    prompts, samplings = zip(*(([i % 64 for i in prompt], sampling) for prompt, sampling in REQUESTS), strict=True)
    return [answer.token_ids for answer in made.generate(list(prompts), list(samplings))]


def write_int4(folder: Path, dtype: str) -> str:
    config, stored, _ = case_tensors("int4_group")
    return str(write_case(folder, config, stored))


def write_moe(folder: Path, dtype: str) -> str:
    import jax.numpy as jnp

    return write(folder, QWEN | dict(torch_dtype=dtype), change=lambda _, tensor: tensor.astype(jnp.dtype(dtype)))


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(write_moe, "float32"), (write_moe, "bfloat16"), (write_int4, "int4")],
    ids=["f32", "bf16", "int4"],
)
def test_orbax_on_another_mesh(tmp_path, make, dtype):
    source = make(tmp_path / "source", dtype)
    convert(source, tmp_path / "orbax", to="orbax", max_bytes=100_000)
    assert len(list((tmp_path / "orbax").glob("group-*"))) > 1
    one = engine(source)
    tokens = answers(one)
    needed = set()
    for mesh in MESHES:
        made = engine(str(tmp_path / "orbax"), mesh)
        assert answers(made) == tokens, mesh
        packed = [node for _, node in nnx.iter_graph(made._pair.target) if isinstance(node, PackedWeight)]
        assert {node.packing.kind for node in packed} == ({"int4"} if dtype == "int4" else set())
        (told,) = READ.findall(str(made.load_report))
        read, needs = (int(figure.replace(",", "")) for figure in told)
        assert read >= needs > 0
        needed.add(needs)
    # every distinct part once, however many devices keep it: the figure of the folder itself
    (told,) = READ.findall(str(one.load_report))
    assert needed == {int(told[1].replace(",", ""))}
