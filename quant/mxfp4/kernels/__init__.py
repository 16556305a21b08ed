"""Ops on MXFP4 tensors: quantizing activations, linear layers, layers of experts."""
