"""Symmetric memory and kernels for ranks in one NVLink domain."""
