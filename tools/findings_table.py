"""Write anew what follows from the tables under experiments/: the verdicts of each RESULT.md and docs/findings.md.

Run from the repository root, after a result is published or an expected.toml is changed: python tools/findings_table.py
"""

from pathlib import Path

from gramscope.reproduce.experiments import RESULT_FILE, all_experiments
from gramscope.reproduce.overview import with_table, with_verdicts

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS, PAGE = ROOT / "experiments", ROOT / "docs" / "findings.md"


def main() -> None:
    for one in all_experiments(EXPERIMENTS):
        result = one.folder / RESULT_FILE
        if result.exists():
            result.write_text(with_verdicts(result.read_text(encoding="utf-8"), one), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), EXPERIMENTS), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)} and the verdicts of every {RESULT_FILE}")


if __name__ == "__main__":
    main()
