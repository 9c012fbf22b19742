"""``python -m gramscope.reproduce``: the same as ``gramscope reproduce``."""

import sys

from gramscope.cli.main import app

if __name__ == "__main__":
    app(["reproduce", *sys.argv[1:]], prog_name="gramscope")
