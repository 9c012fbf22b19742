"""Write the table of all published numbers beside ours into docs/findings.md, from the tables under experiments/.

Run from the repository root: python tools/findings_table.py
"""

from pathlib import Path

from gramscope.reproduce.overview import with_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "findings.md"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), ROOT / "experiments"), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
