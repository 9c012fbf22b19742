"""What the package index needs and the source does not know: the project's addresses, and a README with absolute links.

`make dist REPOSITORY=https://...` gives the address (SITE=https://... that of the docs, where there is one). Without
one the package is built all the same: with no addresses, and with the README as it is, whose picture and links lead
nowhere on the index. hatchling runs this file; see [tool.hatch.metadata.hooks.custom] in pyproject.toml.
"""

import os
import re
from pathlib import Path

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # the tests call the two functions; only a build needs the class
    MetadataHookInterface = object


def addresses(repository: str, site: str = "") -> dict[str, str]:
    """The project's links, by the labels that the index knows."""
    if not repository:
        return {}
    pages = {"Documentation": site} if site else {}
    files = {"Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
    return {"Repository": repository, "Issues": f"{repository}/issues", **pages} | {
        label: f"{repository}/blob/HEAD/{file}" for label, file in files.items()
    }


def absolute_links(text: str, repository: str, version: str) -> str:
    """The README with links to the files of this version's tag; pictures to the files themselves."""
    if not repository:
        return text
    text = re.sub(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)", rf"![\1]({repository}/raw/v{version}/\2)", text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", rf"[\1]({repository}/blob/v{version}/\2)", text)


class IndexMetadata(MetadataHookInterface):
    def update(self, metadata: dict[str, object]) -> None:
        repository = os.environ.get("REPOSITORY", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        version = re.search(
            r'__version__ = "(.*)"', (Path(self.root) / "src/gramscope/__init__.py").read_text(encoding="utf-8")
        )[1]
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute_links(text, repository, version),
        }
        if repository:
            metadata["urls"] = addresses(repository, os.environ.get("SITE", ""))
