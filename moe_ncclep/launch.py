"""Run an unmodified Megatron script with the dispatcher registered.

torchrun --nproc-per-node 8 -m moe_ncclep.launch pretrain_gpt.py ... --moe-token-dispatcher-type ncclep
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

_USAGE = """\
usage: python -m moe_ncclep.launch [--cpu] SCRIPT [ARGUMENTS ...]
       python -m moe_ncclep.launch [--cpu] -m MODULE [ARGUMENTS ...]

Registers the token dispatcher "ncclep" with Megatron-Core and its --ncclep-* flags with Megatron's parser,
then runs SCRIPT or MODULE as the main program.

  --cpu   let Megatron-Core's models run on machines without a GPU
"""


def main(argv: list[str]) -> int:
    """Run the command line ``argv`` (without the program's name); returns 2 for a wrong one."""
    cpu = argv[:1] == ["--cpu"]
    rest = argv[1:] if cpu else argv
    if rest[:1] in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0
    as_module = rest[:1] == ["-m"]
    program = rest[1:] if as_module else rest
    if not program:
        print(_USAGE, end="", file=sys.stderr)
        return 2
    if not as_module and not os.path.isfile(program[0]):
        print(f"moe_ncclep.launch: no such script: {program[0]}", file=sys.stderr)
        return 2
    if as_module:
        sys.path.insert(0, os.getcwd())
        if importlib.util.find_spec(program[0].partition(".")[0]) is None:
            print(f"moe_ncclep.launch: no such module: {program[0]}", file=sys.stderr)
            return 2

    if cpu:
        from moe_ncclep.megatron.cpu import apply_cpu_shim

        apply_cpu_shim()
    import moe_ncclep.megatron  # noqa: F401

    sys.argv = program
    if as_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
