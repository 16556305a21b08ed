"""The ops that models are made of, one file each: reference, refusal, kernels, launch wrappers."""
