"""Conversion of checkpoints on disk: to MXFP4, to bf16, or between two layouts of names.

    source = formats.read_source(folder)                       headers, format
    plan = plan.plan_mxfp4(source, plan.ToMXFP4())             what becomes of each tensor
    job = writer.job(plan, target)                             which file it goes to
    writer.write(job, writer.check_target(job, resume), 1, progress)
    parts.merge(job, options)                                  or several processes' parts made one checkpoint
    verify.verify(job)                                         what came out, per tensor

Nothing is written before all that headers and config.json can tell has been checked.
"""
