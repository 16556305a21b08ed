"""Checks Triton kernels for Intel GPUs on a machine without one: compiled by Intel's back end, run on this CPU.

A development tool, not part of the installed package. `kernels`, `lint` and `report` need Python alone; the rest needs
the environment that `setup.sh` builds, since `triton-xpu` and `triton` are the same import.
"""
