"""Code run in a process that has imported torch and nothing else of ours.

Importing torch takes seconds, so one server imports it and forks for each piece of code.
"""

import atexit
import json
import subprocess
import sys
from functools import cache

SERVER = """
import json, os, sys, tempfile, traceback
import torch
for line in sys.stdin:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            status = 0
            try:
                exec(json.loads(line), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        out.seek(0), err.seek(0)
        print(json.dumps([status, out.read().decode(), err.read().decode()]), flush=True)
"""


@cache
def server():
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    return process


def run_after_torch(code: str) -> tuple[str, str]:
    """What the code writes to its output and to its error stream; a failure of the code is a failure here."""
    process = server()
    process.stdin.write(json.dumps(code) + "\n")
    process.stdin.flush()
    status, out, err = json.loads(process.stdout.readline())
    assert status == 0, err
    return out, err
