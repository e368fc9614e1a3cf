"""`outboard doctor`: everything to check before one blames the software.

`machine` says where facts come from, `facts` gathers them (sysfs, procfs, the kernel log, NVML in a process that may be given up, what was
measured), each area's module has its checks and the rule for each, `report` shows what they found. Nothing here writes, and nothing needs
a GPU: what cannot be read is a finding of its own where it matters.
"""
