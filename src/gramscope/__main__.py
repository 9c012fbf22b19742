"""``python -m gramscope``: the same commands as ``gramscope``."""

from gramscope.cli.main import app

if __name__ == "__main__":
    app(prog_name="gramscope")
