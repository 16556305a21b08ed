"""What the ports share: dispatch, device facts, kernels, weights, accuracy."""
