"""A model beside its reference: how far apart they are, where that begins, and whether it is within stated bounds.

The reference runs first and leaves its logits and streams in files; the port runs after it, alone in memory. Each
layer of the port is fed the reference's input, so that a layer shows its own error and not that of the layers before.
"""
