"""The README's Python example runs as written, and its commands name flags and files that exist."""

import re
from pathlib import Path

import pytest

from eaglejax.cli.flags import GROUPS
from eaglejax.models.families import FAMILIES

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
_FLAGS = {flag.name for group in GROUPS.values() for flag in group} | {"help"}


def test_the_python_example_runs(smollm2_path, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 200


def test_flags_named_in_prose_exist():
    named = set(re.findall(r"`--([a-z_]+)", README)) | set(re.findall(r"eaglejax generate.* --([a-z_]+)", README))
    assert len(named) > 15
    assert named <= _FLAGS


def test_every_family_is_named():
    (targets,) = re.findall(r"^Targets: (.*?)Drafts:", README, re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`([a-z0-9_]+)`", targets))
    assert named - {"model_type"} == {family.name for family in FAMILIES}


@pytest.mark.parametrize("page", ["README.md", "docs/design.md", "docs/capture.md", "docs/training.md"])
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert all((ROOT / page).parent.joinpath(link).exists() for link in links), links
