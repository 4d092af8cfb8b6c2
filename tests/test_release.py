"""What a release is checked by: release/check.py, README on a package index, the workflow. `make release-check` runs all."""

import re
from pathlib import Path

import packaging.tags
import pytest
import yaml

import hatch_build
from release import check

ROOT = Path(__file__).parent.parent
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


# README where the files beside it are not

README = """
[page](docs/a.md#part) ![drawn [twice]](docs/b.svg) [![badge](c.svg)](docs/d.md) <img alt="x" src="e.png" width="9">
[paper](https://example.org/f) [below](#g) [mail](mailto:h@example.org) [`code`](i.py) `losses[0](scores)`

```python
print(losses[0](scores))
```
"""


def test_links_lead_to_the_code_host_from_an_index():
    before = "https://host/us/anyk"
    assert hatch_build.for_index(README, f"{before}/", "1.2") == (
        README.replace("(docs/a", f"({before}/blob/v1.2/docs/a")
        .replace("(docs/b", f"({before}/raw/v1.2/docs/b")
        .replace("(c.svg", f"({before}/raw/v1.2/c.svg")
        .replace("(docs/d", f"({before}/blob/v1.2/docs/d")
        .replace('"e.png', f'"{before}/raw/v1.2/e.png')
        .replace("(i.py", f"({before}/blob/v1.2/i.py")
    )


def test_without_a_code_host_what_would_be_broken_is_left_out():
    rest = README[README.index("[paper]") :].replace("[`code`](i.py)", "`code`")
    assert hatch_build.for_index(README, "", "1.2").split() == ["page", *rest.split()]


def test_the_pages_own_readme_has_no_broken_link_on_an_index():
    for source in ("", "https://host/us/anyk"):
        text = hatch_build.for_index((ROOT / "README.md").read_text(), source, "1.2")
        text = re.sub(hatch_build.CODE, "", text)
        assert not re.findall(hatch_build.LINK, text)
        assert not re.findall(hatch_build.TAG, text)


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ('<a href="https://a.b/c">x</a><img src="https://a.b/d.svg"><a href="mailto:e@f">y</a>', []),
        ('<h2><a href="#part" id="part"></a>Part</h2><a href="#part">x</a>', []),
        ('<a href="#nowhere">x</a>', ["link to #nowhere, which no heading has"]),
        ('<a href="docs/a.md">x</a>', ["link to docs/a.md, which is relative"]),
        ('<img src="docs/a.svg" alt="x">', ["image to docs/a.svg, which is relative"]),
        ('<img src="//a.b/c.svg">', ["image to //a.b/c.svg, which is relative"]),
        ("<img>", ["image without a place: an index removes all but http, https and mailto, data: too"]),
    ],
)
def test_what_leads_nowhere_on_an_index_is_told(page, told):
    assert check.broken(page) == told


# Files and versions


def test_version_and_day_are_the_same_everywhere(tmp_path, monkeypatch):
    assert check.same_version_everywhere().startswith(check.version())
    for name in ("src/anyk/__init__.py", "CHANGELOG.md", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(check, "ROOT", tmp_path)
    check.same_version_everywhere()
    for name, before, after in (
        ("CITATION.cff", "\nversion: ", "\nversion: 9"),
        ("CITATION.cff", '\ndate-released: "', '\ndate-released: "9'),
        ("CHANGELOG.md", "\n## 0", "\n## 9"),
        ("src/anyk/__init__.py", '__version__ = "', '__version__ = "9'),
    ):
        text = (tmp_path / name).read_text()
        assert before in text
        (tmp_path / name).write_text(text.replace(before, after, 1))
        with pytest.raises(check.Wrong, match=r"CHANGELOG\.md begins with"):
            check.same_version_everywhere()
        (tmp_path / name).write_text(text)


def test_one_of_each_kind_is_released(tmp_path):
    names = [f"anyk-{check.version()}{end}" for end in (".tar.gz", "-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl")]
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(check.Wrong, match="one pure wheel"):
        check.artifacts(tmp_path)
    names.append(f"anyk-{check.version()}-py3-none-any.whl")
    (tmp_path / names[-1]).touch()
    assert [path.name for path in check.artifacts(tmp_path)] == names
    (tmp_path / "anyk-0.0.1.tar.gz").touch()
    with pytest.raises(check.Wrong, match=r"found anyk-0\.0\.1"):
        check.artifacts(tmp_path)


@pytest.mark.parametrize(("oldest", "tag"), [("11.0", "macosx_11_0_arm64"), ("14", "macosx_14_0_arm64")])
def test_a_wheel_for_a_mac_is_for_the_system_that_it_is_compiled_for(monkeypatch, oldest, tag):
    monkeypatch.setattr(hatch_build.sys, "platform", "darwin")
    monkeypatch.setattr(hatch_build, "mac_platforms", lambda version: packaging.tags.mac_platforms(version, "arm64"))
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", oldest)
    assert hatch_build.platform_tag() == tag


# The workflow


def test_the_workflow_publishes_for_a_tag_alone_and_after_everything_else():
    jobs = dict(WORKFLOW["jobs"])
    publish = jobs.pop("publish")
    assert publish["if"] == "github.event_name == 'push' && startsWith(github.ref, 'refs/tags/v')"
    assert set(publish["needs"]) == set(jobs)
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for job in jobs.values():
        assert "permissions" not in job
        assert not any("publish" in str(step) or "twine" in str(step) for step in job["steps"])
