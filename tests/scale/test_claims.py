"""Claims: one holder, taken over only from the dead."""

import json
import os
import subprocess
import sys
import time

from gramscope.scale.claims import Claims


def test_one_holder_at_a_time(tmp_path):
    first, second = Claims(tmp_path), Claims(tmp_path)
    assert first.take("0.0")
    assert not second.take("0.0")
    assert not first.take("0.0"), "not even twice by one"
    second.release("0.0")
    assert not second.take("0.0"), "another's claim is not released"
    first.release("0.0")
    assert second.take("0.0")
    second.close()
    first.close()
    assert not list(tmp_path.iterdir())


def test_what_killed_processes_left_is_removed(tmp_path):
    (tmp_path / "kernel").mkdir()
    old, new = tmp_path / "kernel" / ".0.1.abc.tmp", tmp_path / "kernel" / ".0.2.abc.tmp"
    for path in (old, new, tmp_path / "kernel" / "0.1", tmp_path / ".clock.dead"):
        path.touch()
    for path in (old, tmp_path / "kernel" / "0.1", tmp_path / ".clock.dead"):
        os.utime(path, (1e9, 1e9))
    claims = Claims(tmp_path)
    claims.remove_abandoned(tmp_path / "kernel")
    claims.close()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".0.2.abc.tmp", "0.1", "kernel"]


def test_a_claim_of_a_dead_process_is_taken_over_at_once(tmp_path):
    code = "import sys; from pathlib import Path; from gramscope.scale.claims import Claims; import os\n"
    code += "Claims(Path(sys.argv[1])).take('0.0'); os.kill(os.getpid(), 9)"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (tmp_path / "0.0").exists()
    claims = Claims(tmp_path)
    assert claims.take("0.0")
    claims.close()


def test_a_lease_runs_out_unless_there_are_signs_of_life(tmp_path):
    alive, waiting = Claims(tmp_path, lease=0.4), Claims(tmp_path, lease=0.4)
    assert alive.take("alive")
    assert alive.take("gone")
    elsewhere = {**json.loads((tmp_path / "gone").read_text()), "machine": "another"}
    alive._held.discard(tmp_path / "gone")
    (tmp_path / "gone").write_text(json.dumps(elsewhere))
    (tmp_path / "torn").write_text("{")  # its holder was killed while it wrote
    assert not waiting.take("gone")
    time.sleep(0.7)
    assert waiting.take("gone")
    assert waiting.take("torn")
    assert not waiting.take("alive")
    alive.close()
    waiting.close()
