"""The names that `eaglejax` promises are there, and the design page says the same."""

import re
import subprocess
import sys
from pathlib import Path

import eaglejax

DESIGN = (Path(__file__).parents[1] / "docs" / "design.md").read_text(encoding="utf-8")


def test_every_promised_name_is_there():
    for name in eaglejax.__all__:
        assert getattr(eaglejax, name).__name__ == name
    (line,) = re.findall(r"^  __init__\.py +(.*)\(nothing heavy", DESIGN, re.MULTILINE)
    assert {name.strip() for name in line.split(",")} == set(eaglejax.__all__)


def test_the_tree_has_the_promised_fields():
    (line,) = re.findall(r"engine\.propose\(.*# Tree: (.*)", DESIGN)
    assert set(re.findall(r"\.([a-z]+) \[", line)) == set(eaglejax.Tree.__dataclass_fields__)


def test_nothing_heavy_comes_with_the_package():
    code = "import sys, eaglejax; assert not {'jax', 'flax', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_design_page_shows_each_argument_once():
    (call,) = re.findall(r"EagleJaxEngine\.from_pretrained\((.*?)slots=4\)", DESIGN, re.DOTALL)
    arguments = re.findall(r"(?:^| )([a-z_]+)=", call, re.MULTILINE)
    assert len(arguments) == len(set(arguments)), arguments
