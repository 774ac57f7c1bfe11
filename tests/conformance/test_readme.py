"""The README's Python examples run as they stand, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyamp.trace import Trace

_README = Path(__file__).parents[2] / "README.md"
_EXAMPLES = dict(re.findall(r"^## (\w+)\n+```python\n(.*?)```", _README.read_text("utf-8"), flags=re.M | re.S))


@pytest.mark.parametrize("heading", ["PyTorch", "JAX", "Keras"])
def test_example_runs(heading: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(_EXAMPLES[heading])
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stderr
    if heading != "JAX":
        assert Trace.read(tmp_path / "run.jsonl").records
