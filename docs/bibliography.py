"""The page of references, written from references.bib: one line a work, in the order of the file."""

import re
from pathlib import Path

ENTRY = re.compile(r"^@(?P<kind>\w+)\{(?P<key>[\w-]+),\s*(?P<fields>.*)\}\s*$", re.MULTILINE)
FIELD = re.compile(r"(\w+)=\{((?:[^{}]|\{[^{}]*\})*)\}")


def entries(text: str) -> dict[str, dict[str, str]]:
    """The fields of each work by its key; an entry stands on one line.

    >>> entries("@misc{a2020, title={T}, year={2020}}")
    {'a2020': {'title': 'T', 'year': '2020'}}
    """
    return {found["key"]: dict(FIELD.findall(found["fields"])) for found in ENTRY.finditer(text)}


def line(work: dict[str, str]) -> str:
    """``Authors, *Title*, place, year, arXiv number``, with the surnames alone."""
    names = [name.strip("{} ").split(",")[0] for name in work.get("author", "").split(" and ") if name]
    names = ["et al." if name == "others" else name for name in names]
    authors = ", ".join(names).replace(", et al.", " et al.")
    place = work.get("journal") or work.get("booktitle") or work.get("publisher") or ""
    number = work.get("eprint")
    link = f"[arXiv:{number}](https://arxiv.org/abs/{number})" if number else ""
    parts = (authors, f"*{work['title']}*", place, work["year"], link)
    return "- " + ", ".join(part for part in parts if part)


def write_bibliography(source: Path, page: Path) -> None:
    works = entries(source.read_text(encoding="utf-8"))
    head = "# References\n\nThe works that the docs and docstrings cite. For BibTeX: `docs/references.bib`."
    text = head + "\n\n" + "\n".join(line(work) for work in works.values()) + "\n"
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")
