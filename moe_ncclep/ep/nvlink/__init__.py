"""The CUDA kernels of ``csrc/`` as one shared library."""
