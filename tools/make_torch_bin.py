"""Writes tests/data/checkpoint/: files by torch, and the same tensors in safetensors form. Needs torch and safetensors.

Run from the project's root: python tools/make_torch_bin.py
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path("tests/data/checkpoint")


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 4, generator=generator)
    state = {
        "f32": base,
        "f64": base.double(),
        "f16": base.half(),
        "bf16": base.bfloat16(),
        "i64": torch.arange(-3, 5),
        "i32": torch.arange(-3, 5, dtype=torch.int32),
        "i8": torch.arange(-3, 5, dtype=torch.int8),
        "u8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        # the same storage again: whole, transposed, from an offset, every other column
        "tied": base,
        "transposed": base.T,
        "rows": base[2:5],
        "columns": base[:, ::2],
        "expanded": base[:1].expand(3, 4),
        "parameter": torch.nn.Parameter(torch.randn(2, 3, generator=generator)),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.save(state, FOLDER / "pytorch_model.bin")
    save_file({k: v.detach().contiguous().clone() for k, v in state.items()}, FOLDER / "expected.safetensors")
    # what a module's own state dict adds: an OrderedDict with an attribute
    torch.save(torch.nn.Linear(3, 2).requires_grad_(False).state_dict(), FOLDER / "linear.bin")
    torch.save({"old": torch.ones(2)}, FOLDER / "old_format.bin", _use_new_zipfile_serialization=False)


main()
