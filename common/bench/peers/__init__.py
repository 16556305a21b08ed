"""What others offer for the same calls: one module a package, imported only when its turn comes.

Each function takes an op's arguments and returns the call to time; what it reshapes or builds before that is free.
"""
