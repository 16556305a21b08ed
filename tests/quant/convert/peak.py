"""Run by the tests in a process of its own: converts, and prints its peak memory in bytes before and after.

python peak.py SOURCE TARGET THREADS
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from xpu_ports.quant.convert import writer
from xpu_ports.quant.convert.formats import read_source
from xpu_ports.quant.convert.plan import ToMXFP4, plan_mxfp4


def peak() -> int:
    """The largest resident size so far, in bytes; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    job = writer.job(plan_mxfp4(read_source(Path(sys.argv[1])), ToMXFP4()), Path(sys.argv[2]))
    before = peak()
    writer.write(job, writer.check_target(job, resume=False), int(sys.argv[3]), lambda _: None)
    print(before, peak())
