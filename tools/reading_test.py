"""Can a page be read at first sight? Checks the concept pages, and lists long pages and long sentences.

    python tools/reading_test.py            # exit code 1 if a concept page does not have the fixed form

The fixed form: three labelled sentences in the first 100 words (what it is, when it is high or low, what to do), a
picture, and the headings Formula, How to read it, What to do, When it misleads. Long pages and sentences are a list
for the writer, not an error.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
LABELS = ("**What it is.**", "**High or low.**", "**What to do.**")
HEADINGS = ("Formula", "How to read it", "What to do", "When it misleads")
FIRST_WORDS, LONG_PAGE, LONG_SENTENCE = 100, 1500, 40


def concept_pages() -> list[str]:
    """The pages of the first list of docs/concepts.md, one for each measure."""
    first = (DOCS / "concepts.md").read_text(encoding="utf-8").split("## ")[1]
    return re.findall(r"\]\(([\w-]+)\.md\)", first)


def prose(text: str) -> str:
    """The text without code, tables, pictures, directives, headings and addresses of links."""
    text = re.sub(r"^(```|:::+).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^( {4}.*|\s*(\||!\[|#|<!--).*)$", "", text, flags=re.MULTILINE)  # four spaces: formulas
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """Sentences; a paragraph or an item of a list ends one too. A formula in `backticks` is one word."""
    plain = re.sub(r"`[^`]*`", "code", prose(text))
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", plain)
    parts = [part for block in blocks for part in re.split(r"(?<=[.:?!;])\s", block)]
    return [" ".join(part.split()) for part in parts if part.strip()]


def faults(text: str) -> list[str]:
    """What a concept page lacks of the fixed form; nothing if it has it."""
    found = [f"no {label} at its start" for label in LABELS if label not in text]
    if not found:
        places = [text.index(label) for label in LABELS]
        lead = text[: text.index("\n\n", places[-1])]
        count = len(" ".join(sentences(lead)).split())
        if places != sorted(places):
            found.append("the three labels are in another order")
        if count > FIRST_WORDS:
            found.append(f"its first three items have {count} words, more than {FIRST_WORDS}")
    if "](images/" not in text:
        found.append("no picture")
    titles = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    return found + [f"no heading '{h}'" for h in HEADINGS if not any(title.startswith(h) for title in titles)]


def main() -> int:
    wrong = 0
    for name in concept_pages():
        for fault in faults((DOCS / f"{name}.md").read_text(encoding="utf-8")):
            print(f"{name}.md: {fault}")
            wrong += 1
    print(f"{len(concept_pages())} concept pages, {wrong} faults\n")
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        count = len(prose(text).split())
        long = [s for s in sentences(text) if len(s.split()) > LONG_SENTENCE]
        if count > LONG_PAGE:
            print(f"{path.name}: {count:,} words (over {LONG_PAGE:,})")
        for sentence in long:
            print(f"{path.name}: {len(sentence.split())} words: {sentence[:90]}...")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
