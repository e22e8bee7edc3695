"""The launcher runs a script or module just as Python would, with the dispatcher registered."""

from __future__ import annotations

import json
import os

import pytest

from moe_ncclep import launch
from tests.megatron.configs import CONFIG, run_python

pytestmark = pytest.mark.megatron

_SCRIPT = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "main": main.__file__,
    "registered": "moe_ncclep.megatron" in sys.modules, "megatron": "megatron.core" in sys.modules,
}))
sys.exit(int(os.environ.get("EXIT", "0")))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "scripts").mkdir()
    path = tmp_path / "scripts" / "pretrain_something.py"
    path.write_text(_SCRIPT)
    return path


def test_a_script_gets_its_own_command_line(script):
    result = run_python("-m", "moe_ncclep.launch", str(script), "--cpu", "-m", "--help", "x y")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "argv": [str(script), "--cpu", "-m", "--help", "x y"],
        "name": "__main__",
        "file": str(script),
        "path": str(script.parent),
        "main": str(script),
        "registered": True,
        "megatron": False,
    }


def test_a_module_gets_its_own_command_line(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    result = run_python("-m", "moe_ncclep.launch", "-m", script.stem, "--num-layers", "2", EXIT="3")
    assert result.returncode == 3, "the exit status is the program's"
    said = json.loads(result.stdout)
    assert said["argv"] == [str(script), "--num-layers", "2"]
    assert (said["name"], said["file"], said["main"]) == ("__main__", str(script), str(script))
    assert os.path.samefile(said["path"], script.parent)
    assert said["registered"] is True


def test_a_relative_script(script, monkeypatch):
    monkeypatch.chdir(script.parent.parent)
    result = run_python("-m", "moe_ncclep.launch", f"scripts/{script.name}")
    said = json.loads(result.stdout)
    assert said["argv"] == [f"scripts/{script.name}"]
    assert said["path"] == str(script.parent)


def test_the_cpu_shim_comes_first_and_megatron_knows_us(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        f"from {CONFIG} import TransformerConfig\n"
        "config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_moe_experts=8,\n"
        "                           moe_ffn_hidden_size=64, moe_token_dispatcher_type='ncclep')\n"
        "from moe_ncclep.megatron import is_ncclep\n"
        "print(is_ncclep(config), torch.cuda.is_available() or torch.cuda.current_device(), sys.argv[1:])\n"
    )
    result = run_python("-m", "moe_ncclep.launch", "--cpu", str(script), "-v", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "True cpu ['-v']"


def test_a_failing_script_shows_its_own_traceback(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise KeyError('in the script')\n")
    result = run_python("-m", "moe_ncclep.launch", str(script))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "KeyError: 'in the script'"


@pytest.mark.parametrize("argv", [[], ["--cpu"], ["-m"], ["--cpu", "-m"]])
def test_nothing_to_run_shows_the_usage(argv, capsys):
    assert launch.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: python -m moe_ncclep.launch [--cpu] SCRIPT")


@pytest.mark.parametrize("argv", [["nowhere.py"], ["--cpu", "nowhere.py"], ["--unknown"]])
def test_a_missing_script_is_named(argv, capsys):
    assert launch.main(argv) == 2
    assert capsys.readouterr().err == f"moe_ncclep.launch: no such script: {argv[-1]}\n"


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--cpu", "--help"]])
def test_help(argv, capsys):
    assert launch.main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: python -m moe_ncclep.launch")
    assert "--cpu" in out
    assert err == ""


def test_the_exit_status_of_the_command_line():
    result = run_python("-m", "moe_ncclep.launch", "nowhere.py")
    assert (result.returncode, result.stderr) == (2, "moe_ncclep.launch: no such script: nowhere.py\n")
