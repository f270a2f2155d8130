"""One wheel holds the command and exactly our three packages."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_only_our_packages_and_its_command_runs_outside_the_source_tree(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "rulecast",
        "rulecast_server",
        "rulecast_agent",
    }
    assert any(name.endswith("rulecast/v1/rules_pb2.py") for name in names)
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    code = "import sys, rulecast.cli; sys.exit(not rulecast.cli.__file__.startswith(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=env, cwd=tmp_path)
