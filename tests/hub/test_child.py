"""Child processes do not run what lies in the user's folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from edgellm.hub.child import python_command


def test_a_module_in_the_users_folder_is_not_imported(tmp_path: Path) -> None:
    for name in ("dis", "pip"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the user')")
    code = "import dis, runpy; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [*python_command(code), "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("pip ")
