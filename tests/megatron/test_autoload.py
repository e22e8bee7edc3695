"""Registration by MOE_NCCLEP, through the .pth line at interpreter start."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.megatron.configs import CONFIG, HAS_TRAINING, MOE_LAYER, PREPARE, ROOT, run_python

pytestmark = pytest.mark.megatron

PTH = ROOT / "moe_ncclep" / "moe_ncclep_autoload.pth"


@pytest.fixture
def site(tmp_path):
    """Code that reads the .pth line as the interpreter does when it starts."""
    shutil.copy(PTH, tmp_path / PTH.name)
    return f"import site, sys\nsite.addsitedir({str(tmp_path)!r})\n"


def test_the_wheel_puts_the_line_at_the_top():
    text = (ROOT / "pyproject.toml").read_text()
    (section,) = re.findall(r"^\[tool\.hatch\.build\.targets\.wheel\.force-include\]\n((?:.+\n)+)", text, re.MULTILINE)
    included = dict(re.findall(r'^"(.+)" = "(.+)"$', section, re.MULTILINE))
    assert included == {"moe_ncclep/moe_ncclep_autoload.pth": "moe_ncclep_autoload.pth"}
    assert all((ROOT / path).is_file() for path in included)


def test_it_is_one_line_that_site_executes():
    text = PTH.read_text()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert text.startswith("import ")


@pytest.mark.parametrize("value", [None, "", "0", "off", "No"])
def test_inert_unless_asked(site, value):
    code = "print([name for name in sys.modules if name == 'torch' or name.startswith('moe_ncclep.megatron')])\n"
    code += "print([finder for finder in sys.meta_path if 'ncclep' in repr(finder)])"
    result = run_python("-c", site + code, MOE_NCCLEP=value)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["[]", "[]"]


_USE = """
from megatron.core.transformer.transformer_config import TransformerConfig
import megatron.core.transformer.moe.moe_layer as moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from moe_ncclep.megatron import is_ncclep
config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_moe_experts=8,
                           moe_ffn_hidden_size=64, moe_token_dispatcher_type="ncclep")
print(is_ncclep(config), moe_layer.MoEFlexTokenDispatcher is not MoEFlexTokenDispatcher)
"""


@pytest.mark.parametrize(
    "first",
    [
        CONFIG,
        MOE_LAYER,
        pytest.param("megatron.training", marks=pytest.mark.skipif(not HAS_TRAINING, reason="no such")),
    ],
)
def test_registers_when_megatron_is_imported(site, first):
    code = f"print('torch' in sys.modules, 'moe_ncclep.megatron' in sys.modules)\n{PREPARE}\nimport {first}\n{_USE}"
    if HAS_TRAINING:
        code += "from megatron.training.arguments import add_megatron_arguments as add\nprint(add.adds_ncclep_flags)"
    result = run_python("-c", site + code, MOE_NCCLEP="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["False False", "True True", *(["True"] if HAS_TRAINING else [])]


def test_a_package_that_is_gone_costs_one_line(site):
    """As after an uninstallation that left the line behind."""
    result = run_python("-c", f"import sys\nsys.modules['moe_ncclep'] = None\n{site}print('started')", MOE_NCCLEP="1")
    assert (result.returncode, result.stdout) == (0, "started\n")
    assert result.stderr.startswith("MOE_NCCLEP is set, but moe_ncclep cannot be registered: ModuleNotFoundError(")
    assert result.stderr.count("\n") == 1


def test_a_broken_package_costs_one_line(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # out of reach of ours
    package = tmp_path / "broken" / "moe_ncclep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("1 +\n")
    # -S: an installed package has a line of its own, which would complain as well.
    result = run_python("-S", "-c", f"{site}print('started')", MOE_NCCLEP="1", PYTHONPATH=str(package.parent))
    assert (result.returncode, result.stdout) == (0, "started\n")
    assert result.stderr.startswith("MOE_NCCLEP is set, but moe_ncclep cannot be registered: SyntaxError(")
    assert result.stderr.count("\n") == 1
