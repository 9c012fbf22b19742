"""What a release says about itself: one version everywhere, addresses that nobody invented, a README for the index."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import gramscope
from test_docs import module_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
metadata = module_of(ROOT / "tools" / "index_metadata.py")


def test_one_version_and_one_author():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    zenodo = json.loads((ROOT / ".zenodo.json").read_text(encoding="utf-8"))
    assert re.search(r"^version: (.*)$", citation, re.M)[1] == gramscope.__version__
    author = PROJECT["authors"][0]["name"]
    assert f"  - name: {author}\n" in citation
    assert [creator["name"] for creator in zenodo["creators"]] == [author]
    assert zenodo["license"] == PROJECT["license"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.M)[1]
    assert gramscope.__version__.split(".dev")[0] == newest, "the newest section of the changelog is this version's"


def test_no_address_is_invented():
    assert metadata.addresses("") == {}
    assert metadata.absolute_links(README, "", "1.0") == README
    assert "urls" not in PROJECT, "they come from make dist REPOSITORY=..."


@pytest.mark.parametrize("site", ["", "https://docs.example"])
def test_addresses_come_from_the_one_that_is_given(site):
    found = metadata.addresses("https://forge.example/a/b", site)
    assert found["Issues"] == "https://forge.example/a/b/issues"
    assert ("Documentation" in found) == bool(site)
    assert all(address.startswith("https://") for address in found.values())


def test_on_the_index_every_link_of_the_readme_is_absolute():
    text = metadata.absolute_links(README, "https://forge.example/a/b", "1.0")
    targets = re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert targets
    assert all(target.startswith("https://") for target in targets)
    assert "(https://forge.example/a/b/raw/v1.0/docs/images/report.png)" in text
    assert "(https://forge.example/a/b/blob/v1.0/docs/watch.md)" in text
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", README, flags=re.DOTALL)))
